// Orders of the tokens of a T x H x W grid: whole numbers only, no tensors.
#ifndef SPARGE_SRC_PROBLEM_ORDER_H_
#define SPARGE_SRC_PROBLEM_ORDER_H_

#include <sparge/sparge.h>

#include <cstdint>

namespace sparge::impl {

// The number of cells of a grid. Throws Failure unless every side is at least 1 and the cells are at most 2^31-1.
int64_t CountCells(const int64_t grid[3]);

// out[i] = base + raster index (t * H * W + y * W + x) of the i-th token in that order. `seed` counts for
// SPARGE_ORDER_RANDOM only. The grid has been checked by CountCells.
void FillOrder(sparge_order order, const int64_t grid[3], uint64_t seed, int32_t base, int32_t* out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_PROBLEM_ORDER_H_

// Orders of the tokens of a T x H x W grid: whole numbers only, no tensors.
#ifndef SPARGE_SRC_PROBLEM_ORDER_H_
#define SPARGE_SRC_PROBLEM_ORDER_H_

#include <sparge/sparge.h>

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace sparge::impl {

// The number of cells of a grid. Throws Failure unless every side is at least 1 and the cells are at most 2^31-1.
int64_t CountCells(const int64_t grid[3]);

// out[i] = base + raster index (t * H * W + y * W + x) of the i-th token in that order. `seed` counts for
// SPARGE_ORDER_RANDOM only. The grid has been checked by CountCells.
void FillOrder(sparge_order order, const int64_t grid[3], uint64_t seed, int32_t base, int32_t* out);

// All tokens of a descriptor with a grid: text as it lies, the grid along the Hilbert curve.
using TokenOrder = std::shared_ptr<const std::vector<int32_t>>;
TokenOrder LayCurve(const sparge_plan_desc& desc);

// To lay a curve takes far longer than all else in a plan, and a model has few grids: the last ones are kept. Safe to
// use from several threads at once.
class Curves {
 public:
  static constexpr size_t kMostKept = 4;

  TokenOrder Get(const sparge_plan_desc& desc);

 private:
  using Key = std::array<int64_t, 5>;
  struct Curve {
    Key key;
    TokenOrder order;
  };
  std::mutex mutex_;
  std::list<Curve> curves_;  // the latest first
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_PROBLEM_ORDER_H_

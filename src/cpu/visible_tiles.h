// Rule "visible" of stage 1: a tile is eligible iff some query of it sees some key of it.
#ifndef SPARGE_SRC_CPU_VISIBLE_TILES_H_
#define SPARGE_SRC_CPU_VISIBLE_TILES_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/problem/problem.h"

namespace sparge::impl {

// The queries of a row of tiles.
struct TileRows {
  BlockId id;
  int64_t first, last;
};

// Whether some query of the row sees some key of a block; and if the mask changes a score there, its bit in `masked`.
bool IsVisible(const Problem& problem, const sparge_run_args& args, const TileRows& row, int64_t block,
               uint64_t* masked);

// Sets visible[j] for every key block; returns how many are. `masked`, bits of 0 or NULL without mask: tiles in which
// the mask changes a score.
int64_t FindVisible(const Problem& problem, const sparge_run_args& args, const TileRows& row, bool* visible,
                    uint64_t* masked);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_VISIBLE_TILES_H_

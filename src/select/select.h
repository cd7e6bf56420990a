// Stage 1, from the scores of a row of tiles (one query block against all key blocks) to the tiles that are computed.
//
//   select    floor: every tile with mass >= (1 - tau) / sqrt(visible tiles); cdf: the smallest set with mass >= tau;
//             topk: the ceil(topk * visible) best; at least one
//   force     all tiles of a query block (or key block) that is not self-similar; the diagonal; the sink; floor: the
//             keys right before each query
//
// Numbers in, bits out: who scored the tiles, and on which device, does not matter here.
#ifndef SPARGE_SRC_SELECT_SELECT_H_
#define SPARGE_SRC_SELECT_SELECT_H_

#include <sparge/sparge.h>

#include <cmath>
#include <cstdint>

#include "src/base/visible.h"

namespace sparge::impl {

// The mass from which on the rule `floor` keeps a tile of a row with so many visible ones. One bound for all rows
// misses the least mass for a given number of tiles; the root lets it follow rows in which mass is spread over more
// tiles.
inline double MassFloor(double tau, int64_t visible) { return (1 - tau) / std::sqrt(static_cast<double>(visible)); }

// Floor keeps so many keys before each causal query. Where a block of queries begins in a tile of keys, its first
// queries have their neighbours in the tile before, on which the others hardly look: its mass, a mean over the block,
// is small, and yet these queries would be wholly wrong without it (docs/accuracy.md).
inline constexpr int64_t kNearKeys = 32;

// Arrays have one entry per key block.
struct RowScores {
  int64_t tiles;
  const bool* visible;
  int64_t eligible;  // visible tiles
  double* score;     // of a tile: its mass, or the logarithm of that; used up
  bool logs;         // the latter
  bool part;         // these are some of the row's tiles, and masses are shares of all of them
  int32_t* order;    // scratch
};

struct RowRule {
  sparge_select select;  // CDF, TOPK or FLOOR
  sparge_head_params params;
  bool query_alike;           // else a mean tells nothing about the queries: every tile
  const float* k_similarity;  // per key block: likewise; NULL = not asked
  int64_t visible;            // tiles that the row sees, of all keys if these are a part: what floor and topk count by
  Range diagonal;             // always kept where visible; with floor, the keys before it, too
  bool keep_sink;
  // The sum of the numbers that are not below `least`.
  double (*mass_from)(const double* mass, int64_t count, double least);
};

// Diagonal and sink: kept where visible, whatever their masses are.
inline bool IsForced(const RowRule& rule, int64_t tile) {
  return (tile >= rule.diagonal.begin && tile < rule.diagonal.end) || (rule.keep_sink && tile == 0);
}

// Sets the bits of the kept tiles; they are 0 before.
void SelectRow(const RowRule& rule, const RowScores& row, uint64_t* kept);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_SELECT_SELECT_H_

// Stage 1: which tiles to compute. Works from what packing left, the caller's mask or map, and positions; never from q,
// k.
//
// Rules for one row of tiles (one query block against all key blocks), each a function in predict.cc:
//   visible   a tile is eligible iff some query of it sees some key of it (causal, window, length, mask)
//   score     how much of the row's attention a tile holds. Predictor `keys`: pooled.h. Predictor `paper`: mean of the
//             query block . mean of the key block, as attention would score it, and the softmax of that
//   select    floor: every tile with mass >= (1 - tau) / sqrt(visible tiles); cdf: the smallest set with mass >= tau;
//   topk: the
//             ceil(topk * visible) best; at least one
//   force     all tiles of a query block (`paper`: or key block) that is not self-similar; the diagonal; the sink
#ifndef SPARGE_SRC_CPU_PREDICT_H_
#define SPARGE_SRC_CPU_PREDICT_H_

#include <cmath>
#include <cstdint>

#include "src/base/arena.h"
#include "src/cpu/pack.h"
#include "src/cpu/pooled.h"
#include "src/problem/problem.h"

namespace sparge::impl {

// Per query block of all heads (Plan::QueryBlock): `words` 64-bit words of tiles.
struct BlockMap {
  int64_t words;
  uint64_t* kept;
  uint64_t* masked;    // the mask changes a score in this tile; NULL without mask
  int64_t* eligible;   // tiles per row
  int64_t* computed;   // kept tiles per row
  Pooled pooled;       // per worker
  std::byte* scratch;  // per worker

  const uint64_t* KeptRow(int64_t row) const { return kept + row * words; }
  const uint64_t* MaskedRow(int64_t row) const { return masked == nullptr ? nullptr : masked + row * words; }
};

inline bool TestBit(const uint64_t* bits, int64_t index) { return ((bits[index / 64] >> (index % 64)) & 1) != 0; }
inline void SetBit(uint64_t* bits, int64_t index) { bits[index / 64] |= uint64_t{1} << (index % 64); }

// The mass from which on the rule `floor` keeps a tile of a row with so many visible ones. One bound for all rows
// misses the least mass for a given number of tiles; the root lets it follow rows in which mass is spread over more
// tiles.
inline double MassFloor(double tau, int64_t visible) { return (1 - tau) / std::sqrt(static_cast<double>(visible)); }

BlockMap LayBlockMap(const Plan& plan, Arena& arena);

// Fills the map for the active heads; rows of others have no eligible tile.
void PredictAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                const BlockMap& map);

// Writes the map of the active heads as bytes into a (batch, q_heads, q_blocks, k_blocks) array of zeros.
void WriteMap(const Plan& plan, const HeadChoice& heads, const BlockMap& map, uint8_t* out);

// One row with its visible tiles in the order in which tau takes them; lies in the worker's scratch.
struct RankedRow {
  int64_t count;           // visible tiles
  const int32_t* order;    // most mass first, ties by lower index
  const double* mass;      // by tile; sums to 1
  const uint64_t* forced;  // bits: kept whatever tau is
  const uint64_t* masked;  // as BlockMap::MaskedRow
};
RankedRow RankRow(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockMap& map,
                  int32_t worker, int64_t index);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PREDICT_H_

// Stage 1: which tiles to compute. Works from block summaries, the caller's mask or map, and positions; never from q,
// k.
//
// Rules for one row of tiles (one query block against all key blocks), each a function in predict.cc:
//   visible   a tile is eligible iff some query of it sees some key of it (causal, window, length, mask)
//   score     mean of the query block . mean of the key block, as attention would score it
//   select    cdf: the smallest set with softmax mass >= tau; topk: the ceil(topk * visible) best; at least one
//   force     all tiles of a query block or key block that is not self-similar; the diagonal; the sink
#ifndef SPARGE_SRC_PREDICT_H_
#define SPARGE_SRC_PREDICT_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/pack.h"
#include "src/plan.h"

namespace sparge {

// Per query block of all heads (Plan::QueryBlock): `words` 64-bit words of tiles.
struct BlockMap {
  int64_t words;
  uint64_t* kept;
  uint64_t* masked;    // the mask changes a score in this tile; NULL without mask
  int64_t* eligible;   // tiles per row
  int64_t* computed;   // kept tiles per row
  std::byte* scratch;  // per worker

  const uint64_t* KeptRow(int64_t row) const { return kept + row * words; }
  const uint64_t* MaskedRow(int64_t row) const { return masked == nullptr ? nullptr : masked + row * words; }
};

inline bool TestBit(const uint64_t* bits, int64_t index) { return ((bits[index / 64] >> (index % 64)) & 1) != 0; }
inline void SetBit(uint64_t* bits, int64_t index) { bits[index / 64] |= uint64_t{1} << (index % 64); }

BlockMap LayBlockMap(const Plan& plan, Arena& arena);

// Fills the map.
void PredictAll(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockMap& map);

// Writes the map as bytes: (batch, q_heads, q_blocks, k_blocks), 0 where a sequence has no such tile.
void WriteMap(const Plan& plan, const BlockMap& map, uint8_t* out);

}  // namespace sparge
#endif  // SPARGE_SRC_PREDICT_H_

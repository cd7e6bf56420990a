// The block map: one bit per tile, rows of query blocks numbered through all heads (Problem::QueryBlock).
#ifndef SPARGE_SRC_SELECT_BLOCK_MAP_H_
#define SPARGE_SRC_SELECT_BLOCK_MAP_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/problem/problem.h"

namespace sparge::impl {

// `words` 64-bit words of tiles per row.
struct BlockMap {
  int64_t words;
  uint64_t* kept;
  uint64_t* masked;   // the mask changes a score in this tile; NULL without mask
  int64_t* eligible;  // tiles per row
  int64_t* computed;  // kept tiles per row

  uint64_t* KeptRow(int64_t row) const { return kept + row * words; }
  uint64_t* MaskedRow(int64_t row) const { return masked == nullptr ? nullptr : masked + row * words; }
};

inline bool TestBit(const uint64_t* bits, int64_t index) { return ((bits[index / 64] >> (index % 64)) & 1) != 0; }
inline void SetBit(uint64_t* bits, int64_t index) { bits[index / 64] |= uint64_t{1} << (index % 64); }

inline BlockMap LayBlockMap(const Problem& problem, Arena& arena) {
  const int64_t rows = problem.q_heads * problem.all_q_blocks;
  BlockMap map{};
  map.words = CeilDiv(problem.k_blocks, 64);
  map.kept = arena.Take<uint64_t>(rows * map.words);
  map.masked = problem.mask == SPARGE_MASK_NONE ? nullptr : arena.Take<uint64_t>(rows * map.words);
  map.eligible = arena.Take<int64_t>(rows);
  map.computed = arena.Take<int64_t>(rows);
  return map;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_SELECT_BLOCK_MAP_H_

// Which tokens of a sequence a rank has: whole blocks of queries, so that blocks of a part are blocks of the whole.
#ifndef SPARGE_DISTRIBUTED_SHARDS_H_
#define SPARGE_DISTRIBUTED_SHARDS_H_

#include <sparge/sparge_mpi.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sparge::distributed {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tokens [first, first + count) of the whole, which are [at, at + count) of the rank that has them.
struct Segment {
  int64_t first, count, at;
  int64_t end() const { return first + count; }
};
using Segments = std::vector<Segment>;  // of one rank, ascending

inline Segments SegmentsOf(int64_t tokens, int rank, int ranks, sparge_mpi_shard shard) {
  const int64_t blocks = CeilDiv(tokens, SPARGE_BLOCK_Q);
  const int64_t pieces = shard == SPARGE_MPI_ZIGZAG ? 2 * int64_t{ranks} : ranks;
  std::vector<int64_t> own = {rank};
  if (shard == SPARGE_MPI_ZIGZAG) own.push_back(pieces - 1 - rank);
  Segments found;
  for (const int64_t piece : own) {
    const auto border = [&](int64_t p) { return std::min(p * blocks / pieces * SPARGE_BLOCK_Q, tokens); };
    const int64_t first = border(piece), count = border(piece + 1) - first;
    if (count == 0) continue;
    if (!found.empty() && found.back().end() == first) {
      found.back().count += count;  // neighbours are one
    } else {
      found.push_back({first, count, found.empty() ? 0 : found.back().at + found.back().count});
    }
  }
  return found;
}

inline int64_t CountTokens(const Segments& segments) {
  return segments.empty() ? 0 : segments.back().at + segments.back().count;
}

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_SHARDS_H_

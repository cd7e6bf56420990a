// What both kernels of stage 1 know of a row of the map: one query block against all key blocks.
#ifndef SPARGE_SRC_CUDA_KERNEL_STAGE1_CUH_
#define SPARGE_SRC_CUDA_KERNEL_STAGE1_CUH_

#include "tensors.cuh"

namespace sparge::cuda {

// Half-open; of keys or of key blocks.
struct Range {
  int begin, end;
};

// Keys that a query at `query` sees (Visible::KeysOf); `longer`: by how much its window is.
__device__ inline Range KeysOf(const SequenceInfo& s, int64_t query, int64_t longer = 0) {
  const int64_t position = query + s.offset, all = s.k_count;
  Range keys{0, static_cast<int>(all)};
  if (s.window > 0) keys.begin = static_cast<int>(min(max(position - s.window - longer + 1, int64_t{0}), all));
  if (s.causal) keys.end = static_cast<int>(min(max(position + 1, int64_t{0}), all));
  return keys;
}
__device__ inline Range BlocksOf(Range keys) {
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / kTileK, (keys.end + kTileK - 1) / kTileK};
}

struct MapRow {
  int head, q_block, sequence, block;
  const SequenceInfo& s;
  int queries;    // of the block
  int64_t first;  // its first query in the sequence
  int64_t index;  // Problem::QueryBlock

  __device__ Range Visible() const {
    const Range begin = KeysOf(s, first), end = KeysOf(s, first + queries - 1);
    return BlocksOf({begin.begin, end.end});
  }
};
__device__ inline MapRow FindRow(const Shape& shape, int row) {
  const int head = row / shape.all_q_blocks, q_block = row % shape.all_q_blocks;
  const int sequence = shape.sequence_of_q_block[q_block];
  const SequenceInfo& s = shape.sequences[sequence];
  const int block = q_block - s.q_block_begin;
  return {
      head, q_block, sequence, block, s, min(kTileQ, s.q_count - block * kTileQ), static_cast<int64_t>(block) * kTileQ,
      row};
}

}  // namespace sparge::cuda
#endif  // SPARGE_SRC_CUDA_KERNEL_STAGE1_CUH_

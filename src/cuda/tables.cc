// Fills the tables of a plan on the host and copies them to the GPU at once.
#include "src/cuda/tables.h"

#include <cstring>
#include <vector>

namespace sparge::impl {
namespace {

cuda::SequenceInfo InfoOf(const Problem& problem, const Sequence& s) {
  cuda::SequenceInfo info{};
  info.index = s.index;
  info.q_begin = s.q_begin;
  info.k_begin = s.k_begin;
  info.offset = s.visible.offset;
  info.window = s.visible.window;
  info.q_count = static_cast<int32_t>(s.q_count);
  info.q_blocks = static_cast<int32_t>(s.q_blocks);
  info.q_block_begin = static_cast<int32_t>(s.q_block_begin);
  info.k_count = static_cast<int32_t>(s.k_count);
  info.k_blocks = static_cast<int32_t>(s.k_blocks);
  info.k_block_begin = static_cast<int32_t>(s.k_block_begin);
  info.causal = s.visible.causal;
  info.tail_begin = static_cast<int32_t>(std::max<int64_t>(s.q_count - problem.dense_tail, 0));
  return info;
}

std::vector<cuda::HeadParams> HeadsOf(const Problem& problem) {
  std::vector<cuda::HeadParams> heads;
  for (int64_t h = 0; h < problem.q_heads; ++h) {
    const sparge_head_params& head = problem.heads[h];
    heads.push_back({head.theta, head.tau, head.topk, static_cast<float>(head.pv_skip * kLog2e),
                     static_cast<float>(SinkLogit(problem, h))});
  }
  return heads;
}

// Queries of sequences without keys.
std::vector<cuda::EmptyRows> EmptyOf(const Problem& problem) {
  std::vector<cuda::EmptyRows> rows;
  if (problem.q_tokens == 0) return rows;
  if (!problem.packed && problem.kv_tokens == 0) {
    for (int64_t b = 0; b < problem.batch; ++b) rows.push_back({b, 0, problem.q_tokens});
  }
  for (const KeylessRows& r : problem.keyless) rows.push_back({r.index, r.q_begin, r.q_count});
  return rows;
}

// Arrays one behind the other, each from a multiple of 64 on.
class Blob {
 public:
  template <class T>
  size_t Add(const std::vector<T>& array) {
    const size_t at = bytes_.size();
    bytes_.resize(at + RoundUp(static_cast<int64_t>(array.size() * sizeof(T)), 64));
    if (!array.empty()) std::memcpy(bytes_.data() + at, array.data(), array.size() * sizeof(T));
    return at;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

Tables MakeTables(const Driver& driver, CudaContext context, const Problem& problem) {
  std::vector<cuda::SequenceInfo> sequences;
  std::vector<int32_t> of_q_block, of_k_block;
  for (const Sequence& s : problem.sequences) {
    const auto index = static_cast<int32_t>(sequences.size());
    of_q_block.insert(of_q_block.end(), static_cast<size_t>(s.q_blocks), index);
    of_k_block.insert(of_k_block.end(), static_cast<size_t>(s.k_blocks), index);
    sequences.push_back(InfoOf(problem, s));
  }
  const std::vector<cuda::EmptyRows> empty = EmptyOf(problem);
  Blob blob;
  const size_t sequences_at = blob.Add(sequences);
  const size_t of_q_block_at = blob.Add(of_q_block);
  const size_t of_k_block_at = blob.Add(of_k_block);
  const size_t heads_at = blob.Add(HeadsOf(problem));
  const size_t empty_at = blob.Add(empty);
  Tables tables{CudaMemory(driver, context, blob.bytes().data(), blob.bytes().size()), {}, nullptr, nullptr, 0};
  const std::byte* at = tables.memory.data();
  cuda::Shape& shape = tables.shape;
  shape.sequences = reinterpret_cast<const cuda::SequenceInfo*>(at + sequences_at);
  shape.sequence_of_q_block = reinterpret_cast<const int32_t*>(at + of_q_block_at);
  shape.sequence_of_k_block = reinterpret_cast<const int32_t*>(at + of_k_block_at);
  shape.sequence_count = static_cast<int32_t>(sequences.size());
  shape.q_heads = static_cast<int32_t>(problem.q_heads);
  shape.kv_heads = static_cast<int32_t>(problem.kv_heads);
  shape.heads_per_kv = static_cast<int32_t>(problem.heads_per_kv);
  shape.all_q_blocks = static_cast<int32_t>(problem.all_q_blocks);
  shape.all_k_blocks = static_cast<int32_t>(problem.all_k_blocks);
  shape.q_blocks = static_cast<int32_t>(problem.q_blocks);
  shape.k_blocks = static_cast<int32_t>(problem.k_blocks);
  shape.qk_dim = static_cast<int32_t>(problem.qk_dim);
  shape.v_dim = static_cast<int32_t>(problem.v_dim);
  shape.packed = problem.packed;
  shape.kept_words = static_cast<int32_t>(CeilDiv(problem.k_blocks, 32));
  tables.heads = reinterpret_cast<const cuda::HeadParams*>(at + heads_at);
  tables.empty = reinterpret_cast<const cuda::EmptyRows*>(at + empty_at);
  tables.empty_count = static_cast<int64_t>(empty.size());
  return tables;
}

}  // namespace sparge::impl

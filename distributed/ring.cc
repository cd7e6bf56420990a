// The ring, and joining of its results.
#include "distributed/ring.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sparge::distributed {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

sparge_tensor Contiguous(const Buffer& buffer, sparge_dtype dtype, int64_t heads, int64_t tokens, int64_t dim) {
  return ViewHeads(buffer.as<std::byte>(), dtype, heads, tokens, dim);
}

// A tensor of any strides, contiguous.
void Pack(const sparge_tensor& from, const PlanDesc& desc, int64_t tokens, int64_t dim, const Buffer& to) {
  const int64_t size = BytesOf(from.dtype);
  std::byte* out = to.as<std::byte>();
  for (int64_t b = 0; b < desc.batch; ++b) {
    for (int64_t h = 0; h < desc.kv_heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t, out += dim * size) {
        const int64_t at = b * from.batch_stride + h * from.head_stride + t * from.token_stride;
        std::memcpy(out, static_cast<const std::byte*>(from.data) + at * size, dim * size);
      }
    }
  }
}

void Add(const sparge_head_stats& from, sparge_head_stats* to) {
  to->qk_eligible += from.qk_eligible;
  to->qk_computed += from.qk_computed;
  to->pv_eligible += from.pv_eligible;
  to->pv_computed += from.pv_computed;
}

}  // namespace

void Ring::Run() {
  Group& group = call_.group;
  const int ranks = group.ranks(), before = (group.rank() + ranks - 1) % ranks, next = (group.rank() + 1) % ranks;
  for (const Segment& q : call_.own_q()) {  // of no keys: zeros, and a log-sum-exp of -inf
    const Partial& none = results_.emplace_back(RoomFor(q));
    std::fill_n(none.lse.as<float>(), none.lse.size() / sizeof(float), kMinusInf);
  }
  if (call_.args.head_stats != nullptr) std::fill_n(call_.args.head_stats, call_.q_rows(), sparge_head_stats{});
  if (call_.args.map_out != nullptr) {  // tiles that nobody sees are in no part
    const int64_t rows = call_.q_rows() * CeilDiv(CountTokens(call_.own_q()), SPARGE_BLOCK_Q);
    std::fill_n(call_.args.map_out, rows * CeilDiv(call_.desc.kv_tokens, SPARGE_BLOCK_K), uint8_t{0});
  }
  Held held = OwnKeys();
  for (int step = 0; step < ranks; ++step) {
    const int owner = (group.rank() + ranks - step) % ranks;
    Held coming;
    Transfers* transfers = nullptr;
    if (step + 1 < ranks) {
      coming = RoomFor((owner + ranks - 1) % ranks);
      transfers = group.Open();
      for (const Buffer& into : {coming.k, coming.v}) group.Receive(into, before, transfers);
      for (const Buffer& from : {held.k, held.v}) group.Send(from, next, transfers);
    }
    const bool in_time = group.Compute(
        [&] {
          for (size_t i = 0; i < call_.own_q().size(); ++i) AddKeys(i, owner, held);
        },
        transfers);
    if (transfers != nullptr) group.Wait(transfers);
    parts_in_time_ += in_time ? 1 : 0;
    held = coming;
  }
  group.Compute([&] {
    for (size_t i = 0; i < call_.own_q().size(); ++i) Finish(i);
  });
  if (call_.args.stats != nullptr) {
    stats_.struct_size = call_.args.stats->struct_size;
    std::memcpy(static_cast<void*>(call_.args.stats), static_cast<const sparge_stats*>(&stats_),
                std::min(stats_.struct_size, sizeof(sparge_stats)));
  }
}

Ring::Held Ring::RoomFor(int rank) const {
  const int64_t tokens = call_.kv_rows() * CountTokens(call_.k_of[rank]);
  return {Buffer(tokens * call_.desc.qk_dim * BytesOf(call_.args.k.dtype)),
          Buffer(tokens * call_.desc.v_dim * BytesOf(call_.args.v.dtype))};
}

Ring::Held Ring::OwnKeys() const {
  const Held held = RoomFor(call_.group.rank());
  Pack(call_.args.k, call_.desc, CountTokens(call_.own_k()), call_.desc.qk_dim, held.k);
  Pack(call_.args.v, call_.desc, CountTokens(call_.own_k()), call_.desc.v_dim, held.v);
  return held;
}

Ring::Partial Ring::RoomFor(const Segment& q) const {
  const int64_t tokens = call_.q_rows() * q.count;
  return {Buffer::Of<float>(tokens * call_.desc.v_dim), Buffer::Of<float>(tokens)};
}

sparge_partial Ring::View(const Partial& partial, const Segment& q) const {
  const int64_t heads = call_.desc.q_heads;
  return {Contiguous(partial.o, SPARGE_F32, heads, q.count, call_.desc.v_dim),
          {partial.lse.as<float>(), heads * q.count, q.count}};
}

// The result of a segment of queries, with the keys of one more rank.
void Ring::AddKeys(size_t index, int owner, const Held& held) {
  const Segment& q = call_.own_q()[index];
  const int64_t tokens = CountTokens(call_.k_of[owner]), heads = call_.desc.kv_heads;
  const sparge_tensor keys = Contiguous(held.k, call_.args.k.dtype, heads, tokens, call_.desc.qk_dim);
  const sparge_tensor values = Contiguous(held.v, call_.args.v.dtype, heads, tokens, call_.desc.v_dim);
  const sparge_partial result = View(results_[index], q);
  std::vector<Partial> found;
  std::vector<sparge_partial> parts = {result};
  for (const Segment& k : call_.k_of[owner]) {
    if (!call_.Sees(q, k)) continue;
    found.push_back(RunPart(index, k, Cut(keys, k), Cut(values, k)));
    parts.push_back(View(found.back(), q));
  }
  if (parts.size() > 1) Merge(q, parts, result);
}

Ring::Partial Ring::RunPart(size_t index, const Segment& k, const sparge_tensor& keys, const sparge_tensor& values) {
  const Segment& q = call_.own_q()[index];
  const Partial part = RoomFor(q);
  const sparge_partial view = View(part, q);
  Stats stats;
  std::vector<sparge_head_stats> heads(call_.q_rows());
  std::vector<uint8_t> map;
  RunArgs args;
  args.q = Cut(call_.args.q, q);
  args.k = keys;
  args.v = values;
  args.o = view.o;
  args.lse = view.lse;
  args.stats = &stats;
  args.head_stats = heads.data();
  args.key_survey = survey_.data();
  if (!sums_.empty()) args.pool_lse = sums_[index].as<double>();
  if (call_.args.map_out != nullptr) {
    map.resize(call_.q_rows() * CeilDiv(q.count, SPARGE_BLOCK_Q) * CeilDiv(k.count, SPARGE_BLOCK_K));
    args.map_out = map.data();
  }
  PartPlan(call_.context, call_.DescOf(q, k)).Run(args);
  AddStats(stats, heads);
  if (!map.empty()) StoreMap(q, k, map);
  return part;
}

void Ring::AddStats(const Stats& stats, const std::vector<sparge_head_stats>& heads) {
  stats_.group_rows = stats.group_rows;
  stats_.threads = stats.threads;
  stats_.isa = stats.isa;
  Add(stats.total, &stats_.total);
  stats_.total_ms += stats.total_ms;
  stats_.pack_ms += stats.pack_ms;
  stats_.predict_ms += stats.predict_ms;
  stats_.schedule_ms += stats.schedule_ms;
  stats_.kernel_ms += stats.kernel_ms;
  stats_.key_blocks += stats.key_blocks;
  for (size_t i = 0; call_.args.head_stats != nullptr && i < heads.size(); ++i)
    Add(heads[i], &call_.args.head_stats[i]);
}

void Ring::StoreMap(const Segment& q, const Segment& k, const std::vector<uint8_t>& map) const {
  const int64_t own_blocks = CeilDiv(CountTokens(call_.own_q()), SPARGE_BLOCK_Q);
  const int64_t columns = CeilDiv(call_.desc.kv_tokens, SPARGE_BLOCK_K);
  const int64_t q_blocks = CeilDiv(q.count, SPARGE_BLOCK_Q), k_blocks = CeilDiv(k.count, SPARGE_BLOCK_K);
  for (int64_t head = 0; head < call_.q_rows(); ++head) {
    for (int64_t i = 0; i < q_blocks; ++i) {
      const int64_t row = head * own_blocks + q.at / SPARGE_BLOCK_Q + i;
      std::copy_n(map.data() + (head * q_blocks + i) * k_blocks, k_blocks,
                  call_.args.map_out + row * columns + k.first / SPARGE_BLOCK_K);
    }
  }
}

void Ring::Merge(const Segment& q, const std::vector<sparge_partial>& parts, const sparge_partial& out) const {
  const PlanDesc& desc = call_.desc;
  Check(sparge_merge_parts(call_.context, desc.batch, desc.q_heads, q.count, desc.v_dim, parts.data(),
                           static_cast<int64_t>(parts.size()), &out));
}

// Into the caller's tensors, with the sinks: parts that have nothing but a share of the denominator.
void Ring::Finish(size_t index) const {
  const Segment& q = call_.own_q()[index];
  std::vector<sparge_partial> parts = {View(results_[index], q)};
  Partial sinks;
  if (call_.desc.sink_logits != nullptr) {
    sinks = RoomFor(q);
    for (int64_t head = 0; head < call_.q_rows(); ++head) {
      std::fill_n(sinks.lse.as<float>() + head * q.count, q.count, call_.desc.sink_logits[head % call_.desc.q_heads]);
    }
    parts.push_back(View(sinks, q));
  }
  sparge_partial out = {Cut(call_.args.o, q), parts[0].lse};
  if (call_.args.lse.data != nullptr) {
    out.lse = call_.args.lse;
    out.lse.data += q.at;
  }
  Merge(q, parts, out);
}

}  // namespace sparge::distributed

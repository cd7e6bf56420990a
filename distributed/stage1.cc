// Surveys and pools of all ranks.
#include "distributed/stage1.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace sparge::distributed {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
constexpr int64_t kPoolQueries = 64;  // neighbouring queries of a pool, as sparge.h has it

double LogAddExp(double a, double b) {
  const double top = std::max(a, b);
  return top == kMinusInf ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

// Of one segment of own keys; which queries there are does not matter, so any view will do.
void Survey(const Call& call, const Segment& k, double* out) {
  PlanDesc desc;
  desc.batch = call.desc.batch;
  desc.q_heads = desc.kv_heads = call.desc.kv_heads;
  desc.q_tokens = SPARGE_FEW_QUERIES;  // enough that keys would be packed for them
  desc.kv_tokens = k.count;
  desc.qk_dim = call.desc.qk_dim;
  desc.v_dim = call.desc.v_dim;
  desc.select = SPARGE_SELECT_ALL;
  RunArgs args;
  args.k = Cut(call.args.k, k);
  args.v = Cut(call.args.v, k);
  args.q = {args.k.data, args.k.dtype, 0, 0, 0};
  args.key_survey_out = out;
  PartPlan(call.context, desc).Predict(args);
}

// The pools of a segment of queries, as pool_rows and pool_counts, and how they travel: without the rows that nobody
// filled.
struct Pools {
  Buffer rows, counts;
};

class PoolExchange {
 public:
  PoolExchange(const Call& call, const std::vector<double>& survey)
      : call_(call),
        survey_(survey),
        block_pools_(PartPlan(call.context, call.desc).pools() / CeilDiv(call.desc.q_tokens, SPARGE_BLOCK_Q)) {}

  std::vector<Buffer> Run() {
    Group& group = call_.group;
    std::vector<Pools> own;
    group.Compute([&] {
      for (const Segment& q : call_.own_q()) own.push_back(Leave(q));
    });
    Send(own);
    std::vector<Buffer> outgoing;
    group.Compute([&] {
      for (int r = 0; r < group.ranks(); ++r) outgoing.push_back(AgainstOwnKeys(r));
    });
    const size_t own_bytes = SumsOf(call_.own_q()) * sizeof(double);
    return Join(group.Exchange(outgoing, std::vector<size_t>(group.ranks(), own_bytes)));
  }

 private:
  int64_t BlocksOf(const Segment& q) const { return call_.q_rows() * CeilDiv(q.count, SPARGE_BLOCK_Q); }
  int64_t SumsOf(const Segments& of) const {
    int64_t sums = 0;
    for (const Segment& q : of) sums += BlocksOf(q) * block_pools_;
    return sums;
  }
  // Rows of a block that mean something: its pools, and queries that are pools of their own, unless they are too many.
  int64_t UsedRows(int32_t count) const {
    constexpr int64_t kPools = SPARGE_BLOCK_Q / kPoolQueries;
    return kPools + (count <= block_pools_ - kPools ? count : 0);
  }

  void Predict(const Segment& q, const Segment& k, RunArgs args) const {
    args.key_survey = survey_.data();
    PartPlan(call_.context, call_.DescOf(q, k)).Predict(args);
  }

  // Pools do not depend on the keys, so that a block of zeros will do; but all queries must see it.
  Pools Leave(const Segment& q) const {
    const Pools pools{Buffer::Of<float>(BlocksOf(q) * block_pools_ * call_.desc.qk_dim),
                      Buffer::Of<int32_t>(BlocksOf(q))};
    const Buffer sums = Buffer::Of<double>(BlocksOf(q) * block_pools_);
    const std::vector<float> zeros(call_.desc.qk_dim);
    PlanDesc desc = call_.DescOf(q, {0, 1, 0});
    desc.causal = 0;
    desc.window = 0;
    desc.query_offset = SPARGE_OFFSET_BOTTOM_RIGHT;
    RunArgs args;
    args.q = Cut(call_.args.q, q);
    args.k = {const_cast<float*>(zeros.data()), SPARGE_F32, 0, 0, 0};
    args.pool_rows_out = pools.rows.as<float>();
    args.pool_counts_out = pools.counts.as<int32_t>();
    args.pool_lse_out = sums.as<double>();
    args.key_survey = survey_.data();
    PartPlan(call_.context, desc).Predict(args);
    return pools;
  }

  // Counts first: they say how many rows follow.
  void Send(const std::vector<Pools>& own) {
    Group& group = call_.group;
    const int64_t row_bytes = call_.desc.qk_dim * static_cast<int64_t>(sizeof(float));
    std::vector<size_t> count_bytes, rows_bytes;
    std::vector<std::byte> counts, rows;
    for (const Segments& its : call_.q_of) {
      int64_t blocks = 0;
      for (const Segment& q : its) blocks += BlocksOf(q);
      count_bytes.push_back(blocks * sizeof(int32_t));
    }
    for (const Pools& pools : own) {
      counts.insert(counts.end(), pools.counts.as<std::byte>(), pools.counts.as<std::byte>() + pools.counts.size());
      for (size_t block = 0; block < pools.counts.size() / sizeof(int32_t); ++block) {
        const std::byte* from = pools.rows.as<std::byte>() + block * block_pools_ * row_bytes;
        rows.insert(rows.end(), from, from + UsedRows(pools.counts.as<int32_t>()[block]) * row_bytes);
      }
    }
    counts_of_ = group.Gather(Buffer(counts), count_bytes);
    for (const Buffer& of : counts_of_) {
      int64_t used = 0;
      for (size_t block = 0; block < of.size() / sizeof(int32_t); ++block) used += UsedRows(of.as<int32_t>()[block]);
      rows_bytes.push_back(used * row_bytes);
    }
    rows_of_ = group.Gather(Buffer(rows), rows_bytes);
  }

  // The sums of a rank's pools over the keys that this one has.
  Buffer AgainstOwnKeys(int rank) const {
    const Buffer sums = Buffer::Of<double>(SumsOf(call_.q_of[rank]));
    double* to = sums.as<double>();
    const int32_t* counts = counts_of_[rank].as<int32_t>();
    const float* packed = rows_of_[rank].as<float>();
    for (const Segment& q : call_.q_of[rank]) {
      const int64_t blocks = BlocksOf(q), size = blocks * block_pools_;
      std::vector<float> rows(size * call_.desc.qk_dim);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t floats = UsedRows(counts[block]) * call_.desc.qk_dim;
        std::copy_n(packed, floats, rows.data() + block * block_pools_ * call_.desc.qk_dim);
        packed += floats;
      }
      std::fill_n(to, size, kMinusInf);
      std::vector<double> found(size);
      for (const Segment& k : call_.own_k()) {
        if (!call_.Sees(q, k)) continue;
        RunArgs args;
        args.k = Cut(call_.args.k, k);
        args.pool_rows = rows.data();
        args.pool_counts = counts;
        args.pool_lse_out = found.data();
        Predict(q, k, args);
        std::transform(to, to + size, found.begin(), to, LogAddExp);
      }
      counts += blocks;
      to += size;
    }
    return sums;
  }

  // In the order of the ranks: the same numbers from run to run.
  std::vector<Buffer> Join(const std::vector<Buffer>& incoming) const {
    std::vector<Buffer> joined;
    int64_t at = 0;
    for (const Segment& q : call_.own_q()) {
      const int64_t size = BlocksOf(q) * block_pools_;
      double* sums = joined.emplace_back(Buffer::Of<double>(size)).as<double>();
      std::fill_n(sums, size, kMinusInf);
      for (const Buffer& of : incoming) std::transform(sums, sums + size, of.as<double>() + at, sums, LogAddExp);
      at += size;
    }
    return joined;
  }

  const Call& call_;
  const std::vector<double>& survey_;
  const int64_t block_pools_;                // per query block and head
  std::vector<Buffer> counts_of_, rows_of_;  // of the pools of each rank
};

}  // namespace

std::vector<double> SurveyKeys(const Call& call) {
  const int64_t dim = call.desc.qk_dim, width = dim + 3, size = call.kv_rows() * width;
  std::vector<size_t> bytes;
  for (const Segments& its : call.k_of) bytes.push_back(its.size() * size * sizeof(double));
  const Buffer own(bytes[call.group.rank()]);
  call.group.Compute([&] {
    for (size_t i = 0; i < call.own_k().size(); ++i) Survey(call, call.own_k()[i], own.as<double>() + i * size);
  });
  const std::vector<Buffer> all = call.group.Gather(own, bytes);
  std::map<int64_t, const double*> by_place;  // added in the order of the whole, as one rank does
  for (int r = 0; r < call.group.ranks(); ++r) {
    for (size_t i = 0; i < call.k_of[r].size(); ++i) by_place[call.k_of[r][i].first] = all[r].as<double>() + i * size;
  }
  std::vector<double> joined(size, 0.0);
  for (const auto& [first, survey] : by_place) {
    for (int64_t i = 0; i < size; ++i) {
      joined[i] = i % width <= dim ? joined[i] + survey[i] : std::max(joined[i], survey[i]);
    }
  }
  return joined;
}

std::vector<Buffer> SumPools(const Call& call, const std::vector<double>& survey) {
  return PoolExchange(call, survey).Run();
}

}  // namespace sparge::distributed

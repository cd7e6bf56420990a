// Stage 1, from the scores of a row of tiles to the tiles that are computed: the rules of src/select, by one block of
// threads per row of the map. Sums that decide are of integers, so that their order does not matter.
#include "src/select/unlike.h"
#include "stage1.cuh"

namespace sparge::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr float kMinusInfinity = -INFINITY;
constexpr double kMassOne = 1 << 30;  // steps of masses when they are added

// Bits that order as numbers do.
__device__ uint32_t OrderBits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Selector {
  const StageParams& p;
  const MapRow row;
  const HeadParams& head;
  Range seen;                   // tiles
  float* scores;                // of the row of the map: p.score_rows rows; the first one becomes the masses
  unsigned long long* scratch;  // shared: kWarps
  bool trusts_query;
  const float* k_similarity;  // NULL: every key block is trusted

  // The visible tiles, each by one thread.
  template <class Body>
  __device__ void ForEachTile(const Body& body) const {
    for (int j = seen.begin + static_cast<int>(threadIdx.x); j < seen.end; j += kThreads) body(j);
  }
  // Over the threads of the block, in all of them.
  template <class T, class Join>
  __device__ T Reduce(T x, const Join& join) const {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = join(x, __shfl_xor_sync(~0u, x, d));
    T* all = reinterpret_cast<T*>(scratch);
    __syncthreads();
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = x;
    __syncthreads();
    x = all[0];
    for (int w = 1; w < kWarps; ++w) x = join(x, all[w]);
    return x;
  }
  __device__ float Max(float x) const {
    return Reduce(x, [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ float Sum(float x) const {
    return Reduce(x, [](float a, float b) { return a + b; });
  }
  __device__ unsigned long long Sum(unsigned long long x) const {
    return Reduce(x, [](unsigned long long a, unsigned long long b) { return a + b; });
  }

  __device__ bool IsTrusted(int j) const {
    return trusts_query && (k_similarity == nullptr || k_similarity[j] > static_cast<float>(head.theta));
  }

  // Masses of tiles from the sums of pools: the mean of their shares. A tile of which a query by itself has a good
  // share has the mass 1.
  __device__ void JoinPools() const {
    __shared__ float top[kScoredRows], by[kScoredRows];
    int counted = 0;
#pragma unroll 1
    for (int r = 0; r < kScoredRows; ++r) {
      const float* sums = scores + static_cast<int64_t>(r) * p.shape.k_blocks;
      float most = kMinusInfinity, sum = 0;
      ForEachTile([&](int j) { most = fmaxf(most, sums[j]); });
      most = Max(most);
      const bool sees = most > kMinusInfinity;
      ForEachTile([&](int j) { sum += sees ? Exp2(sums[j] - most) : 0.0f; });
      sum = Sum(sum);
      counted += sees && r < kPools;
      if (threadIdx.x != 0) continue;
      top[r] = most;
      by[r] = sees ? 1.0f / sum : 0.0f;
    }
    __syncthreads();
    ForEachTile([&](int j) {
      float mass = 0, own = 0;
      for (int r = 0; r < kScoredRows; ++r) {
        if (by[r] == 0) continue;
        const float share = Exp2(scores[static_cast<int64_t>(r) * p.shape.k_blocks + j] - top[r]) * by[r];
        if (r < kPools) mass += share;
        if (r >= kPools) own = fmaxf(own, share);
      }
      if (counted > 1) mass /= static_cast<float>(counted);
      scores[j] = own >= static_cast<float>(impl::kOwnShare) ? 1.0f : mass;
    });
    __syncthreads();
  }

  // Masses from logarithms, over the tiles that `counts(j)` says; others keep their logarithm.
  struct Softmax {
    float top, by;
    __device__ float Mass(float log) const { return Exp2(log - top) * by; }
  };
  template <class Counts>
  __device__ Softmax SoftmaxOver(const Counts& counts) const {
    float top = kMinusInfinity;
    ForEachTile([&](int j) {
      if (counts(j)) top = fmaxf(top, scores[j]);
    });
    top = Max(top);
    float sum = 0;
    ForEachTile([&](int j) {
      if (counts(j)) sum += Exp2(scores[j] - top);
    });
    return {top, 1.0f / Sum(sum)};
  }

  // Candidates in the order of selection: the larger value first, of equal ones the lower index. Larger keys come
  // first.
  struct Order {
    const float* values;
    int index_bits;
    __device__ unsigned long long Key(int j) const {
      const unsigned long long last = (1ull << index_bits) - 1;
      return static_cast<unsigned long long>(OrderBits(values[j])) << index_bits | (last - j);
    }
  };
  // The key of the last candidate that is needed for the best ones to weigh `target` together; 0 if all weigh less.
  template <class Weight>
  __device__ unsigned long long FindBorder(const Order& order, const Weight& weight, unsigned long long target) const {
    unsigned long long border = 0;
    for (int bit = 31 + order.index_bits; bit >= 0; --bit) {
      const unsigned long long from = border | 1ull << bit;
      unsigned long long held = 0;
      ForEachTile([&](int j) {
        if (IsTrusted(j) && order.Key(j) >= from) held += weight(j);
      });
      if (Sum(held) >= target) border = from;
    }
    return border;
  }

  __device__ Range Diagonal() const {
    if (!row.s.causal) return {0, 0};
    const int64_t all = row.s.k_count, at = row.first + row.s.offset;
    const int64_t begin = min(max(at - p.near_keys, int64_t{0}), all);
    const int64_t end = min(max(at + row.queries, int64_t{0}), all);
    return BlocksOf({static_cast<int>(begin), static_cast<int>(end)});
  }

  __device__ int64_t Place() const {
    return ((row.s.index * p.shape.q_heads + row.head) * p.shape.q_blocks + row.block) * p.shape.k_blocks;
  }

  // Writes the bits of the row; returns how many are set.
  template <class Keeps>
  __device__ int Write(const Keeps& keeps) const {
    uint32_t* kept = p.kept + row.index * p.shape.kept_words;
    int count = 0;
    for (int word = threadIdx.x / 32; word < p.shape.kept_words; word += kWarps) {
      const int j = word * 32 + threadIdx.x % 32;
      const bool keep = j >= seen.begin && j < seen.end && keeps(j);
      const uint32_t bits = __ballot_sync(~0u, keep);
      if (threadIdx.x % 32 == 0) {
        kept[word] = bits;
        count += __popc(bits);
      }
      if (p.map_out != nullptr && j < row.s.k_blocks) p.map_out[Place() + j] = keep;
    }
    return static_cast<int>(Sum(static_cast<unsigned long long>(count)));
  }

  // Which candidates the rule takes: those whose key is at least this.
  __device__ unsigned long long Border(const Order& order, int candidates) const {
    if (p.mode == kByCount) {
      const double wanted = ceil(head.topk * static_cast<double>(seen.end - seen.begin));
      const double take = fmin(fmax(wanted, 1.0), static_cast<double>(candidates));
      return FindBorder(
          order, [](int) { return 1ull; }, static_cast<unsigned long long>(take));
    }
    if (head.tau >= 1) return 0;
    const Softmax softmax = p.logs ? SoftmaxOver([this](int j) { return IsTrusted(j); }) : Softmax{};
    const auto mass = [&](int j) { return p.logs ? softmax.Mass(scores[j]) : scores[j]; };
    if (p.mode == kByFloor) {
      float best = 0;
      ForEachTile([&](int j) {
        if (IsTrusted(j)) best = fmaxf(best, mass(j));
      });
      // select.h: MassFloor.
      const double floor = (1 - head.tau) / sqrt(static_cast<double>(seen.end - seen.begin));
      const double least = fmin(floor, static_cast<double>(Max(best)));
      unsigned long long border = ~0ull;
      ForEachTile([&](int j) {
        if (IsTrusted(j) && static_cast<double>(mass(j)) >= least) border = min(border, order.Key(j));
      });
      return Reduce(border, [](unsigned long long a, unsigned long long b) { return a < b ? a : b; });
    }
    const auto weight = [&](int j) {
      return static_cast<unsigned long long>(__double2ll_rn(static_cast<double>(mass(j)) * kMassOne));
    };
    const auto target = static_cast<unsigned long long>(__double2ll_rn(head.tau * kMassOne));
    return FindBorder(order, weight, target > 0 ? target : 1);
  }

  __device__ void Select() const {
    if (p.mode <= kMapTiles) {
      const uint8_t* map = p.map;
      if (map != nullptr) {
        map += row.s.index * p.map_batch_stride + row.head * p.map_head_stride +
               static_cast<int64_t>(row.block) * p.shape.k_blocks;
      }
      return Count(Write([map](int j) { return map == nullptr || map[j] != 0; }));
    }
    if (!p.logs) JoinPools();
    if (p.mass_out != nullptr) WriteMasses();
    int candidates = 0;
    float best = kMinusInfinity;
    ForEachTile([&](int j) {
      candidates += IsTrusted(j);
      best = fmaxf(best, scores[j]);
    });
    candidates = static_cast<int>(Sum(static_cast<unsigned long long>(candidates)));
    best = Max(best);
    if (!p.logs && !(best > 0)) {  // pooled queries that are all zeros or not finite tell nothing: all are alike
      ForEachTile([&](int j) { scores[j] = 1.0f / static_cast<float>(candidates); });
      __syncthreads();
    }
    const Order order{scores, 32 - __clz(p.shape.k_blocks)};
    const unsigned long long border = candidates > 0 ? Border(order, candidates) : 0;
    const Range diagonal = Diagonal();
    Count(Write([&](int j) {
      const bool forced = (j >= diagonal.begin && j < diagonal.end) || (p.keep_sink && j == 0);
      return forced || !IsTrusted(j) || order.Key(j) >= border;
    }));
  }

  __device__ void WriteMasses() const {
    const Softmax softmax = p.logs ? SoftmaxOver([](int) { return true; }) : Softmax{};
    ForEachTile([&](int j) { p.mass_out[Place() + j] = p.logs ? softmax.Mass(scores[j]) : scores[j]; });
  }

  // Groups of rows whose PV is left out are taken off by the attention kernel.
  __device__ void Count(int computed) const {
    if (p.stats == nullptr || threadIdx.x != 0) return;
    HeadStats& stats = p.stats[row.s.index * p.shape.q_heads + row.head];
    const unsigned long long tiles = seen.end - seen.begin;
    const unsigned long long groups = (row.queries + kWarpRows - 1) / kWarpRows;
    atomicAdd(&stats.qk_eligible, tiles);
    atomicAdd(&stats.qk_computed, static_cast<unsigned long long>(computed));
    atomicAdd(&stats.pv_eligible, tiles * groups);
    atomicAdd(&stats.pv_computed, static_cast<unsigned long long>(computed) * groups);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) sparge_select(const __grid_constant__ StageParams p) {
  __shared__ unsigned long long scratch[kWarps];
  const MapRow row = FindRow(p.shape, p.first_row + static_cast<int>(blockIdx.x));
  const HeadParams& head = p.heads[row.head];
  const bool predicts = p.mode > kMapTiles;
  const bool in_tail = row.first + row.queries > row.s.tail_begin;
  const bool alike = predicts && p.q_similarity[row.index] > static_cast<float>(head.theta);
  const int64_t kv_first =
      static_cast<int64_t>(row.head / p.shape.heads_per_kv) * p.shape.all_k_blocks + row.s.k_block_begin;
  const Selector selector{p,
                          row,
                          head,
                          row.Visible(),
                          p.scores + static_cast<int64_t>(blockIdx.x) * p.score_rows * p.shape.k_blocks,
                          scratch,
                          alike && !in_tail,
                          p.k_similarity == nullptr ? nullptr : p.k_similarity + kv_first};
  selector.Select();
}

// Zeros and log-sum-exp -inf for queries of sequences without keys: blockIdx = (row of the list, head).
extern "C" __global__ void __launch_bounds__(kThreads) sparge_write_empty(const __grid_constant__ EmptyParams p) {
  const EmptyRows& rows = p.rows[blockIdx.x];
  const int head = static_cast<int>(blockIdx.y);
  const int64_t batch = p.shape.packed ? 0 : rows.index;
  for (int64_t t = rows.q_begin; t < rows.q_begin + rows.q_count; ++t) {
    const int64_t at = ElementAt(p.shape, p.o, rows.index, head, t);
    for (int c = threadIdx.x; c < p.shape.v_dim; c += kThreads) StoreElement(p.o, at + c, 0.0f);
    if (p.lse == nullptr || threadIdx.x != 0) continue;
    p.lse[batch * p.lse_batch_stride + head * p.lse_head_stride + t] = kMinusInfinity;
  }
}

}  // namespace sparge::cuda

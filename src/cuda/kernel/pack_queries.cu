// Packing of queries: images of shared memory, what centring the keys takes from their scores, and what stage 1 wants
// to know: means and self-similarity, queries that are unlike their pool, and rows to score against every key. One
// block of threads per block of 128 queries.
#include "rows.cuh"
#include "src/select/unlike.h"

namespace sparge::cuda {
namespace {

using impl::UnlikeRows;
static_assert(kOwnRows == UnlikeRows::kMostUnlike);

template <int kDim>
struct QueryPacker {
  static constexpr int kThreadsHere = PackThreads(kDim), kWarps = kThreadsHere / 32;
  // Shared memory of a block of threads.
  struct Memory {
    float rows[kRoundRows * kDim];  // of a round, as judged
    float means[kPools * kDim];
    float mean_by[kRoundRows], unit_by[kRoundRows], inverse_pre[kRoundRows];
    float distance[kRoundRows];
    float median, scratch[kWarps];
    int own[kOwnRows];
    uint8_t finite[kRoundRows];
  };

  const PackQueriesParams& p;
  const SequenceInfo& s;
  Memory& memory;
  int head, block, count;  // queries of the block
  int64_t index, unit;     // Problem::QueryBlock, KvUnit

  __device__ void Load(int r, Row<kDim>& row) const {
    const int64_t token = s.q_begin + static_cast<int64_t>(block) * kTileQ + r;
    row.Load(p.q, ElementAt(p.shape, p.q, s.index, head, token), r < count ? p.shape.qk_dim : 0);
  }
  __device__ float FactorOf(double scale) const {
    return static_cast<float>(fmin(fmax(scale * p.units[unit].score_factor, -p.factor_limit), p.factor_limit));
  }
  __device__ float ShiftOf(const Row<kDim>& row) const {
    constexpr double kMost = 3.4028234663852886e38;
    const double dot = row.Dot(p.key_mean + unit * kDim) * static_cast<double>(row.InversePre());
    return row.finite ? static_cast<float>(fmin(fmax(p.shift_factor * dot, -kMost), kMost)) : NAN;
  }

  // The rows [first, first + kRoundRows) of the block. `part`: queries that a mean is of.
  __device__ void PackRound(int first, int part) const {
    uint8_t* image = p.queries + index * QueryBytes(kDim);
    for (int t = threadIdx.x / 32; t < kRoundRows; t += kWarps) {
      Row<kDim> row;
      Load(first + t, row);
      row.Judge();
      row.Store(memory.rows + t * kDim);
      const float norm = row.Norm();
      const float shift = ShiftOf(row);
      row.Rotate(p.rotation);
      const float factor = FactorOf(row.Scale(row.template Round<true>(image, first + t)));
      if (threadIdx.x % 32 != 0) continue;
      reinterpret_cast<float*>(image + kTileQ * kDim)[first + t] = factor;
      p.q_shift[index * kTileQ + first + t] = shift;
      memory.finite[t] = row.finite;
      memory.inverse_pre[t] = row.InversePre();
      memory.mean_by[t] = row.InversePre() / static_cast<float>(part);
      memory.unit_by[t] = norm > 0 ? 1.0f / norm : 0.0f;
    }
  }

  // The squared distance of a row of the round from `other`, which was multiplied by 1 / other_by; in all lanes.
  __device__ float DistanceOf(int row, const float* other, float other_by) const {
    float sum = 0;
    for (int c = threadIdx.x % 32; c < kDim; c += 32) {
      const float difference = memory.rows[row * kDim + c] * memory.inverse_pre[row] - other[c] * other_by;
      sum = fmaf(difference, difference, sum);
    }
    return WarpSum(sum);
  }
  __device__ void MeasureFromMean(const float* mean, int rows) {
    for (int t = threadIdx.x / 32; t < rows; t += kWarps) {
      const float sum = DistanceOf(t, mean, 1.0f);
      const bool counts = memory.finite[t] && __float_as_uint(sum) < kInfinityBits;
      if (threadIdx.x % 32 == 0) memory.distance[t] = counts ? sum : 0.0f;
    }
    __syncthreads();
  }
  // Rows that are as close as `most` to the speaker need no look of their own.
  __device__ void DropAlike(int speaker, int rows, float most) {
    for (int t = threadIdx.x / 32; t < rows; t += kWarps) {
      if (!(memory.distance[t] > most)) continue;
      const float sum = DistanceOf(t, memory.rows + speaker * kDim, memory.inverse_pre[speaker]);
      if (threadIdx.x % 32 == 0 && (sum <= most || t == speaker)) memory.distance[t] = 0;
    }
    __syncthreads();
  }

  // Adds the round's queries that are unlike their pool, `found` of them so far; see UnlikeRows.
  __device__ int FindUnlike(int first, const float* mean, int rows, int found) {
    if (rows < UnlikeRows::kFewestRows) return found;
    MeasureFromMean(mean, rows);
    if (static_cast<int>(threadIdx.x) < rows) {
      const float mine = memory.distance[threadIdx.x];
      int rank = 0;
      for (int t = 0; t < rows; ++t) {
        const float x = memory.distance[t];
        rank += x < mine || (x == mine && t < static_cast<int>(threadIdx.x));
      }
      if (rank == rows / 2) memory.median = mine;
    }
    __syncthreads();
    const float most = UnlikeRows::kRatio * memory.median;
    for (; found <= kOwnRows; ++found) {
      int far = 0;  // all threads look, and find the same
      for (int t = 1; t < rows; ++t)
        if (memory.distance[t] > memory.distance[far]) far = t;
      if (!(memory.distance[far] > most)) return found;
      __syncthreads();  // all have looked
      if (threadIdx.x == 0 && found < kOwnRows) memory.own[found] = first + far;
      DropAlike(far, rows, most);
    }
    return found;
  }
  // Pools and queries by themselves as rows to be scored.
  __device__ void PackScored(int pools, int own) const {
    uint8_t* rows = p.scored.rows + index * kScoredRows * kDim;
    for (int r = threadIdx.x / 32; r < kScoredRows; r += kWarps) {
      Row<kDim> row;
      const bool used = r < pools || (r >= kPools && r - kPools < own);
      if (r < kPools) {
        row.Load(memory.means + r * kDim);
      } else {
        Load(used ? memory.own[r - kPools] : kTileQ, row);
      }
      row.Judge();
      const float shift = ShiftOf(row);
      row.Rotate(p.rotation);
      const float factor = FactorOf(row.Scale(row.template Round<false>(rows, r)));
      if (threadIdx.x % 32 != 0) continue;
      p.scored.factor[index * kScoredRows + r] = factor;
      p.scored.shift[index * kScoredRows + r] = shift;
    }
  }

  __device__ void Run() {
    const int c = static_cast<int>(threadIdx.x);
    const bool by_pool = p.pools == kPools;
    for (int i = c; i < kPools * kDim; i += kThreadsHere) memory.means[i] = 0;
    Summary summary;
    int finite = 0, mean_finite = 0, own = 0;
    for (int first = 0; first < kTileQ; first += kRoundRows) {
      const int rows = max(0, min(kRoundRows, count - first));
      const int part = by_pool ? rows : count;
      __syncthreads();
      PackRound(first, max(part, 1));
      __syncthreads();
      if (p.pools == 0) continue;
      if (by_pool) summary.mean = mean_finite = 0;
      for (int t = 0; t < rows; ++t) {
        finite += memory.finite[t];
        mean_finite += memory.finite[t];
      }
      if (c < kDim) summary.Add<kDim>(memory.rows, memory.mean_by, memory.unit_by, rows);
      const bool whole = by_pool || first + kRoundRows >= kTileQ;
      if (!whole) continue;
      summary.CorrectMean(part, mean_finite);
      const int pool = by_pool ? first / kRoundRows : 0;
      if (c < kDim) {
        memory.means[pool * kDim + c] = summary.mean;
        p.mean[(index * p.pools + pool) * kDim + c] = summary.mean;
      }
      __syncthreads();
      if (p.judges) own = FindUnlike(first, memory.means + pool * kDim, rows, own);
    }
    if (p.pools == 0) return;
    const float similarity = Similarity<kWarps>(summary.unit, finite, memory.scratch);
    if (c == 0) p.similarity[index] = own > kOwnRows ? -INFINITY : similarity;
    if (!p.scores_all) return;
    if (own > kOwnRows) own = 0;  // the block is computed in full
    if (c == 0) p.scored.own[index] = own;
    __syncthreads();
    PackScored((count + kPoolRows - 1) / kPoolRows, own);
  }
};

template <int kDim>
__device__ void PackQueries(const PackQueriesParams& p) {
  using Memory = typename QueryPacker<kDim>::Memory;
  // More than any kernel may have by itself is asked for by the launch.
  static_assert(kDim <= 128 || sizeof(Memory) <= LaunchedPackBytes(kDim));
  SPARGE_LAUNCHED_SHARED(uint8_t, launched);
  Memory* at = reinterpret_cast<Memory*>(launched);
  if constexpr (kDim <= 128) {
    __shared__ Memory own;
    at = &own;
  }
  Memory& memory = *at;
  const int q_block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int sequence = p.shape.sequence_of_q_block[q_block];
  const SequenceInfo& s = p.shape.sequences[sequence];
  const int block = q_block - s.q_block_begin;
  QueryPacker<kDim> packer{p,
                           s,
                           memory,
                           head,
                           block,
                           min(kTileQ, s.q_count - block * kTileQ),
                           static_cast<int64_t>(head) * p.shape.all_q_blocks + q_block,
                           static_cast<int64_t>(sequence) * p.shape.kv_heads + head / p.shape.heads_per_kv};
  packer.Run();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(PackThreads(64))
    sparge_pack_queries_64(const __grid_constant__ PackQueriesParams p) {
  PackQueries<64>(p);
}
extern "C" __global__ void __launch_bounds__(PackThreads(128))
    sparge_pack_queries_128(const __grid_constant__ PackQueriesParams p) {
  PackQueries<128>(p);
}
extern "C" __global__ void __launch_bounds__(PackThreads(256))
    sparge_pack_queries_256(const __grid_constant__ PackQueriesParams p) {
  PackQueries<256>(p);
}

}  // namespace sparge::cuda

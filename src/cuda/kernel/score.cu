// Stage 1, scores. Predictor `keys`: pooled queries, and queries by themselves, against every key: per key block the
// logarithm of the sum of 2^score over the keys that the row sees. Predictor `paper`: mean against mean.
#include "stage1.cuh"

namespace sparge::cuda {
namespace {

constexpr float kMinusInfinity = -INFINITY;

// A warp has the rows of two neighbouring query blocks, 8 each, against all key blocks: lane / 4 is a row of the first
// block, and the same of the second.
template <int kDim>
struct Scorer {
  static constexpr int kProducts = kDim / 32;  // along the channels
  static constexpr int kKeyTiles = kTileK / 8;

  const StageParams& p;
  int lane = threadIdx.x % 32;

  struct Rows {
    uint32_t a[kProducts][4];
    float factor[2], shift[2];
    Range keys[2];  // that the row sees
  };

  // In which order channels are multiplied does not matter, as long as it is one for rows and keys: a lane takes the 16
  // bytes of a chunk at once, for the two products from k on.
  __device__ int ChunkOf(int k) const { return 2 * k + lane % 4; }

  // What row r of a block sees: a pool stands where its last query is, a query by itself sees what the first one does.
  __device__ Range KeysOfScored(const MapRow& row, int r) const {
    const int pools = (row.queries + kPoolRows - 1) / kPoolRows;
    if (r < kPools) {
      if (r >= pools) return {0, 0};
      return KeysOf(row.s, row.first + (r + 1) * kPoolRows - 1, p.pool_window);
    }
    const bool used = p.own_rows && r - kPools < p.scored.own[row.index];
    return used ? KeysOf(row.s, row.first) : Range{0, 0};
  }

  __device__ void Load(const MapRow& row, int half, Rows& rows) const {
    const int r = lane / 4;
    const int64_t at = row.index * kScoredRows + r;
#pragma unroll
    for (int k = 0; k < kProducts; k += 2) {
      const uint4 four = *reinterpret_cast<const uint4*>(p.scored.rows + at * kDim + ChunkOf(k) * 16);
      rows.a[k][half] = four.x;
      rows.a[k][half + 2] = four.y;
      rows.a[k + 1][half] = four.z;
      rows.a[k + 1][half + 2] = four.w;
    }
    rows.factor[half] = p.scored.factor[at];
    rows.shift[half] = p.scored.shift[at];
    rows.keys[half] = KeysOfScored(row, r);
  }

  // The sums of a key block, both query blocks at once.
  __device__ void Multiply(const Rows& rows, int64_t kv_block, int32_t (&sums)[kKeyTiles][4]) const {
    constexpr int kKeys = StepKeys(kDim);
    // Every part of the channels has the keys; the first one's are read.
    constexpr int kParts = ChannelParts(kDim);
    const uint8_t* steps = p.steps + kv_block * (kTileK / kKeys) * kParts * p.step_bytes;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const int key = n * 8 + lane / 4;
      const uint8_t* image = steps + key / kKeys * kParts * p.step_bytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
#pragma unroll
      for (int k = 0; k < kProducts; k += 2) {
        const int at = SwizzledByte<kDim>(key % kKeys, ChunkOf(k) * 16);
        const uint4 four = *reinterpret_cast<const uint4*>(image + at);
        MultiplyS8(sums[n], rows.a[k], four.x, four.y);
        MultiplyS8(sums[n], rows.a[k + 1], four.z, four.w);
      }
    }
  }

  // log2 of the sum over the key block's keys of 2^score, of the lane's row of query block `half`; in its four lanes.
  __device__ float SumOf(const Rows& rows, int half, int key_block, int64_t kv_block,
                         const int32_t (&sums)[kKeyTiles][4]) const {
    float scores[kKeyTiles][2];
    float top = kMinusInfinity;
    const float inverse_cap = p.softcap > 0 ? 1.0f / p.softcap : 0.0f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int within = n * 8 + lane % 4 * 2 + i;
        const int key = key_block * kTileK + within;
        float score =
            static_cast<float>(sums[n][half * 2 + i]) * p.key_scale[kv_block * kTileK + within] * rows.factor[half];
        if (p.softcap > 0) score = p.softcap * Tanh((score + rows.shift[half]) * inverse_cap);
        const bool seen = key >= rows.keys[half].begin && key < rows.keys[half].end;
        scores[n][i] = seen ? score : kMinusInfinity;
        top = fmaxf(top, scores[n][i]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float reference = top == kMinusInfinity ? 0.0f : top;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) sum += Exp2(scores[n][0] - reference) + Exp2(scores[n][1] - reference);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum > 0 ? reference + Log2(sum) : kMinusInfinity;
  }

  // Scores `halves` query blocks from row `row` of the map on; a warp of gridDim.y takes each so-manieth key block.
  __device__ void Run(int row, int halves) const {
    const MapRow first = FindRow(p.shape, p.first_row + row);
    const MapRow second = FindRow(p.shape, p.first_row + row + halves - 1);
    Rows rows;
    Load(first, 0, rows);
    Load(second, 1, rows);
    Range seen = first.Visible();
    if (halves == 2) {
      const Range also = second.Visible();
      const bool none = seen.begin >= seen.end;
      if (also.begin < also.end) {
        seen = none ? also : Range{min(seen.begin, also.begin), max(seen.end, also.end)};
      }
    }
    const int64_t kv_first =
        static_cast<int64_t>(first.head / p.shape.heads_per_kv) * p.shape.all_k_blocks + first.s.k_block_begin;
    for (int j = seen.begin + static_cast<int>(blockIdx.y); j < seen.end; j += static_cast<int>(gridDim.y)) {
      int32_t sums[kKeyTiles][4];
      Multiply(rows, kv_first + j, sums);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= halves) break;
        const float sum = SumOf(rows, half, j, kv_first + j, sums);
        float* to = p.scores + (static_cast<int64_t>(row + half) * kScoredRows + lane / 4) * p.shape.k_blocks;
        if (lane % 4 == 0) to[j] = sum;
      }
    }
  }
};

template <int kDim>
__device__ void ScoreKeys(const StageParams& p) {
  const int warp = static_cast<int>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int row = warp * 2;
  if (row >= p.row_count) return;
  const Scorer<kDim> scorer{p};
  bool together = row + 1 < p.row_count;
  if (together) {
    const MapRow a = FindRow(p.shape, p.first_row + row), b = FindRow(p.shape, p.first_row + row + 1);
    together = a.head == b.head && a.sequence == b.sequence;
    if (!together) scorer.Run(row + 1, 1);
  }
  scorer.Run(row, together ? 2 : 1);
}

// What attention would give the mean query and the mean key, log2 units. A warp per tile; blockIdx.x is the row.
template <int kDim>
__device__ void ScoreMeans(const StageParams& p) {
  const MapRow row = FindRow(p.shape, p.first_row + static_cast<int>(blockIdx.x));
  const int kv_head = row.head / p.shape.heads_per_kv;
  const int64_t unit = static_cast<int64_t>(row.sequence) * p.shape.kv_heads + kv_head;
  const int64_t kv_first = static_cast<int64_t>(kv_head) * p.shape.all_k_blocks + row.s.k_block_begin;
  const int lane = threadIdx.x % 32;
  double query[kDim / 32];
  double shift = 0;
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    query[i] = static_cast<double>(p.q_mean[row.index * kDim + lane + 32 * i]);
    shift += query[i] * static_cast<double>(p.key_mean[unit * kDim + lane + 32 * i]);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) shift += __shfl_xor_sync(~0u, shift, d);
  const double unit_size = 1.0 / static_cast<double>(p.units[unit].inverse_unit);
  const Range seen = row.Visible();
  float* to = p.scores + static_cast<int64_t>(blockIdx.x) * p.shape.k_blocks;
  for (int j = seen.begin + threadIdx.x / 32; j < seen.end; j += kThreads / 32) {
    double dot = 0;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      dot += query[i] * static_cast<double>(p.k_mean[(kv_first + j) * kDim + lane + 32 * i]);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
    float score = static_cast<float>(dot * unit_size * p.mean_factor);
    if (p.softcap > 0) {
      score = p.softcap * Tanh((score + static_cast<float>(shift * p.mean_factor)) * (1.0f / p.softcap));
    }
    if (lane == 0) to[j] = score;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_keys_64(const __grid_constant__ StageParams p) {
  ScoreKeys<64>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_keys_128(const __grid_constant__ StageParams p) {
  ScoreKeys<128>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_keys_256(const __grid_constant__ StageParams p) {
  ScoreKeys<256>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_means_64(const __grid_constant__ StageParams p) {
  ScoreMeans<64>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_means_128(const __grid_constant__ StageParams p) {
  ScoreMeans<128>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) sparge_score_means_256(const __grid_constant__ StageParams p) {
  ScoreMeans<256>(p);
}

}  // namespace sparge::cuda

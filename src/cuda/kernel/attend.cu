// Stage 2 on the GPU, top to bottom: one block of 128 queries against the key blocks that stage 1 kept.
//
// Four warps take 32 rows each. Keys and values come in steps (params.h), two of which are in shared memory: while one
// is used the next one is on its way, and one barrier per step says that it has arrived and that the other is free.
//
//   s = Q K^T: s8 mma. Accumulators start at 0x4B400000, so that they read as the float 1.5 * 2^23 + sum.
//
//   s in log2 units: less that, times the scales of key and query; softcap; hidden keys are -inf.
//
//   skip: if no row of the warp has a score above its running maximum - lambda, the rest of the step is left out.
//
//   p = 2^(s - m): the sums O and l are rescaled where a maximum of the warp grew.
//
//   O += p V: f16 or e4m3 mma. The layout of s is that of its operand.
//
// Heads of more than 128 channels have two blocks of threads for a block of queries: both compute all scores, each has
// half of the channels of V and O.
//
// A row sees the keys [first, last] by position; only steps that cross such a border look at them (causal, windows, the
// last keys, rows beyond the last query). A row that has seen no key gives zeros and log-sum-exp -inf.
#include "kept_blocks.cuh"
#include "params.h"
#include "ptx.cuh"
#include "tensors.cuh"

namespace sparge::cuda {
namespace {

constexpr int kIntegerBias = 0x4B400000;
constexpr float kFloatBias = 12582912.0f;  // the same bits
constexpr int kRowTiles = 2;               // of 16 rows, per warp
constexpr int kRowsPerLane = 2 * kRowTiles;
constexpr float kMinusInfinity = -INFINITY;

// The rows of one lane: row r is that of C's elements 2 * (r & 1) of row tile r / 2.
struct Rows {
  float top[kRowsPerLane];  // log2 units; -inf until a key was seen
  float sum[kRowsPerLane];  // of this lane's columns
};

struct Keys {
  int first, last;
};

template <int kDim, bool kFp8>
struct Attention {
  static constexpr int kKeys = StepKeys(kDim);
  static constexpr int kSteps = kTileK / kKeys;  // per key block
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kChannels = ChannelsAtOnce(kDim);
  static constexpr int kParts = ChannelParts(kDim);
  static constexpr int kChannelTiles = kChannels / 8;
  static constexpr int kStage = StepBytes(kDim, kFp8);

  const AttendParams& p;
  const SequenceInfo& s;
  int block;
  Rows rows;
  float o[kRowTiles][kChannelTiles][4];

  // Shared memory: the queries with their factors, then two stages. Its place is known to the compiler, so that none of
  // this takes a register for long.
  static __device__ uint8_t* Shared() {
    SPARGE_LAUNCHED_SHARED(uint8_t, shared);
    return shared;
  }
  static __device__ uint32_t Stage(int stage) { return SharedAddress(Shared()) + QueryBytes(kDim) + stage * kStage; }
  static __device__ int Head() { return static_cast<int>(blockIdx.y); }
  static __device__ int Lane() { return threadIdx.x % 32; }
  // Which of the channels are this block's.
  static __device__ int Part() { return static_cast<int>(blockIdx.x) % kParts; }
  // The first of this lane's rows.
  __device__ int Query() const { return block * kTileQ + Warp() * kWarpRows + Lane() / 4; }
  static __device__ int Warp() { return threadIdx.x / 32; }
  // Of this lane's rows, from query RowOf(0) on.
  static __device__ const float* Factors() {
    return reinterpret_cast<const float*>(Shared() + kTileQ * kDim) + Warp() * kWarpRows + Lane() / 4;
  }
  // Of the keys of a stage.
  static __device__ const float* Scales(int stage) {
    const int before = QueryBytes(kDim) + KeyBytes(kDim) + ValueBytes(kDim, kFp8);
    return reinterpret_cast<const float*>(Shared() + before + stage * kStage);
  }

  __device__ Attention(const AttendParams& params, const SequenceInfo& sequence, int q_block)
      : p(params), s(sequence), block(q_block) {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      rows.top[r] = kMinusInfinity;
      rows.sum[r] = 0;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0;
      }
    }
  }

  __device__ int RowOf(int r) const { return r / 2 * 16 + (r & 1) * 8; }

  // What row r sees; nothing if there is no such query.
  __device__ Keys KeysOf(int r) const {
    const int64_t position = s.offset + (Query() + RowOf(r));
    const int64_t all = s.k_count - 1;
    Keys keys{0, static_cast<int>(all)};
    if (s.causal) keys.last = static_cast<int>(position < -1 ? -1 : position < all ? position : all);
    if (s.window > 0) {
      const int64_t first = position - s.window + 1;
      keys.first = static_cast<int>(first < 0 ? 0 : first < all + 1 ? first : all + 1);
    }
    if (Query() + RowOf(r) >= s.q_count) keys.last = -1;
    return keys;
  }

  // Copies a step of packed keys and values, 16 bytes per thread and turn.
  __device__ void Fetch(int key_block, int step, int stage) const {
    const int64_t kv_block =
        static_cast<int64_t>(Head() / p.shape.heads_per_kv) * p.shape.all_k_blocks + s.k_block_begin + key_block;
    const uint8_t* from = p.steps + ((kv_block * kSteps + step) * kParts + Part()) * kStage;
    const uint32_t to = Stage(stage);
    for (int i = threadIdx.x * 16; i < kStage; i += kThreads * 16) CopyAsync(to + i, from + i);
  }

  __device__ void FetchQueries() const {
    const int64_t index = static_cast<int64_t>(Head()) * p.shape.all_q_blocks + s.q_block_begin + block;
    const uint8_t* from = p.queries + index * QueryBytes(kDim);
    for (int i = threadIdx.x * 16; i < QueryBytes(kDim); i += kThreads * 16)
      CopyAsync(SharedAddress(Shared()) + i, from + i);
  }

  // Integer sums of the step's scores, with their bias.
  __device__ void Multiply(uint32_t keys, int32_t (&sums)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = kIntegerBias;
      }
    }
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int row = Warp() * kWarpRows + m * 16 + (Lane() & 15);
        LoadMatrices(a[m], SharedAddress(Shared()) + row * kDim + SwizzledChunk<kDim>(row, 2 * k + (Lane() >> 4)) * 16);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        const int row = n * 8 + (Lane() & 7) + 8 * (Lane() >> 4);
        LoadMatrices(b, keys + row * kDim + SwizzledChunk<kDim>(row, 2 * k + ((Lane() >> 3) & 1)) * 16);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          MultiplyS8(sums[m][n], a[m], b[0], b[1]);
          MultiplyS8(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Scores in log2 units.
  __device__ void Scale(const float* scales, const int32_t (&sums)[kRowTiles][kKeyTiles][4],
                        float (&scores)[kRowTiles][kKeyTiles][4]) const {
    float factor[kRowsPerLane];
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) factor[r] = Factors()[RowOf(r)];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + n * 8 + Lane() % 4 * 2);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float sum = __int_as_float(sums[m][n][i]) - kFloatBias;
          scores[m][n][i] = sum * (i & 1 ? scale.y : scale.x) * factor[m * 2 + i / 2];
        }
      }
    }
  }

  __device__ void Cap(float (&scores)[kRowTiles][kKeyTiles][4]) const {
    const int64_t index = static_cast<int64_t>(Head()) * p.shape.all_q_blocks + s.q_block_begin;
    const float inverse = 1.0f / p.softcap;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      const float shift = p.q_shift[index * kTileQ + Query() + RowOf(r)];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[r / 2][n][(r & 1) * 2 + i];
          score = p.softcap * Tanh((score + shift) * inverse);
        }
      }
    }
  }

  __device__ void Hide(int first_key, float (&scores)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      const Keys keys = KeysOf(r);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + n * 8 + Lane() % 4 * 2 + i;
          if (key < keys.first || key > keys.last) scores[r / 2][n][(r & 1) * 2 + i] = kMinusInfinity;
        }
      }
    }
  }

  // The largest score of each row of the warp, in all lanes that share the row.
  __device__ void FindTops(const float (&scores)[kRowTiles][kKeyTiles][4], float (&top)[kRowsPerLane]) const {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      float most = kMinusInfinity;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        most = fmaxf(most, fmaxf(scores[r / 2][n][(r & 1) * 2], scores[r / 2][n][(r & 1) * 2 + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      top[r] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    }
  }

  // Moves the running maxima to those of the step; what was summed so far follows if any of the warp's grew.
  __device__ void MoveTops(const float (&top)[kRowsPerLane]) {
    bool grew = false;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) grew |= top[r] > rows.top[r];
    if (!__any_sync(~0u, grew)) return;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      const float most = fmaxf(rows.top[r], top[r]);
      const float keep = Exp2(rows.top[r] - Reference(most));
      rows.top[r] = most;
      rows.sum[r] *= keep;
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n) {
        o[r / 2][n][(r & 1) * 2] *= keep;
        o[r / 2][n][(r & 1) * 2 + 1] *= keep;
      }
    }
  }
  // What a row's scores are relative to: -inf - (-inf) would be NaN.
  static __device__ float Reference(float top) { return top == kMinusInfinity ? 0.0f : top; }

  __device__ void Weigh(float (&scores)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      const float reference = Reference(rows.top[r]) - (kFp8 ? kE4m3Shift : 0.0f);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[r / 2][n][(r & 1) * 2 + i];
          score = Exp2(score - reference);
          sum += score;
        }
      }
      rows.sum[r] += sum;
    }
  }

  __device__ void AddValuesF16(uint32_t values, const float (&weights)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = weights[m][2 * k + i / 2] + (i & 1) * 2;
          a[m][i] = PackF16(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kChannelTiles; n += 2) {
        uint32_t b[4];
        const int row = k * 16 + (Lane() & 15);
        const int chunk = SwizzledChunk<kChannels * 2>(row, n + (Lane() >> 4));
        LoadMatricesTransposed(b, values + row * kChannels * 2 + chunk * 16);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          MultiplyF16(o[m][n], a[m], b[0], b[1]);
          MultiplyF16(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void AddValuesE4m3(uint32_t values, const float (&weights)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 32; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* low = weights[m][4 * k + i / 2 * 2] + (i & 1) * 2;
          const float* high = weights[m][4 * k + i / 2 * 2 + 1] + (i & 1) * 2;
          a[m][i] = PackE4m3(low[0], low[1]) | PackE4m3(high[0], high[1]) << 16;
        }
      }
#pragma unroll
      for (int n = 0; n < kChannelTiles; n += 2) {
        uint32_t b[4];
        const int row = n * 8 + (Lane() & 7) + 8 * (Lane() >> 4);
        LoadMatrices(b, values + row * kKeys + SwizzledChunk<kKeys>(row, 2 * k + ((Lane() >> 3) & 1)) * 16);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          MultiplyE4m3(o[m][n], a[m], b[0], b[1]);
          MultiplyE4m3(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // What a step meant to the warp.
  struct Judged {
    bool seen, matters;
  };
  // The step whose first key is `first_key`; `inside`: every row of the warp sees every key of it.
  __device__ Judged Step(int stage, int first_key, bool inside, float skip) {
    float scores[kRowTiles][kKeyTiles][4];
    {
      int32_t sums[kRowTiles][kKeyTiles][4];
      Multiply(Stage(stage), sums);
      Scale(Scales(stage), sums, scores);
    }
    if (p.softcap > 0) Cap(scores);
    if (!inside) Hide(first_key, scores);
    float top[kRowsPerLane];
    FindTops(scores, top);
    bool seen = false, matters = false;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      seen |= top[r] > kMinusInfinity;
      matters |= top[r] > rows.top[r] - skip;
    }
    const Judged judged{__any_sync(~0u, seen) != 0, __any_sync(~0u, matters) != 0};
    if (!judged.matters) return judged;
    MoveTops(top);
    Weigh(scores);
    if constexpr (kFp8) {
      AddValuesE4m3(Stage(stage) + KeyBytes(kDim), scores);
    } else {
      AddValuesF16(Stage(stage) + KeyBytes(kDim), scores);
    }
    return judged;
  }

  // All kept steps. Returns in how many tiles the warp left out PV.
  __device__ int Run() {
    const int64_t row = static_cast<int64_t>(Head()) * p.shape.all_q_blocks + s.q_block_begin + block;
    KeptBlocks kept(p.kept + row * p.shape.kept_words, p.shape.kept_words);
    // Keys that all rows of the warp see; none if some of its rows are no queries.
    Keys all;
    all.first = __shfl_sync(~0u, KeysOf(kRowsPerLane - 1).first, 31);
    all.last = __shfl_sync(~0u, KeysOf(0).last, 0);
    if (__any_sync(~0u, Query() + RowOf(kRowsPerLane - 1) >= s.q_count)) all.last = -1;

    int now = kept.Next();
    if (now != KeptBlocks::kEnd) {
      FetchQueries();
      Fetch(now, 0, 0);
      CommitCopies();
    }
    int left_out = 0, stage = 0;
    Judged tile{false, false};
    while (now != KeptBlocks::kEnd) {
      const int step = kSteps == 2 ? stage : 0;  // both count to two
      const bool last_step = step == kSteps - 1;
      const int next = last_step ? kept.Next() : now;
      WaitForCopies<0>();
      __syncthreads();  // the step has arrived for all, and nobody reads the other stage any more
      if (next != KeptBlocks::kEnd) Fetch(next, last_step ? 0 : step + 1, stage ^ 1);
      CommitCopies();
      const int first_key = now * kTileK + step * kKeys;
      const bool inside = first_key >= all.first && first_key + kKeys - 1 <= all.last;
      const Judged judged = Step(stage, first_key, inside, p.heads[Head()].skip);
      tile = {tile.seen || judged.seen, tile.matters || judged.matters};
      if (last_step) {
        left_out += tile.seen && !tile.matters;
        tile = {false, false};
      }
      now = next;
      stage ^= 1;
    }
    return left_out;
  }

  __device__ void Finish() {
    const int kv_head = Head() / p.shape.heads_per_kv;
    const int sequence = static_cast<int>(&s - p.shape.sequences);
    const float* unit = p.value_unit + (static_cast<int64_t>(sequence) * p.shape.kv_heads + kv_head) * kDim;
    const int64_t first = (static_cast<int64_t>(Head()) * p.shape.all_q_blocks + s.q_block_begin) * kTileQ;
    const float sink = p.heads[Head()].sink;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      float sum = rows.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int q = Query() + RowOf(r);
      if (q >= s.q_count) continue;
      const float shift = p.q_shift[first + q];
      // With a softcap the scores are what they are; else centring took the shift from all of them.
      const float left_out = p.softcap > 0 ? 0.0f : shift;
      const bool empty = sum == 0;
      float lse = empty ? kMinusInfinity : rows.top[r] + Log2(sum) - (kFp8 ? kE4m3Shift : 0.0f) + left_out;
      float by = empty ? 0.0f : 1.0f / sum;
      if (!empty && sink > kMinusInfinity) {
        const float most = fmaxf(lse, sink);
        const float joined = most + Log2(Exp2(lse - most) + Exp2(sink - most));
        by *= Exp2(lse - joined);
        lse = joined;
      }
      if (isnan(shift) && !empty) by = lse = shift;  // a query that is not finite
      if (p.lse != nullptr && Lane() % 4 == 0 && Part() == 0) {
        const int64_t batch = p.shape.packed ? 0 : s.index;
        p.lse[batch * p.lse_batch_stride + Head() * p.lse_head_stride + s.q_begin + q] = lse * kLn2;
      }
      const int64_t at = ElementAt(p.shape, p.o, s.index, Head(), s.q_begin + q);
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int channel = Part() * kChannels + n * 8 + Lane() % 4 * 2 + i;
          // A row that saw nothing has sums 0, and zero times a unit is zero.
          if (channel < p.shape.v_dim) {
            StoreElement(p.o, at + channel, o[r / 2][n][(r & 1) * 2 + i] * by * unit[channel]);
          }
        }
      }
    }
  }
};

template <int kDim, bool kFp8>
__device__ void AttendBlock(const AttendParams& p) {
  using A = Attention<kDim, kFp8>;
  // Causal: blocks that see most keys start first.
  const int q_block = p.shape.all_q_blocks - 1 - static_cast<int>(blockIdx.x) / A::kParts;
  const SequenceInfo& s = p.shape.sequences[p.shape.sequence_of_q_block[q_block]];
  const int head = static_cast<int>(blockIdx.y);
  const int block = q_block - s.q_block_begin;
  A a(p, s, block);
  const int left_out = a.Run();
  a.Finish();
  if (p.stats != nullptr && A::Lane() == 0 && A::Part() == 0 && left_out > 0) {
    HeadStats& stats = p.stats[s.index * p.shape.q_heads + head];
    atomicAdd(&stats.pv_computed, 0ull - static_cast<unsigned long long>(left_out));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2) sparge_attend_64_f16(const __grid_constant__ AttendParams p) {
  AttendBlock<64, false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sparge_attend_128_f16(const __grid_constant__ AttendParams p) {
  AttendBlock<128, false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sparge_attend_256_f16(const __grid_constant__ AttendParams p) {
  AttendBlock<256, false>(p);
}
// Where e4m3 has an instruction of its own; sm_90 and sm_100 would compute it by that of f16.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
extern "C" __global__ void __launch_bounds__(kThreads, 2) sparge_attend_64_fp8(const __grid_constant__ AttendParams p) {
  AttendBlock<64, true>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sparge_attend_128_fp8(const __grid_constant__ AttendParams p) {
  AttendBlock<128, true>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sparge_attend_256_fp8(const __grid_constant__ AttendParams p) {
  AttendBlock<256, true>(p);
}
#endif

}  // namespace sparge::cuda

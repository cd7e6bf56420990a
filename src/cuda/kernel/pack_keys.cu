// Packing of keys and values: a survey of each block, the mean and units of each head, then images of shared memory
// (params.h) with summaries for stage 1. One block of threads per block of 64 keys.
#include "rows.cuh"

namespace sparge::cuda {
namespace {

// Where a block of keys stands.
struct KeyBlock {
  int kv_head, block, sequence;
  const SequenceInfo& s;
  int count;  // keys

  __device__ int64_t Unit(const Shape& shape) const {
    return static_cast<int64_t>(sequence) * shape.kv_heads + kv_head;
  }
};
__device__ KeyBlock FindKeyBlock(const Shape& shape) {
  const int at = static_cast<int>(blockIdx.x);
  const int sequence = shape.sequence_of_k_block[at];
  const SequenceInfo& s = shape.sequences[sequence];
  const int block = at - s.k_block_begin;
  return {static_cast<int>(blockIdx.y), block, sequence, s, min(kTileK, s.k_count - block * kTileK)};
}

__device__ bool IsFinite(float x) { return (__float_as_uint(x) & 0x7FFFFFFF) < kInfinityBits; }

// Sets finite[t] for the tokens of a block: warp w looks at tokens w, w + kWarps and so on.
template <int kWarps>
__device__ void FindFinite(const Shape& shape, const Tensor& tensor, const KeyBlock& b, int dim, uint8_t* finite) {
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < b.count; t += kWarps) {
    const int64_t at = ElementAt(shape, tensor, b.s.index, b.kv_head, b.s.k_begin + b.block * kTileK + t);
    bool good = true;
    for (int c = lane; c < dim; c += 32) good = good && IsFinite(LoadElement(tensor, at + c));
    good = __all_sync(~0u, good);
    if (lane == 0) finite[t] = good;
  }
}

template <int kDim>
__device__ void SurveyBlock(const SurveyParams& p) {
  constexpr int kWarps = PackThreads(kDim) / 32;
  __shared__ uint8_t finite[2][kTileK];
  __shared__ float tops[kWarps];
  const KeyBlock b = FindKeyBlock(p.shape);
  const int64_t index = static_cast<int64_t>(b.kv_head) * p.shape.all_k_blocks + blockIdx.x;
  FindFinite<kWarps>(p.shape, p.k, b, p.shape.qk_dim, finite[0]);
  if (p.v.data != nullptr) FindFinite<kWarps>(p.shape, p.v, b, p.shape.v_dim, finite[1]);
  __syncthreads();
  int count = 0;
  for (int t = 0; t < b.count; ++t) count += finite[0][t];
  const int c = static_cast<int>(threadIdx.x);
  const int64_t first = b.s.k_begin + b.block * kTileK;
  const float part = 1.0f / static_cast<float>(max(count, 1));
  float mean = 0, top = 0, value_top = 0;
  for (int t = 0; t < b.count; ++t) {
    if (c < p.shape.qk_dim && finite[0][t]) {
      const float x = LoadElement(p.k, ElementAt(p.shape, p.k, b.s.index, b.kv_head, first + t) + c);
      mean = fmaf(x, part, mean);
      top = fmaxf(top, fabsf(x));
    }
    if (p.v.data != nullptr && c < p.shape.v_dim && finite[1][t]) {
      value_top =
          fmaxf(value_top, fabsf(LoadElement(p.v, ElementAt(p.shape, p.v, b.s.index, b.kv_head, first + t) + c)));
    }
  }
  if (c < kDim) {
    p.block_mean[index * kDim + c] = mean;
    p.value_max[index * kDim + c] = value_top;
  }
  top = WarpMax(top);
  if (c % 32 == 0) tops[c / 32] = top;
  __syncthreads();
  if (c != 0) return;
  for (int w = 1; w < kWarps; ++w) top = fmaxf(top, tops[w]);
  p.block_max[index] = top;
  p.finite[index] = count;
}

// The exponent of the largest power of two that is not above x, within what a float can invert.
__device__ int UnitExponent(float x) {
  if (x == 0) return 0;
  const int exponent = static_cast<int>(__float_as_uint(x) >> 23) - 127;  // below -100 whatever a denormal is
  return max(-100, min(exponent, 127));
}
__device__ float PowerOfTwo(int exponent) {
  return exponent < -126 ? __uint_as_float(1u << (149 + exponent))
                         : __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// One block of threads per sequence and kv head.
template <int kDim, bool kFp8>
__device__ void ChooseUnits(const SurveyParams& p) {
  const int sequence = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y);
  const SequenceInfo& s = p.shape.sequences[sequence];
  const int64_t unit = static_cast<int64_t>(sequence) * p.shape.kv_heads + kv_head;
  const int64_t first = static_cast<int64_t>(kv_head) * p.shape.all_k_blocks + s.k_block_begin;
  const int c = static_cast<int>(threadIdx.x);
  float k_max = 0, v_max = 0;
  int tokens = 0;
  double sum = 0;
  for (int64_t j = first; j < first + s.k_blocks; ++j) {
    k_max = fmaxf(k_max, p.block_max[j]);
    tokens += p.finite[j];
    if (c >= kDim) continue;
    v_max = fmaxf(v_max, p.value_max[j * kDim + c]);
    sum += static_cast<double>(p.block_mean[j * kDim + c]) * p.finite[j];
  }
  const int k_unit = UnitExponent(k_max);
  if (c == 0) {
    const double scale = k_unit >= 0 ? PowerOfTwo(k_unit) : 1.0 / PowerOfTwo(-k_unit);
    p.units[unit] = {p.scale * scale, PowerOfTwo(-k_unit), 0};
  }
  if (c >= kDim) return;
  // Keys near the largest float are not centred: the difference could overflow.
  const bool centre = tokens > 0 && k_max <= 0x1p126f;
  p.key_mean[unit * kDim + c] = centre ? static_cast<float>(sum / static_cast<double>(tokens)) : 0.0f;
  const int v_unit = UnitExponent(v_max);
  const float inverse = PowerOfTwo(-v_unit);
  const float step = kFp8 && v_max > 0 ? 448.0f / (v_max * inverse) : 1.0f;
  p.value_inverse[unit * kDim + c] = inverse;
  p.value_step[unit * kDim + c] = step;
  p.value_unit[unit * kDim + c] = PowerOfTwo(v_unit) / step;
}

// The values of a block into its steps, each part of the channels into the images that it has; a token that is not
// finite is zeros.
template <int kDim, bool kFp8>
__device__ void PackValues(const PackKeysParams& p, const KeyBlock& b, const uint8_t* finite, uint8_t* steps) {
  constexpr int kKeys = StepKeys(kDim), kChannels = ChannelsAtOnce(kDim), kThreadsHere = PackThreads(kDim);
  const int64_t unit = b.Unit(p.shape) * kDim;
  const int64_t first = b.s.k_begin + b.block * kTileK;
  const auto value = [&](int t, int c) {
    if (t >= b.count || c >= p.shape.v_dim || !finite[t]) return 0.0f;
    const float x = LoadElement(p.v, ElementAt(p.shape, p.v, b.s.index, b.kv_head, first + t) + c);
    return x * p.value_inverse[unit + c] * p.value_step[unit + c];
  };
  const auto values_of = [&](int token, int c) {
    const int image = token / kKeys * ChannelParts(kDim) + c / kChannels;
    return steps + image * StepBytes(kDim, kFp8) + KeyBytes(kDim);
  };
  if constexpr (kFp8) {
    // A word is four tokens of a channel: those at neighbouring places.
    for (int i = threadIdx.x; i < kTileK / 4 * kDim; i += kThreadsHere) {
      const int c = i % kDim, word = i / kDim;              // words count through the block
      const int sixteen = word / 4 * 16, t = word % 4 * 2;  // tokens t, t + 1, t + 8, t + 9 of these 16
      const uint32_t low = PackE4m3(value(sixteen + t, c), value(sixteen + t + 1, c));
      const uint32_t high = PackE4m3(value(sixteen + t + 8, c), value(sixteen + t + 9, c));
      const int at = SwizzledByte<kKeys>(c % kChannels, sixteen % kKeys + E4m3Place(t));
      *reinterpret_cast<uint32_t*>(values_of(sixteen, c) + at) = low | high << 16;
    }
  } else {
    for (int i = threadIdx.x; i < kTileK * kDim / 2; i += kThreadsHere) {
      const int c = i % (kDim / 2) * 2, t = i / (kDim / 2);
      const int at = SwizzledByte<kChannels * 2>(t % kKeys, c % kChannels * 2);
      *reinterpret_cast<uint32_t*>(values_of(t, c) + at) = PackF16(value(t, c), value(t, c + 1));
    }
  }
}

// Keys whose rows are in shared memory at once, for the summaries.
__device__ constexpr int RoundKeys(int dim) { return dim > 128 ? 32 : kTileK; }

template <int kDim, bool kFp8>
struct KeyPacker {
  static constexpr int kKeys = StepKeys(kDim), kWarps = PackThreads(kDim) / 32, kRound = RoundKeys(kDim);
  struct Memory {
    float rows[kRound * kDim];
    float mean_by[kTileK], unit_by[kTileK], scratch[kWarps];
    uint8_t finite[2][kTileK];
  };
  const PackKeysParams& p;
  const KeyBlock& b;
  Memory& memory;
  int64_t index, unit;
  uint8_t* steps;

  // A key: its integers and its scale into the image of every part.
  __device__ void PackKey(int t) const {
    Row<kDim> row;
    const int64_t token = b.s.k_begin + b.block * kTileK + t;
    row.Load(p.k, ElementAt(p.shape, p.k, b.s.index, b.kv_head, token), t < b.count ? p.shape.qk_dim : 0);
    if (t < b.count) row.Centre(p.key_mean + unit * kDim, p.units[unit].inverse_unit);
    row.Judge();
    row.Store(memory.rows + t % kRound * kDim);
    const float norm = row.Norm();
    row.Rotate(p.rotation);
    uint8_t* step = steps + t / kKeys * ChannelParts(kDim) * StepBytes(kDim, kFp8);
    float rounded = 0;
    for (int part = 0; part < ChannelParts(kDim); ++part) {
      rounded = row.template Round<true>(step + part * StepBytes(kDim, kFp8), t % kKeys);
    }
    const float scale = static_cast<float>(row.Scale(rounded));
    if (threadIdx.x % 32 != 0) return;
    memory.finite[0][t] = row.finite;
    memory.mean_by[t] = row.InversePre() / static_cast<float>(b.count);
    memory.unit_by[t] = norm > 0 ? 1.0f / norm : 0.0f;
    p.key_scale[index * kTileK + t] = scale;
    // A key that is not finite, or whose value is not, makes NaN of the rows that see it, and of no other.
    const bool good = t >= b.count || (row.finite && (p.v.data == nullptr || memory.finite[1][t]));
    for (int part = 0; part < ChannelParts(kDim); ++part) {
      uint8_t* image = step + part * StepBytes(kDim, kFp8);
      reinterpret_cast<float*>(image + KeyBytes(kDim) + ValueBytes(kDim, kFp8))[t % kKeys] = good ? scale : NAN;
    }
  }

  __device__ void Run() const {
    const int c = static_cast<int>(threadIdx.x);
    if (p.v.data != nullptr) FindFinite<kWarps>(p.shape, p.v, b, p.shape.v_dim, memory.finite[1]);
    Summary summary;
    for (int first = 0; first < kTileK; first += kRound) {
      __syncthreads();
      for (int t = first + c / 32; t < first + kRound; t += kWarps) PackKey(t);
      __syncthreads();
      const int rows = max(0, min(kRound, b.count - first));
      if (p.summarises && c < kDim)
        summary.Add<kDim>(memory.rows, memory.mean_by + first, memory.unit_by + first, rows);
    }
    if (p.v.data != nullptr) PackValues<kDim, kFp8>(p, b, memory.finite[1], steps);
    if (!p.summarises) return;
    int tokens = 0;
    for (int t = 0; t < b.count; ++t) tokens += memory.finite[0][t];
    summary.CorrectMean(b.count, tokens);
    if (c < kDim) p.block_mean[index * kDim + c] = summary.mean;
    const float similarity = Similarity<kWarps>(summary.unit, tokens, memory.scratch);
    if (c == 0) p.similarity[index] = similarity;
  }
};

template <int kDim, bool kFp8>
__device__ void PackKeys(const PackKeysParams& p) {
  using Packer = KeyPacker<kDim, kFp8>;
  __shared__ typename Packer::Memory memory;
  const KeyBlock b = FindKeyBlock(p.shape);
  const int64_t index = static_cast<int64_t>(b.kv_head) * p.shape.all_k_blocks + blockIdx.x;
  const Packer packer{p, b, memory, index, b.Unit(p.shape), p.steps + index * BlockStepBytes(kDim, kFp8)};
  packer.Run();
}

}  // namespace

#define SPARGE_SURVEY(dim)                                          \
  extern "C" __global__ void __launch_bounds__(PackThreads(dim))    \
      sparge_survey_##dim(const __grid_constant__ SurveyParams p) { \
    SurveyBlock<dim>(p);                                            \
  }
#define SPARGE_PACK_KEYS(dim, pv, fp8)                                          \
  extern "C" __global__ void __launch_bounds__(PackThreads(dim))                \
      sparge_units_##dim##_##pv(const __grid_constant__ SurveyParams p) {       \
    ChooseUnits<dim, fp8>(p);                                                   \
  }                                                                             \
  extern "C" __global__ void __launch_bounds__(PackThreads(dim))                \
      sparge_pack_keys_##dim##_##pv(const __grid_constant__ PackKeysParams p) { \
    PackKeys<dim, fp8>(p);                                                      \
  }
SPARGE_SURVEY(64)
SPARGE_SURVEY(128)
SPARGE_SURVEY(256)
SPARGE_PACK_KEYS(64, f16, false)
SPARGE_PACK_KEYS(128, f16, false)
SPARGE_PACK_KEYS(256, f16, false)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
SPARGE_PACK_KEYS(64, fp8, true)
SPARGE_PACK_KEYS(128, fp8, true)
SPARGE_PACK_KEYS(256, fp8, true)
#endif

}  // namespace sparge::cuda

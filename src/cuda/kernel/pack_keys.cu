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

// Sets finite[t] for the tokens of a block: warp w looks at tokens w, w + kPackWarps and so on.
__device__ void FindFinite(const Shape& shape, const Tensor& tensor, const KeyBlock& b, int dim, uint8_t* finite) {
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < b.count; t += kPackWarps) {
    const int64_t at = ElementAt(shape, tensor, b.s.index, b.kv_head, b.s.k_begin + b.block * kTileK + t);
    bool good = true;
    for (int c = lane; c < dim; c += 32) good = good && IsFinite(LoadElement(tensor, at + c));
    good = __all_sync(~0u, good);
    if (lane == 0) finite[t] = good;
  }
}

template <int kDim>
__device__ void SurveyBlock(const SurveyParams& p) {
  __shared__ uint8_t finite[2][kTileK];
  __shared__ float tops[kPackWarps];
  const KeyBlock b = FindKeyBlock(p.shape);
  const int64_t index = static_cast<int64_t>(b.kv_head) * p.shape.all_k_blocks + blockIdx.x;
  FindFinite(p.shape, p.k, b, p.shape.qk_dim, finite[0]);
  if (p.v.data != nullptr) FindFinite(p.shape, p.v, b, p.shape.v_dim, finite[1]);
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
  for (int w = 1; w < kPackWarps; ++w) top = fmaxf(top, tops[w]);
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

// The values of a block into its steps; a token that is not finite is zeros.
template <int kDim, bool kFp8>
__device__ void PackValues(const PackKeysParams& p, const KeyBlock& b, const uint8_t* finite, uint8_t* steps) {
  constexpr int kKeys = StepKeys(kDim);
  const int64_t unit = b.Unit(p.shape) * kDim;
  const int64_t first = b.s.k_begin + b.block * kTileK;
  const auto value = [&](int t, int c) {
    if (t >= b.count || c >= p.shape.v_dim || !finite[t]) return 0.0f;
    const float x = LoadElement(p.v, ElementAt(p.shape, p.v, b.s.index, b.kv_head, first + t) + c);
    return x * p.value_inverse[unit + c] * p.value_step[unit + c];
  };
  if constexpr (kFp8) {
    // A word is four tokens of a channel: those at neighbouring places.
    for (int i = threadIdx.x; i < kTileK / 4 * kDim; i += kPackThreads) {
      const int c = i % kDim, word = i / kDim;              // words count through the block
      const int sixteen = word / 4 * 16, t = word % 4 * 2;  // tokens t, t + 1, t + 8, t + 9 of these 16
      const uint32_t low = PackE4m3(value(sixteen + t, c), value(sixteen + t + 1, c));
      const uint32_t high = PackE4m3(value(sixteen + t + 8, c), value(sixteen + t + 9, c));
      uint8_t* step = steps + sixteen / kKeys * StepBytes(kDim, kFp8) + KeyBytes(kDim);
      const int at = SwizzledByte<kKeys>(c, sixteen % kKeys + E4m3Place(t));
      *reinterpret_cast<uint32_t*>(step + at) = low | high << 16;
    }
  } else {
    for (int i = threadIdx.x; i < kTileK * kDim / 2; i += kPackThreads) {
      const int c = i % (kDim / 2) * 2, t = i / (kDim / 2);
      uint8_t* step = steps + t / kKeys * StepBytes(kDim, kFp8) + KeyBytes(kDim);
      const int at = SwizzledByte<kDim * 2>(t % kKeys, c * 2);
      *reinterpret_cast<uint32_t*>(step + at) = PackF16(value(t, c), value(t, c + 1));
    }
  }
}

template <int kDim, bool kFp8>
__device__ void PackKeys(const PackKeysParams& p) {
  constexpr int kKeys = StepKeys(kDim);
  __shared__ float rows[kTileK * kDim];
  __shared__ float mean_by[kTileK], unit_by[kTileK], scratch[kPackWarps];
  __shared__ uint8_t finite[2][kTileK];
  const KeyBlock b = FindKeyBlock(p.shape);
  const int64_t index = static_cast<int64_t>(b.kv_head) * p.shape.all_k_blocks + blockIdx.x;
  const int64_t unit = b.Unit(p.shape);
  uint8_t* steps = p.steps + index * (kTileK / kKeys) * StepBytes(kDim, kFp8);
  const bool with_values = p.v.data != nullptr;
  if (with_values) FindFinite(p.shape, p.v, b, p.shape.v_dim, finite[1]);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < kTileK; t += kPackWarps) {
    Row<kDim> row;
    const int64_t token = b.s.k_begin + b.block * kTileK + t;
    row.Load(p.k, ElementAt(p.shape, p.k, b.s.index, b.kv_head, token), t < b.count ? p.shape.qk_dim : 0);
    if (t < b.count) row.Centre(p.key_mean + unit * kDim, p.units[unit].inverse_unit);
    row.Judge();
    row.Store(rows + t * kDim);
    const float norm = row.Norm();
    row.Rotate(p.rotation);
    uint8_t* step = steps + t / kKeys * StepBytes(kDim, kFp8);
    const float scale = static_cast<float>(row.Scale(row.template Round<true>(step, t % kKeys)));
    if (lane != 0) continue;
    finite[0][t] = row.finite;
    mean_by[t] = row.InversePre() / static_cast<float>(b.count);
    unit_by[t] = norm > 0 ? 1.0f / norm : 0.0f;
    p.key_scale[index * kTileK + t] = scale;
    // A key that is not finite, or whose value is not, makes NaN of the rows that see it, and of no other.
    const bool good = t >= b.count || (row.finite && (!with_values || finite[1][t]));
    float* scales = reinterpret_cast<float*>(step + KeyBytes(kDim) + ValueBytes(kDim, kFp8));
    scales[t % kKeys] = good ? scale : NAN;
  }
  __syncthreads();
  if (with_values) PackValues<kDim, kFp8>(p, b, finite[1], steps);
  if (!p.summarises) return;
  Summary summary;
  int tokens = 0;
  for (int t = 0; t < b.count; ++t) tokens += finite[0][t];
  if (threadIdx.x < kDim) summary.Add<kDim>(rows, mean_by, unit_by, b.count);
  summary.CorrectMean(b.count, tokens);
  if (threadIdx.x < kDim) p.block_mean[index * kDim + threadIdx.x] = summary.mean;
  const float similarity = Similarity(summary.unit, tokens, scratch);
  if (threadIdx.x == 0) p.similarity[index] = similarity;
}

}  // namespace

#define SPARGE_SURVEY(dim)                                          \
  extern "C" __global__ void __launch_bounds__(kPackThreads)        \
      sparge_survey_##dim(const __grid_constant__ SurveyParams p) { \
    SurveyBlock<dim>(p);                                            \
  }
#define SPARGE_PACK_KEYS(dim, pv, fp8)                                          \
  extern "C" __global__ void __launch_bounds__(kPackThreads)                    \
      sparge_units_##dim##_##pv(const __grid_constant__ SurveyParams p) {       \
    ChooseUnits<dim, fp8>(p);                                                   \
  }                                                                             \
  extern "C" __global__ void __launch_bounds__(kPackThreads)                    \
      sparge_pack_keys_##dim##_##pv(const __grid_constant__ PackKeysParams p) { \
    PackKeys<dim, fp8>(p);                                                      \
  }
SPARGE_SURVEY(64)
SPARGE_SURVEY(128)
SPARGE_PACK_KEYS(64, f16, false)
SPARGE_PACK_KEYS(128, f16, false)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
SPARGE_PACK_KEYS(64, fp8, true)
SPARGE_PACK_KEYS(128, fp8, true)
#endif

}  // namespace sparge::cuda

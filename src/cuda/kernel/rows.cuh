// One query or key row, by one warp: load, rotate, round to 8 bits. The operations and their order are those of the CPU
// (src/cpu/pack-inl.h), so that the integers are the same. Lane l holds the elements l, l + 32 and so on.
#ifndef SPARGE_SRC_CUDA_KERNEL_ROWS_CUH_
#define SPARGE_SRC_CUDA_KERNEL_ROWS_CUH_

#include "src/base/packing.h"
#include "tensors.cuh"

namespace sparge::cuda {

inline constexpr int kRoundRows = 64;  // queries that are in shared memory at once
inline constexpr uint32_t kInfinityBits = 0x7F800000;

// Bit i % 32 of word i / 32: element i changes its sign.
struct SignBits {
  uint32_t word[kLargestDim / 32];
  constexpr SignBits() : word() {
    for (int i = 0; i < kLargestDim; ++i) {
      if (impl::kRandomSigns.sign[i] < 0) word[i / 32] |= 1u << (i % 32);
    }
  }
};

__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ inline float WarpSum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ inline double WarpSum(double x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

template <int kDim>
struct Row {
  static constexpr int kPerLane = kDim / 32;
  float x[kPerLane];
  float top;      // largest magnitude
  float pre = 1;  // the row was multiplied by this power of two, so that its squares are floats
  bool finite;

  static __device__ int Element(int i) { return threadIdx.x % 32 + 32 * i; }

  __device__ void Load(const Tensor& tensor, int64_t at, int dim) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = Element(i) < dim ? LoadElement(tensor, at + Element(i)) : 0.0f;
  }
  __device__ void Load(const float* from) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = from[Element(i)];
  }
  __device__ void Store(float* to) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to[Element(i)] = x[i];
  }
  __device__ void Centre(const float* mean, float inverse_unit) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = (x[i] - mean[Element(i)]) * inverse_unit;
  }

  // Largest magnitude as bits, which order as numbers do, with all that is not finite above.
  __device__ uint32_t TopBits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFF);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, d));
    return bits;
  }

  // A row that is not finite becomes zeros; one of extreme size is brought to where its squares are floats.
  __device__ void Judge() {
    const uint32_t bits = TopBits();
    finite = bits < kInfinityBits;
    top = finite ? __uint_as_float(bits) : 0.0f;
    pre = top > 0 && top < 0x1p-60f ? 0x1p100f : top > 0x1p40f ? 0x1p-100f : 1.0f;
    top *= pre;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = finite ? x[i] * pre : 0.0f;
  }
  __device__ float InversePre() const { return 1.0f / pre; }

  __device__ float Norm() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum = fmaf(x[i], x[i], sum);
    return sqrtf(WarpSum(sum));
  }

  __device__ double Dot(const float* other) const {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(other[Element(i)]);
    return WarpSum(sum);
  }

  // Hadamard in blocks of a power of two, after the signs. The first two stages pair what vectors of four lanes do
  // (src/cpu/rotate-inl.h), so that `baseline` and `neon` get the same integers.
  __device__ void Rotate(int block) {
    constexpr SignBits kSigns;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = (kSigns.word[i] >> lane) & 1 ? -x[i] : x[i];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= block) break;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], d == 2 ? 3 : d);
        x[i] = lane & d ? other - x[i] : other + x[i];
      }
    }
#pragma unroll
    for (int d = 1; d < kPerLane; d *= 2) {
      if (d * 32 >= block) break;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (i & d) continue;
        const float a = x[i], b = x[i + d];
        x[i] = a + b;
        x[i + d] = a - b;
      }
    }
    top = __uint_as_float(TopBits());
  }

  // Writes the integers of the row `row` of an image; returns their step. `kImage`: swizzled.
  template <bool kImage>
  __device__ float Round(uint8_t* to, int row) const {
    const float step = top / 127.0f;
    const float by = step > 0 ? 1.0f / step : 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = kImage ? SwizzledByte<kDim>(row, Element(i)) : row * kDim + Element(i);
      to[at] = static_cast<uint8_t>(__float2int_rn(x[i] * by));
    }
    return step;
  }
  // The step in units of the row as it came.
  __device__ double Scale(float step) const { return static_cast<double>(step) * static_cast<double>(InversePre()); }
};

// Means and self-similarity of a block while its rows pass by, kRoundRows at a time; thread c has channel c.
struct Summary {
  float mean = 0, unit = 0;

  // rows: [row][kDim] as judged; mean_by, unit_by: per row.
  template <int kDim>
  __device__ void Add(const float* rows, const float* mean_by, const float* unit_by, int count) {
    for (int r = 0; r < count; ++r) {
      const float x = rows[r * kDim + threadIdx.x];
      mean = fmaf(x, mean_by[r], mean);
      unit = fmaf(x, unit_by[r], unit);
    }
  }
  // A pool some of whose tokens were not finite.
  __device__ void CorrectMean(int count, int finite) {
    if (finite != 0 && finite != count) mean *= static_cast<float>(count) / static_cast<float>(finite);
  }
};

// Sum over the threads of a block, in all of them. `scratch`: a float per warp.
template <int kWarps>
__device__ float BlockSum(float x, float* scratch) {
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += scratch[w];
  return sum;
}

// Squared length of the mean unit vector, from the sum of unit vectors.
template <int kWarps>
__device__ float Similarity(float unit, int tokens, float* scratch) {
  const float squared = BlockSum<kWarps>(unit * unit, scratch);
  const float n = static_cast<float>(tokens);
  return tokens == 0 ? 0.0f : fminf(squared / (n * n), 1.0f);
}

}  // namespace sparge::cuda
#endif  // SPARGE_SRC_CUDA_KERNEL_ROWS_CUH_

// Elements of the caller's tensors, and the little arithmetic that several kernels share.
#ifndef SPARGE_SRC_CUDA_KERNEL_TENSORS_CUH_
#define SPARGE_SRC_CUDA_KERNEL_TENSORS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"
#include "ptx.cuh"

namespace sparge::cuda {

inline constexpr float kLn2 = 0.693147180559945f;
inline constexpr float kLog2e = 1.44269504088896f;

// sparge_dtype
inline constexpr int kF32 = 0, kF16 = 1, kBf16 = 2;

// Place of a token's first element.
__device__ inline int64_t ElementAt(const Shape& shape, const Tensor& tensor, int64_t index, int64_t head,
                                    int64_t token) {
  const int64_t batch = shape.packed ? 0 : index;
  return batch * tensor.batch_stride + head * tensor.head_stride + token * tensor.token_stride;
}

__device__ inline float LoadElement(const Tensor& tensor, int64_t at) {
  if (tensor.dtype == kF32) return static_cast<const float*>(tensor.data)[at];
  if (tensor.dtype == kF16) return __half2float(static_cast<const __half*>(tensor.data)[at]);
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(tensor.data)[at]) << 16);
}

// A mean of largest floats may round one step above them: it is brought back, infinities and NaN stay.
__device__ inline void StoreElement(const Tensor& tensor, int64_t at, float value) {
  if (tensor.dtype == kF32) {
    static_cast<float*>(tensor.data)[at] = value;
  } else if (tensor.dtype == kF16) {
    static_cast<__half*>(tensor.data)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(tensor.data)[at] = __float2bfloat16_rn(value);
  }
}

// 1 - 2 / (1 + e^2x); near 0, where that would cancel, x - x^3 / 3.
__device__ inline float Tanh(float x) {
  const float power = Exp2(2 * kLog2e * fabsf(x));
  const float large = 1.0f - __fdividef(2.0f, 1.0f + power);
  const float y = fabsf(x) < 0.02f ? fabsf(x) * (1.0f - x * x * (1.0f / 3)) : large;
  return copysignf(y, x);
}

}  // namespace sparge::cuda
#endif  // SPARGE_SRC_CUDA_KERNEL_TENSORS_CUH_

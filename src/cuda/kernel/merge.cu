// Joins partial results: a warp has a row of the output, blockIdx = (four rows, head, batch).
#include "tensors.cuh"

namespace sparge::cuda {
namespace {

constexpr float kMinusInfinity = -INFINITY;

__device__ int64_t LseAt(const Part& part, int64_t token) {
  return blockIdx.z * part.lse_batch_stride + blockIdx.y * part.lse_head_stride + token;
}
__device__ int64_t RowAt(const Part& part, int64_t token) {
  return blockIdx.z * part.o.batch_stride + blockIdx.y * part.o.head_stride + token * part.o.token_stride;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) sparge_merge(const __grid_constant__ MergeParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  float top = kMinusInfinity;
  bool is_nan = false;
  for (int i = 0; i < p.count; ++i) {
    const float lse = p.parts[i].lse[LseAt(p.parts[i], token)];
    is_nan = is_nan || isnan(lse);
    top = fmaxf(top, lse);
  }
  float sum = 0;
  for (int i = 0; top > kMinusInfinity && i < p.count; ++i) {
    sum += Exp2((p.parts[i].lse[LseAt(p.parts[i], token)] - top) * kLog2e);
  }
  // A part that saw no key has the weight 0 and no say, whatever is in its memory.
  for (int c = threadIdx.x % 32; c < p.dim; c += 32) {
    float value = 0;
    for (int i = 0; sum > 0 && i < p.count; ++i) {
      const float weight = Exp2((p.parts[i].lse[LseAt(p.parts[i], token)] - top) * kLog2e);
      if (weight > 0) value += weight / sum * LoadElement(p.parts[i].o, RowAt(p.parts[i], token) + c);
    }
    StoreElement(p.out.o, RowAt(p.out, token) + c, is_nan ? NAN : value);
  }
  __syncwarp();  // `out` may be a part, whose log-sum-exp all lanes have read now
  if (threadIdx.x % 32 == 0) {
    p.out.lse[LseAt(p.out, token)] = is_nan ? NAN : sum > 0 ? top + Log2(sum) * kLn2 : kMinusInfinity;
  }
}

}  // namespace sparge::cuda

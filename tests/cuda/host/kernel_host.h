// The kernels of src/cuda/kernel as ordinary C++, so that a debugger and sanitizers can look at them: one fiber per
// thread of a block, blocks one after the other. Included before each .cu file; it stands in for ptx.cuh and for what
// nvcc knows by itself. Copies arrive at once and approximations are exact: what that hides is for tools/ptxrun to
// find.
#ifndef SPARGE_TESTS_CUDA_HOST_KERNEL_HOST_H_
#define SPARGE_TESTS_CUDA_HOST_KERNEL_HOST_H_

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/cuda/host/fibers.h"

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using sparge::testing::host::blockIdx;
using sparge::testing::host::Exchange;
using sparge::testing::host::gridDim;
using sparge::testing::host::SyncThreads;
using sparge::testing::host::threadIdx;

inline void __syncthreads() { SyncThreads(); }
inline void __syncwarp() { Exchange<char>(0); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int distance) {
  return Exchange<T>(x)[sparge::testing::host::Lane() ^ distance];
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return Exchange<T>(x)[lane];
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint32_t* all = Exchange<uint32_t>(x ? 1u : 0u);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i] << i;
  return bits;
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int32_t x) { return std::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline long long __double2ll_rn(double x) { return std::llrint(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline void atomicAdd(unsigned long long* to, unsigned long long x) { *to += x; }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
using std::isnan;

// ptx.cuh
#define SPARGE_SRC_CUDA_KERNEL_PTX_CUH_
#define SPARGE_LAUNCHED_SHARED(type, name) type* name = reinterpret_cast<type*>(sparge::testing::host::launched_shared)

namespace sparge::cuda {

namespace host = sparge::testing::host;

// Addresses count from the launched shared memory, the only one that is addressed so.
inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - host::launched_shared);
}

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  const uint32_t* all = host::Exchange<uint32_t>(address);
  const int lane = host::Lane();
  for (int m = 0; m < 4; ++m) {
    std::memcpy(&r[m], host::launched_shared + all[m * 8 + lane / 4] + lane % 4 * 4, 4);
  }
}
inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  const uint32_t* all = host::Exchange<uint32_t>(address);
  const int lane = host::Lane();
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      std::memcpy(&pair[i], host::launched_shared + all[m * 8 + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    }
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

struct Operands {
  uint32_t a[4], b[2];
};
// c += a b, with numbers of kBits that `value` reads from a word.
template <int kBits, class Sum, class C, class Value>
void Multiply(C (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Value& value) {
  constexpr int kPerWord = 32 / kBits;
  Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Operands* all = host::Exchange<Operands>(mine);
  const int g = host::Lane() / 4, t = host::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int n = t * 2 + (i & 1);
    Sum sum = 0;
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 4 * kPerWord; ++k) {
        const uint32_t x = all[g * 4 + k / kPerWord].a[half * 2 + i / 2];
        const uint32_t y = all[n * 4 + k / kPerWord].b[half];
        sum += static_cast<Sum>(value(x >> k % kPerWord * kBits)) * static_cast<Sum>(value(y >> k % kPerWord * kBits));
      }
    }
    c[i] = static_cast<C>(c[i] + sum);
  }
}
inline void MultiplyS8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Multiply<8, int32_t>(c, a, b0, b1, [](uint32_t x) { return static_cast<int8_t>(x); });
}
inline void MultiplyF16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Multiply<16, float>(c, a, b0, b1, [](uint32_t x) {
    __half_raw raw;
    raw.x = static_cast<uint16_t>(x);
    return __half2float(__half(raw));
  });
}
inline void MultiplyE4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Multiply<8, float>(c, a, b0, b1, [](uint32_t x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(x), __NV_E4M3)));
  });
}

inline void CopyAsync(uint32_t to_shared, const void* from) {
  std::memcpy(host::launched_shared + to_shared, from, 16);
}
inline void CommitCopies() {}
template <int kPending>
void WaitForCopies() {}

inline float Exp2(float x) { return std::exp2(x); }
inline float Log2(float x) { return std::log2(x); }
inline uint32_t PackF16(float low, float high) {
  return __half_raw(__float2half_rn(low)).x | static_cast<uint32_t>(__half_raw(__float2half_rn(high)).x) << 16;
}
inline uint32_t PackE4m3(float low, float high) {
  return __nv_cvt_float_to_fp8(low, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32_t>(__nv_cvt_float_to_fp8(high, __NV_SATFINITE, __NV_E4M3)) << 8;
}

}  // namespace sparge::cuda
#endif  // SPARGE_TESTS_CUDA_HOST_KERNEL_HOST_H_

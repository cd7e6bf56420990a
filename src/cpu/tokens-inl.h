// Reading tokens of any type as floats, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_TOKENS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_TOKENS_INL_H_
#undef SPARGE_SRC_CPU_TOKENS_INL_H_
#else
#define SPARGE_SRC_CPU_TOKENS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "src/base/half.h"
#include "src/base/tokens.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// One token as floats, zero-padded to `pad`.
HWY_INLINE void LoadToken(const TokenRows& rows, const std::byte* from, int64_t pad, float* out) {
  const F32 d;
  int64_t i = 0;
  if (rows.dtype == SPARGE_F32) {
    const auto* floats = reinterpret_cast<const float*>(from);
    for (; i + kLanes <= rows.dim; i += kLanes) hn::Store(hn::LoadU(d, floats + i), d, out + i);
  } else if (rows.dtype == SPARGE_F16) {
    const hn::Rebind<hwy::float16_t, F32> half;
    for (; i + kLanes <= rows.dim; i += kLanes) {
      hn::Store(hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from) + i)), d, out + i);
    }
  } else {
    const hn::Rebind<hwy::bfloat16_t, F32> half;
    for (; i + kLanes <= rows.dim; i += kLanes) {
      hn::Store(hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::bfloat16_t*>(from) + i)), d, out + i);
    }
  }
  for (; i < rows.dim; ++i) out[i] = LoadElement(from, rows.dtype, i);
  std::fill(out + rows.dim, out + pad, 0.0f);
}

// The token at `from` as floats, padded: where it lies if it is that already, else converted into `buffer`.
HWY_INLINE const float* AsFloats(const TokenRows& rows, const std::byte* from, int64_t pad, float* buffer) {
  if (rows.dtype == SPARGE_F32 && rows.dim == pad) return reinterpret_cast<const float*>(from);
  LoadToken(rows, from, pad, buffer);
  return buffer;
}
HWY_INLINE const float* TokenAsFloats(const TokenRows& rows, int64_t token, int64_t pad, float* buffer) {
  return AsFloats(rows, rows.Token(token), pad, buffer);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

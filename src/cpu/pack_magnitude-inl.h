// Magnitudes and norms of rows, for packing; compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_PACK_MAGNITUDE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_PACK_MAGNITUDE_INL_H_
#undef SPARGE_SRC_CPU_PACK_MAGNITUDE_INL_H_
#else
#define SPARGE_SRC_CPU_PACK_MAGNITUDE_INL_H_
#endif

#include <hwy/highway.h>

#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Magnitudes are compared as bits: the same order, and what is not finite is above all else.
inline constexpr int32_t kInfinityBits = 0x7F800000;
HWY_INLINE VI MagnitudeBits(VF x) { return hn::BitCast(I32(), hn::Abs(x)); }

// |row|^2.
HWY_INLINE float SquaredNorm(const float* row, int64_t pad) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < pad; i += kLanes) {
    const VF x = hn::Load(d, row + i);
    sum = hn::MulAdd(x, x, sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

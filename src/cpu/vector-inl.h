// Vector types and the few vector helpers that more than one room needs, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_VECTOR_INL_H_
#undef SPARGE_SRC_CPU_VECTOR_INL_H_
#else
#define SPARGE_SRC_CPU_VECTOR_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef SPARGE_AVX512
#define SPARGE_AVX512 (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL)

using F32 = hn::ScalableTag<float>;
using I32 = hn::ScalableTag<int32_t>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
inline constexpr int kLanes = static_cast<int>(HWY_LANES(float));
// Packed keys and values lie in panels of so many lanes: what a register panel reads step by step is contiguous.
inline constexpr int kPanelLanes = 2 * kLanes;

// For lambdas: compiled for the target, and inlined so early that what they capture can live in registers.
#ifndef SPARGE_INLINE
#define SPARGE_INLINE HWY_ATTR __attribute__((always_inline))
#endif

// body(0), body(1), ... as compile-time indices: g++ keeps an array of vectors in registers only if no loop indexes it.
template <int kCount, class Body>
HWY_INLINE void Unroll(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) SPARGE_INLINE {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

// The lanes of each of kLanes vectors reduced with `op`: lane i of the result belongs to vectors[i]. Merging two
// vectors at a time takes a third of the instructions of kLanes reductions.
template <class V, class Op>
HWY_INLINE V ReduceEach(V (&vectors)[kLanes], const Op& op) {
  const hn::DFromV<V> d;
  for (int left = kLanes; left > 1; left /= 2) {
    for (int i = 0; i < left / 2; ++i) {
      const V a = vectors[2 * i];
      const V b = vectors[2 * i + 1];
      vectors[i] = op(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
    }
  }
  return vectors[0];
}
template <class V>
HWY_INLINE V MaxOfEach(V (&vectors)[kLanes]) {
  return ReduceEach(vectors, [](V a, V b) HWY_ATTR { return hn::Max(a, b); });
}
template <class V>
HWY_INLINE V SumOfEach(V (&vectors)[kLanes]) {
  return ReduceEach(vectors, [](V a, V b) HWY_ATTR { return hn::Add(a, b); });
}

// The nearest integer of numbers within int32: hn::NearestInt takes four more instructions to care for others.
HWY_INLINE VI NearestSmall(VF x) {
#if SPARGE_AVX512
  return VI{_mm512_cvtps_epi32(x.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI{_mm256_cvtps_epi32(x.raw)};
#else
  return hn::NearestInt(x);
#endif
}

// One bit per lane.
HWY_INLINE uint32_t MaskBits(hn::Mask<F32> mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(F32(), mask, bytes);
  uint32_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

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
#if HWY_TARGET == HWY_AVX2
  // Two steps within 128 bits, where shuffles take one instruction and one cycle, and one across.
  const hn::RepartitionToWide<hn::DFromV<V>> pairs;
  V halves[2];
  for (int h = 0; h < 2; ++h) {
    V merged[2];
    for (int i = 0; i < 2; ++i) {
      const V a = vectors[4 * h + 2 * i];
      const V b = vectors[4 * h + 2 * i + 1];
      merged[i] = op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    }
    const auto a = hn::BitCast(pairs, merged[0]);
    const auto b = hn::BitCast(pairs, merged[1]);
    halves[h] = op(hn::BitCast(d, hn::InterleaveLower(pairs, a, b)), hn::BitCast(d, hn::InterleaveUpper(pairs, a, b)));
  }
  return op(hn::ConcatLowerLower(d, halves[1], halves[0]), hn::ConcatUpperUpper(d, halves[1], halves[0]));
#else
  V merged[kLanes];
  Unroll<kLanes>([&](auto i) SPARGE_INLINE { merged[i] = vectors[i]; });
  const auto halve = [&](auto left) SPARGE_INLINE {
    Unroll<left>([&](auto i) SPARGE_INLINE {
      const V a = merged[2 * i];
      const V b = merged[2 * i + 1];
      merged[i] = op(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
    });
  };
  if constexpr (kLanes == 16) halve(std::integral_constant<int, 8>{});
  if constexpr (kLanes >= 8) halve(std::integral_constant<int, 4>{});
  halve(std::integral_constant<int, 2>{});
  halve(std::integral_constant<int, 1>{});
  return merged[0];
#endif
}
template <class V>
HWY_INLINE V MaxOfEach(V (&vectors)[kLanes]) {
  return ReduceEach(vectors, [](V a, V b) HWY_ATTR { return hn::Max(a, b); });
}
template <class V>
HWY_INLINE V SumOfEach(V (&vectors)[kLanes]) {
  return ReduceEach(vectors, [](V a, V b) HWY_ATTR { return hn::Add(a, b); });
}

// The larger of the two sums that each of kLanes vectors has: over its lanes 0, 1, 4, 5, ... and over the others.
HWY_INLINE VF LargerHalfOfEach(const VF (&vectors)[kLanes]) {
  const F32 d;
#if HWY_TARGET == HWY_AVX2
  VF sums[2];  // both sums of the vectors 0, 1 | 4, 5 and of 2, 3 | 6, 7 (left and right of 128 bits)
  for (int h = 0; h < 2; ++h) {
    VF merged[2];
    for (int i = 0; i < 2; ++i) {
      const auto a = vectors[4 * i + 2 * h].raw;
      const auto b = vectors[4 * i + 2 * h + 1].raw;
      merged[i] = hn::Add(VF{_mm256_shuffle_ps(a, b, 0x88)}, VF{_mm256_shuffle_ps(a, b, 0xDD)});
    }
    sums[h] = hn::Add(hn::ConcatLowerLower(d, merged[1], merged[0]), hn::ConcatUpperUpper(d, merged[1], merged[0]));
  }
  return hn::Max(VF{_mm256_shuffle_ps(sums[0].raw, sums[1].raw, 0x88)},
                 VF{_mm256_shuffle_ps(sums[0].raw, sums[1].raw, 0xDD)});
#else
  const auto halves = hn::RebindMask(d, hn::Eq(hn::And(hn::Iota(I32(), 0), hn::Set(I32(), 2)), hn::Zero(I32())));
  VF firsts[kLanes], seconds[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    firsts[i] = hn::IfThenElseZero(halves, vectors[i]);
    seconds[i] = hn::IfThenZeroElse(halves, vectors[i]);
  }
  return hn::Max(SumOfEach(firsts), SumOfEach(seconds));
#endif
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

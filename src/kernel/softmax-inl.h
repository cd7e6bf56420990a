// The vector pieces of the softmax: 2^x and tanh, compiled once per instruction set.
#if defined(SPARGE_SRC_KERNEL_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_KERNEL_SOFTMAX_INL_H_
#undef SPARGE_SRC_KERNEL_SOFTMAX_INL_H_
#else
#define SPARGE_SRC_KERNEL_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include "src/kernel/dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
namespace HWY_NAMESPACE {

// 2^f for |f| <= 1/2: the polynomial with the smallest largest relative error, 7.5e-5 at degree 3, well below half a
// step of an 8-bit probability (2e-3), and 7.5e-8 at degree 5, about the rounding of fp32.
template <int kDegree>
HWY_INLINE VF Exp2Polynomial(VF f) {
  const F32 d;
  if constexpr (kDegree == 3) {
    VF p = hn::Set(d, 5.51716690e-2f);
    p = hn::MulAdd(p, f, hn::Set(d, 2.42611122e-1f));
    p = hn::MulAdd(p, f, hn::Set(d, 6.93260985e-1f));
    return hn::MulAdd(p, f, hn::Set(d, 9.99928074e-1f));
  } else {
    static_assert(kDegree == 5);
    VF p = hn::Set(d, 1.32764720e-3f);
    p = hn::MulAdd(p, f, hn::Set(d, 9.67554133e-3f));
    p = hn::MulAdd(p, f, hn::Set(d, 5.55071327e-2f));
    p = hn::MulAdd(p, f, hn::Set(d, 2.40221197e-1f));
    p = hn::MulAdd(p, f, hn::Set(d, 6.93146967e-1f));
    return hn::MulAdd(p, f, hn::Set(d, 1.00000007f));
  }
}

// 2^x for x < 127.5; exactly 0 for x < -126.5, so that a hidden score (-inf) gets no weight at all.
template <int kDegree>
HWY_INLINE VF Exp2(VF x) {
  const F32 d;
  const VF clamped = hn::Max(x, hn::Set(d, -127.0f));
  const VF whole = hn::Round(clamped);
  const VF p = Exp2Polynomial<kDegree>(hn::Sub(clamped, whole));
  // 2^n by putting n + 127 into the exponent; n = -127 gives +0.
  const VI exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(I32(), whole), hn::Set(I32(), 127)));
  return hn::Mul(p, hn::BitCast(F32(), exponent));
}

// 2^x for -30 <= x < 30, clamped below, in fewer instructions: adding 1.5 * 2^23 rounds x to an integer in the low bits
// of the sum, from where it is added to the exponent. Not exactly 0 for hidden scores, but integers are made of it.
template <int kDegree>
HWY_INLINE VF Exp2Bounded(VF x) {
  const F32 d;
  const VF magic = hn::Set(d, 12582912.0f);
  const VF clamped = hn::Max(x, hn::Set(d, -30.0f));
  const VF shifted = hn::Add(clamped, magic);
  const VF f = hn::Sub(clamped, hn::Sub(shifted, magic));
  return hn::BitCast(
      d, hn::Add(hn::BitCast(I32(), Exp2Polynomial<kDegree>(f)), hn::ShiftLeft<23>(hn::BitCast(I32(), shifted))));
}

// The lanes of each of 8 vectors reduced with `op`, in order, and repeated to fill kGroupPad floats. Merging two
// vectors at a time takes a third of the instructions of 8 reductions.
template <class Op>
HWY_INLINE void ReduceRows(VF (&rows)[8], const Op& op, float* out) {
  const F32 d;
  const auto merge = [&](VF a, VF b) HWY_ATTR { return op(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a)); };
  VF pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) pairs[i] = merge(rows[2 * i], rows[2 * i + 1]);
  for (int i = 0; i < 2; ++i) quads[i] = merge(pairs[2 * i], pairs[2 * i + 1]);
  constexpr size_t kWidth = HWY_LANES(float);
  if constexpr (kWidth == 4) {
    hn::Store(quads[0], d, out);
    hn::Store(quads[1], d, out + 4);
  } else {
    VF all = merge(quads[0], quads[1]);
    for (size_t lanes = kWidth; lanes > 8; lanes /= 2) all = merge(all, all);
    hn::Store(all, d, out);
  }
}

// tanh(y), relative error below 1e-6: an odd series near 0, where 1 - 2 / (1 + e^2y) would cancel.
HWY_INLINE VF Tanh(VF y) {
  const F32 d;
  const VF y2 = hn::Mul(y, y);
  VF series = hn::Set(d, -17.0f / 315.0f);
  series = hn::MulAdd(series, y2, hn::Set(d, 2.0f / 15.0f));
  series = hn::MulAdd(series, y2, hn::Set(d, -1.0f / 3.0f));
  series = hn::MulAdd(hn::Mul(series, y2), y, y);
  constexpr float kTwoLog2e = 2.8853900817779268f;
  // Beyond 10 tanh is 1 in fp32; the bound keeps 2^x in its range.
  const VF bounded = hn::Min(hn::Max(y, hn::Set(d, -10.0f)), hn::Set(d, 10.0f));
  const VF e = Exp2<5>(hn::Mul(bounded, hn::Set(d, kTwoLog2e)));
  const VF one = hn::Set(d, 1.0f);
  const VF far = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(one, e)));
  return hn::IfThenElse(hn::Lt(hn::Abs(y), hn::Set(d, 0.25f)), series, far);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

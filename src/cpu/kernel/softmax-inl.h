// The vector pieces of the softmax: 2^x and tanh, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_SOFTMAX_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_SOFTMAX_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include "src/cpu/kernel/dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// 2^f: the polynomials with the smallest largest relative error, 7.5e-5 at degree 3, well below half a step of an 8-bit
// probability (2e-3), and 7.5e-8 at degree 5, about the rounding of fp32.
template <int kDegree>
HWY_INLINE VF Exp2Polynomial(VF f) {
  static_assert(kDegree == 3 || kDegree == 5);
#if SPARGE_AVX512  // 0 <= f < 1
  constexpr float kCubic[] = {9.99925195e-1f, 6.95833627e-1f, 2.26067267e-1f, 7.80242750e-2f};
  constexpr float kQuintic[] = {9.99999925e-1f, 6.93153073e-1f, 2.40153619e-1f,
                                5.58263138e-2f, 8.98934451e-3f, 1.87757501e-3f};
#else  // |f| <= 1/2
  constexpr float kCubic[] = {9.99928074e-1f, 6.93260985e-1f, 2.42611122e-1f, 5.51716690e-2f};
  constexpr float kQuintic[] = {1.00000007f,    6.93146967e-1f, 2.40221197e-1f,
                                5.55071327e-2f, 9.67554133e-3f, 1.32764720e-3f};
#endif
  const float* coefficients = kDegree == 3 ? kCubic : kQuintic;
  const F32 d;
  VF p = hn::Set(d, coefficients[kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) p = hn::MulAdd(p, f, hn::Set(d, coefficients[i]));
  return p;
}

// 2^x for x < 127.5; exactly 0 for x < -126.5, so that a hidden score (-inf) gets no weight at all, and so that no
// product has to deal with denormal numbers, which take a hundred times as long.
template <int kDegree>
HWY_INLINE VF Exp2(VF x) {
  const F32 d;
#if SPARGE_AVX512
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  constexpr int kMinusFloor = 1;  // x - floor(x)
  const VF p = Exp2Polynomial<kDegree>(VF{_mm512_reduce_ps(x.raw, kMinusFloor)});
  return VF{_mm512_maskz_scalef_ps(normal, p.raw, x.raw)};
#else
  const VF clamped = hn::Max(x, hn::Set(d, -127.0f));
  const VI whole = NearestSmall(clamped);
  const VF p = Exp2Polynomial<kDegree>(hn::Sub(clamped, hn::ConvertTo(d, whole)));
  // 2^n by putting n + 127 into the exponent; n = -127 gives +0.
  const VI exponent = hn::ShiftLeft<23>(hn::Add(whole, hn::Set(I32(), 127)));
  return hn::Mul(p, hn::BitCast(F32(), exponent));
#endif
}

// 2^x for x < 30 in fewer instructions, to be rounded to an integer: what is far below 1, as a hidden score is, comes
// out as some number that rounds to 0.
template <int kDegree>
HWY_INLINE VF Exp2Coarse(VF x) {
  const F32 d;
#if SPARGE_AVX512
  constexpr int kMinusFloor = 1;
  const VF p = Exp2Polynomial<kDegree>(VF{_mm512_reduce_ps(x.raw, kMinusFloor)});
  return VF{_mm512_scalef_ps(p.raw, x.raw)};
#else
  // Adding 1.5 * 2^23 rounds x to an integer in the low bits of the sum, from where it is added to the exponent.
  const VF magic = hn::Set(d, 12582912.0f);
  const VF clamped = hn::Max(x, hn::Set(d, -30.0f));
  const VF shifted = hn::Add(clamped, magic);
  const VF f = hn::Sub(clamped, hn::Sub(shifted, magic));
  return hn::BitCast(
      d, hn::Add(hn::BitCast(I32(), Exp2Polynomial<kDegree>(f)), hn::ShiftLeft<23>(hn::BitCast(I32(), shifted))));
#endif
}

// Integers 0..255 or 0..32767 of one row of a tile, narrowed and stored in order.
inline constexpr int kTileVectors = kBlockK / kLanes;
#if SPARGE_AVX512
HWY_INLINE void StoreNarrow(const VI (&n)[kTileVectors], uint8_t* out) {
  // The pack instructions work within 128 bits and leave quad 4v + l at 4l + v.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i words[] = {_mm512_packus_epi32(n[0].raw, n[1].raw), _mm512_packus_epi32(n[2].raw, n[3].raw)};
  _mm512_store_si512(out, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(words[0], words[1])));
}
HWY_INLINE void StoreNarrow(const VI (&n)[kTileVectors], int16_t* out) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  for (int i = 0; i < kTileVectors; i += 2) {
    const __m512i words = _mm512_packs_epi32(n[i].raw, n[i + 1].raw);
    _mm512_store_si512(out + i * 16, _mm512_permutexvar_epi64(order, words));
  }
}
#elif HWY_TARGET == HWY_AVX2
HWY_INLINE void StoreNarrow(const VI (&n)[kTileVectors], uint8_t* out) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < kTileVectors; i += 4) {
    const __m256i low = _mm256_packus_epi32(n[i].raw, n[i + 1].raw);
    const __m256i high = _mm256_packus_epi32(n[i + 2].raw, n[i + 3].raw);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + i * 8),
                       _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
  }
}
HWY_INLINE void StoreNarrow(const VI (&n)[kTileVectors], int16_t* out) {
  for (int i = 0; i < kTileVectors; i += 2) {
    const __m256i words = _mm256_packs_epi32(n[i].raw, n[i + 1].raw);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + i * 8), _mm256_permute4x64_epi64(words, 0xD8));
  }
}
#else
template <typename T>
HWY_INLINE void StoreNarrow(const VI (&n)[kTileVectors], T* out) {
  const hn::Rebind<T, F32> narrow;
  for (int i = 0; i < kTileVectors; ++i) {
    hn::Store(hn::DemoteTo(narrow, n[i]), narrow, out + i * kLanes);
  }
}
#endif

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
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

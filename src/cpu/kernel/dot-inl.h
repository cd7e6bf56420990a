// The dot-product step of each precision, compiled once per instruction set: what a 32-bit lane of A (one row,
// broadcast) times a vector of 32-bit lanes of B adds to the accumulator. Intrinsics and assembly are here, in
// softmax-inl.h and in base/vector-inl.h only.
#if defined(SPARGE_SRC_CPU_KERNEL_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_DOT_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_DOT_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_DOT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "src/cpu/kernel/kernel.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {
using I16 = hn::ScalableTag<int16_t>;
using VI16 = hn::Vec<I16>;

// fp32: one product per lane.
struct DotF32 {
  using Acc = VF;
  using A = VF;
  using B = VF;
  static HWY_INLINE A PrepareA(VI lanes) { return hn::BitCast(F32(), lanes); }
  static HWY_INLINE B PrepareB(VI lanes) { return hn::BitCast(F32(), lanes); }
  static HWY_INLINE Acc Start() { return hn::Zero(F32()); }
  static HWY_INLINE void Step(Acc& acc, A a, B b) { acc = hn::MulAdd(a, b, acc); }
  static HWY_INLINE VF Total(Acc acc) { return acc; }
};

// int16: a pair of products per lane into int32. |a|_2 |b|_2 < 2^31 (QK, by norm_max) or 64 p_max v_max < 2^31 (PV), so
// the total fits; sums on the way may wrap, which is harmless.
#undef SPARGE_VNNI
#undef SPARGE_VEX
#define SPARGE_VNNI (HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX2)
// VNNI on AVX2 is a row of its own among the instruction sets, and has the encoding that processors without AVX-512
// know.
#if HWY_TARGET == HWY_AVX2
#define SPARGE_VEX "%{vex%} "
#else
#define SPARGE_VEX ""
#endif
#if SPARGE_VNNI
// Assembly, because Highway 1.0.3 does not switch the VNNI intrinsics on for these targets (our table checks the CPU).
struct DotI16Vnni {
  using Acc = VI;
  using A = VI;
  using B = VI;
  static HWY_INLINE A PrepareA(VI lanes) { return lanes; }
  static HWY_INLINE B PrepareB(VI lanes) { return lanes; }
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    asm(SPARGE_VEX "vpdpwssd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
  }
  static HWY_INLINE VF Total(Acc acc) { return hn::ConvertTo(F32(), acc); }
};
#endif

#if HWY_TARGET == HWY_AVX3_DL
using DotI16 = DotI16Vnni;
#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
struct DotI16 {
  using Acc = VI;
  using A = VI;
  using B = VI;
  static HWY_INLINE A PrepareA(VI lanes) { return lanes; }
  static HWY_INLINE B PrepareB(VI lanes) { return lanes; }
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    // Assembly, because g++ 12 multiplies ahead of the sums and runs out of registers.
    VI products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc.raw), "=&v"(products.raw) : "v"(a.raw), "v"(b.raw));
  }
  static HWY_INLINE VF Total(Acc acc) { return hn::ConvertTo(F32(), acc); }
};
#else
struct DotI16 {
  struct Acc {
    HWY_INLINE Acc() {}  // written out, here and below: g++ gives implicit ones no target, and NEON refuses to inline
    HWY_INLINE Acc(VI low, VI high) : low(low), high(high) {}
    VI low, high;  // NEON multiplies the halves of a vector apart; elsewhere `high` stays zero and vanishes
  };
  using A = VI16;
  using B = VI16;
  static HWY_INLINE A PrepareA(VI lanes) { return hn::BitCast(I16(), lanes); }
  static HWY_INLINE B PrepareB(VI lanes) { return hn::BitCast(I16(), lanes); }
  static HWY_INLINE Acc Start() { return {hn::Zero(I32()), hn::Zero(I32())}; }
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    acc.low = hn::ReorderWidenMulAccumulate(I32(), a, b, acc.low, acc.high);
  }
  static HWY_INLINE VF Total(const Acc& acc) {
    return hn::ConvertTo(F32(), hn::RearrangeToOddPlusEven(acc.low, acc.high));
  }
};
#endif

// int8: a quad of products per lane, A unsigned and B signed, as x86 wants them. Where a step sums into int32 nothing
// limits the grid but the bytes: 576 * 255 * 127 < 2^31.
inline constexpr QuantGrid kGridI8Wide{
    .q_max = 127, .q_offset = 128, .k_max = 127, .p_max = 255, .v_max = 127, .fine_max = 127, .rotate = true};
#if SPARGE_VNNI
inline constexpr char kInt8VnniText[] = "u8 x s8 quads by vpdpbusd into int32; q 8 bits";
// vpdpbusd sums four products exactly in int32.
struct DotI8Vnni : DotI16Vnni {
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE Acc Start(VI start) { return start; }
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    asm(SPARGE_VEX "vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
  }
};
#endif

#if HWY_TARGET == HWY_AVX3_DL
inline constexpr const char* kInt8Text = kInt8VnniText;
using DotI8 = DotI8Vnni;
inline constexpr QuantGrid kGridI8 = kGridI8Wide;

#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
inline constexpr char kInt8Text[] = "u8 x s8 pairs by vpmaddubsw, 64 dims summed in int16; q 7 bits";
// vpmaddubsw saturates at int16: two products of 127 * 127 are 32258 and fit, which is why q and p have 7 bits here.
// Sums may wrap on the way, for the total fits: by the norms below at most (126 + 2.9) * (248 + 2.9) in QK and
// (180 + 2.9) * (176 + 2.9) in PV, both < 2^15; 2.9 > sqrt(32) / 2 is what rounding can add to the norm of 32 numbers.
struct DotI8 {
  using Acc = VI;  // pairs of int16
  using A = VI;
  using B = VI;
  static HWY_INLINE A PrepareA(VI lanes) { return lanes; }
  static HWY_INLINE B PrepareB(VI lanes) { return lanes; }
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE Acc Start(VI start) { return start; }
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    VI pairs;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(acc.raw), "=&v"(pairs.raw) : "v"(a.raw), "v"(b.raw));
  }
  static HWY_INLINE VF Total(Acc acc) {
#if HWY_TARGET == HWY_AVX2
    return hn::ConvertTo(F32(), VI{_mm256_madd_epi16(acc.raw, _mm256_set1_epi16(1))});
#else
    return hn::ConvertTo(F32(), VI{_mm512_madd_epi16(acc.raw, _mm512_set1_epi16(1))});
#endif
  }
};
inline constexpr QuantGrid kGridI8{.q_max = 63,
                                   .q_offset = 64,
                                   .k_max = 127,
                                   .p_max = 127,
                                   .v_max = 127,
                                   .fine_max = 31,  // 31 * sqrt(32) < 176
                                   .q_norm_max = 126,
                                   .k_norm_max = 248,
                                   .p_norm_max = 180,
                                   .v_norm_max = 176,
                                   .sum_lanes = 16,
                                   .rotate = true};

#elif HWY_TARGET == HWY_EMU128
inline constexpr char kInt8Text[] = "u8 x s8 in plain C++, summed in int32; q 8 bits";
// Byte by byte: emulating the shifts of the next one costs ten times as much. 576 * 255 * 127 < 2^31.
struct DotI8 {
  using Acc = VI;
  using A = VI;
  using B = VI;
  static HWY_INLINE A PrepareA(VI lanes) { return lanes; }
  static HWY_INLINE B PrepareB(VI lanes) { return lanes; }
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE Acc Start(VI start) { return start; }
  static HWY_INLINE void Step(Acc& acc, const A& a, const B& b) {
    uint8_t x[sizeof(a.raw)];
    int8_t y[sizeof(b.raw)];
    std::memcpy(x, a.raw, sizeof(x));
    std::memcpy(y, b.raw, sizeof(y));
    for (size_t i = 0; i < sizeof(x); ++i) acc.raw[i / 4] += x[i] * y[i];
  }
  static HWY_INLINE VF Total(const Acc& acc) { return hn::ConvertTo(F32(), acc); }
};
inline constexpr QuantGrid kGridI8 = kGridI8Wide;

#else
inline constexpr char kInt8Text[] = "u8 x s8, even and odd bytes widened to int16, summed in int32; q 8 bits";
// Portable: even and odd bytes of the lanes become int16 and take the int16 step. Exact: 255 * 127 fits int16 products
// in int32, 576 * 255 * 127 < 2^31.
struct DotI8 {
  using Acc = DotI16::Acc;
  struct A {
    HWY_INLINE A() {}
    HWY_INLINE A(VI16 even, VI16 odd) : even(even), odd(odd) {}
    VI16 even, odd;
  };
  using B = A;
  static HWY_INLINE A PrepareA(VI lanes) {
    const hn::ScalableTag<uint16_t> u16;
    const auto bytes = hn::BitCast(u16, lanes);
    return {hn::BitCast(I16(), hn::And(bytes, hn::Set(u16, 0xFF))), hn::BitCast(I16(), hn::ShiftRight<8>(bytes))};
  }
  static HWY_INLINE B PrepareB(VI lanes) {
    const VI16 bytes = hn::BitCast(I16(), lanes);
    return {hn::ShiftRight<8>(hn::ShiftLeft<8>(bytes)), hn::ShiftRight<8>(bytes)};
  }
  static HWY_INLINE Acc Start() { return DotI16::Start(); }
  // Such that RearrangeToOddPlusEven, which adds neighbours on NEON and halves elsewhere, gives back `start`.
  static HWY_INLINE Acc Start(VI start) {
    const VI zero = hn::Zero(I32());
#if HWY_TARGET == HWY_NEON
    return {hn::InterleaveLower(I32(), start, zero), hn::InterleaveUpper(I32(), start, zero)};
#else
    return {start, zero};
#endif
  }
  static HWY_INLINE void Step(Acc& acc, const A& a, const B& b) {
    DotI16::Step(acc, a.even, b.even);
    DotI16::Step(acc, a.odd, b.odd);
  }
  static HWY_INLINE VF Total(const Acc& acc) { return DotI16::Total(acc); }
};
inline constexpr QuantGrid kGridI8 = kGridI8Wide;
#endif

#if HWY_TARGET == HWY_NEON
// Processors since about 2018 multiply quads of bytes, later ones also unsigned by signed. Assembly, because the
// intrinsics want the whole file to be compiled for these processors. The assembler has to be told, for the rest of the
// function: compilers say at each function what it may have.
struct DotI8Quads {
  using Acc = VI;
  using A = VI;
  using B = VI;
  static HWY_INLINE A PrepareA(VI lanes) { return lanes; }
  static HWY_INLINE B PrepareB(VI lanes) { return lanes; }
  static HWY_INLINE Acc Start() { return hn::Zero(I32()); }
  static HWY_INLINE Acc Start(VI start) { return start; }
  static HWY_INLINE VF Total(Acc acc) { return hn::ConvertTo(F32(), acc); }
};
inline constexpr char kInt8SdotText[] = "s8 x s8 quads by sdot into int32; q 8 bits";
struct DotI8Sdot : DotI8Quads {
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    asm(".arch armv8.2-a+crypto+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(acc.raw) : "w"(a.raw), "w"(b.raw));
  }
};
// Signed times signed: queries need no offset, and probabilities have the 7 bits that are left.
inline constexpr QuantGrid kGridI8Sdot{
    .q_max = 127, .k_max = 127, .p_max = 127, .v_max = 127, .fine_max = 127, .rotate = true};
inline constexpr char kInt8UsdotText[] = "u8 x s8 quads by usdot into int32; q 8 bits";
struct DotI8Usdot : DotI8Quads {
  static HWY_INLINE void Step(Acc& acc, A a, B b) {
    asm(".arch armv8.2-a+crypto+i8mm\n\tusdot %0.4s, %1.16b, %2.16b" : "+w"(acc.raw) : "w"(a.raw), "w"(b.raw));
  }
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

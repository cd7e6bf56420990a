// The matrix product of packed operands in register panels, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_PANEL_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_PANEL_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_PANEL_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>
#include <type_traits>

#include "src/cpu/kernel/dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Register block: kRowsPerPanel x kVectorsPerPanel accumulators, plus the loaded vectors of B and one broadcast of A,
// fit 32 registers on AVX-512 and NEON, and 16 on AVX2. A row group is one panel high.
inline constexpr int kRowsPerPanel = HWY_TARGET == HWY_AVX2 ? 6 : 8;
inline constexpr int kVectorsPerPanel = kPanelLanes / kLanes;

#ifndef SPARGE_UNROLL_4
#ifdef __clang__
#define SPARGE_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define SPARGE_UNROLL_4 _Pragma("GCC unroll 4")
#endif
#endif

// A has `a_bytes` from row to row. B lies in panels of kPanelLanes lanes, the last one perhaps narrower, each of
// `b_steps` steps. The product takes the steps [first, first + steps).
struct Operands {
  const std::byte* a;
  int64_t a_bytes;
  const std::byte* b;
  int64_t b_steps;
  int64_t first, steps;
};

// kRows x kVectors accumulators over the steps: acc(r, n) = start(r, n) + sum_s A(r, s) . B(s, n), each handed to
// done(r, n).
template <class Dot, int kRows, int kVectors, class Start, class Done>
HWY_INLINE void Panel(const Operands& in, const Start& start, const Done& done) {
  const I32 d;
  typename Dot::Acc acc[kRows][kVectors];
  Unroll<kVectors>([&](auto n)
                       SPARGE_INLINE { Unroll<kRows>([&](auto r) SPARGE_INLINE { acc[r][n] = start(r, n); }); });
  const auto step = [&](int64_t s) SPARGE_INLINE {
    const auto* lanes = reinterpret_cast<const int32_t*>(in.b) + s * kVectors * kLanes;
    typename Dot::B vectors[kVectors];
    Unroll<kVectors>([&](auto n) SPARGE_INLINE { vectors[n] = Dot::PrepareB(hn::Load(d, lanes + n * kLanes)); });
    Unroll<kRows>([&](auto r) SPARGE_INLINE {
      int32_t lane;
      std::memcpy(&lane, in.a + r * in.a_bytes + s * kLaneBytes, sizeof(lane));
      const typename Dot::A row = Dot::PrepareA(hn::Set(d, lane));
      Unroll<kVectors>([&](auto n) SPARGE_INLINE { Dot::Step(acc[r][n], row, vectors[n]); });
    });
  };
  // Several steps per turn: fp32 gains 2 to 7 %, integers nothing.
  if constexpr (std::is_same_v<Dot, DotF32>) {
    SPARGE_UNROLL_4
    for (int64_t s = 0; s < in.steps; ++s) step(s);
  } else {
    for (int64_t s = 0; s < in.steps; ++s) step(s);
  }
  Unroll<kRows>([&](auto r) SPARGE_INLINE {
    Unroll<kVectors>([&](auto n) SPARGE_INLINE { done(r, n, Dot::Total(acc[r][n])); });
  });
}

// `rows` rows x kVectors vectors from `lane` on, in panels of kRowsPerPanel, 4, 3, 2 and 1 rows.
template <class Dot, int kVectors, class Start, class Done>
HWY_INLINE void PanelColumn(Operands in, int rows, int64_t lane, const Start& start, const Done& done) {
  in.a += in.first * kLaneBytes;
  in.b += (lane * in.b_steps + in.first * kVectors * kLanes) * kLaneBytes;
  int r0 = 0;
  const auto from = [&](int r, int n) SPARGE_INLINE { return start(r0 + r, lane + n * kLanes); };
  const auto to = [&](int r, int n, VF total) SPARGE_INLINE { done(r0 + r, lane + n * kLanes, total); };
  const std::byte* a = in.a;
  for (; r0 + kRowsPerPanel <= rows; r0 += kRowsPerPanel) {
    in.a = a + r0 * in.a_bytes;
    Panel<Dot, kRowsPerPanel, kVectors>(in, from, to);
  }
  if (r0 + 4 <= rows) {
    in.a = a + r0 * in.a_bytes;
    Panel<Dot, 4, kVectors>(in, from, to);
    r0 += 4;
  }
  if (r0 + 3 == rows) {
    in.a = a + r0 * in.a_bytes;
    return Panel<Dot, 3, kVectors>(in, from, to);
  }
  if (r0 + 2 <= rows) {
    in.a = a + r0 * in.a_bytes;
    Panel<Dot, 2, kVectors>(in, from, to);
    r0 += 2;
  }
  if (r0 < rows) {
    in.a = a + r0 * in.a_bytes;
    Panel<Dot, 1, kVectors>(in, from, to);
  }
}

// done(row, lane, start(row, lane) + total) for all rows x lanes of A times B; `lanes` is a multiple of kLanes.
template <class Dot, class Start, class Done>
HWY_INLINE void Multiply(const Operands& in, int rows, int64_t lanes, const Start& start, const Done& done) {
  int64_t lane = 0;
  for (; lane + kVectorsPerPanel * kLanes <= lanes; lane += kVectorsPerPanel * kLanes) {
    PanelColumn<Dot, kVectorsPerPanel>(in, rows, lane, start, done);
  }
  for (; lane < lanes; lane += kLanes) PanelColumn<Dot, 1>(in, rows, lane, start, done);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// From scores to probabilities: 2^x, rounding to integers, sums, and what rounding may lose. Compiled once per
// instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_WEIGHTS_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_WEIGHTS_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_WEIGHTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>

#include "src/cpu/kernel/pass-inl.h"
#include "src/cpu/kernel/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Which probabilities of a tile to round. Where a few keys have nearly all the weight (an attention sink), the step
// that suits them takes the rest to zero, and all the rest together may matter: then large and small ones get a step
// each.
enum class Part { kAll, kLarge, kSmall };
inline constexpr float kSmallBelow = 1.0f / 64;  // of the row's maximum in the tile
// Probabilities are 2^(score - maximum + this).
template <class P>
HWY_INLINE constexpr float Log2Steps() {
  constexpr int kMax = P::kGrid.p_max;
  if constexpr (!P::kInteger) return 0.0f;
  static_assert(!P::kInteger || kMax == 255 || kMax == 127 || kMax == 8191);
  return kMax == 255 ? 7.99435344f : kMax == 127 ? 6.98868469f : 12.99982387f;
}

// One vector of a part, in the steps of that part.
template <class P, Part kPart>
HWY_INLINE VF PartOf(VF p) {
  const F32 d;
  const auto large = hn::Ge(p, hn::Set(d, static_cast<float>(P::kGrid.p_max) * kSmallBelow));
  if constexpr (kPart == Part::kLarge) return hn::IfThenElseZero(large, p);
  if constexpr (kPart == Part::kSmall) return hn::IfThenZeroElse(large, hn::Mul(p, hn::Set(d, 1 / kSmallBelow)));
  return p;
}

// One row of probabilities to integers, and their sum spread over lanes. The sum is that of the rounded numbers, so
// that what rounding adds to all of them alike cancels in o / l.
template <class P>
HWY_INLINE void RoundRow(const VF (&p)[kTileVectors], int r, Pass<P>& pass) {
  using Dot = typename P::Dot;
  auto* out = pass.rounded + r * kBlockK;
  VI n[kTileVectors];
  for (int i = 0; i < kTileVectors; ++i) n[i] = NearestSmall(p[i]);
  StoreNarrow(n, out);
  // The sum is a dot product with ones.
  constexpr int kPer = PerLane(P::kPrecision);
  const auto ones = Dot::PrepareB(hn::Set(I32(), kPer == 4 ? 0x01010101 : 0x00010001));
  auto acc = Dot::Start();
  for (int j = 0; j < kBlockK; j += kLanes * kPer) {
    Dot::Step(acc, Dot::PrepareA(hn::Load(I32(), reinterpret_cast<const int32_t*>(out + j))), ones);
  }
  VF sum = Dot::Total(acc);
  if constexpr (P::kGrid.p_norm_max != 0) sum = hn::Mul(sum, hn::Set(F32(), pass.coarser[r]));
  hn::Store(sum, F32(), pass.partial_sum + r * kLanes);
}

// The unit of a row's scores, ready for `Below`. A product is exact in a fused instruction and rounded in tile_max:
// where scores are so large that this shows, the row is multiplied first, and its largest key is its maximum again.
inline constexpr float kFusedBelow = 4096;  // log2 units; half a step of floats below it is 2^-13
template <class P>
HWY_INLINE float UnitOf(int r, Pass<P>& pass) {
  if constexpr (!P::kInteger) return 1;
  if (std::abs(pass.tile_max[r]) < kFusedBelow) return pass.unit[r];
  const F32 d;
  float* scores = pass.scores + r * kBlockK;
  const VF unit = hn::Set(d, pass.unit[r]);
  for (int j = 0; j < kBlockK; j += kLanes) hn::Store(hn::Mul(hn::Load(d, scores + j), unit), d, scores + j);
  return pass.unit[r] = 1;
}
template <class P>
HWY_INLINE VF Below(VF score, VF unit, VF base) {
  return P::kInteger ? hn::MulSub(score, unit, base) : hn::Sub(score, base);
}

// Probabilities of rows relative to tile_max, in place of the scores; and rounded ones, unless these must keep a norm:
// then the sums of their squares. fp32: with their sums.
template <class P>
HWY_NOINLINE void Probabilities(Rows rows, Pass<P>& pass) {
  const F32 d;
  for (int r = rows.first; r < rows.first + rows.count; ++r) {
    float* at = pass.scores + r * kBlockK;
    const VF base = hn::Set(d, pass.tile_max[r] - Log2Steps<P>());
    const VF unit = hn::Set(d, UnitOf(r, pass));
    VF p[kTileVectors];
    VF sum = hn::Zero(d);
    for (int i = 0; i < kTileVectors; ++i) {
      const VF below = Below<P>(hn::Load(d, at + i * kLanes), unit, base);
      if constexpr (P::kInteger) {
        p[i] = Exp2Coarse<P::kExpDegree>(below);
        if constexpr (P::kGrid.p_norm_max != 0) sum = hn::MulAdd(p[i], p[i], sum);
      } else {
        p[i] = Exp2<P::kExpDegree>(below);
        if constexpr (P::kDirect) p[i] = hn::Mul(p[i], hn::Set(d, pass.direct_unit));
        sum = hn::Add(sum, p[i]);
      }
      hn::Store(p[i], d, at + i * kLanes);
    }
    if constexpr (P::kInteger && P::kGrid.p_norm_max == 0) {
      RoundRow(p, r, pass);
    } else {
      hn::Store(sum, d, pass.partial_sum + r * kLanes);
    }
  }
}

// How much coarser the steps of rows must be so that neither half of the lanes has an L2 norm above p_norm_max; from
// the sums of squares.
template <class P>
HWY_INLINE void ChooseSteps(Pass<P>& pass) {
  const F32 d;
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF squares[kLanes];
    for (int i = 0; i < kLanes; ++i) squares[i] = hn::Load(d, pass.partial_sum + (first + i) * kLanes);
    const VF norm = hn::Sqrt(LargerHalfOfEach(squares));
    const VF most = hn::Set(d, 1.0f / static_cast<float>(P::kGrid.p_norm_max));
    hn::Store(hn::Max(hn::Mul(norm, most), hn::Set(d, 1.0f)), d, pass.coarser + first);
  }
}

// Stored probabilities of rows, or a part of them, to integers in the steps that were chosen.
template <class P, Part kPart = Part::kAll>
HWY_NOINLINE void RoundProbabilities(Rows rows, Pass<P>& pass) {
  const F32 d;
  for (int r = rows.first; r < rows.first + rows.count; ++r) {
    const VF finer = hn::Set(d, P::kGrid.p_norm_max != 0 ? 1.0f / pass.coarser[r] : 1.0f);
    VF p[kTileVectors];
    for (int i = 0; i < kTileVectors; ++i) {
      p[i] = hn::Mul(PartOf<P, kPart>(hn::Load(d, pass.scores + r * kBlockK + i * kLanes)), finer);
    }
    RoundRow(p, r, pass);
  }
}

// Sums of the rows of the groups, from partial_sum; 0 for the others.
template <class P>
HWY_INLINE void SumRows(uint32_t groups, const Pass<P>& pass, float* out) {
  const F32 d;
  const uint32_t rows = RowsOf(groups, pass);
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF sums[kLanes];
    if (AllOf(rows, first)) {
      Unroll<kLanes>([&](auto i) SPARGE_INLINE { sums[i] = hn::Load(d, pass.partial_sum + (first + i) * kLanes); });
    } else {
      for (int i = 0; i < kLanes; ++i) {
        const int r = first + i;
        sums[i] = ((rows >> r) & 1) != 0 ? hn::Load(d, pass.partial_sum + r * kLanes) : hn::Zero(d);
      }
    }
    hn::Store(SumOfEach(sums), d, out + first);
  }
}

// Groups in which rounding may have changed the weight of the tile by more than kMostLost of a row's weight so far: it
// changes each probability by at most half a step.
template <class P>
HWY_INLINE uint32_t MayLoseWeight(const Pass<P>& pass, const float* l) {
  const F32 d;
  uint32_t rows = 0;
  for (int r = 0; r < pass.rows; r += kLanes) {
    const VF gain = hn::Load(d, pass.gain + r);
    VF most = hn::Mul(gain, hn::Set(d, 0.5f * kBlockK));
    if constexpr (P::kGrid.p_norm_max != 0) most = hn::Mul(most, hn::Load(d, pass.coarser + r));
    const VF tile = hn::MulSub(hn::Load(d, pass.tile_sum + r), gain, most);
    const VF least = hn::MulAdd(hn::Load(d, l + r), hn::Load(d, pass.keep + r), tile);
    rows |= MaskBits(hn::Gt(most, hn::Mul(least, hn::Set(d, P::kMostLost)))) << r;
  }
  return GroupsWith(rows);
}

// Those of the doubtful groups in which it really did.
template <class P>
HWY_NOINLINE uint32_t LoseWeight(uint32_t doubtful, const float* l, Pass<P>& pass) {
  const F32 d;
  ForEachRun(pass, doubtful, [&](Rows run) HWY_ATTR {
    for (int r = run.first; r < run.first + run.count; ++r) {
      VF sum = hn::Zero(d);
      for (int j = 0; j < kBlockK; j += kLanes) sum = hn::Add(sum, hn::Load(d, pass.scores + r * kBlockK + j));
      hn::Store(sum, d, pass.partial_sum + r * kLanes);
    }
  });
  HWY_ALIGN float exact_sum[kPassRows];
  SumRows(doubtful, pass, exact_sum);
  uint32_t rows = 0;
  for (int r = 0; r < pass.rows; r += kLanes) {
    const VF gain = hn::Load(d, pass.gain + r);
    const VF exact = hn::Load(d, exact_sum + r);
    const VF lost = hn::Mul(hn::AbsDiff(exact, hn::Load(d, pass.tile_sum + r)), gain);
    const VF weight = hn::MulAdd(hn::Load(d, l + r), hn::Load(d, pass.keep + r), hn::Mul(exact, gain));
    rows |= MaskBits(hn::Gt(lost, hn::Mul(weight, hn::Set(d, P::kMostLost)))) << r;
  }
  return doubtful & GroupsWith(rows);
}

// True iff some row has its weight on few keys of this tile: then what rounding took from their values does not average
// out. The tile must matter (its maximum within 2^-4 of the running one) and its weights sum to less than 8 maxima.
template <class P>
HWY_INLINE bool HasPeak(const Pass<P>& pass, Rows rows) {
  constexpr float kMax = P::kGrid.p_max;
  bool peak = false;
  for (int r = rows.first; r < rows.first + rows.count; ++r) {
    peak |= pass.gain[r] * kMax > 0x1p-4f && pass.tile_sum[r] < 8 * kMax;
  }
  return peak;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

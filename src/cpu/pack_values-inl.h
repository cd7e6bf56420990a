// Packing of one value block, compiled once per instruction set: load, scale per channel, quantise, lay out.
#if defined(SPARGE_SRC_CPU_PACK_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_PACK_VALUES_INL_H_
#undef SPARGE_SRC_CPU_PACK_VALUES_INL_H_
#else
#define SPARGE_SRC_CPU_PACK_VALUES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/cpu/pack_magnitude-inl.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/tokens-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Rows of one value block as floats in units, zero where there is no token. Returns the magnitude bits of the block.
HWY_INLINE int32_t LoadValues(const PackValuesArgs& args, float* rows) {
  const F32 d;
  const VF unit = hn::Set(d, args.inverse_unit);
  VI top = hn::Zero(I32());
  for (int64_t t = 0; t < args.tokens.count; ++t) {
    float* row = rows + t * args.channels;
    const float* x = TokenAsFloats(args.tokens, t, args.channels, row);
    for (int64_t c = 0; c < args.channels; c += kLanes) {
      const VF v = hn::Mul(hn::LoadU(d, x + c), unit);
      hn::Store(v, d, row + c);
      top = hn::Max(top, MagnitudeBits(v));
    }
  }
  std::fill(rows + args.tokens.count * args.channels, rows + kBlockK * args.channels, 0.0f);
  return hn::GetLane(hn::MaxOfLanes(I32(), top));
}

// Replaces the rows that are not finite by zeros, and returns which they are.
HWY_INLINE uint64_t ClearNotFinite(const PackValuesArgs& args, float* rows) {
  uint64_t not_finite = 0;
  for (int64_t t = 0; t < args.tokens.count; ++t) {
    float* row = rows + t * args.channels;
    if (std::all_of(row, row + args.channels, [](float x) { return std::isfinite(x); })) continue;
    std::fill_n(row, args.channels, 0.0f);
    not_finite |= uint64_t{1} << t;
  }
  return not_finite;
}

// Largest norm of a channel over the keys that fall into one half of the lanes.
HWY_INLINE VF LargestHalfNorm(const PackValuesArgs& args, const float* rows, int64_t c) {
  const F32 d;
  VF halves[2] = {hn::Zero(d), hn::Zero(d)};
  for (int64_t t = 0; t < kBlockK; ++t) {
    const VF x = hn::Load(d, rows + t * args.channels + c);
    VF& half = halves[t / 2 % 2];
    half = hn::MulAdd(x, x, half);
  }
  return hn::Sqrt(hn::Max(halves[0], halves[1]));
}

// Per channel over the block: scale such that integers keep |.| <= max and, if norm_max > 0, their norms; `by` = its
// inverse, 0 for a channel of zeros. A channel more than 2^60 below the head's largest value counts as zero.
HWY_INLINE void ChannelScales(const PackValuesArgs& args, const float* rows, float* by) {
  const F32 d;
  for (int64_t c = 0; c < args.channels; c += kLanes) {
    VF top = hn::Zero(d);
    for (int64_t t = 0; t < kBlockK; ++t) top = hn::Max(top, hn::Abs(hn::Load(d, rows + t * args.channels + c)));
    const auto used = hn::Gt(top, hn::Set(d, 0x1p-60f));
    VF scale = hn::Div(top, hn::Set(d, static_cast<float>(args.max)));
    if (args.norm_max > 0) {
      const VF norm = LargestHalfNorm(args, rows, c);
      scale = hn::Max(scale, hn::Div(norm, hn::Set(d, static_cast<float>(args.norm_max))));
      // A little coarser, so that the largest value is a whole number of steps: a constant channel stays exact.
      scale = hn::Div(top, hn::Floor(hn::Mul(hn::Div(top, scale), hn::Set(d, 1 + 0x1p-20f))));
    }
    hn::Store(hn::IfThenElseZero(used, hn::Div(hn::Set(d, 1.0f), scale)), d, by + c);
    hn::Store(hn::IfThenElseZero(used, scale), d, args.scale + c);
  }
}

// Smallest |token|^2 of the block, tokens of zeros left out.
HWY_INLINE float SmallestNorm2(const PackValuesArgs& args, const float* rows) {
  const F32 d;
  const VF none = hn::Set(d, std::numeric_limits<float>::max());
  VF smallest = none;
  for (int64_t first = 0; first < kBlockK; first += kLanes) {
    VF sums[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      sums[r] = hn::Zero(d);
      for (int64_t c = 0; c < args.channels; c += kLanes) {
        const VF x = hn::Load(d, rows + (first + r) * args.channels + c);
        sums[r] = hn::MulAdd(x, x, sums[r]);
      }
    }
    const VF norm2 = SumOfEach(sums);
    smallest = hn::Min(smallest, hn::IfThenElse(hn::Gt(norm2, hn::Zero(d)), norm2, none));
  }
  return hn::GetLane(hn::MinOfLanes(d, smallest));
}

// When the block's second half of bits is needed: by the rounding error of its worst token, relative to that token's
// norm.
HWY_INLINE FineValues JudgeFineValues(const PackValuesArgs& args, const float* rows) {
  const float worst = SquaredNorm(args.scale, args.channels) / 12 / SmallestNorm2(args, rows);  // squared
  // In units of the precision's own: ordinary tokens have about 1 / max at 64 channels. kAlways means a spike in a
  // channel, which hurts whatever the weights.
  const float peaks = 2.5f / static_cast<float>(args.max);
  const float always = 5 * peaks;
  return worst > always * always ? FineValues::kAlways
         : worst > peaks * peaks ? FineValues::kForPeaks
                                 : FineValues::kNever;
}

// body(step, channel, place of the lane in the block), a vector of lanes at a time, in the order of their places.
template <class Body>
HWY_INLINE void ForEachLane(int64_t channels, int64_t steps, const Body& body) {
  for (int64_t begin = 0; begin < channels; begin += kPanelLanes) {
    const int64_t width = std::min<int64_t>(kPanelLanes, channels - begin);
    // A narrower last panel is one vector after the other, as the kernel reads it.
    const int64_t together = width == kPanelLanes ? kPanelLanes : kLanes;
    for (int64_t first = begin; first < begin + width; first += together) {
      for (int64_t step = 0; step < steps; ++step) {
        for (int64_t c = first; c < first + together; c += kLanes) {
          body(step, c, first * steps + step * together + (c - first));
        }
      }
    }
  }
}

// Lanes of round(v * by), or if kFine of what that rounding leaves, in steps 2 * fine_max times as fine.
template <sparge_precision kPrecision, bool kFine>
HWY_INLINE void StoreValues(const PackValuesArgs& args, const float* rows, const float* by, int32_t* out) {
  const F32 d;
  const I32 di;
  constexpr int kPer = PerLane(kPrecision);
  constexpr int kBits = 32 / kPer;
  const VI field = hn::Set(di, static_cast<int32_t>((int64_t{1} << kBits) - 1));
  const VF finer = hn::Set(d, 2.0f * static_cast<float>(args.fine_max));
  ForEachLane(args.channels, kBlockK / kPer, [&](int64_t step, int64_t c, int64_t at) HWY_ATTR {
    VI lane = hn::Zero(di);
    for (int i = kPer - 1; i >= 0; --i) {
      VF x = hn::Mul(hn::Load(d, rows + (step * kPer + i) * args.channels + c), hn::Load(d, by + c));
      if constexpr (kFine) x = hn::Mul(hn::Sub(x, hn::Round(x)), finer);
      const VI n = NearestSmall(x);
      lane = hn::Or(hn::ShiftLeft < kBits == 32 ? 0 : kBits > (lane), hn::And(n, field));
    }
    hn::Store(lane, di, out + at);
  });
}

template <sparge_precision kPrecision>
uint64_t PackValues(const PackValuesArgs& args) {
  float* rows = args.scratch;
  float* by = args.scratch + kBlockK * args.channels;
  const uint64_t not_finite = LoadValues(args, rows) < kInfinityBits ? 0 : ClearNotFinite(args, rows);
  if constexpr (kPrecision == SPARGE_PRECISION_FP32) {
    const F32 d;
    ForEachLane(args.channels, kBlockK, [&](int64_t step, int64_t c, int64_t at) HWY_ATTR {
      hn::Store(hn::Load(d, rows + step * args.channels + c), d, reinterpret_cast<float*>(args.out) + at);
    });
  } else {
    ChannelScales(args, rows, by);
    StoreValues<kPrecision, false>(args, rows, by, args.out);
    *args.fine = JudgeFineValues(args, rows);
    if (*args.fine != FineValues::kNever) StoreValues<kPrecision, true>(args, rows, by, args.fine_out);
  }
  return not_finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// Packing of one block, compiled once per instruction set: load, centre, summarise, quantise, lay out.
#if defined(SPARGE_SRC_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_PACK_INL_H_
#undef SPARGE_SRC_PACK_INL_H_
#else
#define SPARGE_SRC_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/base/half.h"
#include "src/pack_ops.h"
#include "src/rotate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::ScalableTag<int32_t>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
inline constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));

// One token as floats, zero-padded to `pad`.
HWY_INLINE void LoadToken(const TokenRows& rows, int64_t token, int64_t pad, float* out) {
  const F32 d;
  const std::byte* from = rows.data + token * rows.token_stride * static_cast<int64_t>(DtypeBytes(rows.dtype));
  int64_t i = 0;
  if (rows.dtype == SPARGE_F32) {
    std::memcpy(out, from, sizeof(float) * static_cast<size_t>(rows.dim));
    i = rows.dim;
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

// Largest magnitude of a padded row; negative if an element is not finite (x * 0 is NaN then).
HWY_INLINE float MaxAbs(const float* row, int64_t pad) {
  const F32 d;
  VF top = hn::Zero(d);
  VF zero = hn::Zero(d);
  for (int64_t i = 0; i < pad; i += kLanes) {
    const VF x = hn::Load(d, row + i);
    top = hn::Max(top, hn::Abs(x));
    zero = hn::MulAdd(x, hn::Zero(d), zero);
  }
  const float check = hn::GetLane(hn::SumOfLanes(d, zero));
  return check == 0.0f ? hn::GetLane(hn::MaxOfLanes(d, top)) : -1.0f;
}

// to += row * factor.
HWY_INLINE void AddScaled(const float* row, float factor, int64_t pad, float* to) {
  const F32 d;
  const VF by = hn::Set(d, factor);
  for (int64_t i = 0; i < pad; i += kLanes) {
    hn::Store(hn::MulAdd(hn::Load(d, row + i), by, hn::Load(d, to + i)), d, to + i);
  }
}

// |row * first * second|^2; two factors, because one alone may overflow.
HWY_INLINE float SquaredNorm(const float* row, float first, float second, int64_t pad) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < pad; i += kLanes) {
    const VF x = hn::Mul(hn::Mul(hn::Load(d, row + i), hn::Set(d, first)), hn::Set(d, second));
    sum = hn::MulAdd(x, x, sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// In double: the score a row loses to centring may be large, and goes into the log-sum-exp.
HWY_INLINE double DotDouble(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

Measured Measure(const TokenRows& tokens, int64_t dim_pad, float* mean, float* scratch) {
  Measured result{0.0f, 0};
  if (mean != nullptr) std::fill_n(mean, dim_pad, 0.0f);
  // Times 1 / count before adding, so that the sum of the largest floats does not overflow.
  const float part = 1.0f / static_cast<float>(std::max<int64_t>(tokens.count, 1));
  for (int64_t t = 0; t < tokens.count; ++t) {
    LoadToken(tokens, t, dim_pad, scratch);
    const float max_abs = MaxAbs(scratch, dim_pad);
    if (max_abs < 0) continue;
    result.max_abs = std::max(result.max_abs, max_abs);
    ++result.finite;
    if (mean != nullptr) AddScaled(scratch, part, dim_pad, mean);
  }
  if (mean != nullptr && result.finite > 0 && result.finite < tokens.count) {
    const float correct = static_cast<float>(tokens.count) / static_cast<float>(result.finite);
    for (int64_t i = 0; i < dim_pad; ++i) mean[i] *= correct;
  }
  return result;
}

// The size of a row: x * pre * inverse has the largest magnitude 1. `pre` is 2^100 for rows so small that the inverse
// would overflow, else 1.
struct RowSize {
  float max_abs = 0;
  float pre = 1;
  float inverse = 0;
  float relative_norm = 0;  // |row|_2 / max_abs, if asked for
  double unit = 1;          // the row was divided by this
};

HWY_INLINE RowSize SizeOf(const float* row, int64_t pad, bool with_norm) {
  RowSize size;
  size.max_abs = MaxAbs(row, pad);
  if (size.max_abs == 0.0f) return size;
  size.pre = size.max_abs < 0x1p-100f ? 0x1p100f : 1.0f;
  size.inverse = 1.0f / (size.max_abs * size.pre);
  if (with_norm) size.relative_norm = std::sqrt(SquaredNorm(row, size.pre, size.inverse, pad));
  return size;
}

// Rotates a row and returns its new size. The row is brought
// to a largest magnitude of 1 first, for the rotation of the largest floats would overflow.
HWY_INLINE RowSize Rotate(const PackRowsArgs& args, float* row, const RowSize& size) {
  if (size.max_abs == 0.0f) return size;
  RotateRow(row, size.pre, size.inverse, args.tokens.dim, args.dim_pad);
  RowSize rotated = SizeOf(row, args.dim_pad, args.norm_max > 0);
  rotated.unit = static_cast<double>(size.max_abs);
  return rotated;
}

// How a row becomes numbers of the kernel: stored = round(x * pre * by), x = stored * scale.
struct RowScale {
  float pre, by;
  double scale;
};

// Integers with |.| <= max and, if norm_max > 0, |.|_2 <= norm_max.
HWY_INLINE RowScale IntegerScale(const RowSize& size, int max, int norm_max) {
  double step = 1.0 / max;
  if (norm_max > 0) step = std::max(step, static_cast<double>(size.relative_norm) / norm_max);
  return {size.pre, static_cast<float>(static_cast<double>(size.inverse) / step),
          static_cast<double>(size.max_abs) * size.unit * step};
}

// Stores round(x * pre * by) + offset as lanes of 1, 2 or 4 numbers; returns the sum of the integers without offset.
template <sparge_precision kPrecision>
HWY_INLINE int32_t StoreLanes(const PackRowsArgs& args, int64_t token, const float* row, const RowScale& scale) {
  const F32 d;
  const I32 di;
  HWY_ALIGN std::byte lanes[RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign) * sizeof(float)];
  const VF pre = hn::Set(d, scale.pre);
  const VF by = hn::Set(d, scale.by);
  // Rounding may not step over the bound: x is at most max * (1 + 2^-22).
  const VF bound = hn::Set(d, static_cast<float>(args.max));
  VI sum = hn::Zero(di);
  for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
    const VF x = hn::Mul(hn::Mul(hn::Load(d, row + i), pre), by);
    if constexpr (kPrecision == SPARGE_FP32) {
      hn::Store(x, d, reinterpret_cast<float*>(lanes) + i);
      continue;
    }
    const VI n = hn::NearestInt(hn::Max(hn::Min(x, bound), hn::Neg(bound)));
    sum = hn::Add(sum, n);
    if constexpr (kPrecision == SPARGE_INT16) {
      const hn::Rebind<int16_t, F32> narrow;
      hn::Store(hn::DemoteTo(narrow, n), narrow, reinterpret_cast<int16_t*>(lanes) + i);
    } else if (args.offset == 0) {
      const hn::Rebind<int8_t, F32> narrow;
      hn::Store(hn::DemoteTo(narrow, n), narrow, reinterpret_cast<int8_t*>(lanes) + i);
    } else {
      const hn::Rebind<uint8_t, F32> narrow;
      const VI shifted = hn::Add(n, hn::Set(di, args.offset));
      hn::Store(hn::DemoteTo(narrow, shifted), narrow, reinterpret_cast<uint8_t*>(lanes) + i);
    }
  }
  int32_t* out = args.out + token * args.row_stride;
  for (int64_t lane = 0; lane < args.row_lanes; ++lane) {
    std::memcpy(out + lane * args.lane_stride, lanes + lane * kLaneBytes, kLaneBytes);
  }
  return kPrecision == SPARGE_FP32 ? 0 : hn::GetLane(hn::SumOfLanes(di, sum));
}

// Mean and self-similarity of a block: sums while its rows pass by.
struct Summary {
  float* mean;
  float* unit;  // sum of unit vectors
  int64_t pad, count;
  int32_t tokens = 0;

  HWY_INLINE void Start() {
    std::fill_n(mean, pad, 0.0f);
    std::fill_n(unit, pad, 0.0f);
  }
  HWY_INLINE void Add(const float* row, const RowSize& size) {
    const F32 d;
    ++tokens;
    AddScaled(row, 1.0f / static_cast<float>(count), pad, mean);
    if (size.max_abs == 0.0f) return;  // no direction: counts as a token, adds nothing
    const VF pre = hn::Set(d, size.pre);
    const VF by = hn::Set(d, size.inverse / size.relative_norm);
    for (int64_t i = 0; i < pad; i += kLanes) {
      const VF x = hn::Mul(hn::Load(d, row + i), pre);
      hn::Store(hn::MulAdd(x, by, hn::Load(d, unit + i)), d, unit + i);
    }
  }
  // Returns the similarity; corrects the mean if some of the `count` tokens were not finite.
  HWY_INLINE float Finish() {
    if (tokens == 0) return 0.0f;
    const float n = static_cast<float>(tokens);
    if (tokens < count) {
      for (int64_t i = 0; i < pad; ++i) mean[i] *= static_cast<float>(count) / n;
    }
    return std::min(SquaredNorm(unit, 1.0f / n, 1.0f, pad), 1.0f);
  }
};

HWY_INLINE void CentreRow(const PackRowsArgs& args, float* row) {
  const F32 d;
  const VF unit = hn::Set(d, args.inverse_unit);
  for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
    const VF x = hn::Sub(hn::Load(d, row + i), hn::Load(d, args.centre + i));
    hn::Store(hn::Mul(x, unit), d, row + i);
  }
}

// What centring the keys takes from this query's scores.
HWY_INLINE float QueryShift(const PackRowsArgs& args, const float* row, bool finite) {
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  if (args.shift_factor == 0) return 0.0f;
  constexpr double kMost = std::numeric_limits<float>::max();
  const double shift = args.shift_factor * DotDouble(row, args.centre, args.tokens.dim);
  return static_cast<float>(std::clamp(shift, -kMost, kMost));
}

// The row's scale, and into args.scale what the kernel multiplies by. For queries that is the factor from dot to score,
// bounded so that no score exceeds the limit; fp32 has it multiplied into the row.
template <sparge_precision kPrecision>
HWY_INLINE RowScale ChooseScale(const PackRowsArgs& args, int64_t token, const RowSize& size) {
  const bool integer = kPrecision != SPARGE_FP32;
  RowScale scale = integer ? IntegerScale(size, args.max, args.norm_max) : RowScale{1.0f, 1.0f, 1.0};
  if (!args.is_query) {
    if (integer) args.scale[token] = static_cast<float>(scale.scale);
    return scale;
  }
  const double largest = integer ? args.max : size.max_abs;
  const double bound = largest > 0 ? args.limit / largest : 0;
  const double factor = std::clamp(scale.scale * args.score_factor, -bound, bound);
  if (integer) {
    args.scale[token] = static_cast<float>(factor);
  } else {
    constexpr double kMost = std::numeric_limits<float>::max();
    scale.pre = size.pre;
    scale.by = static_cast<float>(std::clamp(factor / size.pre, -kMost, kMost));
  }
  return scale;
}

template <sparge_precision kPrecision>
uint64_t PackRows(const PackRowsArgs& args) {
  float* row = args.scratch;
  Summary summary{args.mean, args.scratch + args.dim_pad, args.dim_pad, args.tokens.count};
  if (args.mean != nullptr) summary.Start();
  uint64_t not_finite = 0;
  for (int64_t t = 0; t < args.tokens.count; ++t) {
    LoadToken(args.tokens, t, args.dim_pad, row);
    const bool finite = MaxAbs(row, args.dim_pad) >= 0;
    if (!finite) std::fill_n(row, args.dim_pad, 0.0f);
    if (args.is_query) {
      args.shift[t] = QueryShift(args, row, finite);
    } else if (finite) {
      CentreRow(args, row);
    } else {
      not_finite |= uint64_t{1} << t;
    }
    const RowSize size = SizeOf(row, args.dim_pad, args.mean != nullptr || args.norm_max > 0);
    if (args.mean != nullptr && finite) summary.Add(row, size);
    const RowScale scale = ChooseScale<kPrecision>(args, t, args.rotate ? Rotate(args, row, size) : size);
    const int32_t sum = StoreLanes<kPrecision>(args, t, row, scale);
    if (args.start != nullptr) args.start[t] = -args.start_offset * sum;
  }
  if (args.mean != nullptr) *args.similarity = summary.Finish();
  return not_finite;
}

// Rows of one value block as floats, zero where there is no finite token. Returns which tokens are not finite.
HWY_INLINE uint64_t LoadValues(const PackValuesArgs& args, float* rows) {
  const F32 d;
  uint64_t not_finite = 0;
  for (int64_t t = 0; t < kBlockK; ++t) {
    float* row = rows + t * args.channels;
    if (t < args.tokens.count) LoadToken(args.tokens, t, args.channels, row);
    if (t < args.tokens.count && MaxAbs(row, args.channels) < 0) not_finite |= uint64_t{1} << t;
    if (t >= args.tokens.count || ((not_finite >> t) & 1) != 0) std::fill_n(row, args.channels, 0.0f);
    for (int64_t c = 0; c < args.channels; c += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, row + c), hn::Set(d, args.inverse_unit)), d, row + c);
    }
  }
  return not_finite;
}

// Per channel over the block: scale = max|v| / max; `by` = its inverse, 0 for a channel of zeros. A channel more than
// 2^100 below the head's largest value counts as zero.
HWY_INLINE void ChannelScales(const PackValuesArgs& args, const float* rows, float* by) {
  const F32 d;
  for (int64_t c = 0; c < args.channels; c += kLanes) {
    VF top = hn::Zero(d);
    for (int64_t t = 0; t < kBlockK; ++t) top = hn::Max(top, hn::Abs(hn::Load(d, rows + t * args.channels + c)));
    const auto used = hn::Gt(top, hn::Set(d, 0x1p-100f));
    const VF max = hn::Set(d, static_cast<float>(args.max));
    hn::Store(hn::IfThenElseZero(used, hn::Div(max, top)), d, by + c);
    hn::Store(hn::IfThenElseZero(used, hn::Div(top, max)), d, args.scale + c);
  }
}

// When the block's second half of bits is needed: by the rounding error of its worst token, relative to that token's
// norm.
HWY_INLINE FineValues JudgeFineValues(const PackValuesArgs& args, const float* rows) {
  const float step2 = SquaredNorm(args.scale, 1.0f, 1.0f, args.channels);
  float worst = 0;  // squared
  for (int64_t t = 0; t < args.tokens.count; ++t) {
    const float norm2 = SquaredNorm(rows + t * args.channels, 1.0f, 1.0f, args.channels);
    if (norm2 > 0) worst = std::max(worst, step2 / 12 / norm2);
  }
  // In units of the precision's own: ordinary tokens have about 1 / max at 64 channels. kAlways means a spike in a
  // channel, which hurts whatever the weights.
  const float peaks = 2.5f / static_cast<float>(args.max);
  const float always = 5 * peaks;
  return worst > always * always ? FineValues::kAlways
         : worst > peaks * peaks ? FineValues::kForPeaks
                                 : FineValues::kNever;
}

// Lanes of round(v * by), or if `fine` of what that rounding leaves, in steps 2 * max times as fine.
template <sparge_precision kPrecision, bool kFine>
HWY_INLINE void StoreValues(const PackValuesArgs& args, const float* rows, const float* by, int32_t* out) {
  const F32 d;
  const I32 di;
  constexpr int kPer = PerLane(kPrecision);
  constexpr int kBits = 32 / kPer;
  const VI field = hn::Set(di, static_cast<int32_t>((int64_t{1} << kBits) - 1));
  const VF bound = hn::Set(d, static_cast<float>(args.max));
  for (int64_t step = 0; step < kBlockK / kPer; ++step) {
    for (int64_t c = 0; c < args.channels; c += kLanes) {
      VI lane = hn::Zero(di);
      for (int i = kPer - 1; i >= 0; --i) {
        VF x = hn::Mul(hn::Load(d, rows + (step * kPer + i) * args.channels + c), hn::Load(d, by + c));
        if constexpr (kFine) x = hn::Mul(hn::Sub(x, hn::Round(x)), hn::Add(bound, bound));
        const VI n = hn::NearestInt(hn::Max(hn::Min(x, bound), hn::Neg(bound)));
        lane = hn::Or(hn::ShiftLeft < kBits == 32 ? 0 : kBits > (lane), hn::And(n, field));
      }
      hn::Store(lane, di, out + step * args.channels + c);
    }
  }
}

template <sparge_precision kPrecision>
uint64_t PackValues(const PackValuesArgs& args) {
  float* rows = args.scratch;
  float* by = args.scratch + kBlockK * args.channels;
  const uint64_t not_finite = LoadValues(args, rows);
  if constexpr (kPrecision == SPARGE_FP32) {
    std::memcpy(args.out, rows, sizeof(float) * static_cast<size_t>(kBlockK * args.channels));
  } else {
    ChannelScales(args, rows, by);
    StoreValues<kPrecision, false>(args, rows, by, args.out);
    *args.fine = JudgeFineValues(args, rows);
    if (*args.fine != FineValues::kNever) StoreValues<kPrecision, true>(args, rows, by, args.fine_out);
  }
  return not_finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

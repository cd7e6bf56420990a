// Packing of one block, compiled once per instruction set: load, centre, summarise, quantise, lay out.
#if defined(SPARGE_SRC_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_PACK_INL_H_
#undef SPARGE_SRC_CPU_PACK_INL_H_
#else
#define SPARGE_SRC_CPU_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/cpu/pack_magnitude-inl.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/rotate-inl.h"
#include "src/cpu/tokens-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// In double: the score a row loses to centring may be large, and goes into the log-sum-exp.
HWY_INLINE double DotDouble(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

// Adds one token to `mean` (unless NULL) and to the magnitudes of its channels.
HWY_INLINE void MeasureToken(const float* x, float part, int64_t pad, float* mean, VI& top) {
  const F32 d;
  for (int64_t i = 0; i < pad; i += kLanes) {
    const VF v = hn::LoadU(d, x + i);
    top = hn::Max(top, MagnitudeBits(v));
    if (mean != nullptr) hn::Store(hn::MulAdd(v, hn::Set(d, part), hn::Load(d, mean + i)), d, mean + i);
  }
}

// `only`: bit t = token t is finite and counts.
HWY_INLINE int32_t MeasureTokens(const TokenRows& tokens, uint64_t only, int64_t pad, float* mean, float* scratch) {
  VI top = hn::Zero(I32());
  if (mean != nullptr) std::fill_n(mean, pad, 0.0f);
  // Times 1 / count before adding, so that the sum of the largest floats does not overflow.
  const float part = 1.0f / static_cast<float>(std::max(std::popcount(only), 1));
  for (int64_t t = 0; t < tokens.count; ++t) {
    if (((only >> t) & 1) != 0) MeasureToken(TokenAsFloats(tokens, t, pad, scratch), part, pad, mean, top);
  }
  return hn::GetLane(hn::MaxOfLanes(I32(), top));
}

Survey SurveyTokens(const TokenRows& tokens, int64_t dim_pad, float* mean, float* scratch) {
  uint64_t finite = tokens.count == 64 ? ~uint64_t{0} : (uint64_t{1} << tokens.count) - 1;
  int32_t top = MeasureTokens(tokens, finite, dim_pad, mean, scratch);
  if (top >= kInfinityBits) {
    for (int64_t t = 0; t < tokens.count; ++t) {
      VI bits = hn::Zero(I32());
      MeasureToken(TokenAsFloats(tokens, t, dim_pad, scratch), 0.0f, dim_pad, nullptr, bits);
      if (hn::GetLane(hn::MaxOfLanes(I32(), bits)) >= kInfinityBits) finite &= ~(uint64_t{1} << t);
    }
    top = MeasureTokens(tokens, finite, dim_pad, mean, scratch);
  }
  return {std::bit_cast<float>(top), std::popcount(finite)};
}

// Rows are packed kLanes at a time, so that what is one number per row is computed for all of them at once.
struct Batch {
  float* rows;      // kLanes x pad floats
  int64_t first;    // token of row 0
  int64_t count;    // 1..kLanes
  uint32_t finite;  // bit per row; rows that are not finite were replaced by zeros
  VF top;           // largest magnitude
  // The rows were multiplied by this power of two, so that rotation and norms neither overflow nor vanish. It is 1
  // unless a row is very large or small.
  HWY_ALIGN float pre[kLanes];
  HWY_ALIGN float inverse_pre[kLanes];
  HWY_ALIGN float norm[kLanes];  // if asked for

  HWY_INLINE Batch() {}
};

// Token `t`, centred and divided by the unit if it is a key. Returns the magnitudes.
HWY_INLINE VI LoadRow(const PackRowsArgs& args, int64_t t, float* row) {
  const F32 d;
  const float* x = TokenAsFloats(args.tokens, t, args.dim_pad, row);
  VI top = hn::Zero(I32());
  if (args.is_query) {
    for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
      const VF v = hn::LoadU(d, x + i);
      hn::Store(v, d, row + i);
      top = hn::Max(top, MagnitudeBits(v));
    }
    return top;
  }
  const VF unit = hn::Set(d, args.inverse_unit);
  for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
    const VF v = hn::Mul(hn::Sub(hn::LoadU(d, x + i), hn::Load(d, args.centre + i)), unit);
    hn::Store(v, d, row + i);
    top = hn::Max(top, MagnitudeBits(v));
  }
  return top;
}

HWY_INLINE void ScaleRow(float* row, float by, int64_t pad) {
  const F32 d;
  for (int64_t i = 0; i < pad; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, row + i), hn::Set(d, by)), d, row + i);
  }
}

HWY_INLINE void LoadBatch(const PackRowsArgs& args, Batch& batch) {
  const F32 d;
  VI tops[kLanes];
  for (int r = 0; r < kLanes; ++r) tops[r] = hn::Zero(I32());
  for (int r = 0; r < batch.count; ++r) tops[r] = LoadRow(args, batch.first + r, batch.rows + r * args.dim_pad);
  const VI bits = MaxOfEach(tops);
  const VF top = hn::BitCast(d, bits);
  const auto finite = hn::Lt(bits, hn::Set(I32(), kInfinityBits));
  // Such that squares of rotated rows, 576 times as large at most, can be summed.
  const auto small = hn::And(hn::Lt(top, hn::Set(d, 0x1p-60f)), hn::Gt(top, hn::Zero(d)));
  const auto large = hn::Gt(top, hn::Set(d, 0x1p40f));
  batch.finite = MaskBits(hn::RebindMask(d, finite));
  VF pre = hn::Set(d, 1.0f);
  VF inverse_pre = pre;
  if (!hn::AllFalse(d, hn::Or(small, large)) || !hn::AllTrue(I32(), finite)) {
    pre = hn::IfThenElse(small, hn::Set(d, 0x1p100f), hn::IfThenElse(large, hn::Set(d, 0x1p-100f), pre));
    inverse_pre = hn::Div(inverse_pre, pre);
    hn::Store(pre, d, batch.pre);
    for (int r = 0; r < batch.count; ++r) {
      float* row = batch.rows + r * args.dim_pad;
      if (((batch.finite >> r) & 1) == 0) std::fill_n(row, args.dim_pad, 0.0f);
      ScaleRow(row, batch.pre[r], args.dim_pad);
    }
  }
  hn::Store(pre, d, batch.pre);
  hn::Store(inverse_pre, d, batch.inverse_pre);
  batch.top = hn::Mul(hn::IfThenElseZero(hn::RebindMask(d, finite), top), pre);
}

// L2 norms of the rows.
HWY_INLINE void FindNorms(const PackRowsArgs& args, Batch& batch) {
  const F32 d;
  VF sums[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    sums[r] = hn::Zero(d);
    if (r >= batch.count) continue;
    for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
      const VF x = hn::Load(d, batch.rows + r * args.dim_pad + i);
      sums[r] = hn::MulAdd(x, x, sums[r]);
    }
  }
  hn::Store(hn::Sqrt(SumOfEach(sums)), d, batch.norm);
}

// True for the lanes that hold the first halves of packed lanes: numbers 0 and 1 of every four.
HWY_INLINE hn::Mask<I32> FirstHalves() {
  return hn::Eq(hn::And(hn::Iota(I32(), 0), hn::Set(I32(), 2)), hn::Zero(I32()));
}

// The largest norm of what one narrow accumulator sums: over sums of kSumDims numbers, and both halves of their lanes.
inline constexpr int64_t kSumDims = 64;
HWY_INLINE VF LargestSumNorm(const PackRowsArgs& args, const Batch& batch) {
  const F32 d;
  const auto first = hn::RebindMask(d, FirstHalves());
  VF largest = hn::Zero(d);
  for (int64_t begin = 0; begin < args.dim_pad; begin += kSumDims) {
    const int64_t end = std::min(begin + kSumDims, args.dim_pad);
    VF firsts[kLanes], seconds[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      VF sum = hn::Zero(d);
      for (int64_t i = begin; r < batch.count && i < end; i += kLanes) {
        const VF x = hn::Load(d, batch.rows + r * args.dim_pad + i);
        sum = hn::MulAdd(x, x, sum);
      }
      firsts[r] = hn::IfThenElseZero(first, sum);
      seconds[r] = hn::IfThenZeroElse(first, sum);
    }
    largest = hn::Max(largest, hn::Max(SumOfEach(firsts), SumOfEach(seconds)));
  }
  return hn::Sqrt(largest);
}

// Means and self-similarity of a block: sums while its rows pass by.
struct Summary {
  float* mean;  // of the pool at hand
  float* unit;  // sum of unit vectors
  int64_t pad, count, pool_rows;
  int32_t tokens = 0;       // finite ones
  int64_t pool_begin = 0;   // first row of the pool
  int32_t pool_tokens = 0;  // finite ones of the pool

  HWY_INLINE int64_t PoolCount() const { return std::min(pool_rows, count - pool_begin); }
  HWY_INLINE void Start() {
    std::fill_n(mean, pad, 0.0f);
    std::fill_n(unit, pad, 0.0f);
  }
  // Corrects the mean if some tokens of the pool were not finite.
  HWY_INLINE void FinishPool() {
    if (pool_tokens == 0 || pool_tokens == PoolCount()) return;
    const float by = static_cast<float>(PoolCount()) / static_cast<float>(pool_tokens);
    for (int64_t i = 0; i < pad; ++i) mean[i] *= by;
  }
  HWY_INLINE void Add(const Batch& batch) {
    const F32 d;
    if (batch.first >= pool_begin + pool_rows) {
      FinishPool();
      pool_begin += pool_rows;
      pool_tokens = 0;
      mean += pad;
      std::fill_n(mean, pad, 0.0f);
    }
    const int finite = std::popcount(batch.finite & ((uint32_t{1} << batch.count) - 1));
    tokens += finite;
    pool_tokens += finite;
    const auto pool_count = static_cast<float>(PoolCount());
    float mean_by[kLanes], unit_by[kLanes];
    for (int r = 0; r < batch.count; ++r) {
      mean_by[r] = batch.inverse_pre[r] / pool_count;
      // A row of zeros has no direction: it counts as a token and adds nothing.
      unit_by[r] = batch.norm[r] > 0 ? 1.0f / batch.norm[r] : 0.0f;
    }
    for (int64_t i = 0; i < pad; i += kLanes) {
      VF mean_sum = hn::Load(d, mean + i);
      VF unit_sum = hn::Load(d, unit + i);
      for (int r = 0; r < batch.count; ++r) {
        const VF x = hn::Load(d, batch.rows + r * pad + i);
        mean_sum = hn::MulAdd(x, hn::Set(d, mean_by[r]), mean_sum);
        unit_sum = hn::MulAdd(x, hn::Set(d, unit_by[r]), unit_sum);
      }
      hn::Store(mean_sum, d, mean + i);
      hn::Store(unit_sum, d, unit + i);
    }
  }
  // Returns the similarity.
  HWY_INLINE float Finish() {
    FinishPool();
    if (tokens == 0) return 0.0f;
    const float n = static_cast<float>(tokens);
    return std::min(SquaredNorm(unit, pad) / (n * n), 1.0f);
  }
};

HWY_INLINE void RotateBatch(const PackRowsArgs& args, Batch& batch) {
  const int64_t block = RotationBlock(args.tokens.dim);
  VF tops[kLanes];
  for (int r = 0; r < kLanes; ++r) tops[r] = hn::Zero(F32());
  for (int r = 0; r < batch.count; ++r) {
    tops[r] = RotateRow(batch.rows + r * args.dim_pad, block, args.dim_pad);
  }
  batch.top = MaxOfEach(tops);
}

// What centring the keys takes from this query's scores.
HWY_INLINE float QueryShift(const PackRowsArgs& args, const float* row, bool finite, float inverse_pre) {
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  if (args.shift_factor == 0) return 0.0f;
  constexpr double kMost = std::numeric_limits<float>::max();
  const double dot = DotDouble(row, args.centre, args.tokens.dim) * static_cast<double>(inverse_pre);
  return static_cast<float>(std::clamp(args.shift_factor * dot, -kMost, kMost));
}

// How the rows become numbers of the kernel: stored = round(x * by).
template <sparge_precision kPrecision>
HWY_INLINE void ChooseScales(const PackRowsArgs& args, const Batch& batch, float* by) {
  const F32 d;
  HWY_ALIGN float step[kLanes], top[kLanes];
  if constexpr (kPrecision != SPARGE_PRECISION_FP32) {
    // Integers with |.| <= max and, if norm_max > 0, |.|_2 <= norm_max.
    VF steps = hn::Div(batch.top, hn::Set(d, static_cast<float>(args.max)));
    if (args.norm_max > 0) {
      const VF norm = args.sum_lanes == 0 ? hn::Load(d, batch.norm) : LargestSumNorm(args, batch);
      steps = hn::Max(steps, hn::Div(norm, hn::Set(d, static_cast<float>(args.norm_max))));
    }
    hn::Store(steps, d, step);
    hn::Store(hn::IfThenElseZero(hn::Gt(steps, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), steps)), d, by);
  } else {
    hn::Store(hn::Set(d, 1.0f), d, step);
    hn::Store(hn::Load(d, batch.inverse_pre), d, by);
  }
  hn::Store(batch.top, d, top);
  for (int r = 0; r < batch.count; ++r) {
    const double scale = static_cast<double>(step[r]) * static_cast<double>(batch.inverse_pre[r]);
    if (!args.is_query) {
      if (kPrecision != SPARGE_PRECISION_FP32) args.scale[batch.first + r] = static_cast<float>(scale);
      continue;
    }
    // The factor from dot to score, bounded so that no score exceeds the limit.
    if constexpr (kPrecision != SPARGE_PRECISION_FP32) {
      const double bound = args.limit / args.max;
      args.scale[batch.first + r] = static_cast<float>(std::clamp(scale * args.score_factor, -bound, bound));
    } else {  // fp32 has the factor multiplied into the row
      constexpr double kMost = std::numeric_limits<float>::max();
      const double bound = top[r] > 0 ? args.limit / static_cast<double>(top[r]) : 0;
      by[r] = static_cast<float>(std::clamp(std::clamp(scale * args.score_factor, -bound, bound), -kMost, kMost));
    }
  }
}

// Stores round(x * by) + offset for the dims [begin, end) as lanes of 1, 2 or 4 numbers; returns the integers without
// offset, summed over vectors.
template <sparge_precision kPrecision>
HWY_INLINE VI StoreLanes(const PackRowsArgs& args, int64_t token, const float* row, float by_row, int64_t begin,
                         int64_t end) {
  const F32 d;
  const I32 di;
  HWY_ALIGN std::byte lanes[RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign) * sizeof(float)];
  const VF by = hn::Set(d, by_row);
  VI sum = hn::Zero(di);
  for (int64_t i = 0; i < end - begin; i += kLanes) {
    const VF x = hn::Mul(hn::Load(d, row + begin + i), by);
    if constexpr (kPrecision == SPARGE_PRECISION_FP32) {
      hn::Store(x, d, reinterpret_cast<float*>(lanes) + i);
      continue;
    }
    // Rounding does not step over the bound: x is at most max * (1 + 2^-21), which is nearer to max than to max + 1.
    const VI n = NearestSmall(x);
    sum = hn::Add(sum, n);
    if constexpr (kPrecision == SPARGE_PRECISION_INT16) {
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
  const int64_t first_lane = begin / PerLane(kPrecision);
  const int64_t count = std::min((end - begin) / PerLane(kPrecision), args.row_lanes - first_lane);
  if (args.is_query) {
    std::memcpy(args.out + token * args.row_lanes + first_lane, lanes, static_cast<size_t>(count * kLaneBytes));
    return sum;
  }
  const int64_t within = token % kPanelLanes;
  int32_t* out = args.out + (token - within) * args.row_lanes + first_lane * kPanelLanes + within;
  for (int64_t lane = 0; lane < count; ++lane) {
    std::memcpy(out + lane * kPanelLanes, lanes + lane * kLaneBytes, kLaneBytes);
  }
  return sum;
}

// -offset * sum of the integers, where an accumulation starts: one int32, or a pair of int16 for the halves of lanes.
HWY_INLINE VI StartOf(const PackRowsArgs& args, VI (&sums)[kLanes]) {
  const VI offset = hn::Set(I32(), -args.start_offset);
  if (args.sum_lanes == 0) return hn::Mul(SumOfEach(sums), offset);
  const auto first = FirstHalves();
  VI seconds[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    seconds[r] = hn::IfThenZeroElse(first, sums[r]);
    sums[r] = hn::IfThenElseZero(first, sums[r]);
  }
  const VI low = hn::And(hn::Mul(SumOfEach(sums), offset), hn::Set(I32(), 0xFFFF));
  return hn::Or(low, hn::ShiftLeft<16>(hn::Mul(SumOfEach(seconds), offset)));
}

template <sparge_precision kPrecision>
HWY_INLINE void StoreBatch(const PackRowsArgs& args, const Batch& batch, const float* by) {
  const int64_t span = args.sum_lanes == 0 ? args.dim_pad : kSumDims;
  for (int64_t begin = 0; begin < args.dim_pad; begin += span) {
    VI sums[kLanes];
    for (int r = 0; r < kLanes; ++r) sums[r] = hn::Zero(I32());
    for (int r = 0; r < batch.count; ++r) {
      sums[r] = StoreLanes<kPrecision>(args, batch.first + r, batch.rows + r * args.dim_pad, by[r], begin,
                                       std::min(begin + span, args.dim_pad));
    }
    if (args.start == nullptr) continue;
    HWY_ALIGN int32_t start[kLanes];
    hn::Store(StartOf(args, sums), I32(), start);
    std::copy_n(start, batch.count, args.start + begin / span * kBlockK + batch.first);
  }
}

template <sparge_precision kPrecision>
uint64_t PackRows(const PackRowsArgs& args) {
  Batch batch;
  batch.rows = args.scratch;
  Summary summary{args.mean, args.scratch + kLanes * args.dim_pad, args.dim_pad, args.tokens.count, args.pool_rows};
  if (args.mean != nullptr) summary.Start();
  uint64_t not_finite = 0;
  for (batch.first = 0; batch.first < args.tokens.count; batch.first += kLanes) {
    batch.count = std::min<int64_t>(kLanes, args.tokens.count - batch.first);
    LoadBatch(args, batch);
    for (int r = 0; r < batch.count; ++r) {
      const bool finite = ((batch.finite >> r) & 1) != 0;
      if (args.is_query) {
        args.shift[batch.first + r] = QueryShift(args, batch.rows + r * args.dim_pad, finite, batch.inverse_pre[r]);
      } else if (!finite) {
        not_finite |= uint64_t{1} << (batch.first + r);
      }
    }
    if (args.mean != nullptr || args.norm_max > 0) FindNorms(args, batch);
    if (args.mean != nullptr) summary.Add(batch);
    if (args.rotate) RotateBatch(args, batch);
    HWY_ALIGN float by[kLanes];
    ChooseScales<kPrecision>(args, batch, by);
    StoreBatch<kPrecision>(args, batch, by);
  }
  if (args.mean != nullptr) *args.similarity = summary.Finish();
  return not_finite;
}

void PackDirectRows(const DirectRowsArgs& args) {
  const F32 d;
  for (int64_t t = 0; t < args.tokens.count; ++t) {
    float* row = args.out + t * args.dim_pad;
    const float* x = TokenAsFloats(args.tokens, t, args.dim_pad, row);
    VI bits = hn::Zero(I32());
    for (int64_t i = 0; i < args.dim_pad; i += kLanes) bits = hn::Max(bits, MagnitudeBits(hn::LoadU(d, x + i)));
    const int32_t top = hn::GetLane(hn::MaxOfLanes(I32(), bits));
    const bool finite = top < kInfinityBits;
    args.shift[t] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    // A power of two, so that nothing is rounded: a key of 2^128 times 576 numbers of 2^-12 is finite.
    const int exponent = finite && top > 0 ? std::ilogb(std::bit_cast<float>(top)) + 13 : 0;
    constexpr double kMost = std::numeric_limits<float>::max();
    args.factor[t] = static_cast<float>(std::clamp(std::ldexp(args.score_factor, exponent), -kMost, kMost));
    // In two steps, for 2^-exponent alone may not be a float.
    const VF by = hn::Set(d, finite ? std::ldexp(1.0f, -exponent / 2) : 0.0f);
    const VF by_rest = hn::Set(d, finite ? std::ldexp(1.0f, -exponent - (-exponent / 2)) : 0.0f);
    for (int64_t i = 0; i < args.dim_pad; i += kLanes) {
      const VF v = hn::Mul(hn::Mul(hn::LoadU(d, x + i), by), by_rest);
      hn::Store(finite ? v : hn::Zero(d), d, row + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

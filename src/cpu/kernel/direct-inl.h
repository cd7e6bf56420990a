// QK and PV straight from the caller's tensors, for a handful of queries: there, packing a key costs more than using
// it. Compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_DIRECT_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_DIRECT_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_DIRECT_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "src/cpu/kernel/kernel.h"
#include "src/cpu/tokens-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// kLanes tokens as padded floats, from token `first` on; `count` of them exist.
struct TokenVectors {
  const float* at[kLanes];
  int count;
};
inline constexpr int64_t kMaxDimPad = RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign);
HWY_INLINE void LoadTokens(const TokenRows& tokens, int64_t first, int64_t pad, float* buffer, TokenVectors& out) {
  out.count = static_cast<int>(std::clamp<int64_t>(tokens.count - first, 0, kLanes));
  for (int i = 0; i < out.count; ++i) out.at[i] = AsFloats(tokens, tokens.Place(first + i), pad, buffer + i * pad);
}

// Asks for kLanes tokens that are needed soon: keys and values take turns, which hardware does not foresee.
HWY_INLINE void Foresee(const TokenRows& tokens, int64_t first) {
  const int64_t element = static_cast<int64_t>(DtypeBytes(tokens.dtype));
  const int64_t count = std::clamp<int64_t>(tokens.count - first, 0, kLanes);
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* at = tokens.Place(first + i);
    for (int64_t b = 0; b < tokens.dim * element; b += 64) __builtin_prefetch(at + b, 0, 2);
  }
}

// Scores of `rows` query rows (dim_pad floats each) against the keys of one block, log2 units: dot * factor, bounded.
// Returns a bit for every key that is not finite; its scores are 0.
HWY_INLINE uint64_t DirectScores(const QueryBlock& query, int row, int rows, const DirectTokens& tokens, int64_t block,
                                 float* scores) {
  const F32 d;
  HWY_ALIGN float buffer[kLanes * kMaxDimPad];
  TokenVectors key;
  const int64_t pad = query.row_lanes;
  const VF limit = hn::Set(d, kDirectScoreLimit);
  uint64_t not_finite = 0;
  for (int j = 0; j < kBlockK; j += kLanes) {
    Foresee(tokens.values, block * kBlockK + j);
    LoadTokens(tokens.keys, block * kBlockK + j, pad, buffer, key);
    for (int r = 0; r < rows; ++r) {
      const auto* q = reinterpret_cast<const float*>(query.rows) + (row + r) * pad;
      VF dots[kLanes];
      for (int i = 0; i < kLanes; ++i) dots[i] = hn::Zero(d);
      for (int i = 0; i < key.count; ++i) {
        for (int64_t c = 0; c < pad; c += kLanes) {
          dots[i] = hn::MulAdd(hn::Load(d, q + c), hn::LoadU(d, key.at[i] + c), dots[i]);
        }
      }
      // Finite numbers have finite dots, see PackDirectRows.
      const VF dot = SumOfEach(dots);
      const auto finite = hn::Eq(hn::Sub(dot, dot), hn::Zero(d));
      const VF score = hn::Mul(hn::IfThenElseZero(finite, dot), hn::Set(d, query.factor[row + r]));
      not_finite |= static_cast<uint64_t>(MaskBits(hn::Not(finite))) << j;
      hn::Store(hn::Max(hn::Min(score, limit), hn::Neg(limit)), d, scores + r * kBlockK + j);
    }
  }
  return not_finite;
}

// o += p . values for one row and kLanes keys. A key without weight is left alone: it may be hidden, and its value may
// be no number at all.
HWY_INLINE void AddWeighted(const float* p, const TokenVectors& value, int64_t channels, float* o) {
  const F32 d;
  const uint32_t all = (uint32_t{1} << value.count) - 1;
  const uint32_t used = MaskBits(hn::Ne(hn::Load(d, p), hn::Zero(d))) & all;
  if (used == 0) return;
  for (int64_t c = 0; c < channels; c += kLanes) {
    VF sum = hn::Load(d, o + c);
    if (used == all) {
      for (int i = 0; i < value.count; ++i) sum = hn::MulAdd(hn::Set(d, p[i]), hn::LoadU(d, value.at[i] + c), sum);
    } else {
      for (uint32_t rest = used; rest != 0; rest &= rest - 1) {
        const int i = std::countr_zero(rest);
        sum = hn::MulAdd(hn::Set(d, p[i]), hn::LoadU(d, value.at[i] + c), sum);
      }
    }
    hn::Store(sum, d, o + c);
  }
}

HWY_INLINE void DirectProducts(const DirectTokens& tokens, int64_t block, int64_t channels, int rows,
                               const float* probabilities, float* o) {
  HWY_ALIGN float buffer[kLanes * kMaxDimPad];
  TokenVectors value;
  for (int j = 0; j < kBlockK; j += kLanes) {
    LoadTokens(tokens.values, block * kBlockK + j, channels, buffer, value);
    for (int r = 0; r < rows; ++r) AddWeighted(probabilities + r * kBlockK + j, value, channels, o + r * channels);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

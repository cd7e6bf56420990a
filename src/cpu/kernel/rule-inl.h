// What happens to the scores of a tile between QK and softmax where a tile is not plain: softcap, slope, mask and
// visibility; and keys that are not finite. Compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_RULE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_RULE_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_RULE_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_RULE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "src/base/half.h"
#include "src/cpu/kernel/kernel.h"
#include "src/cpu/kernel/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// A mask element in log2 units. The lowest float, which many programs use for "hidden", must stay finite: it hides only
// beside others that are larger.
HWY_INLINE float MaskInLog2(float mask) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float scaled = mask * static_cast<float>(kLog2e);
  return std::isinf(scaled) && !std::isinf(mask) ? std::copysign(kMost, mask) : scaled;
}

// The mask's part of one row, log2 units: bias[j] for the keys [begin, end) of a tile. Reads no other mask element.
HWY_INLINE void MaskBias(const ScoreRule& rule, int64_t row, int64_t key, Range keys, float* bias) {
  const int64_t at = row * rule.mask_stride + key;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    switch (rule.mask_type) {
      case SPARGE_MASK_BOOL:
        bias[j] = static_cast<const uint8_t*>(rule.mask)[at + j] != 0 ? 0.0f : kMinusInf;
        break;
      case SPARGE_MASK_ADD_F32:
        bias[j] = MaskInLog2(static_cast<const float*>(rule.mask)[at + j]);
        break;
      case SPARGE_MASK_ADD_F16:
        bias[j] = MaskInLog2(FloatFromF16(static_cast<const uint16_t*>(rule.mask)[at + j]));
        break;
      case SPARGE_MASK_NONE:
        break;
    }
  }
}

// Softcap, slope, mask and visibility of one row of a tile, in this order; scores come in `unit` and become log2 units.
// `use_mask`: this tile needs the mask.
HWY_INLINE void ApplyRule(const KernelArgs& args, int64_t row, int64_t block, bool use_mask, float unit,
                          float* scores) {
  const F32 d;
  const ScoreRule& rule = args.rule;
  const int64_t key = block * kBlockK;
  const Range all = rule.visible.KeysOf(args.query.Position(row));
  const Range keys{std::clamp<int64_t>(all.begin - key, 0, kBlockK), std::clamp<int64_t>(all.end - key, 0, kBlockK)};
  HWY_ALIGN float bias[kBlockK];
  if (use_mask) {
    std::fill_n(bias, kBlockK, 0.0f);
    MaskBias(rule, row, key, keys, bias);
  }
  const VF cap = hn::Set(d, rule.softcap);
  const VF inverse_cap = hn::Set(d, rule.softcap > 0 ? 1.0f / rule.softcap : 0.0f);
  const VF shift = hn::Set(d, args.query.shift[row]);
  // ALiBi without the base of the distance: BaseBias.
  const int64_t middle = QueryBlock::Middle(args.query.Position(row), args.query.pooled);
  const Visible::Distance distance =
      rule.slope != 0 ? rule.visible.DistanceOf(middle, rule.slope < 0) : Visible::Distance{};
  const VF nearest = hn::Set(d, static_cast<float>(distance.nearest - key));
  const VF back = hn::Set(d, static_cast<float>(distance.back));
  for (int j = 0; j < kBlockK; j += kLanes) {
    const VF index = hn::Iota(d, static_cast<float>(j));
    VF s = hn::Mul(hn::Load(d, scores + j), hn::Set(d, unit));
    if (rule.softcap > 0) s = hn::Mul(cap, Tanh(hn::Mul(hn::Add(s, shift), inverse_cap)));
    if (rule.slope != 0) {
      s = hn::NegMulAdd(hn::Set(d, rule.slope), hn::Sub(hn::Abs(hn::Sub(nearest, index)), back), s);
    }
    if (use_mask) s = hn::Add(s, hn::Load(d, bias + j));
    const auto visible = hn::And(hn::Ge(index, hn::Set(d, static_cast<float>(keys.begin))),
                                 hn::Lt(index, hn::Set(d, static_cast<float>(keys.end))));
    hn::Store(hn::IfThenElse(visible, s, hn::Set(d, kMinusInf)), d, scores + j);
  }
}

// A row that sees a key or value that is not finite becomes NaN; rows that do not see it stay as they are.
HWY_INLINE void ApplyPoison(uint64_t poison, const float* scores, float& l) {
  for (; poison != 0; poison &= poison - 1) {
    if (scores[std::countr_zero(poison)] > kMinusInf) l = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// What the precisions differ in, and the rows that meet one tile together. Compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_PASS_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_PASS_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_PASS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "src/cpu/kernel/dot-inl.h"
#include "src/cpu/kernel/kernel.h"
#include "src/cpu/kernel/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Rows of a group decide on the PV skip together. Small groups skip more (kernels differ by 5-7 points between 6 and 12
// rows), larger ones reuse a loaded key vector more often.
inline constexpr int kGroup = kRowsPerPanel;
inline constexpr int kPassGroups = 4;
inline constexpr int kPassRows = kPassGroups * kGroup;
inline constexpr int kMaxGroups = (kBlockQ + kGroup - 1) / kGroup;
static_assert(kPassRows % kLanes == 0 && kPassRows <= 32);

// What the precisions differ in. `kExpDegree`: see Exp2. `kMostLost`: the share of a row's weight that rounding may
// move; about a tenth of the precision's error, and ten times what rounding moves in a tile of noise.
struct PrecisionF32 {
  using Dot = DotF32;
  using Rounded = float;
  static constexpr sparge_precision kPrecision = SPARGE_PRECISION_FP32;
  static constexpr bool kDirect = false;
  static constexpr bool kInteger = false;
  static constexpr int kExpDegree = 5;
  static constexpr QuantGrid kGrid{.q_max = 0, .k_max = 0, .p_max = 1, .v_max = 0, .fine_max = 0};
};
struct PrecisionDirect : PrecisionF32 {  // from the caller's tensors
  static constexpr bool kDirect = true;
};
struct PrecisionI16 {
  using Dot = DotI16;
  using Rounded = int16_t;
  static constexpr sparge_precision kPrecision = SPARGE_PRECISION_INT16;
  static constexpr bool kDirect = false;
  static constexpr float kMostLost = 2e-4f;
  static constexpr bool kInteger = true;
  static constexpr int kExpDegree = 5;
  // QK: |q|_2 |k|_2 <= (46300 + sqrt(576)/2)^2 < 2^31, the second term being what rounding can add to a norm.
  // PV: 64 * 8191 * 4095 < 2^31.
  static constexpr QuantGrid kGrid{.q_max = 32767,
                                   .k_max = 32767,
                                   .p_max = 8191,
                                   .v_max = 4095,
                                   .fine_max = 4095,
                                   .q_norm_max = 46300,
                                   .k_norm_max = 46300};
};
struct PrecisionI8 {
  using Dot = DotI8;
  using Rounded = uint8_t;
  static constexpr sparge_precision kPrecision = SPARGE_PRECISION_INT8;
  static constexpr bool kDirect = false;
  static constexpr float kMostLost = 2e-2f;
  static constexpr bool kInteger = true;
  static constexpr int kExpDegree = 3;
  static constexpr QuantGrid kGrid = kGridI8;
};
// Of processors that have one instruction for the step. All else in them is as the target has it.
#if HWY_TARGET == HWY_AVX2
struct PrecisionI16Vnni : PrecisionI16 {
  using Dot = DotI16Vnni;
};
struct PrecisionI8Vnni : PrecisionI8 {
  using Dot = DotI8Vnni;
  static constexpr QuantGrid kGrid = kGridI8Wide;
};
#elif HWY_TARGET == HWY_NEON
struct PrecisionI8Sdot : PrecisionI8 {
  using Dot = DotI8Sdot;
  static constexpr QuantGrid kGrid = kGridI8Sdot;
};
struct PrecisionI8Usdot : PrecisionI8 {
  using Dot = DotI8Usdot;
};
#endif

// The rows of a pass while they meet one tile. Arrays of one number per row are whole vectors.
template <class P>
struct Pass {
  // In log2 units divided by `unit`; and then in their place probabilities; integers: in 1 / p_max.
  HWY_ALIGN float scores[kPassRows * kBlockK];
  // What a row's scores are still to be multiplied by: 1, or (integers only) the query's factor where nothing but the
  // softmax needs them, which multiplies and subtracts in one instruction. Never negative.
  HWY_ALIGN float unit[kPassRows];
  HWY_ALIGN typename P::Rounded rounded[P::kInteger ? kPassRows * kBlockK : 1];  // probabilities as integers
  HWY_ALIGN float partial_sum[kPassRows * kLanes];  // of a row's numbers, spread over lanes
  HWY_ALIGN float tile_max[kPassRows];              // log2 units; fp32: what probabilities are relative to
  HWY_ALIGN float tile_sum[kPassRows];              // of the probabilities as they are stored; integers: in 1 / p_max
  HWY_ALIGN float keep[kPassRows];                  // what the old sums are multiplied by
  HWY_ALIGN float gain[kPassRows];                  // what 1 / p_max of the tile's maximum is worth (integers only)
  HWY_ALIGN float coarser[kPassRows];               // steps of the stored probabilities in units of 1 / p_max
  float direct_unit;  // direct: probabilities are this power of two times what they are elsewhere
  // Bit j: key or value j of the tile is not finite.
  uint64_t poison;
  int row;   // first row in the query block
  int rows;  // 1..kPassRows
};

// Units of all rows of a query block, as QK leaves their scores.
template <class P>
struct RowUnits {
  HWY_INLINE explicit RowUnits(const QueryBlock& query) {
    if constexpr (P::kInteger) {
      std::copy_n(query.factor, query.count, unit);
      // Rows that are not there have scores of -inf, and 0 times that would be NaN.
      std::fill(unit + query.count, unit + kBlockQ + kPassRows, 1.0f);
      negative = std::any_of(unit, unit + query.count, [](float x) { return x < 0; });
    }
  }
  HWY_INLINE void CopyTo(Pass<P>& pass) const {
    const F32 d;
    for (int r = 0; r < kPassRows; r += kLanes) hn::Store(hn::Load(d, unit + pass.row + r), d, pass.unit + r);
  }

  HWY_ALIGN float unit[P::kInteger ? kBlockQ + kPassRows : 1];
  bool negative = false;  // a negative scale of the call: maxima need the scores themselves
};

// One bit per group of a pass to one per row, of those that are there.
template <class P>
HWY_INLINE uint32_t RowsOf(uint32_t groups, const Pass<P>& pass) {
  constexpr uint32_t kGroupRows = (1u << kGroup) - 1;
  uint32_t rows = 0;
  for (int g = 0; g < kPassGroups; ++g) rows |= ((groups >> g) & 1) * kGroupRows << (g * kGroup);
  return rows & static_cast<uint32_t>((uint64_t{1} << pass.rows) - 1);
}
// All rows of the vector that begins with row `first`.
HWY_INLINE bool AllOf(uint32_t rows, int first) {
  constexpr uint32_t kVectorRows = (1u << kLanes) - 1;
  return ((rows >> first) & kVectorRows) == kVectorRows;
}

// One bit per row of a pass to one per group.
HWY_INLINE uint32_t GroupsWith(uint32_t row_bits) {
  uint32_t groups = 0;
  for (int g = 0; g < kPassGroups; ++g) {
    groups |= static_cast<uint32_t>(((row_bits >> (g * kGroup)) & ((1u << kGroup) - 1)) != 0) << g;
  }
  return groups;
}

// Neighbouring rows of a pass.
struct Rows {
  int first, count;
};

// body(rows) for every run of neighbouring groups among `groups`, or for every group by itself.
template <class P, class Body>
HWY_INLINE void ForEachRun(const Pass<P>& pass, uint32_t groups, const Body& body) {
  while (groups != 0) {
    const int first = std::countr_zero(groups);
    const int end = first + std::countr_one(groups >> first);
    body(Rows{first * kGroup, std::min(end * kGroup, pass.rows) - first * kGroup});
    groups &= ~((uint32_t{1} << end) - 1);
  }
}
template <class P, class Body>
HWY_INLINE void ForEachGroup(const Pass<P>& pass, uint32_t groups, const Body& body) {
  for (; groups != 0; groups &= groups - 1) ForEachRun(pass, groups & -groups, body);
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// Stage 2, written once for every precision and instruction set: QK, score rule, online softmax with PV skip, PV.
#if defined(SPARGE_SRC_KERNEL_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_KERNEL_TILE_INL_H_
#undef SPARGE_SRC_KERNEL_TILE_INL_H_
#else
#define SPARGE_SRC_KERNEL_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

#include "src/base/half.h"
#include "src/kernel/dot-inl.h"
#include "src/kernel/kernel.h"
#include "src/kernel/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
namespace HWY_NAMESPACE {

inline constexpr int kLanes = static_cast<int>(HWY_LANES(float));
// Rows of a group decide on the PV skip together. Small groups skip more (kernels differ by 5-7 points between 6 and 12
// rows), larger ones reuse a loaded key vector more often.
inline constexpr int kGroup = 8;
inline constexpr int kGroupPad = kGroup < kLanes ? kLanes : kGroup;
// Register block: kRowsPerPanel x kVectorsPerPanel accumulators, plus the loaded vectors of B and one broadcast of A,
// fit 32 registers on AVX-512 and 16 elsewhere.
inline constexpr int kRowsPerPanel = HWY_TARGET <= HWY_AVX3 ? 8 : 4;
inline constexpr int kVectorsPerPanel = 2;
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
inline constexpr float kLog2e = 1.44269504088896340736f;

// What the precisions differ in. `kExpDegree`: see Exp2. `kMostLost`: the share of a row's weight that rounding may
// move; about a tenth of the precision's error, and ten times what rounding moves in a tile of noise.
struct PrecisionF32 {
  using Dot = DotF32;
  using Probability = float;
  static constexpr sparge_precision kPrecision = SPARGE_FP32;
  static constexpr bool kInteger = false;
  static constexpr int kExpDegree = 5;
  static constexpr QuantGrid kGrid{0, 0, 0, 0, 1, 0, false};
};
struct PrecisionI16 {
  using Dot = DotI16;
  using Probability = int16_t;
  static constexpr sparge_precision kPrecision = SPARGE_INT16;
  static constexpr float kMostLost = 2e-4f;
  static constexpr bool kInteger = true;
  static constexpr int kExpDegree = 5;
  // QK: |q|_2 |k|_2 <= (46300 + sqrt(576)/2)^2 < 2^31, the second term being what rounding can add to a norm.
  // PV: 64 * 8191 * 4095 < 2^31.
  static constexpr QuantGrid kGrid{32767, 0, 32767, 46300, 8191, 4095, false};
};
struct PrecisionI8 {
  using Dot = DotI8;
  using Probability = uint8_t;
  static constexpr sparge_precision kPrecision = SPARGE_INT8;
  static constexpr float kMostLost = 4e-3f;
  static constexpr bool kInteger = true;
  static constexpr int kExpDegree = 3;
  static constexpr QuantGrid kGrid = kGridI8;
};

// Scores, probabilities and softmax state of one row group while it walks over the kept tiles. Arrays of kGroupPad hold
// whole vectors: where these are longer than a group, the rows are repeated (ReduceRows) and evolve alike.
template <class P>
struct Group {
  HWY_ALIGN float scores[kGroup * kBlockK];
  HWY_ALIGN typename P::Probability probabilities[kGroup * kBlockK];
  HWY_ALIGN float tile_max[kGroupPad];
  HWY_ALIGN float tile_sum[kGroupPad];
  HWY_ALIGN float exact_sum[kGroupPad];  // before rounding
  HWY_ALIGN float keep[kGroupPad];       // what the old sums are multiplied by
  HWY_ALIGN float gain[kGroupPad];       // what the tile's sums are multiplied by
  HWY_ALIGN float m[kGroupPad];
  HWY_ALIGN float l[kGroupPad];
  int row;   // first row in the query block
  int rows;  // 1..kGroup
};

// For lambdas: compiled for the target, and inlined so early that what they capture can live in registers.
#ifndef SPARGE_INLINE
#define SPARGE_INLINE HWY_ATTR __attribute__((always_inline))
#endif

// body(0), body(1), ... as compile-time indices: g++ keeps an array of vectors in registers only if no loop indexes it.
template <int kCount, class Body>
HWY_INLINE void Unroll(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) SPARGE_INLINE {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

// kRows x kVectors accumulators over `steps`: acc(r, n) = start(n) + sum_s A(r, s) . B(s, n), each handed to done(r,
// n).
template <class Dot, int kRows, int kVectors, class Done>
HWY_INLINE void Panel(const std::byte* a, int64_t a_bytes, const std::byte* b, int64_t b_bytes, int64_t steps,
                      const int32_t* start, const Done& done) {
  const I32 d;
  typename Dot::Acc acc[kRows][kVectors];
  Unroll<kVectors>([&](auto n) SPARGE_INLINE {
    const VI from = start == nullptr ? hn::Zero(d) : hn::Load(d, start + n * kLanes);
    Unroll<kRows>([&](auto r) SPARGE_INLINE { acc[r][n] = Dot::Start(from); });
  });
  for (int64_t s = 0; s < steps; ++s) {
    const auto* lanes = reinterpret_cast<const int32_t*>(b + s * b_bytes);
    typename Dot::B vectors[kVectors];
    Unroll<kVectors>([&](auto n) SPARGE_INLINE { vectors[n] = Dot::PrepareB(hn::Load(d, lanes + n * kLanes)); });
    Unroll<kRows>([&](auto r) SPARGE_INLINE {
      int32_t lane;
      std::memcpy(&lane, a + r * a_bytes + s * kLaneBytes, sizeof(lane));
      const typename Dot::A row = Dot::PrepareA(hn::Set(d, lane));
      Unroll<kVectors>([&](auto n) SPARGE_INLINE { Dot::Step(acc[r][n], row, vectors[n]); });
    });
  }
  Unroll<kRows>([&](auto r) SPARGE_INLINE {
    Unroll<kVectors>([&](auto n) SPARGE_INLINE { done(r, n, Dot::Total(acc[r][n])); });
  });
}

// Covers rows x lanes with panels: full ones, then single rows and single vectors for the rest.
template <class Dot, int kVectors, class Done>
HWY_INLINE void PanelColumn(const std::byte* a, int64_t a_bytes, int rows, const std::byte* b, int64_t b_bytes,
                            int64_t steps, const int32_t* start, int64_t lane, const Done& done) {
  int r0 = 0;
  for (; r0 + kRowsPerPanel <= rows; r0 += kRowsPerPanel) {
    Panel<Dot, kRowsPerPanel, kVectors>(a + r0 * a_bytes, a_bytes, b, b_bytes, steps, start,
                                        [&](int r, int n, VF total)
                                            SPARGE_INLINE { done(r0 + r, lane + n * kLanes, total); });
  }
  for (; r0 < rows; ++r0) {
    Panel<Dot, 1, kVectors>(a + r0 * a_bytes, a_bytes, b, b_bytes, steps, start,
                            [&](int, int n, VF total) SPARGE_INLINE { done(r0, lane + n * kLanes, total); });
  }
}

// done(row, lane, total) for all rows x lanes of A times B; `lanes` is a multiple of kLanes.
template <class Dot, class Done>
HWY_INLINE void Multiply(const std::byte* a, int64_t a_bytes, int rows, const std::byte* b, int64_t lanes,
                         int64_t steps, const int32_t* start, const Done& done) {
  const int64_t b_bytes = lanes * kLaneBytes;
  int64_t lane = 0;
  for (; lane + kVectorsPerPanel * kLanes <= lanes; lane += kVectorsPerPanel * kLanes) {
    PanelColumn<Dot, kVectorsPerPanel>(a, a_bytes, rows, b + lane * kLaneBytes, b_bytes, steps,
                                       start == nullptr ? nullptr : start + lane, lane, done);
  }
  for (; lane < lanes; lane += kLanes) {
    PanelColumn<Dot, 1>(a, a_bytes, rows, b + lane * kLaneBytes, b_bytes, steps,
                        start == nullptr ? nullptr : start + lane, lane, done);
  }
}

// QK: scores of the group's rows against one key block, log2 units.
template <class P>
HWY_NOINLINE void Scores(const KernelArgs& args, int64_t block, Group<P>& group) {
  const F32 d;
  const QueryBlock& query = args.query;
  const int64_t row_bytes = query.row_lanes * kLaneBytes;
  const std::byte* keys = args.blocks.keys + block * query.row_lanes * kBlockK * kLaneBytes;
  const std::byte* rows = query.rows + group.row * row_bytes;
  if constexpr (P::kInteger) {
    const float* key_scale = args.blocks.key_scale + block * kBlockK;
    const int32_t* start = P::kGrid.q_offset == 0 ? nullptr : args.blocks.key_start + block * kBlockK;
    const float* factor = query.factor + group.row;
    Multiply<typename P::Dot>(rows, row_bytes, group.rows, keys, kBlockK, query.row_lanes, start,
                              [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
                                const VF scaled = hn::Mul(dot, hn::Load(d, key_scale + lane));
                                hn::Store(hn::Mul(scaled, hn::Set(d, factor[r])), d, group.scores + r * kBlockK + lane);
                              });
  } else {
    Multiply<typename P::Dot>(rows, row_bytes, group.rows, keys, kBlockK, query.row_lanes, nullptr,
                              [&](int r, int64_t lane, VF dot)
                                  SPARGE_INLINE { hn::Store(dot, d, group.scores + r * kBlockK + lane); });
  }
}

// A mask element in log2 units. The lowest float, which many programs use for "hidden", must stay finite: it hides only
// beside others that are larger.
HWY_INLINE float MaskInLog2(float mask) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float scaled = mask * kLog2e;
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

// Softcap, slope, mask and visibility of one row of a tile, in this order. `use_mask`: this tile needs the mask.
HWY_INLINE void ApplyRule(const KernelArgs& args, int64_t row, int64_t block, bool use_mask, float* scores) {
  const F32 d;
  const ScoreRule& rule = args.rule;
  const int64_t key = block * kBlockK;
  const Range all = rule.visible.KeysOf(args.query.first + row);
  const Range keys{std::clamp<int64_t>(all.begin - key, 0, kBlockK), std::clamp<int64_t>(all.end - key, 0, kBlockK)};
  HWY_ALIGN float bias[kBlockK] = {};
  if (use_mask) MaskBias(rule, row, key, keys, bias);
  const VF cap = hn::Set(d, rule.softcap);
  const VF inverse_cap = hn::Set(d, rule.softcap > 0 ? 1.0f / rule.softcap : 0.0f);
  const VF shift = hn::Set(d, args.query.shift[row]);
  // |row + offset - key| as a float: exact below 2^24, and beyond that the slope has long made the score negligible.
  const VF distance = hn::Set(d, static_cast<float>(args.query.first + row + rule.visible.offset - key));
  for (int j = 0; j < kBlockK; j += kLanes) {
    const VF index = hn::Iota(d, static_cast<float>(j));
    VF s = hn::Load(d, scores + j);
    if (rule.softcap > 0) s = hn::Mul(cap, Tanh(hn::Mul(hn::Add(s, shift), inverse_cap)));
    if (rule.slope != 0) s = hn::NegMulAdd(hn::Set(d, rule.slope), hn::Abs(hn::Sub(distance, index)), s);
    s = hn::Add(s, hn::Load(d, bias + j));
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

// What a tile means to a row group: no score that counts (hidden), none that can still matter (skipped), or work.
enum class Tile { kHidden, kSkipped, kComputed };

// Row maxima of the tile, and the softmax-aware skip: work iff some row's maximum is above its running one - skip.
template <class P>
HWY_INLINE Tile JudgeTile(Group<P>& group, float skip) {
  const F32 d;
  VF tops[kGroup];
  for (int r = 0; r < kGroup; ++r) {
    tops[r] = hn::Set(d, kMinusInf);
    if (r >= group.rows) continue;
    const float* scores = group.scores + r * kBlockK;
    for (int j = 0; j < kBlockK; j += kLanes) tops[r] = hn::Max(tops[r], hn::Load(d, scores + j));
  }
  ReduceRows(
      tops, [](VF a, VF b) HWY_ATTR { return hn::Max(a, b); }, group.tile_max);
  bool seen = false;
  bool matters = false;
  for (int r = 0; r < kGroupPad; r += kLanes) {
    const VF tile = hn::Load(d, group.tile_max + r);
    const VF bar = hn::Sub(hn::Load(d, group.m + r), hn::Set(d, skip));
    seen |= !hn::AllFalse(d, hn::Gt(tile, hn::Set(d, kMinusInf)));
    matters |= !hn::AllFalse(d, hn::Gt(tile, bar));
  }
  return matters ? Tile::kComputed : seen ? Tile::kSkipped : Tile::kHidden;
}

// Moves the running maximum over the tile: new m, and the factors for the old and the new sums.
template <class P>
HWY_INLINE void MoveMaximum(Group<P>& group) {
  const F32 d;
  const VF minus_inf = hn::Set(d, kMinusInf);
  for (int r = 0; r < kGroupPad; r += kLanes) {
    const VF old = hn::Load(d, group.m + r);
    const VF tile = hn::Load(d, group.tile_max + r);
    const VF now = hn::Max(old, tile);
    // Where nothing was seen yet, -inf - (-inf) would be NaN; 2^(-inf - 0) is the 0 that is meant.
    const VF base = hn::IfThenZeroElse(hn::Eq(now, minus_inf), now);
    hn::Store(now, d, group.m + r);
    hn::Store(Exp2<5>(hn::Sub(old, base)), d, group.keep + r);
    if constexpr (P::kInteger) {
      // Probabilities are rounded against the tile's own maximum, so that a tile below the running one keeps its bits.
      hn::Store(hn::Mul(Exp2<5>(hn::Sub(tile, base)), hn::Set(d, 1.0f / P::kGrid.p_max)), d, group.gain + r);
      hn::Store(hn::IfThenZeroElse(hn::Eq(tile, minus_inf), tile), d, group.tile_max + r);
    } else {
      hn::Store(base, d, group.tile_max + r);
    }
  }
}

// Which probabilities of a tile to round. Where a few keys have nearly all the weight (an attention sink), the step
// that suits them takes the rest to zero, and all the rest together may matter: then large and small ones get a step
// each.
enum class Part { kAll, kLarge, kSmall };
inline constexpr float kSmallBelow = 1.0f / 64;  // of the row's maximum in the tile

// One vector of probabilities in steps of 1 / p_max (kSmall: finer), before rounding.
template <class P, Part kPart>
HWY_INLINE VF StepsOf(VF score_below_max) {
  const F32 d;
  constexpr float kSteps = kPart == Part::kSmall ? P::kGrid.p_max / kSmallBelow : P::kGrid.p_max;
  VF p = hn::Mul(Exp2Bounded<P::kExpDegree>(score_below_max), hn::Set(d, kSteps));
  const VF border = hn::Set(d, kSteps * kSmallBelow);
  if constexpr (kPart == Part::kLarge) p = hn::IfThenElseZero(hn::Ge(p, border), p);
  if constexpr (kPart == Part::kSmall) p = hn::IfThenElseZero(hn::Lt(p, border), p);
  return p;
}

// Probabilities of the tile relative to tile_max, and their row sums. The sum is that of the rounded numbers, so that
// what rounding adds to all of them alike cancels in o / l.
template <class P, Part kPart = Part::kAll>
HWY_NOINLINE void Probabilities(Group<P>& group) {
  const F32 d;
  VF sums[kGroup], exact[kGroup];
  for (int r = 0; r < kGroup; ++r) {
    sums[r] = exact[r] = hn::Zero(d);
    if (r >= group.rows) continue;
    const float* scores = group.scores + r * kBlockK;
    auto* out = group.probabilities + r * kBlockK;
    const VF base = hn::Set(d, group.tile_max[r]);
    if constexpr (P::kInteger) {
      const hn::Rebind<typename P::Probability, F32> narrow;
      VI sum = hn::Zero(I32());
      for (int j = 0; j < kBlockK; j += kLanes) {
        const VF p = StepsOf<P, kPart>(hn::Sub(hn::Load(d, scores + j), base));
        const VI n = hn::NearestInt(p);
        hn::Store(hn::DemoteTo(narrow, n), narrow, out + j);
        sum = hn::Add(sum, n);
        exact[r] = hn::Add(exact[r], p);
      }
      sums[r] = hn::ConvertTo(d, sum);
    } else {
      for (int j = 0; j < kBlockK; j += kLanes) {
        const VF p = Exp2<P::kExpDegree>(hn::Sub(hn::Load(d, scores + j), base));
        hn::Store(p, d, out + j);
        sums[r] = hn::Add(sums[r], p);
      }
    }
  }
  const auto add = [](VF a, VF b) HWY_ATTR { return hn::Add(a, b); };
  if constexpr (kPart == Part::kSmall) {
    HWY_ALIGN float small[kGroupPad];
    ReduceRows(sums, add, small);
    for (int r = 0; r < kGroupPad; ++r) group.tile_sum[r] += small[r] * kSmallBelow;
  } else {
    ReduceRows(sums, add, group.tile_sum);
  }
  if constexpr (kPart == Part::kAll && P::kInteger) ReduceRows(exact, add, group.exact_sum);
}

// True iff rounding changed the weight of the tile by more than kMostLost of a row's weight so far.
template <class P>
HWY_INLINE bool LosesWeight(const Group<P>& group) {
  const F32 d;
  bool loses = false;
  for (int r = 0; r < kGroupPad; r += kLanes) {
    const VF gain = hn::Load(d, group.gain + r);
    const VF exact = hn::Load(d, group.exact_sum + r);
    const VF lost = hn::Mul(hn::AbsDiff(exact, hn::Load(d, group.tile_sum + r)), gain);
    const VF weight = hn::MulAdd(hn::Load(d, group.l + r), hn::Load(d, group.keep + r), hn::Mul(exact, gain));
    loses |= !hn::AllFalse(d, hn::Gt(lost, hn::Mul(weight, hn::Set(d, P::kMostLost))));
  }
  return loses;
}

// o = o * keep + (probabilities . values) * value_scale * gain * fraction; fp32 has neither scale nor gain.
template <class P>
HWY_NOINLINE void AddProducts(const KernelArgs& args, int64_t block, const std::byte* all_values, const float* keep,
                              float fraction, Group<P>& group) {
  const F32 d;
  const int64_t channels = args.blocks.channels;
  constexpr int kSteps = kBlockK / PerLane(P::kPrecision);
  const std::byte* values = all_values + block * kSteps * channels * kLaneBytes;
  float* o = args.state.o + group.row * channels;
  const float* value_scale = P::kInteger ? args.blocks.value_scale + block * channels : nullptr;
  Multiply<typename P::Dot>(reinterpret_cast<const std::byte*>(group.probabilities),
                            kBlockK * static_cast<int64_t>(sizeof(typename P::Probability)), group.rows, values,
                            channels, kSteps, nullptr, [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
                              float* at = o + r * channels + lane;
                              VF tile = dot;
                              if constexpr (P::kInteger) {
                                const VF scale = hn::Load(d, value_scale + lane);
                                tile = hn::Mul(tile, hn::Mul(scale, hn::Set(d, group.gain[r] * fraction)));
                              }
                              hn::Store(hn::MulAdd(hn::Load(d, at), hn::Set(d, keep[r]), tile), d, at);
                            });
}

// True iff some row has its weight on few keys of this tile: then what rounding took from their values does not average
// out. The tile must matter (its maximum within 2^-4 of the running one) and its weights sum to less than 8 maxima.
template <class P>
HWY_INLINE bool HasPeak(const Group<P>& group) {
  constexpr float kMax = P::kGrid.p_max;
  bool peak = false;
  for (int r = 0; r < group.rows; ++r) peak |= group.gain[r] * kMax > 0x1p-4f && group.tile_sum[r] < 8 * kMax;
  return peak;
}

// Probabilities, then l and o over the tile: old * keep + tile * gain.
template <class P>
HWY_INLINE void Accumulate(const KernelArgs& args, int64_t block, Group<P>& group) {
  const KeyValueBlocks& blocks = args.blocks;
  Probabilities<P>(group);
  [[maybe_unused]] constexpr float kOnes[] = {1, 1, 1, 1, 1, 1, 1, 1};
  static_assert(std::size(kOnes) == kGroup);
  [[maybe_unused]] bool split = false;
  if constexpr (P::kInteger) {
    split = LosesWeight(group);
    if (split) Probabilities<P, Part::kLarge>(group);
  }
  AddProducts(args, block, blocks.values, group.keep, 1.0f, group);
  if constexpr (P::kInteger) {
    const FineValues fine = blocks.fine[block];
    if (fine == FineValues::kAlways || (fine == FineValues::kForPeaks && HasPeak(group))) {
      AddProducts(args, block, blocks.fine_values, kOnes, 0.5f / P::kGrid.v_max, group);
    }
    if (split) {
      Probabilities<P, Part::kSmall>(group);
      AddProducts(args, block, blocks.values, kOnes, kSmallBelow, group);
    }
  }
  const F32 d;
  for (int r = 0; r < kGroupPad; r += kLanes) {
    VF tile = hn::Load(d, group.tile_sum + r);
    if constexpr (P::kInteger) tile = hn::Mul(tile, hn::Load(d, group.gain + r));
    hn::Store(hn::MulAdd(hn::Load(d, group.l + r), hn::Load(d, group.keep + r), tile), d, group.l + r);
  }
}

// One row group over all kept tiles. Returns the number of tiles whose PV it skipped.
template <class P>
HWY_INLINE int64_t AttendGroup(const KernelArgs& args, Group<P>& group) {
  const ScoreRule& rule = args.rule;
  const int64_t first = args.query.first + group.row;
  const int64_t last = first + group.rows - 1;
  const Range any = rule.visible.KeysOfAny(first, last);
  const Range all = rule.visible.KeysOfAll(first, last);
  const bool special = rule.softcap > 0 || rule.slope != 0;
  int64_t skipped = 0;
  for (int64_t i = 0; i < args.kept_count; ++i) {
    const int64_t block = args.kept[i];
    const Range keys{block * kBlockK, (block + 1) * kBlockK};
    if (!Overlaps(any, keys)) continue;  // hidden from this group, though not from the whole query block
    const bool use_mask = args.masked_tiles != nullptr && ((args.masked_tiles[block / 64] >> (block % 64)) & 1) != 0;
    const bool inside = all.begin <= keys.begin && keys.end <= all.end;
    Scores<P>(args, block, group);
    const uint64_t poison = args.blocks.poison[block];
    if (special || use_mask || !inside) {
      for (int r = 0; r < group.rows; ++r) {
        ApplyRule(args, group.row + r, block, use_mask, group.scores + r * kBlockK);
      }
    }
    if (poison != 0) {
      for (int r = 0; r < group.rows; ++r) ApplyPoison(poison, group.scores + r * kBlockK, group.l[r]);
    }
    const Tile tile = JudgeTile(group, args.skip);
    skipped += tile == Tile::kSkipped;
    if (tile != Tile::kComputed) continue;
    MoveMaximum(group);
    Accumulate(args, block, group);
  }
  return skipped;
}

template <class P>
int64_t Attend(const KernelArgs& args) {
  Group<P> group;
  int64_t skipped = 0;
  std::memset(args.state.o, 0, sizeof(float) * static_cast<size_t>(args.query.count * args.blocks.channels));
  for (int row = 0; row < args.query.count; row += kGroup) {
    group.row = row;
    group.rows = std::min(kGroup, args.query.count - row);
    for (int r = 0; r < kGroupPad; ++r) {
      group.m[r] = group.tile_max[r] = kMinusInf;
      group.l[r] = 0;
    }
    skipped += AttendGroup(args, group);
    for (int r = 0; r < group.rows; ++r) {
      args.state.m[row + r] = group.m[r];
      args.state.l[row + r] = group.l[r];
    }
  }
  return skipped;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

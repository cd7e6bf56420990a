// Stage 2, written once for every precision and instruction set: QK, score rule, online softmax with PV skip, PV.
//
// A tile meets the rows of the query block in passes of a few row groups, and a pass goes through the phases one after
// the other: scores of all its groups, then maxima, probabilities, products. So the tile's keys stay in the first-level
// cache while they are used, and then its values; and what is one number per row is computed for whole vectors of rows.
#if defined(SPARGE_SRC_KERNEL_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_KERNEL_TILE_INL_H_
#undef SPARGE_SRC_KERNEL_TILE_INL_H_
#else
#define SPARGE_SRC_KERNEL_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "src/kernel/direct-inl.h"
#include "src/kernel/dot-inl.h"
#include "src/kernel/kernel.h"
#include "src/kernel/panel-inl.h"
#include "src/kernel/rule-inl.h"
#include "src/kernel/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
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
  static constexpr sparge_precision kPrecision = SPARGE_FP32;
  static constexpr bool kDirect = false;
  static constexpr float kLog2Unit = 0;  // of the probabilities
  static constexpr bool kInteger = false;
  static constexpr int kExpDegree = 5;
  static constexpr QuantGrid kGrid{.q_max = 0, .k_max = 0, .p_max = 1, .v_max = 0, .fine_max = 0};
};
// fp32 from the caller's tensors. Probabilities are 2^-32 times smaller than elsewhere, so that sums of the largest
// floats stay finite.
struct PrecisionDirect : PrecisionF32 {
  static constexpr bool kDirect = true;
  static constexpr float kLog2Unit = 32;
};
struct PrecisionI16 {
  using Dot = DotI16;
  using Rounded = int16_t;
  static constexpr sparge_precision kPrecision = SPARGE_INT16;
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
  static constexpr sparge_precision kPrecision = SPARGE_INT8;
  static constexpr float kMostLost = 4e-3f;
  static constexpr bool kInteger = true;
  static constexpr int kExpDegree = 3;
  static constexpr QuantGrid kGrid = kGridI8;
};

// The rows of a pass while they meet one tile. Arrays of one number per row are whole vectors.
template <class P>
struct Pass {
  HWY_ALIGN float scores[kPassRows * kBlockK];      // and then in their place probabilities; integers: in 1 / p_max
  HWY_ALIGN typename P::Rounded rounded[P::kInteger ? kPassRows * kBlockK : 1];  // probabilities as integers
  HWY_ALIGN float partial_sum[kPassRows * kLanes];  // of a row's numbers, spread over lanes
  HWY_ALIGN float tile_max[kPassRows];              // log2 units; fp32: what probabilities are relative to
  HWY_ALIGN float tile_sum[kPassRows];              // of the probabilities as they are stored; integers: in 1 / p_max
  HWY_ALIGN float keep[kPassRows];                  // what the old sums are multiplied by
  HWY_ALIGN float gain[kPassRows];                  // what 1 / p_max of the tile's maximum is worth (integers only)
  HWY_ALIGN float coarser[kPassRows];               // steps of the stored probabilities in units of 1 / p_max
  int row;                                          // first row in the query block
  int rows;                                         // 1..kPassRows
};

// Running maximum and sum of all rows of the query block.
struct RowSums {
  HWY_ALIGN float m[kBlockQ + kPassRows];
  HWY_ALIGN float l[kBlockQ + kPassRows];
};

// Which keys the rows of a group see: some of them, all of them.
struct GroupView {
  Range any, all;
};

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

// QK: scores of rows against one key block, log2 units.
template <class P>
HWY_NOINLINE void Scores(const KernelArgs& args, int64_t block, Rows rows, Pass<P>& pass) {
  using Dot = typename P::Dot;
  const F32 d;
  const QueryBlock& query = args.query;
  const int row = pass.row + rows.first;
  float* scores = pass.scores + rows.first * kBlockK;
  if constexpr (!P::kInteger) {
    if constexpr (P::kDirect) return DirectScores(query, row, rows.count, args.direct, block, scores);
  }
  const int64_t row_bytes = query.row_lanes * kLaneBytes;
  Operands in{query.rows + row * row_bytes, row_bytes,
              args.blocks.keys + block * query.row_lanes * kBlockK * kLaneBytes, kBlockK * kLaneBytes,
              query.row_lanes};
  if constexpr (P::kInteger) {
    const float* key_scale = args.blocks.key_scale + block * kBlockK;
    const float* factor = query.factor + row;
    const int64_t sums = P::kGrid.Sums(query.row_lanes);
    [[maybe_unused]] const int32_t* key_start = args.blocks.key_start + block * sums * kBlockK;
    const auto start = [&](int, int64_t lane) SPARGE_INLINE {
      if constexpr (P::kGrid.q_offset != 0) {
        return Dot::Start(hn::Load(I32(), key_start + lane));
      } else {
        return Dot::Start();
      }
    };
    const auto score = [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
      return hn::Mul(hn::Mul(dot, hn::Load(d, key_scale + lane)), hn::Set(d, factor[r]));
    };
    if constexpr (P::kGrid.sum_lanes != 0) in.steps = std::min<int64_t>(P::kGrid.sum_lanes, in.steps);
    Multiply<Dot>(in, rows.count, kBlockK, start, [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
      hn::Store(score(r, lane, dot), d, scores + r * kBlockK + lane);
    });
    if constexpr (P::kGrid.sum_lanes != 0) {
      for (int64_t sum = 1; sum < sums; ++sum) {  // a narrow accumulator has to be emptied in between
        in.a += P::kGrid.sum_lanes * kLaneBytes;
        in.b += P::kGrid.sum_lanes * in.b_bytes;
        in.steps = std::min<int64_t>(P::kGrid.sum_lanes, query.row_lanes - sum * P::kGrid.sum_lanes);
        key_start += kBlockK;
        Multiply<Dot>(in, rows.count, kBlockK, start, [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
          float* at = scores + r * kBlockK + lane;
          hn::Store(hn::Add(score(r, lane, dot), hn::Load(d, at)), d, at);
        });
      }
    }
  } else {
    Multiply<Dot>(
        in, rows.count, kBlockK, [&](int, int64_t) SPARGE_INLINE { return Dot::Start(); },
        [&](int r, int64_t lane, VF dot) SPARGE_INLINE { hn::Store(dot, d, scores + r * kBlockK + lane); });
  }
}

// Row maxima of the tile; -inf for rows of groups that do not see it.
template <class P>
HWY_INLINE void TileMaxima(uint32_t active, Pass<P>& pass) {
  const F32 d;
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF tops[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int r = first + i;
      tops[i] = hn::Set(d, kMinusInf);
      if (r >= pass.rows || ((active >> (r / kGroup)) & 1) == 0) continue;
      const float* scores = pass.scores + r * kBlockK;
      for (int j = 0; j < kBlockK; j += kLanes) tops[i] = hn::Max(tops[i], hn::Load(d, scores + j));
    }
    hn::Store(MaxOfEach(tops), d, pass.tile_max + first);
  }
}

// What the tile means to the groups of a pass: `seen` has a score that counts, `matters` one that can still matter.
struct Judged {
  uint32_t seen, matters;
};

// The softmax-aware skip: a group has work iff some row's tile maximum is above its running one - skip.
template <class P>
HWY_INLINE Judged JudgeTile(const Pass<P>& pass, const float* m, float skip) {
  const F32 d;
  uint32_t seen = 0, matters = 0;
  for (int r = 0; r < pass.rows; r += kLanes) {
    const VF tile = hn::Load(d, pass.tile_max + r);
    const VF bar = hn::Sub(hn::Load(d, m + r), hn::Set(d, skip));
    seen |= MaskBits(hn::Gt(tile, hn::Set(d, kMinusInf))) << r;
    matters |= MaskBits(hn::Gt(tile, bar)) << r;
  }
  return {GroupsWith(seen), GroupsWith(matters)};
}

// Moves the running maxima over the tile: new m, and the factors for the old and the new sums. Rows that skip the tile
// or do not see it stay: their tile maximum is not above the running one.
template <class P>
HWY_INLINE void MoveMaxima(Pass<P>& pass, float* m) {
  const F32 d;
  const VF minus_inf = hn::Set(d, kMinusInf);
  for (int r = 0; r < pass.rows; r += kLanes) {
    const VF old = hn::Load(d, m + r);
    const VF tile = hn::Load(d, pass.tile_max + r);
    const VF now = hn::Max(old, tile);
    // Where nothing was seen yet, -inf - (-inf) would be NaN; 2^(-inf - 0) is the 0 that is meant.
    const VF base = hn::IfThenZeroElse(hn::Eq(now, minus_inf), now);
    hn::Store(now, d, m + r);
    hn::Store(hn::IfThenElse(hn::Eq(old, now), hn::Set(d, 1.0f), Exp2<5>(hn::Sub(old, base))), d, pass.keep + r);
    if constexpr (P::kInteger) {
      // Probabilities are rounded against the tile's own maximum, so that a tile below the running one keeps its bits.
      hn::Store(hn::Mul(Exp2<5>(hn::Sub(tile, base)), hn::Set(d, 1.0f / P::kGrid.p_max)), d, pass.gain + r);
      hn::Store(hn::IfThenZeroElse(hn::Eq(tile, minus_inf), tile), d, pass.tile_max + r);
    } else {
      hn::Store(base, d, pass.tile_max + r);
    }
  }
}

// Which probabilities of a tile to round. Where a few keys have nearly all the weight (an attention sink), the step
// that suits them takes the rest to zero, and all the rest together may matter: then large and small ones get a step
// each.
enum class Part { kAll, kLarge, kSmall };
inline constexpr float kSmallBelow = 1.0f / 64;  // of the row's maximum in the tile
inline constexpr float Log2Of(int p_max) { return p_max == 255 ? 7.99435344f : p_max == 127 ? 6.98868469f : 12.99982387f; }

// Probabilities are 2^(score - maximum + this).
template <class P>
HWY_INLINE constexpr float Log2Steps() {
  if constexpr (P::kInteger) return Log2Of(P::kGrid.p_max);
  else return -P::kLog2Unit;
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

// One row of probabilities to integers, and their sum spread over lanes. The sum is that of the rounded numbers, so that
// what rounding adds to all of them alike cancels in o / l.
template <class P>
HWY_INLINE void RoundRow(const VF (&p)[kTileVectors], int r, Pass<P>& pass) {
  using Dot = typename P::Dot;
  auto* out = pass.rounded + r * kBlockK;
  VI n[kTileVectors];
  for (int i = 0; i < kTileVectors; ++i) n[i] = hn::NearestInt(p[i]);
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

// Probabilities of rows relative to tile_max, in place of the scores; and rounded ones, unless these must keep a norm:
// then the sums of their squares. fp32: with their sums.
template <class P>
HWY_NOINLINE void Probabilities(Rows rows, Pass<P>& pass) {
  const F32 d;
  for (int r = rows.first; r < rows.first + rows.count; ++r) {
    float* at = pass.scores + r * kBlockK;
    const VF base = hn::Set(d, pass.tile_max[r] - Log2Steps<P>());
    VF p[kTileVectors];
    VF sum = hn::Zero(d);
    for (int i = 0; i < kTileVectors; ++i) {
      const VF below = hn::Sub(hn::Load(d, at + i * kLanes), base);
      if constexpr (P::kInteger) {
        p[i] = Exp2Coarse<P::kExpDegree>(below);
        if constexpr (P::kGrid.p_norm_max != 0) sum = hn::MulAdd(p[i], p[i], sum);
      } else {
        p[i] = Exp2<P::kExpDegree>(below);
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

// How much coarser the steps of rows must be so that neither half of the lanes has an L2 norm above p_norm_max; from the
// sums of squares.
template <class P>
HWY_INLINE void ChooseSteps(Pass<P>& pass) {
  const F32 d;
  const auto halves = hn::RebindMask(d, hn::Eq(hn::And(hn::Iota(I32(), 0), hn::Set(I32(), 2)), hn::Zero(I32())));
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF firsts[kLanes], seconds[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const VF squares = hn::Load(d, pass.partial_sum + (first + i) * kLanes);
      firsts[i] = hn::IfThenElseZero(halves, squares);
      seconds[i] = hn::IfThenZeroElse(halves, squares);
    }
    const VF norm = hn::Sqrt(hn::Max(SumOfEach(firsts), SumOfEach(seconds)));
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
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF sums[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int r = first + i;
      const bool has = r < pass.rows && ((groups >> (r / kGroup)) & 1) != 0;
      sums[i] = has ? hn::Load(d, pass.partial_sum + r * kLanes) : hn::Zero(d);
    }
    hn::Store(SumOfEach(sums), d, out + first);
  }
}

// Groups in which rounding may have changed the weight of the tile by more than kMostLost of a row's weight so far: it
// changes each probability by at most half a step, and the largest hardly.
template <class P>
HWY_INLINE uint32_t MayLoseWeight(const Pass<P>& pass, const float* l) {
  const F32 d;
  uint32_t rows = 0;
  for (int r = 0; r < pass.rows; r += kLanes) {
    const VF gain = hn::Load(d, pass.gain + r);
    VF most = hn::Mul(gain, hn::Set(d, 0.5f * (kBlockK - 1)));
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

// o *= keep, which is 1 for most rows of most tiles.
template <class P>
HWY_INLINE void Rescale(const KernelArgs& args, const Pass<P>& pass) {
  const F32 d;
  const int64_t channels = args.blocks.channels;
  for (int first = 0; first < pass.rows; first += kLanes) {
    uint32_t moved = MaskBits(hn::Ne(hn::Load(d, pass.keep + first), hn::Set(d, 1.0f)));
    for (; moved != 0; moved &= moved - 1) {
      const int r = first + std::countr_zero(moved);
      if (r >= pass.rows) break;
      float* o = args.state.o + (pass.row + r) * channels;
      const VF keep = hn::Set(d, pass.keep[r]);
      for (int64_t c = 0; c < channels; c += kLanes) hn::Store(hn::Mul(hn::Load(d, o + c), keep), d, o + c);
    }
  }
}

// o += (probabilities . values) * value_scale * gain * fraction; fp32 has neither scale nor gain.
template <class P>
HWY_NOINLINE void AddProducts(const KernelArgs& args, int64_t block, const std::byte* all_values, float fraction,
                              Rows rows, const Pass<P>& pass) {
  using Dot = typename P::Dot;
  const F32 d;
  const int64_t channels = args.blocks.channels;
  constexpr int kSteps = kBlockK / PerLane(P::kPrecision);
  constexpr int64_t kRowBytes = kBlockK * static_cast<int64_t>(sizeof(typename P::Rounded));
  const void* probabilities = pass.scores;
  if constexpr (P::kInteger) probabilities = pass.rounded;
  const Operands in{static_cast<const std::byte*>(probabilities) + rows.first * kRowBytes, kRowBytes,
                    all_values + block * kSteps * channels * kLaneBytes, channels * kLaneBytes, kSteps};
  float* o = args.state.o + (pass.row + rows.first) * channels;
  if constexpr (!P::kInteger) {
    if constexpr (P::kDirect) {
      return DirectProducts(args.direct, block, channels, rows.count, pass.scores + rows.first * kBlockK, o);
    }
  }
  if constexpr (P::kInteger) {
    const float* value_scale = args.blocks.value_scale + block * channels;
    HWY_ALIGN float gain[kPassRows];
    for (int r = 0; r < rows.count; ++r) {
      gain[r] = pass.gain[rows.first + r] * fraction;
      if constexpr (P::kGrid.p_norm_max != 0) gain[r] *= pass.coarser[rows.first + r];
    }
    Multiply<Dot>(
        in, rows.count, channels, [&](int, int64_t) SPARGE_INLINE { return Dot::Start(); },
        [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
          float* at = o + r * channels + lane;
          const VF scale = hn::Mul(hn::Load(d, value_scale + lane), hn::Set(d, gain[r]));
          hn::Store(hn::MulAdd(dot, scale, hn::Load(d, at)), d, at);
        });
  } else {
    Multiply<Dot>(
        in, rows.count, channels,
        [&](int r, int64_t lane) SPARGE_INLINE { return hn::Load(d, o + r * channels + lane); },
        [&](int r, int64_t lane, VF sum) SPARGE_INLINE { hn::Store(sum, d, o + r * channels + lane); });
  }
}

// A tile in two parts, large and small probabilities each in steps of their own.
template <class P>
HWY_NOINLINE void AddInParts(const KernelArgs& args, int64_t block, Rows rows, Pass<P>& pass) {
  const F32 d;
  const auto row_sum = [&](int r) HWY_ATTR {
    return hn::GetLane(hn::SumOfLanes(d, hn::Load(d, pass.partial_sum + r * kLanes)));
  };
  const int end = rows.first + rows.count;
  RoundProbabilities<P, Part::kLarge>(rows, pass);
  for (int r = rows.first; r < end; ++r) pass.tile_sum[r] = row_sum(r);
  AddProducts(args, block, args.blocks.values, 1.0f, rows, pass);
  if (args.blocks.fine[block] != FineValues::kNever) {
    AddProducts(args, block, args.blocks.fine_values, 0.5f / P::kGrid.fine_max, rows, pass);
  }
  if constexpr (P::kGrid.p_norm_max != 0) {
    for (int r = rows.first; r < end; ++r) {
      VF sum = hn::Zero(d);
      for (int j = 0; j < kBlockK; j += kLanes) {
        const VF p = PartOf<P, Part::kSmall>(hn::Load(d, pass.scores + r * kBlockK + j));
        sum = hn::MulAdd(p, p, sum);
      }
      // The norm of both halves together is enough here.
      const float norm = std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)));
      pass.coarser[r] = std::max(norm / static_cast<float>(P::kGrid.p_norm_max), 1.0f);
    }
  }
  RoundProbabilities<P, Part::kSmall>(rows, pass);
  for (int r = rows.first; r < end; ++r) pass.tile_sum[r] += row_sum(r) * kSmallBelow;
  AddProducts(args, block, args.blocks.values, kSmallBelow, rows, pass);
}

// The second half of the values' bits, for the groups that need it.
template <class P>
HWY_INLINE void AddFineValues(const KernelArgs& args, int64_t block, uint32_t groups, const Pass<P>& pass) {
  const FineValues fine = args.blocks.fine[block];
  if (fine == FineValues::kNever) return;
  ForEachGroup(pass, groups, [&](Rows rows) HWY_ATTR {
    if (fine == FineValues::kForPeaks && !HasPeak(pass, rows)) return;
    AddProducts(args, block, args.blocks.fine_values, 0.5f / P::kGrid.fine_max, rows, pass);
  });
}

// Probabilities, then o and l over the tile: old * keep + tile * gain.
template <class P>
HWY_INLINE void Accumulate(const KernelArgs& args, int64_t block, uint32_t groups, Pass<P>& pass, float* l) {
  uint32_t split = 0;
  ForEachRun(pass, groups, [&](Rows rows) HWY_ATTR { Probabilities(rows, pass); });
  Rescale(args, pass);
  if constexpr (P::kGrid.p_norm_max != 0) {
    ChooseSteps(pass);
    ForEachRun(pass, groups, [&](Rows rows) HWY_ATTR { RoundProbabilities<P>(rows, pass); });
  }
  SumRows(groups, pass, pass.tile_sum);
  if constexpr (P::kInteger) {
    const uint32_t doubtful = groups & MayLoseWeight(pass, l);
    if (doubtful != 0) split = LoseWeight(doubtful, l, pass);
    ForEachGroup(pass, split, [&](Rows rows) HWY_ATTR { AddInParts(args, block, rows, pass); });
    AddFineValues(args, block, groups & ~split, pass);
  }
  ForEachRun(pass, groups & ~split,
             [&](Rows rows) HWY_ATTR { AddProducts(args, block, args.blocks.values, 1.0f, rows, pass); });
  const F32 d;
  for (int r = 0; r < pass.rows; r += kLanes) {
    VF tile = hn::Load(d, pass.tile_sum + r);
    if constexpr (P::kInteger) tile = hn::Mul(tile, hn::Load(d, pass.gain + r));
    hn::Store(hn::MulAdd(hn::Load(d, l + r), hn::Load(d, pass.keep + r), tile), d, l + r);
  }
}

// Scores of the groups that see the tile, with all that the rule does to them. Returns these groups.
template <class P>
HWY_INLINE uint32_t ScorePass(const KernelArgs& args, int64_t block, const GroupView* views, Pass<P>& pass, float* l) {
  const ScoreRule& rule = args.rule;
  const Range keys{block * kBlockK, (block + 1) * kBlockK};
  const bool use_mask = args.masked_tiles != nullptr && ((args.masked_tiles[block / 64] >> (block % 64)) & 1) != 0;
  const bool special = use_mask || rule.softcap > 0 || rule.slope != 0;
  const uint64_t poison = args.blocks.poison == nullptr ? 0 : args.blocks.poison[block];
  uint32_t active = 0, inside = 0;
  for (int g = 0; g * kGroup < pass.rows; ++g) {
    active |= static_cast<uint32_t>(Overlaps(views[g].any, keys)) << g;
    inside |= static_cast<uint32_t>(views[g].all.begin <= keys.begin && keys.end <= views[g].all.end) << g;
  }
  ForEachRun(pass, active, [&](Rows rows) HWY_ATTR { Scores(args, block, rows, pass); });
  ForEachRun(pass, special ? active : active & ~inside, [&](Rows rows) HWY_ATTR {
    for (int r = rows.first; r < rows.first + rows.count; ++r) {
      ApplyRule(args, pass.row + r, block, use_mask, pass.scores + r * kBlockK);
    }
  });
  ForEachRun(pass, poison != 0 ? active : 0, [&](Rows rows) HWY_ATTR {
    for (int r = rows.first; r < rows.first + rows.count; ++r) ApplyPoison(poison, pass.scores + r * kBlockK, l[r]);
  });
  return active;
}

template <class P>
int64_t Attend(const KernelArgs& args) {
  Pass<P> pass;
  RowSums sums;
  GroupView views[kMaxGroups];
  const int count = args.query.count;
  for (int g = 0; g * kGroup < count; ++g) {
    const int64_t first = args.query.first + g * kGroup;
    const int64_t last = args.query.first + std::min((g + 1) * kGroup, count) - 1;
    views[g] = {args.rule.visible.KeysOfAny(first, last), args.rule.visible.KeysOfAll(first, last)};
  }
  std::fill_n(sums.m, kBlockQ + kPassRows, kMinusInf);
  std::fill_n(sums.l, kBlockQ + kPassRows, 0.0f);
  std::memset(args.state.o, 0, sizeof(float) * static_cast<size_t>(count * args.blocks.channels));
  int64_t skipped = 0;
  for (int64_t i = 0; i < args.kept_count; ++i) {
    for (int row = 0; row < count; row += kPassRows) {
      pass.row = row;
      pass.rows = std::min(kPassRows, count - row);
      const uint32_t active = ScorePass(args, args.kept[i], views + row / kGroup, pass, sums.l + row);
      if (active == 0) continue;
      TileMaxima(active, pass);
      const Judged judged = JudgeTile(pass, sums.m + row, args.skip);
      skipped += std::popcount(judged.seen & ~judged.matters);
      if (judged.matters == 0) continue;
      MoveMaxima(pass, sums.m + row);
      Accumulate(args, args.kept[i], judged.matters, pass, sums.l + row);
    }
  }
  std::copy_n(sums.m, count, args.state.m);
  if constexpr (!P::kInteger) {
    for (int r = 0; r < count; ++r) args.state.m[r] += P::kLog2Unit;
  }
  std::copy_n(sums.l, count, args.state.l);
  return skipped;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// Stage 2, written once for every precision and instruction set: QK, score rule, online softmax with PV skip, PV.
//
// A tile meets the rows of the query block in passes of a few row groups, and a pass goes through the phases one after
// the other: scores of all its groups, then maxima, probabilities, products. So the tile's keys stay in the first-level
// cache while they are used, and then its values; and what is one number per row is computed for whole vectors of rows.
#if defined(SPARGE_SRC_CPU_KERNEL_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_TILE_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_TILE_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "src/cpu/kernel/direct-inl.h"
#include "src/cpu/kernel/dot-inl.h"
#include "src/cpu/kernel/kernel.h"
#include "src/cpu/kernel/panel-inl.h"
#include "src/cpu/kernel/pass-inl.h"
#include "src/cpu/kernel/rule-inl.h"
#include "src/cpu/kernel/softmax-inl.h"
#include "src/cpu/kernel/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Running maximum and sum of all rows of the query block.
struct RowSums {
  HWY_ALIGN float m[kBlockQ + kPassRows];
  HWY_ALIGN float l[kBlockQ + kPassRows];
};

// Which keys the rows of a group see: some of them, all of them.
struct GroupView {
  Range any, all;
};
HWY_INLINE GroupView ViewOf(const KernelArgs& args, int group) {
  const int64_t first = args.query.Position(group * kGroup);
  const int64_t last = args.query.Position(std::min((group + 1) * kGroup, args.query.count) - 1);
  return {args.rule.visible.KeysOfAny(first, last), args.rule.visible.KeysOfAll(first, last)};
}

// QK: scores of rows against one key block; of integers without the query's factor.
template <class P>
HWY_NOINLINE void Scores(const KernelArgs& args, int64_t block, Rows rows, Pass<P>& pass) {
  using Dot = typename P::Dot;
  const F32 d;
  const QueryBlock& query = args.query;
  const int row = pass.row + rows.first;
  float* scores = pass.scores + rows.first * kBlockK;
  if constexpr (P::kDirect) {
    pass.poison |= DirectScores(query, row, rows.count, args.direct, block, scores);
    return;
  }
  const int64_t row_bytes = query.row_lanes * kLaneBytes;
  Operands in{query.rows + row * row_bytes,
              row_bytes,
              args.blocks.keys + block * query.row_lanes * kBlockK * kLaneBytes,
              query.row_lanes,
              0,
              query.row_lanes};
  if constexpr (P::kInteger) {
    const float* key_scale = args.blocks.key_scale + block * kBlockK;
    const int64_t sums = P::kGrid.Sums(query.row_lanes);
    [[maybe_unused]] const int32_t* key_start = args.blocks.key_start + block * sums * kBlockK;
    const auto start = [&](int, int64_t lane) SPARGE_INLINE {
      if constexpr (P::kGrid.q_offset != 0) {
        return Dot::Start(hn::Load(I32(), key_start + lane));
      } else {
        return Dot::Start();
      }
    };
    if constexpr (P::kGrid.sum_lanes != 0) in.steps = std::min<int64_t>(P::kGrid.sum_lanes, in.steps);
    Multiply<Dot>(in, rows.count, kBlockK, start, [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
      hn::Store(hn::Mul(dot, hn::Load(d, key_scale + lane)), d, scores + r * kBlockK + lane);
    });
    if constexpr (P::kGrid.sum_lanes != 0) {
      for (int64_t sum = 1; sum < sums; ++sum) {  // a narrow accumulator has to be emptied in between
        in.first = sum * P::kGrid.sum_lanes;
        in.steps = std::min<int64_t>(P::kGrid.sum_lanes, query.row_lanes - in.first);
        key_start += kBlockK;
        Multiply<Dot>(in, rows.count, kBlockK, start, [&](int r, int64_t lane, VF dot) SPARGE_INLINE {
          float* at = scores + r * kBlockK + lane;
          hn::Store(hn::MulAdd(dot, hn::Load(d, key_scale + lane), hn::Load(d, at)), d, at);
        });
      }
    }
  } else {
    Multiply<Dot>(
        in, rows.count, kBlockK, [&](int, int64_t) SPARGE_INLINE { return Dot::Start(); },
        [&](int r, int64_t lane, VF dot) SPARGE_INLINE { hn::Store(dot, d, scores + r * kBlockK + lane); });
  }
}

// Row maxima of the tile, log2 units; -inf for rows of groups that do not see it.
template <class P>
HWY_INLINE void TileMaxima(uint32_t active, Pass<P>& pass) {
  const F32 d;
  const uint32_t rows = RowsOf(active, pass);
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF tops[kLanes];
    const auto look_at = [&](int i) SPARGE_INLINE {
      const float* scores = pass.scores + (first + i) * kBlockK;
      tops[i] = hn::Load(d, scores);
      for (int j = kLanes; j < kBlockK; j += kLanes) tops[i] = hn::Max(tops[i], hn::Load(d, scores + j));
    };
    if (AllOf(rows, first)) {
      Unroll<kLanes>(look_at);
    } else {
      for (int i = 0; i < kLanes; ++i) {
        if (((rows >> (first + i)) & 1) != 0) {
          look_at(i);
        } else {
          tops[i] = hn::Set(d, kMinusInf);
          pass.unit[first + i] = 1;  // a factor of 0 would make it NaN
        }
      }
    }
    VF top = MaxOfEach(tops);
    if constexpr (P::kInteger) top = hn::Mul(top, hn::Load(d, pass.unit + first));
    hn::Store(top, d, pass.tile_max + first);
  }
}

template <class P>
HWY_INLINE void NoteBest(const Pass<P>& pass, float* best) {
  for (int r = 0; r < pass.rows; ++r) best[r] = std::max(best[r], pass.tile_max[r]);
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
  const Operands in{static_cast<const std::byte*>(probabilities) + rows.first * kRowBytes,
                    kRowBytes,
                    all_values + block * kSteps * channels * kLaneBytes,
                    kSteps,
                    0,
                    kSteps};
  float* o = args.state.o + (pass.row + rows.first) * channels;
  if constexpr (P::kDirect) {
    return DirectProducts(args.direct, block, channels, rows.count, pass.scores + rows.first * kBlockK, o);
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

// Groups in which no row has so much weight on the tile that its values are worth reading; their sums become 0.
template <class P>
HWY_INLINE uint32_t DropLight(const KernelArgs& args, uint32_t groups, const float* m, Pass<P>& pass) {
  uint32_t light = 0;
  ForEachGroup(pass, groups, [&](Rows rows) HWY_ATTR {
    const int end = rows.first + rows.count;
    for (int r = rows.first; r < end; ++r) {
      float sum = pass.tile_sum[r];
      if constexpr (P::kInteger) sum *= pass.gain[r];
      const float known = args.known[pass.row + r];
      if (m[r] != known) sum *= std::exp2(m[r] - known);
      if (sum >= args.least[pass.row + r]) return;
    }
    light |= uint32_t{1} << (rows.first / kGroup);
    std::fill(pass.tile_sum + rows.first, pass.tile_sum + end, 0.0f);
  });
  return light;
}

// Probabilities, then o and l over the tile: old * keep + tile * gain. Returns the groups whose PV was left out.
template <class P>
HWY_INLINE uint32_t Accumulate(const KernelArgs& args, int64_t block, uint32_t groups, Pass<P>& pass, const float* m,
                               float* l) {
  uint32_t split = 0, light = 0;
  ForEachRun(pass, groups, [&](Rows rows) HWY_ATTR { Probabilities(rows, pass); });
  Rescale(args, pass);
  if constexpr (P::kGrid.p_norm_max != 0) {
    ChooseSteps(pass);
    ForEachRun(pass, groups, [&](Rows rows) HWY_ATTR { RoundProbabilities<P>(rows, pass); });
  }
  SumRows(groups, pass, pass.tile_sum);
  if (args.least != nullptr) light = DropLight(args, groups, m, pass);
  groups &= ~light;
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
  return light;
}

// Scores of the groups that see the tile, with all that the rule does to them. Returns these groups.
template <class P>
HWY_INLINE uint32_t ScorePass(const KernelArgs& args, int64_t block, const GroupView* views, const RowUnits<P>& units,
                              Pass<P>& pass, float* l) {
  const ScoreRule& rule = args.rule;
  const Range keys{block * kBlockK, (block + 1) * kBlockK};
  const bool use_mask = args.masked_tiles != nullptr && ((args.masked_tiles[block / 64] >> (block % 64)) & 1) != 0;
  bool special = use_mask || rule.softcap > 0 || rule.slope != 0;
  if constexpr (P::kInteger) {
    units.CopyTo(pass);
    special |= units.negative;
  }
  pass.poison = P::kDirect ? 0 : args.blocks.poison[block];
  uint32_t active = 0, inside = 0;
  for (int g = 0; g * kGroup < pass.rows; ++g) {
    active |= static_cast<uint32_t>(Overlaps(views[g].any, keys)) << g;
    inside |= static_cast<uint32_t>(views[g].all.begin <= keys.begin && keys.end <= views[g].all.end) << g;
  }
  ForEachRun(pass, active, [&](Rows rows) HWY_ATTR { Scores(args, block, rows, pass); });
  ForEachRun(pass, special ? active : active & ~inside, [&](Rows rows) HWY_ATTR {
    for (int r = rows.first; r < rows.first + rows.count; ++r) {
      ApplyRule(args, pass.row + r, block, use_mask, P::kInteger ? pass.unit[r] : 1.0f, pass.scores + r * kBlockK);
      if constexpr (P::kInteger) pass.unit[r] = 1;
    }
  });
  ForEachRun(pass, pass.poison != 0 ? active : 0, [&](Rows rows) HWY_ATTR {
    for (int r = rows.first; r < rows.first + rows.count; ++r)
      ApplyPoison(pass.poison, pass.scores + r * kBlockK, l[r]);
  });
  return active;
}

// Asks for the keys of the next tile, and for the values of this one if they will be needed.
template <class P>
HWY_INLINE void ForeseeTile(const KernelArgs& args, int64_t i) {
  const auto ask = [](const std::byte* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b, 0, 3);
  };
  const int64_t key_bytes = args.query.row_lanes * kBlockK * kLaneBytes;
  const int64_t value_bytes = kBlockK / PerLane(P::kPrecision) * args.blocks.channels * kLaneBytes;
  if (i + 1 < args.kept_count) ask(args.blocks.keys + args.kept[i + 1] * key_bytes, key_bytes);
  if (args.foresee_values) ask(args.blocks.values + args.kept[i] * value_bytes, value_bytes);
}

template <class P>
HWY_INLINE int64_t AttendInUnits(const KernelArgs& args, int log2_unit) {
  Pass<P> pass;
  pass.direct_unit = std::ldexp(1.0f, log2_unit);
  if constexpr (P::kGrid.p_norm_max != 0) std::fill_n(pass.partial_sum, kPassRows * kLanes, 0.0f);
  const RowUnits<P> units(args.query);
  RowSums sums;
  GroupView views[kMaxGroups];
  const int count = args.query.count;
  for (int g = 0; g * kGroup < count; ++g) views[g] = ViewOf(args, g);
  std::fill_n(sums.m, kBlockQ + kPassRows, kMinusInf);
  std::fill_n(sums.l, kBlockQ + kPassRows, 0.0f);
  if (args.known != nullptr) std::copy_n(args.known, count, sums.m);
  if (args.known_sum != nullptr) std::copy_n(args.known_sum, count, sums.l);
  if (args.best != nullptr) std::fill_n(args.best, count, kMinusInf);
  std::memset(args.state.o, 0, sizeof(float) * static_cast<size_t>(count * args.blocks.channels));
  int64_t skipped = 0;
  for (int64_t i = 0; i < args.kept_count; ++i) {
    if constexpr (!P::kDirect) {
      if (args.foresee) ForeseeTile<P>(args, i);
    }
    const int64_t skipped_before = skipped;
    for (int row = 0; row < count; row += kPassRows) {
      pass.row = row;
      pass.rows = std::min(kPassRows, count - row);
      const uint32_t active = ScorePass(args, args.kept[i], views + row / kGroup, units, pass, sums.l + row);
      if (active == 0) continue;
      TileMaxima(active, pass);
      if (args.best != nullptr) NoteBest(pass, args.best + row);
      const Judged judged = JudgeTile(pass, sums.m + row, args.skip);
      skipped += std::popcount(judged.seen & ~judged.matters);
      if (judged.matters == 0) continue;
      MoveMaxima(pass, sums.m + row);
      skipped += std::popcount(Accumulate(args, args.kept[i], judged.matters, pass, sums.m + row, sums.l + row));
    }
    if (args.pv_groups != nullptr) {
      args.pv_groups[args.kept[i]] = static_cast<uint8_t>(CeilDiv(count, kGroup) - (skipped - skipped_before));
    }
  }
  std::copy_n(sums.m, count, args.state.m);
  if constexpr (P::kDirect) {
    for (int r = 0; r < count; ++r) args.state.m[r] -= static_cast<float>(log2_unit);
  }
  std::copy_n(sums.l, count, args.state.l);
  return skipped;
}

template <class P>
int64_t Attend(const KernelArgs& args) {
  const int64_t skipped = AttendInUnits<P>(args, 0);
  if constexpr (P::kDirect) {
    // Values come as they are, and sums of the largest floats overflow: then once more with smaller probabilities.
    const float* o = args.state.o;
    const bool finite =
        std::all_of(o, o + args.query.count * args.blocks.channels, [](float x) { return std::isfinite(x); });
    if (!finite) return AttendInUnits<P>(args, -32);
  }
  return skipped;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

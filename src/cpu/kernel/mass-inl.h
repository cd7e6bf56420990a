// How much of a query's attention each key block holds: QK and the sums of softmax, without values. Stage 1 asks this
// for a few pooled queries. Compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_KERNEL_MASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_KERNEL_MASS_INL_H_
#undef SPARGE_SRC_CPU_KERNEL_MASS_INL_H_
#else
#define SPARGE_SRC_CPU_KERNEL_MASS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "src/cpu/kernel/kernel.h"
#include "src/cpu/kernel/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// sum_j 2^(s - tile maximum) of each row, and the maximum, to the place of `block`; 0 and -inf where a row does not see
// it.
template <class P>
HWY_INLINE void StoreTileSums(uint32_t active, int64_t block, Pass<P>& pass, const MassArgs& to) {
  const F32 d;
  HWY_ALIGN float sum[kLanes];
  for (int first = 0; first < pass.rows; first += kLanes) {
    VF sums[kLanes];
    const int count = std::min(kLanes, pass.rows - first);
    for (int i = 0; i < kLanes; ++i) {
      const int r = first + i;
      sums[i] = hn::Zero(d);
      if (i >= count || ((active >> (r / kGroup)) & 1) == 0) continue;
      // Where every key is hidden, -inf - (-inf) would be NaN.
      const VF top = hn::Set(d, std::max(pass.tile_max[r], std::numeric_limits<float>::lowest()));
      const float* scores = pass.scores + r * kBlockK;
      const VF unit = hn::Set(d, UnitOf(r, pass));
      for (int j = 0; j < kBlockK; j += kLanes) {
        sums[i] = hn::Add(sums[i], Exp2<3>(Below<P>(hn::Load(d, scores + j), unit, top)));
      }
    }
    hn::Store(SumOfEach(sums), d, sum);
    for (int i = 0; i < count; ++i) {
      to.mass[(first + i) * to.stride + block] = sum[i];
      to.top[(first + i) * to.stride + block] = pass.tile_max[first + i];
    }
  }
}

// Brings the sums of one row from the maxima of their tiles to that of the row, which it returns.
HWY_INLINE float RebaseRow(Range blocks, const float* top, float* mass) {
  const F32 d;
  float row_top = std::numeric_limits<float>::lowest();
  for (int64_t b = blocks.begin; b < blocks.end; ++b) row_top = std::max(row_top, top[b]);
  int64_t b = blocks.begin;
  for (; b + kLanes <= blocks.end; b += kLanes) {
    const VF by = Exp2<5>(hn::Sub(hn::LoadU(d, top + b), hn::Set(d, row_top)));
    hn::StoreU(hn::Mul(hn::LoadU(d, mass + b), by), d, mass + b);
  }
  for (; b < blocks.end; ++b) mass[b] *= hn::GetLane(Exp2<5>(hn::Set(d, top[b] - row_top)));
  return row_top;
}

template <class P>
void Masses(const KernelArgs& args, const MassArgs& to) {
  Pass<P> pass;
  const RowUnits<P> units(args.query);
  GroupView views[kPassGroups];
  float ignored[kPassRows];  // which rows saw a key that is not finite
  pass.row = 0;
  pass.rows = args.query.count;
  for (int g = 0; g * kGroup < pass.rows; ++g) views[g] = ViewOf(args, g);
  for (int64_t block = to.blocks.begin; block < to.blocks.end; ++block) {
    const uint32_t active = ScorePass(args, block, views, units, pass, ignored);
    TileMaxima(active, pass);
    StoreTileSums(active, block, pass, to);
  }
  for (int r = 0; r < pass.rows; ++r) {
    to.row_top[r] = RebaseRow(to.blocks, to.top + r * to.stride, to.mass + r * to.stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

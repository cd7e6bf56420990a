// Rows that are unlike the pool they belong to, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_PACK_UNLIKE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_PACK_UNLIKE_INL_H_
#undef SPARGE_SRC_CPU_PACK_UNLIKE_INL_H_
#else
#define SPARGE_SRC_CPU_PACK_UNLIKE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "src/cpu/tokens-inl.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// The squared differences of two rows, one sum per lane.
HWY_INLINE VF SquaredDifferences(const float* a, const float* b, int64_t pad) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < pad; i += kLanes) {
    const VF difference = hn::Sub(hn::LoadU(d, a + i), hn::LoadU(d, b + i));
    sum = hn::MulAdd(difference, difference, sum);
  }
  return sum;
}

HWY_INLINE float SquaredDistance(const float* a, const float* b, int64_t pad) {
  return hn::GetLane(hn::SumOfLanes(F32(), SquaredDifferences(a, b, pad)));
}

// The squared distances of `count` rows from `begin` on from the mean, kLanes rows at a time; a row that is not finite
// has none.
HWY_INLINE void DistancesFromMean(const UnlikeArgs& args, const float* mean, int64_t begin, int64_t count,
                                  float* distance) {
  const F32 d;
  for (int64_t r = 0; r < count; r += kLanes) {
    VF sums[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t token = begin + std::min(r + i, count - 1);  // the last one again, for a whole vector
      sums[i] = SquaredDifferences(TokenAsFloats(args.tokens, token, args.dim_pad, args.scratch), mean, args.dim_pad);
    }
    const VF all = SumOfEach(sums);
    hn::Store(hn::IfThenElseZero(hn::IsFinite(all), all), d, distance + r);
  }
}

// The rows of one pool, `count` from `begin` on: the one farthest from the mean speaks for all that are like it, then
// the farthest of the rest.
HWY_INLINE void FindUnlikeOfPool(const UnlikeArgs& args, const float* mean, int64_t begin, int64_t count,
                                 UnlikeRows& out) {
  HWY_ALIGN float distance[kBlockQ];
  float sorted[kBlockQ];
  DistancesFromMean(args, mean, begin, count, distance);
  // Mostly half of the rows are so far away that the median need not be known.
  const float far_enough = *std::max_element(distance, distance + count) / UnlikeRows::kRatio;
  const auto is_far = [far_enough](float x) { return x >= far_enough; };
  if (std::count_if(distance, distance + count, is_far) > count / 2) return;
  std::copy_n(distance, count, sorted);
  std::nth_element(sorted, sorted + count / 2, sorted + count);
  const float most = UnlikeRows::kRatio * sorted[count / 2];
  float* row = args.scratch;
  float* other = args.scratch + args.dim_pad;
  for (; !out.TooMany(); ++out.count) {
    const int64_t far = std::max_element(distance, distance + count) - distance;
    if (!(distance[far] > most)) return;
    if (out.count < UnlikeRows::kMostUnlike) out.rows[out.count] = static_cast<int16_t>(begin + far);
    const float* speaker = TokenAsFloats(args.tokens, begin + far, args.dim_pad, row);
    for (int64_t r = 0; r < count; ++r) {
      if (!(distance[r] > most)) continue;
      const float* x = TokenAsFloats(args.tokens, begin + r, args.dim_pad, other);
      if (r == far || SquaredDistance(x, speaker, args.dim_pad) <= most) distance[r] = 0;
    }
  }
}

void FindUnlike(const UnlikeArgs& args, UnlikeRows& out) {
  out.count = 0;
  const float* mean = args.mean;
  for (int64_t begin = 0; begin < args.tokens.count; begin += args.pool_rows, mean += args.dim_pad) {
    const int64_t count = std::min(args.pool_rows, args.tokens.count - begin);
    if (count >= UnlikeRows::kFewestRows) FindUnlikeOfPool(args, mean, begin, count, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

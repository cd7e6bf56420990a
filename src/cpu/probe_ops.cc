// Compiles the vector functions of measuring for every target.
#include "src/cpu/probe_ops.h"

#include <limits>

#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/probe_ops.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#include "src/cpu/kernel/softmax-inl.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

void Weights(const float* m, const float* top, int64_t count, float* weight) {
  const F32 d;
  const VF minus_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF score = hn::Load(d, m + i);
    hn::Store(hn::IfThenZeroElse(hn::Eq(score, minus_inf), Exp2<5>(hn::Sub(score, hn::Load(d, top + i)))), d,
              weight + i);
  }
}

void Collect(const TileResults& row, const float* weight, const uint8_t* bucket, float* sums) {
  const F32 d;
  for (int64_t t = 0; t < row.tiles; ++t) {
    if (bucket[t] == ProbeOps::kNowhere) continue;
    const VF by = hn::Set(d, weight[t]);
    const float* o = row.o + t * row.stride;
    float* sum = sums + bucket[t] * row.channels;
    for (int64_t c = 0; c < row.channels; c += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(d, o + c), by, hn::Load(d, sum + c)), d, sum + c);
    }
  }
}

void Add(float* to, const float* from, int64_t channels) {
  const F32 d;
  for (int64_t c = 0; c < channels; c += kLanes) {
    hn::Store(hn::Add(hn::Load(d, to + c), hn::Load(d, from + c)), d, to + c);
  }
}

double Distance(const float* row, float by, const float* want, float want_by, int64_t channels) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t c = 0; c < channels; c += kLanes) {
    const VF wanted = hn::Mul(hn::Load(d, want + c), hn::Set(d, want_by));
    sum = hn::Add(sum, hn::Abs(hn::MulSub(hn::Load(d, row + c), hn::Set(d, by), wanted)));
  }
  return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
}

double SquaredDistance(const float* row, float by, const float* want, float want_by, int64_t channels) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t c = 0; c < channels; c += kLanes) {
    const VF wanted = hn::Mul(hn::Load(d, want + c), hn::Set(d, want_by));
    const VF off = hn::MulSub(hn::Load(d, row + c), hn::Set(d, by), wanted);
    sum = hn::MulAdd(off, off, sum);
  }
  return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
}

inline constexpr ProbeOps kProbeOps{&Weights, &Collect, &Add, {&Distance, &SquaredDistance}};

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const ProbeOps* ProbeOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kProbeOps) }

}  // namespace sparge::impl
#endif  // HWY_ONCE

// Compiles the vector functions of measuring for every target.
#include "src/cpu/probe_ops.h"

#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/probe_ops.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

void ScaleRows(float* rows, const float* by, int64_t count, int64_t channels) {
  const F32 d;
  for (int64_t r = 0; r < count; ++r, rows += channels) {
    for (int64_t c = 0; c < channels; c += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, rows + c), hn::Set(d, by[r])), d, rows + c);
    }
  }
}

void AddRows(float* sum, const float* rows, float sign, int64_t count, int64_t channels) {
  const F32 d;
  for (int64_t i = 0; i < count * channels; i += kLanes) {
    hn::Store(hn::MulAdd(hn::Load(d, rows + i), hn::Set(d, sign), hn::Load(d, sum + i)), d, sum + i);
  }
}

double Distance(const float* rows, const float* by, const float* want, int64_t count, int64_t channels) {
  const F32 d;
  double total = 0;
  for (int64_t r = 0; r < count; ++r, rows += channels, want += channels) {
    VF sum = hn::Zero(d);
    for (int64_t c = 0; c < channels; c += kLanes) {
      sum = hn::Add(sum, hn::Abs(hn::MulSub(hn::Load(d, rows + c), hn::Set(d, by[r]), hn::Load(d, want + c))));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  return total;
}

inline constexpr ProbeOps kProbeOps{&ScaleRows, &AddRows, &Distance};

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const ProbeOps* ProbeOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kProbeOps) }

}  // namespace sparge::impl
#endif  // HWY_ONCE

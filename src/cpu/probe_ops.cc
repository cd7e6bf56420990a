// Compiles the vector functions of measuring for every target.
#include "src/cpu/probe_ops.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "src/base/units.h"
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

// body(vectors, first channel) for all channels, as many vectors at a time as fit into registers.
template <class Body>
HWY_INLINE void ForEachChunk(int64_t channels, const Body& body) {
  constexpr int kMost = 4;
  int64_t c = 0;
  for (; c + kMost * kLanes <= channels; c += kMost * kLanes) body(std::integral_constant<int, kMost>{}, c);
  for (; c < channels; c += kLanes) body(std::integral_constant<int, 1>{}, c);
}

// Adds tiles [begin, end) of the order to sums of some channels from `c` on.
template <int kVectors>
HWY_INLINE void AddTiles(const TileResults& row, int64_t begin, int64_t end, int64_t c, VF (&sums)[kVectors]) {
  const F32 d;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t tile = row.order[i];
    const VF by = hn::Set(d, row.weight[tile * row.weight_stride]);
    const float* o = row.o + tile * row.stride + c;
    Unroll<kVectors>([&](auto v) SPARGE_INLINE { sums[v] = hn::MulAdd(hn::Load(d, o + v * kLanes), by, sums[v]); });
  }
}

void Sum(const TileResults& row, int64_t tiles, float by, float* out) {
  const F32 d;
  ForEachChunk(row.channels, [&](auto vectors, int64_t c) HWY_ATTR {
    VF sums[vectors()];
    Unroll<vectors()>([&](auto v) SPARGE_INLINE { sums[v] = hn::Zero(d); });
    AddTiles(row, 0, tiles, c, sums);
    Unroll<vectors()>([&](auto v)
                          SPARGE_INLINE { hn::Store(hn::Mul(sums[v], hn::Set(d, by)), d, out + c + v * kLanes); });
  });
}

template <bool kSquares>
void Distances(const TileResults& row, const ProbeSteps& steps, const float* want, float* out) {
  const F32 d;
  static_assert(ProbeSteps::kMost % kLanes == 0);
  HWY_ALIGN float partial[ProbeSteps::kMost * kLanes];  // of each step, spread over lanes
  std::fill_n(partial, RoundUp(steps.count, kLanes) * kLanes, 0.0f);
  ForEachChunk(row.channels, [&](auto vectors, int64_t c) HWY_ATTR {
    VF sums[vectors()];
    Unroll<vectors()>([&](auto v) SPARGE_INLINE { sums[v] = hn::Zero(d); });
    for (int64_t s = 0, begin = 0; s < steps.count; begin = steps.ends[s++]) {
      AddTiles(row, begin, steps.ends[s], c, sums);
      const VF by = hn::Set(d, steps.by[s]);
      VF distance = hn::Load(d, partial + s * kLanes);
      Unroll<vectors()>([&](auto v) SPARGE_INLINE {
        const VF off = hn::MulSub(sums[v], by, hn::Load(d, want + c + v * kLanes));
        distance = kSquares ? hn::MulAdd(off, off, distance) : hn::Add(hn::Abs(off), distance);
      });
      hn::Store(distance, d, partial + s * kLanes);
    }
  });
  HWY_ALIGN float totals[kLanes];
  for (int64_t first = 0; first < steps.count; first += kLanes) {
    VF each[kLanes];
    for (int i = 0; i < kLanes; ++i) each[i] = hn::Load(d, partial + (first + i) * kLanes);
    hn::Store(SumOfEach(each), d, totals);
    std::copy_n(totals, std::min<int64_t>(kLanes, steps.count - first), out + first);
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

inline constexpr ProbeOps kProbeOps{&Weights, &Sum, {&Distances<false>, &Distances<true>}, &Distance};

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const ProbeOps* ProbeOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kProbeOps) }

}  // namespace sparge::impl
#endif  // HWY_ONCE

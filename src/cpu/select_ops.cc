// Compiles the vector functions of stage 1 for every target.
#include "src/cpu/select_ops.h"

#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/select_ops.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#include "src/cpu/kernel/kernel.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

#if HWY_HAVE_FLOAT64 && HWY_TARGET != HWY_EMU128
void Dots(const float* a, const float* b, int64_t dim_pad, int64_t count, double* out) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> half;
  constexpr int64_t kHalf = static_cast<int64_t>(HWY_LANES(double));
  HWY_ALIGN double query[RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign)];
  for (int64_t i = 0; i < dim_pad; i += kHalf) hn::Store(hn::PromoteTo(d, hn::Load(half, a + i)), d, query + i);
  for (int64_t j = 0; j < count; ++j) {
    const float* key = b + j * dim_pad;
    auto even = hn::Zero(d);
    auto odd = hn::Zero(d);
    for (int64_t i = 0; i < dim_pad; i += 2 * kHalf) {
      even = hn::MulAdd(hn::Load(d, query + i), hn::PromoteTo(d, hn::Load(half, key + i)), even);
      odd = hn::MulAdd(hn::Load(d, query + i + kHalf), hn::PromoteTo(d, hn::Load(half, key + i + kHalf)), odd);
    }
    out[j] = hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
  }
}

double MassFrom(const double* mass, int64_t count, double least) {
  const hn::ScalableTag<double> d;
  constexpr int64_t kHalf = static_cast<int64_t>(HWY_LANES(double));
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + kHalf <= count; i += kHalf) {
    const auto m = hn::LoadU(d, mass + i);
    sum = hn::Add(sum, hn::IfThenElseZero(hn::Ge(m, hn::Set(d, least)), m));
  }
  double total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < count; ++i) total += mass[i] >= least ? mass[i] : 0.0;
  return total;
}
#else
void Dots(const float* a, const float* b, int64_t dim_pad, int64_t count, double* out) {
  for (int64_t j = 0; j < count; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < dim_pad; ++i) {
      sum += static_cast<double>(a[i]) * static_cast<double>(b[j * dim_pad + i]);
    }
    out[j] = sum;
  }
}

double MassFrom(const double* mass, int64_t count, double least) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += mass[i] >= least ? mass[i] : 0.0;
  return total;
}
#endif

inline constexpr SelectOps kSelectOps{&Dots, &MassFrom};

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const SelectOps* SelectOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kSelectOps) }

}  // namespace sparge::impl
#endif  // HWY_ONCE

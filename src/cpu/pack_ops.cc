// Compiles packing for every target.
#include "src/cpu/pack_ops.h"

#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/pack_ops.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#include "src/cpu/pack-inl.h"
#include "src/cpu/pack_checksum-inl.h"
#include "src/cpu/pack_unlike-inl.h"
#include "src/cpu/pack_values-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

uint64_t RowsOf(const PackRowsArgs& args) {
  return args.precision == SPARGE_PRECISION_FP32    ? PackRows<SPARGE_PRECISION_FP32>(args)
         : args.precision == SPARGE_PRECISION_INT16 ? PackRows<SPARGE_PRECISION_INT16>(args)
                                                    : PackRows<SPARGE_PRECISION_INT8>(args);
}

uint64_t ValuesOf(const PackValuesArgs& args) {
  return args.precision == SPARGE_PRECISION_FP32    ? PackValues<SPARGE_PRECISION_FP32>(args)
         : args.precision == SPARGE_PRECISION_INT16 ? PackValues<SPARGE_PRECISION_INT16>(args)
                                                    : PackValues<SPARGE_PRECISION_INT8>(args);
}

inline constexpr PackOps kPackOps{&SurveyTokens, &RowsOf, &ValuesOf, &PackDirectRows, &FindUnlike, &Checksum, &Glimpse};

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const PackOps* PackOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kPackOps) }

}  // namespace sparge::impl
#endif  // HWY_ONCE

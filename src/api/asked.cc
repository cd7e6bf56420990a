// What is not the client's to choose must be as it was.
#include "src/api/asked.h"

#include <cinttypes>

#include "src/api/guard.h"
#include "src/base/status.h"

namespace sparge::impl {

void RefuseChoices(const sparge_plan_desc& desc, const char* chooser) {
  const auto defaults = Defaults(&sparge_plan_desc_init_sized);
  const auto number = [chooser](const char* name, double value, double usual) {
    SPARGE_REQUIRE(value == usual, "%s=%g is the %s's to choose: leave it as sparge_plan_desc_init set it", name, value,
                   chooser);
  };
  const auto pointer = [chooser](const char* name, const void* value) {
    SPARGE_REQUIRE(value == nullptr, "%s is given, but is the %s's to choose", name, chooser);
  };
  number("precision", RawEnum(desc.precision), defaults.precision);
  number("select", RawEnum(desc.select), defaults.select);
  number("params.theta", desc.params.theta, defaults.params.theta);
  number("params.tau", desc.params.tau, defaults.params.tau);
  number("params.topk", desc.params.topk, defaults.params.topk);
  number("params.pv_skip", desc.params.pv_skip, defaults.params.pv_skip);
  number("predictor", RawEnum(desc.predictor), defaults.predictor);
  number("dense_tail", static_cast<double>(desc.dense_tail), static_cast<double>(defaults.dense_tail));
  number("cache_tokens", static_cast<double>(desc.cache_tokens), static_cast<double>(defaults.cache_tokens));
  number("least_effort", desc.least_effort, defaults.least_effort);
  number("decode", desc.decode, defaults.decode);
  pointer("heads", desc.heads);
  pointer("head_precision", desc.head_precision);
  pointer("calibration", desc.calibration);
}

void RefuseParts(const sparge_plan_desc& desc, const char* taker) {
  SPARGE_REQUIRE(desc.all_queries == 0 && desc.all_keys == 0,
                 "all_queries=%" PRId64 " and all_keys=%" PRId64
                 " make this a part of a call, and a %s takes whole ones",
                 desc.all_queries, desc.all_keys, taker);
}

}  // namespace sparge::impl

// What is not the client's to choose must be as it was.
#include "src/api/asked.h"

#include <cinttypes>

#include "src/api/guard.h"
#include "src/base/status.h"
#include "src/tune/tuner.h"

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
  number("glance", desc.glance, defaults.glance);
  pointer("heads", desc.heads);
  pointer("head_precision", desc.head_precision);
  pointer("calibration", desc.calibration);
}

namespace {

template <class Desc>
Bounds BoundsIn(const Desc& desc, double default_l2, double pv_room) {
  return ResolveBounds({desc.target_l1, desc.pv_l1, desc.target_l2, desc.pv_l2}, default_l2, pv_room);
}

// The same for a client, whose header may be another one.
template <class Desc>
sparge_status TellBounds(const Desc* given, void (*init)(Desc*, size_t), sparge_measure* measure, double* target,
                         double* pv) {
  return Guard([&] {
    SPARGE_REQUIRE(measure != nullptr && target != nullptr && pv != nullptr, "measure, target or pv is NULL");
    const Bounds bounds = BoundsOf(CopySized("desc", given, Defaults(init)));
    *measure = bounds.measure;
    *target = bounds.target;
    *pv = bounds.pv;
  });
}

}  // namespace

Bounds BoundsOf(const sparge_calibration_desc& desc) { return BoundsIn(desc, kTargetL2, SPARGE_PV_ROOM); }
Bounds BoundsOf(const sparge_layer_desc& desc) { return BoundsIn(desc, kTargetL2, SPARGE_PV_ROOM); }
Bounds BoundsOf(const sparge_tuner_desc& desc) { return BoundsIn(desc, kTuneTargetL2, SPARGE_TUNE_PV_ROOM); }

void RefuseParts(const sparge_plan_desc& desc, const char* taker) {
  SPARGE_REQUIRE(desc.all_queries == 0 && desc.all_keys == 0,
                 "all_queries=%" PRId64 " and all_keys=%" PRId64
                 " make this a part of a call, and a %s takes whole ones",
                 desc.all_queries, desc.all_keys, taker);
}

}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: from here on the C names

extern "C" {

sparge_status sparge_calibration_desc_bounds(const sparge_calibration_desc* desc, sparge_measure* measure,
                                             double* target, double* pv) {
  return TellBounds(desc, &sparge_calibration_desc_init_sized, measure, target, pv);
}

sparge_status sparge_layer_desc_bounds(const sparge_layer_desc* desc, sparge_measure* measure, double* target,
                                       double* pv) {
  return TellBounds(desc, &sparge_layer_desc_init_sized, measure, target, pv);
}

sparge_status sparge_tuner_desc_bounds(const sparge_tuner_desc* desc, sparge_measure* measure, double* target,
                                       double* pv) {
  return TellBounds(desc, &sparge_tuner_desc_init_sized, measure, target, pv);
}

}  // extern "C"

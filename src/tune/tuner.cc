// Refuses what cannot be tuned, and turns what was found into a preset.
#include "src/tune/tuner.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

void CheckBound(const char* which, const char* measure, double bound) {
  SPARGE_REQUIRE(bound >= SPARGE_TUNE_LEAST && bound <= 1, "%s_%s=%g is outside %g..1", which, measure, bound,
                 SPARGE_TUNE_LEAST);
}

TuneBounds CheckedBounds(const TuneBounds& bounds) {
  const char* const measure = MeasureName(bounds.skip.measure);
  CheckBound("target", measure, bounds.skip.target);
  CheckBound("pv", measure, bounds.skip.pv);
  CheckBound("round", "l1", bounds.round_l1);
  return bounds;
}

void CheckAlike(int64_t index, const sparge_plan_desc& desc, const sparge_plan_desc& first) {
  const auto same = [index](const char* name, int64_t mine, int64_t all) {
    SPARGE_REQUIRE(mine == all, "samples[%" PRId64 "].%s=%" PRId64 " is not the %" PRId64 " of samples[0]", index, name,
                   mine, all);
  };
  same("q_heads", desc.q_heads, first.q_heads);
  same("kv_heads", desc.kv_heads, first.kv_heads);
  same("qk_dim", desc.qk_dim, first.qk_dim);
  same("v_dim", desc.v_dim, first.v_dim);
  same("causal", desc.causal, first.causal);
}

}  // namespace

Tuner::Tuner(sparge_context* context, const TuneBounds& bounds, const std::string& name,
             std::vector<sparge_plan_desc> samples)
    : context_(context), bounds_(CheckedBounds(bounds)), split_(SplitSamples(samples.size(), name, bounds.seed)) {
  for (size_t i = 0; i < samples.size(); ++i) {
    sparge_plan_desc& desc = samples[i];
    desc.predictor = SPARGE_PREDICT_KEYS;  // the one that can be calibrated
    const auto index = static_cast<int64_t>(i);
    try {
      samples_.push_back(MakeSample(desc));
    } catch (const Failure& failure) {
      Fail(failure.status, "samples[%" PRId64 "]: %s", index, failure.detail);
    }
    CheckAlike(index, desc, samples[0]);
  }
}

uint32_t Tuner::RolesOf(int64_t sample) const {
  const auto among = [sample](const std::vector<size_t>& some) {
    return sample >= 0 && std::binary_search(some.begin(), some.end(), static_cast<size_t>(sample));
  };
  return (among(split_.tuning) ? SPARGE_SAMPLE_TUNED : 0u) | (among(split_.verified) ? SPARGE_SAMPLE_VERIFIED : 0u);
}

void Tuner::Run(TuneHost& host) {
  tuned_ = {};
  tuned_ = Search(context_, bounds_, samples_, split_, host).Run();
  params_.clear();
  precision_.clear();
  for (const sparge_tuned_head& head : tuned_.heads) {
    params_.push_back(head.params);
    precision_.push_back(head.precision);
  }
}

const sparge_tuned_head& Tuner::HeadAt(int64_t head) const {
  SPARGE_REQUIRE(finished(), "tuner has not finished a run");
  SPARGE_REQUIRE(head >= 0 && head < q_heads(), "head=%" PRId64 " is outside 0..%" PRId64, head, q_heads() - 1);
  return tuned_.heads[static_cast<size_t>(head)];
}

sparge_layer_preset Tuner::Preset() const {
  SPARGE_REQUIRE(finished(), "tuner has not finished a run");
  const sparge_plan_desc& desc = samples_[0].desc;
  sparge_layer_preset preset{};
  preset.q_heads = desc.q_heads;
  preset.kv_heads = desc.kv_heads;
  preset.qk_dim = desc.qk_dim;
  preset.v_dim = desc.v_dim;
  preset.causal = desc.causal;
  preset.select = SPARGE_SELECT_FLOOR;  // dense heads have parameters that say so under any rule
  preset.predictor = desc.predictor;
  preset.heads = params_.data();
  preset.head_precision = precision_.data();
  return preset;
}

}  // namespace sparge::impl

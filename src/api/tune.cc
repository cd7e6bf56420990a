// Tuning: made, run, asked. Samples and progress come from functions of the caller.
#include <sparge/sparge.h>

#include <cinttypes>
#include <memory>
#include <string>
#include <vector>

#include "src/api/asked.h"
#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/base/status.h"
#include "src/calibrate/calibration.h"
#include "src/tune/tuner.h"

struct sparge_tuner {
  sparge_tuner_desc desc;  // its functions; name and samples are the tuner's
  sparge::impl::Tuner tuner;
};

namespace sparge::impl {
namespace {

// Asks the functions of the caller.
class CallerHost : public TuneHost {
 public:
  explicit CallerHost(const sparge_tuner_desc& desc) : desc_(desc) {}

  sparge_run_args Open(int64_t sample) override {
    const sparge_run_args* given = nullptr;
    const int32_t status = RawEnum(desc_.open(desc_.self, sample, &given));
    if (status != SPARGE_OK) {
      const bool known = status > SPARGE_OK && status <= SPARGE_STOPPED;
      const auto told = known ? static_cast<sparge_status>(status) : SPARGE_INTERNAL_ERROR;
      Fail(told, "open of samples[%" PRId64 "] returned %d: %s", sample, status, sparge_status_text(told));
    }
    try {
      return Checked(given);
    } catch (const Failure& failure) {
      Close(sample);
      Fail(failure.status, "samples[%" PRId64 "]: %s", sample, failure.detail);
    }
  }

  void Close(int64_t sample) noexcept override {
    if (desc_.close != nullptr) desc_.close(desc_.self, sample);
  }

  void Progress(int64_t steps_done, int64_t steps) override {
    if (desc_.progress == nullptr || desc_.progress(desc_.self, steps_done, steps) == 0) return;
    Fail(SPARGE_STOPPED, "stopped after %" PRId64 " of %" PRId64 " steps", steps_done, steps);
  }

 private:
  // Inputs and nothing else: results are not for the caller.
  static sparge_run_args Checked(const sparge_run_args* given) {
    const sparge_run_args args = CopySized("args", given, Defaults(&sparge_run_args_init_sized));
    const auto unset = [](const char* name, bool is_unset) {
      SPARGE_REQUIRE(is_unset, "args.%s is set, but tuning reads q, k, v and the mask only", name);
    };
    unset("o", args.o.data == nullptr);
    unset("map", args.map == nullptr);
    unset("lse", args.lse.data == nullptr);
    unset("map_out", args.map_out == nullptr);
    unset("stats", args.stats == nullptr);
    unset("head_stats", args.head_stats == nullptr);
    unset("workspace", args.workspace == nullptr);
    unset("mass_out", args.mass_out == nullptr);
    unset("pv_out", args.pv_out == nullptr);
    unset("cache", args.cache == nullptr);
    return args;
  }

  const sparge_tuner_desc& desc_;
};

std::vector<sparge_plan_desc> CopySamples(const sparge_tuner_desc& desc) {
  constexpr int64_t kMostSamples = 1 << 20;
  SPARGE_REQUIRE(desc.sample_count >= 1 && desc.sample_count <= kMostSamples,
                 "sample_count=%" PRId64 " is outside 1..%" PRId64, desc.sample_count, kMostSamples);
  SPARGE_REQUIRE(desc.samples != nullptr, "samples is NULL");
  SPARGE_REQUIRE(desc.open != nullptr, "open is NULL");
  std::vector<sparge_plan_desc> samples;
  for (int64_t i = 0; i < desc.sample_count; ++i) {
    const std::string name = "samples[" + std::to_string(i) + "]";
    samples.push_back(CopySized(name.c_str(), desc.samples[i], Defaults(&sparge_plan_desc_init_sized)));
    try {
      RefuseChoices(samples.back(), "tuner");
      RefuseParts(samples.back(), "tuner");
    } catch (const Failure& failure) {
      Fail(failure.status, "%s: %s", name.c_str(), failure.detail);
    }
  }
  return samples;
}

const sparge_tuner& CheckedTuner(const sparge_tuner* tuner) {
  SPARGE_REQUIRE(tuner != nullptr, "tuner is NULL");
  return *tuner;
}

}  // namespace
}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

void sparge_tuner_desc_init_sized(sparge_tuner_desc* desc, size_t size) {
  sparge_tuner_desc defaults{};
  defaults.target_l1 = defaults.pv_l1 = defaults.pv_l2 = SPARGE_NOT_NAMED;
  defaults.target_l2 = kTuneTargetL2;
  defaults.round_l1 = kRoundL1;
  InitSized(desc, size, defaults);
}

void sparge_tuner_info_init_sized(sparge_tuner_info* info, size_t size) { InitSized(info, size, {}); }
void sparge_tuned_head_init_sized(sparge_tuned_head* head, size_t size) { InitSized(head, size, {}); }

sparge_status sparge_tuner_create(sparge_context* context, const sparge_tuner_desc* given, sparge_tuner** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    SPARGE_REQUIRE(context != nullptr, "context is NULL");
    RequireHost(*context, "a tuner");
    const auto desc = CopySized("desc", given, Defaults(&sparge_tuner_desc_init_sized));
    const TuneBounds bounds{BoundsOf(desc), desc.round_l1, desc.seed};
    const std::string name = desc.name == nullptr ? "" : desc.name;
    *out = new sparge_tuner{desc, Tuner(context, bounds, name, CopySamples(desc))};
  });
}

void sparge_tuner_destroy(sparge_tuner* tuner) { delete tuner; }

sparge_status sparge_tuner_run(sparge_tuner* tuner) {
  return Guard([&] {
    CallerHost host(CheckedTuner(tuner).desc);
    tuner->tuner.Run(host);
  });
}

sparge_status sparge_tuner_get_info(const sparge_tuner* tuner, sparge_tuner_info* out) {
  return Guard([&] {
    const Tuner& known = CheckedTuner(tuner).tuner;
    CheckSized("out", out);
    StoreSized({0, known.steps(), known.tuned().ms, known.tuned().dense_ms}, out);
  });
}

uint32_t sparge_tuner_sample(const sparge_tuner* tuner, int64_t index) {
  return tuner == nullptr ? 0 : tuner->tuner.RolesOf(index);
}

sparge_status sparge_tuner_head(const sparge_tuner* tuner, int64_t head, sparge_tuned_head* out) {
  return Guard([&] {
    const sparge_tuned_head& found = CheckedTuner(tuner).tuner.HeadAt(head);
    CheckSized("out", out);
    StoreSized(found, out);
  });
}

sparge_status sparge_tuner_preset(const sparge_tuner* tuner, sparge_layer_preset* out) {
  return Guard([&] {
    const sparge_layer_preset preset = CheckedTuner(tuner).tuner.Preset();
    CheckSized("out", out);
    StoreSized(preset, out);
  });
}

}  // extern "C"

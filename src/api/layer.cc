// Layers: descriptors checked, plans made and run for them, what they learned as bytes.
#include "src/layer/layer.h"

#include <sparge/sparge.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "src/api/asked.h"
#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/api/plan.h"
#include "src/base/status.h"
#include "src/problem/problem.h"

namespace sparge::impl {
namespace {

void CheckNumber(const char* name, int64_t value, int64_t low, int64_t high) {
  SPARGE_REQUIRE(value >= low && value <= high, "%s=%" PRId64 " is outside %" PRId64 "..%" PRId64, name, value, low,
                 high);
}

// Everything a plan would refuse of a preset is refused here: as a call without tokens.
void CheckPreset(const sparge_layer_preset& preset) {
  SPARGE_REQUIRE(preset.heads != nullptr, "preset.heads is NULL");
  SPARGE_REQUIRE(preset.head_precision != nullptr, "preset.head_precision is NULL");
  const int32_t select = RawEnum(preset.select);
  SPARGE_REQUIRE(select == SPARGE_SELECT_ALL || select == SPARGE_SELECT_CDF || select == SPARGE_SELECT_FLOOR,
                 "preset.select=%d is none of ALL, CDF and FLOOR", select);
  auto desc = Defaults(&sparge_plan_desc_init_sized);
  desc.q_heads = preset.q_heads;
  desc.kv_heads = preset.kv_heads;
  desc.qk_dim = preset.qk_dim;
  desc.v_dim = preset.v_dim;
  desc.causal = preset.causal;
  desc.select = preset.select;
  desc.predictor = preset.predictor;
  desc.heads = preset.heads;
  desc.head_precision = preset.head_precision;
  CheckDescriptor(desc);
}

// `least`: the layer's own precision.
PresetSettings CopyPreset(const sparge_layer_preset& given, sparge_precision least) {
  const auto preset = CopySized("preset", &given, Defaults(&sparge_layer_preset_init_sized));
  CheckPreset(preset);
  PresetSettings copy{preset.q_heads,
                      preset.kv_heads,
                      preset.qk_dim,
                      preset.v_dim,
                      preset.causal == 1,
                      preset.select,
                      preset.predictor,
                      {},
                      {}};
  copy.heads.assign(preset.heads, preset.heads + preset.q_heads);
  for (int64_t h = 0; h < preset.q_heads; ++h) {
    copy.precision.push_back(std::min(preset.head_precision[h], least));  // more bits first
  }
  return copy;
}

void CheckDesc(const sparge_layer_desc& desc) {
  CheckRounding(desc.round_l1);
  CheckNumber("precision", desc.precision, SPARGE_PRECISION_AUTO, SPARGE_PRECISION_INT8);
  CheckNumber("remembers", desc.remembers, 0, 1);
  CheckNumber("keep_keys", desc.keep_keys, 0, 1);
  CheckNumber("min_keys", desc.min_keys, 0, INT32_MAX);
  CheckNumber("dense_tail", desc.dense_tail, 0, INT32_MAX);
}

// Bounds without effect are refused: whoever sets them expects one.
void RefuseIdleBounds(const sparge_layer_desc& desc, const Bounds& bounds) {
  if (desc.preset == nullptr && bounds.target != 0) return;
  const auto defaults = Defaults(&sparge_layer_desc_init_sized);
  const char* const beside = desc.preset != nullptr ? "a preset" : "a target of 0";
  const bool usual = desc.target_l1 == defaults.target_l1 &&
                     (desc.target_l2 == defaults.target_l2 || desc.target_l2 == SPARGE_NOT_NAMED);
  const char* const measure = MeasureName(bounds.measure);
  SPARGE_REQUIRE(desc.preset == nullptr || usual, "target_%s=%g has no effect with %s", measure, bounds.target, beside);
  const double pv = bounds.measure == SPARGE_MEASURE_L1 ? desc.pv_l1 : desc.pv_l2;
  SPARGE_REQUIRE(pv <= 0, "pv_%s=%g has no effect with %s", measure, pv, beside);
  SPARGE_REQUIRE(desc.round_l1 == defaults.round_l1, "round_l1=%g has no effect with %s", desc.round_l1, beside);
}

LayerSettings SettingsOf(const sparge_layer_desc* given) {
  const auto desc = CopySized("desc", given, Defaults(&sparge_layer_desc_init_sized));
  CheckDesc(desc);
  LayerSettings settings{};
  settings.bounds = BoundsOf(desc);
  RefuseIdleBounds(desc, settings.bounds);
  settings.round_l1 = desc.round_l1;
  settings.seed = desc.seed;
  settings.precision = settings.bounds.target == 0 ? SPARGE_PRECISION_FP32 : SPARGE_PRECISION_INT8;
  if (desc.precision != SPARGE_PRECISION_AUTO) settings.precision = static_cast<sparge_precision>(desc.precision);
  if (desc.preset != nullptr) settings.preset = CopyPreset(*desc.preset, settings.precision);
  settings.remembers = desc.remembers == 1;
  settings.keep_keys = desc.keep_keys == 1;
  settings.min_keys = desc.min_keys;
  settings.dense_tail = desc.dense_tail;
  return settings;
}

// Plans on a context, whose workspaces serve calls that bring none.
class ContextRunner final : public PlanRunner {
 public:
  explicit ContextRunner(sparge_context& context) : context_(context) {}

  size_t Make(const sparge_plan_desc& desc) override {
    plan_ = MakePlan(context_, desc);
    return plan_->on_device->needs().cache;
  }
  void Run(const sparge_run_args& given) override {
    sparge_run_args args = given;
    std::optional<Workspaces::Lease> lease;
    if (args.workspace == nullptr) {
      lease.emplace(context_.workspaces, plan_->on_device->needs().workspace);
      args.workspace = lease->data();
      args.workspace_size = lease->size();
    }
    RunPlan(*plan_, &args);
  }

 private:
  sparge_context& context_;
  std::unique_ptr<sparge_plan> plan_;
};

void RunLayer(Layer& layer, sparge_context& context, const sparge_plan_desc* given_desc,
              const sparge_run_args* given_args, uint32_t flags) {
  const auto desc = CopySized("desc", given_desc, Defaults(&sparge_plan_desc_init_sized));
  RefuseChoices(desc, "layer");
  RefuseParts(desc, "layer");
  CheckDescriptor(desc);
  auto args = CopySized("args", given_args, Defaults(&sparge_run_args_init_sized));
  SPARGE_REQUIRE(args.cache == nullptr && args.cache_size == 0, "cache is given, but the layer has its own");
  SPARGE_REQUIRE((flags & ~SPARGE_LAYER_DENSE) == 0, "flags=%#x has bits that mean nothing", flags);
  sparge_stats* const wanted = args.stats;
  if (wanted != nullptr) CheckSized("stats", wanted);
  auto stats = Defaults(&sparge_stats_init_sized);
  args.stats = &stats;
  ContextRunner runner(context);
  layer.Run(runner, desc, args, (flags & SPARGE_LAYER_DENSE) != 0);
  if (wanted != nullptr) StoreSized(stats, wanted);
}

}  // namespace
}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

void sparge_layer_preset_init_sized(sparge_layer_preset* preset, size_t size) { InitSized(preset, size, {}); }
void sparge_layer_totals_init_sized(sparge_layer_totals* totals, size_t size) { InitSized(totals, size, {}); }

void sparge_layer_desc_init_sized(sparge_layer_desc* desc, size_t size) {
  sparge_layer_desc defaults{};
  defaults.target_l1 = defaults.pv_l1 = defaults.pv_l2 = SPARGE_NOT_NAMED;
  defaults.target_l2 = kTargetL2;
  defaults.round_l1 = kRoundL1;
  defaults.precision = SPARGE_PRECISION_AUTO;
  defaults.remembers = 1;
  defaults.keep_keys = 1;
  defaults.min_keys = 1024;
  defaults.dense_tail = 128;
  InitSized(desc, size, defaults);
}

sparge_status sparge_layer_create(const sparge_layer_desc* desc, sparge_layer** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    *out = new sparge_layer{Layer(SettingsOf(desc))};
  });
}

void sparge_layer_destroy(sparge_layer* layer) { delete layer; }

sparge_status sparge_layer_run(sparge_layer* layer, sparge_context* context, const sparge_plan_desc* desc,
                               const sparge_run_args* args, uint32_t flags) {
  return Guard([&] {
    SPARGE_REQUIRE(layer != nullptr, "layer is NULL");
    SPARGE_REQUIRE(context != nullptr, "context is NULL");
    RequireHost(*context, "a layer");
    RunLayer(layer->layer, *context, desc, args, flags);
  });
}

sparge_status sparge_layer_get_totals(const sparge_layer* layer, sparge_layer_totals* out) {
  return Guard([&] {
    SPARGE_REQUIRE(layer != nullptr, "layer is NULL");
    CheckSized("out", out);
    StoreSized(layer->layer.Totals(), out);
  });
}

const char* sparge_layer_notice(sparge_layer* layer) { return layer == nullptr ? nullptr : layer->layer.NextNotice(); }

int64_t sparge_layer_calibrations(const sparge_layer* layer) {
  return layer == nullptr ? 0 : layer->layer.CalibrationCount();
}

const sparge_calibration* sparge_layer_calibration(const sparge_layer* layer, int64_t index) {
  return layer == nullptr ? nullptr : layer->layer.CalibrationAt(index);
}

sparge_status sparge_layer_save(const sparge_layer* layer, void* buffer, size_t* size) {
  return Guard([&] {
    SPARGE_REQUIRE(layer != nullptr, "layer is NULL");
    SPARGE_REQUIRE(size != nullptr, "size is NULL");
    const size_t room = *size;
    const std::vector<std::byte> saved = layer->layer.Save();
    *size = saved.size();
    if (buffer == nullptr) return;
    SPARGE_REQUIRE(room >= saved.size(), "size=%zu is less than the %zu needed", room, saved.size());
    std::memcpy(buffer, saved.data(), saved.size());
  });
}

sparge_status sparge_layer_restore(sparge_layer* layer, const void* data, size_t size) {
  return Guard([&] {
    SPARGE_REQUIRE(layer != nullptr, "layer is NULL");
    SPARGE_REQUIRE(data != nullptr, "data is NULL");
    layer->layer.Restore(static_cast<const std::byte*>(data), size);
  });
}

}  // extern "C"

// tuned.cc - lends captures to the tuner as it asks for them, and keeps what it finds.
#include "io/tuned.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/call.h"
#include "io/tensor.h"

namespace sparge::io {
namespace {

PresetBounds PresetBoundsOf(const TunerDesc& desc) {
  const Bounds bounds = BoundsOf(desc);
  return {bounds.measure, bounds.target, bounds.pv, desc.round_l1};
}

// Everything that the parameters depend on, but for the captures.
std::string OptionsText(const TunerDesc& desc, const Context& context) {
  const auto number = [](double value) { return nlohmann::json(value).dump(); };
  const PresetBounds bounds = PresetBoundsOf(desc);
  return TargetName(bounds.measure) + " " + number(bounds.target) + ", " + PvName(bounds.measure) + " " +
         number(bounds.pv) + ", round_l1 " + number(bounds.round_l1) + ", seed " + std::to_string(desc.seed) +
         ", isa " + context.isa() + ", sparge " + sparge_version();
}

// The files are read again while the work goes on; the tuner counts on their shapes.
void CheckUnchanged(const Capture& capture, const PlanDesc& now) {
  const auto same = [&](const char* what, int64_t is, int64_t was) {
    if (is == was) return;
    throw Error(capture.path,
                std::string("has changed: ") + what + " was " + std::to_string(was) + ", is " + std::to_string(is));
  };
  same("batch", now.batch, capture.desc.batch);
  same("q_heads", now.q_heads, capture.desc.q_heads);
  same("kv_heads", now.kv_heads, capture.desc.kv_heads);
  same("q_tokens", now.q_tokens, capture.desc.q_tokens);
  same("kv_tokens", now.kv_tokens, capture.desc.kv_tokens);
  same("qk_dim", now.qk_dim, capture.desc.qk_dim);
  same("v_dim", now.v_dim, capture.desc.v_dim);
}

}  // namespace

std::string PartialOf(const std::string& out) { return out + ".partial"; }

// One layer at work.
class PresetTuner::Layer : public TuneSamples {
 public:
  Layer(const Context& context, const LayerCaptures& layer, TunerDesc bounds)
      : layer_(layer), tuner_(context, Named(bounds), *this) {}

  const std::string& name() const { return layer_.name; }
  int64_t steps() const { return tuner_.Info().steps; }
  // False if it was stopped.
  bool Run(std::function<bool(int64_t)> stops) {
    stops_ = std::move(stops);
    return tuner_.Run();
  }
  // After that.
  TuneTime time() const { return {tuner_.Info().ms, tuner_.Info().dense_ms}; }
  PresetLayer Found() const;

  std::vector<const sparge_plan_desc*> Descriptors() const override {
    std::vector<const sparge_plan_desc*> descriptors;
    for (const Capture& capture : layer_.captures) descriptors.push_back(&capture.desc);
    return descriptors;
  }
  const sparge_run_args& Open(int64_t index) override {
    const Capture& capture = layer_.captures[static_cast<size_t>(index)];
    if (capture.call) return capture.call->args;
    open_ = ReadCall(capture.path);
    CheckUnchanged(capture, open_->desc);
    return open_->args;
  }
  void Close(int64_t /*index*/) noexcept override { open_.reset(); }
  bool Stops(int64_t steps_done, int64_t /*steps*/) override { return stops_(steps_done); }

 private:
  TunerDesc Named(TunerDesc bounds) const {
    bounds.name = layer_.name.c_str();
    return bounds;
  }

  const LayerCaptures& layer_;
  Tuner tuner_;
  std::function<bool(int64_t)> stops_;
  std::optional<RecordedCall> open_;
};

PresetLayer PresetTuner::Layer::Found() const {
  const LayerPreset found = tuner_.Preset();
  PresetLayer layer{found.q_heads, found.kv_heads, found.qk_dim, found.v_dim, found.causal != 0, {}, {}, {}};
  for (size_t i = 0; i < layer_.captures.size(); ++i) {
    (tuner_.TunedOn(static_cast<int64_t>(i)) ? layer.samples : layer.held_out).push_back(layer_.captures[i].name);
  }
  for (int64_t i = 0; i < found.q_heads; ++i) {
    const TunedHead head = tuner_.Head(i);
    layer.heads.push_back({head.precision,
                           head.select,
                           head.params,
                           {head.sparsity, head.work, head.error, head.pv_error, head.round_l1, head.verified_on}});
  }
  return layer;
}

PresetTuner::PresetTuner(const Context& context, const Captures& captures, const std::string& digest, TuneTask task)
    : context_(context), digest_(digest), task_(std::move(task)) {
  preset_ = StartOrResume();
  resumed_ = preset_.layers.size();
  for (const LayerCaptures& layer : captures.layers) {
    if (preset_.layers.contains(layer.name)) continue;
    layers_.push_back(std::make_unique<Layer>(context, layer, task_.bounds));
    steps_ += layers_.back()->steps();
  }
}

PresetTuner::~PresetTuner() = default;

Preset PresetTuner::Fresh() const {
  Preset fresh;
  fresh.made_by = std::string("sparge ") + sparge_version();
  fresh.bounds = PresetBoundsOf(task_.bounds);
  fresh.predictor = SPARGE_PREDICT_KEYS;  // the one that tuning takes
  fresh.seed = task_.bounds.seed;
  fresh.partial = {OptionsText(task_.bounds, context_), digest_};
  return fresh;
}

// What an earlier run finished, or an empty preset. Refuses to mix what does not belong together.
Preset PresetTuner::StartOrResume() const {
  Preset fresh = Fresh();
  const std::string file = PartialOf(task_.out);
  std::error_code error;
  if (task_.restart || !std::filesystem::exists(file, error)) return fresh;
  const std::string ways = "; delete it or " + task_.how_restart + " to begin anew";
  Preset found;
  try {
    found = ReadPreset(file);
  } catch (const Error& failure) {
    throw Error(std::string(failure.what()) + ways);
  }
  if (!found.partial) throw Error(file, "is not an unfinished preset" + ways);
  if (found.partial->options != fresh.partial->options) {
    throw Error(file, "was begun with other options: " + found.partial->options + ways);
  }
  if (found.partial->captures != digest_) throw Error(file, "was begun with other captures" + ways);
  return found;
}

bool PresetTuner::Run(const std::function<bool(int64_t)>& stops) {
  int64_t before = 0;
  for (const std::unique_ptr<Layer>& layer : layers_) {
    if (!layer->Run([&](int64_t done) { return stops(before + done); })) return false;
    before += layer->steps();
    preset_.layers[layer->name()] = layer->Found();
    times_[layer->name()] = layer->time();
    WritePreset(PartialOf(task_.out), preset_);
  }
  preset_.partial.reset();
  WritePreset(task_.out, preset_);
  std::error_code ignored;
  std::filesystem::remove(PartialOf(task_.out), ignored);
  return true;
}

}  // namespace sparge::io

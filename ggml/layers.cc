#include "ggml/layers.h"

#include <algorithm>
#include <cstdio>
#include <string_view>
#include <utility>

#include "io/layer_preset.h"

namespace sparge::ggml {
namespace {

// Every tile, in the precision asked for.
LayerDesc DescribeDense(const Settings& settings) {
  LayerDesc desc;
  desc.target_l2 = 0;
  if (settings.mode != Mode::kExact) desc.precision = settings.precision;
  return desc;
}

LayerDesc Describe(const Settings& settings) {
  if (settings.mode == Mode::kExact) return DescribeDense(settings);
  LayerDesc desc = settings.bounds;
  desc.precision = settings.precision;
  desc.min_keys = settings.min_tokens;
  return desc;
}

// By the name that statistics have, or by that of PyTorch's module, which is what captures from Python are called.
const io::PresetLayer& FindPresetLayer(const io::Preset& preset, const std::string& path, const std::string& name) {
  constexpr std::string_view kLayer = "layer";
  const std::string module = "model.layers." + name.substr(std::min(kLayer.size(), name.size())) + ".self_attn";
  const bool by_module = name.starts_with(kLayer) && !preset.layers.contains(name) && preset.layers.contains(module);
  return io::FindLayer(preset, by_module ? module : name, path);
}

std::unique_ptr<Layer> MakePresetLayer(const Settings& settings, const std::string& name) {
  const io::PresetLayer& entry = FindPresetLayer(*settings.preset, settings.preset_path, name);
  const io::LayerPreset preset(*settings.preset, entry);
  LayerDesc desc = Describe(settings);
  desc.preset = preset.get();
  return std::make_unique<Layer>(desc);
}

}  // namespace

void Totals::Add(const LayerTotals& other) {
  runs.pack_ms += other.pack_ms;
  runs.calibrate_ms += other.calibrate_ms;
  runs.key_blocks += other.key_blocks;
  runs.key_blocks_reused += other.key_blocks_reused;
  runs.tiles.qk_eligible += other.tiles.qk_eligible;
  runs.tiles.qk_computed += other.tiles.qk_computed;
}

void Totals::Add(const Totals& other) {
  calls += other.calls;
  mask_ms += other.mask_ms;
  convert_ms += other.convert_ms;
  total_ms += other.total_ms;
  Add(other.runs);
}

double Totals::Sparsity() const {
  const sparge_head_stats& tiles = runs.tiles;
  return tiles.qk_eligible == 0 ? 0
                                : 1 - static_cast<double>(tiles.qk_computed) / static_cast<double>(tiles.qk_eligible);
}

ModelLayer::ModelLayer(const Settings& settings, std::string name) : settings_(settings), name_(std::move(name)) {
  if (!settings_.preset) {
    layer_ = std::make_unique<Layer>(Describe(settings_));
    return;
  }
  try {
    layer_ = MakePresetLayer(settings_, name_);
    has_preset_ = true;
  } catch (const std::runtime_error& error) {
    SkipNothing(error.what());
  }
}

// The preset is not for this layer.
void ModelLayer::SkipNothing(const char* reason) {
  std::fprintf(stderr, "sparge: %s: %s; this layer skips nothing\n", name_.c_str(), reason);
  layer_ = std::make_unique<Layer>(DescribeDense(settings_));
  has_preset_ = false;
}

void ModelLayer::Run(const Context& context, const PlanDesc& desc, const RunArgs& args) {
  try {
    layer_->Run(context, desc, args);
  } catch (const Error& error) {
    if (!has_preset_ || error.status() != SPARGE_INVALID_ARGUMENT) throw;
    Layer(DescribeDense(settings_)).Run(context, desc, args);  // else it is not the preset that is wrong
    SkipNothing(error.what());
  }
  while (const char* notice = layer_->Notice()) std::fprintf(stderr, "sparge: %s: %s\n", name_.c_str(), notice);
}

void ModelLayer::RunOneHead(const Context& context, const PlanDesc& desc, const RunArgs& args) {
  if (!one_head_) one_head_ = std::make_unique<Layer>(DescribeDense(settings_));
  one_head_->Run(context, desc, args);
}

Totals ModelLayer::Sums() const {
  Totals sums = times;
  sums.Add(layer_->Totals());
  if (one_head_) sums.Add(one_head_->Totals());
  return sums;
}

std::vector<HeadEstimate> ModelLayer::Estimates() const {
  std::vector<HeadEstimate> measured;
  for (const CalibrationView& calibration : layer_->Calibrations()) {
    for (int64_t h = 0; h < calibration.heads(); ++h) {
      const HeadEstimate head = calibration.Head(h);
      if (head.samples > 0) measured.push_back(head);
    }
  }
  return measured;
}

}  // namespace sparge::ggml

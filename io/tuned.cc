// tuned.cc - reads a capture when its turn has come, and copies what was found.
#include "io/tuned.h"

namespace sparge::io {

std::vector<const sparge_plan_desc*> CaptureSamples::Descriptors() const {
  std::vector<const sparge_plan_desc*> descriptors;
  for (const Capture& capture : layer_.captures) descriptors.push_back(&capture.desc);
  return descriptors;
}

const sparge_run_args& CaptureSamples::Open(int64_t index) {
  const Capture& capture = layer_.captures[static_cast<size_t>(index)];
  open_ = ReadCall(capture.path);
  const auto same = [&](const char* what, int64_t now, int64_t before) {
    if (now == before) return;
    throw Error(capture.path,
                std::string("has changed: ") + what + " was " + std::to_string(before) + ", is " + std::to_string(now));
  };
  same("batch", open_->desc.batch, capture.desc.batch);
  same("q_heads", open_->desc.q_heads, capture.desc.q_heads);
  same("kv_heads", open_->desc.kv_heads, capture.desc.kv_heads);
  same("q_tokens", open_->desc.q_tokens, capture.desc.q_tokens);
  same("kv_tokens", open_->desc.kv_tokens, capture.desc.kv_tokens);
  same("qk_dim", open_->desc.qk_dim, capture.desc.qk_dim);
  same("v_dim", open_->desc.v_dim, capture.desc.v_dim);
  return open_->args;
}

void CaptureSamples::Close(int64_t /*index*/) noexcept { open_.reset(); }

std::vector<std::string> CaptureSamples::Names() const {
  std::vector<std::string> names;
  for (const Capture& capture : layer_.captures) names.push_back(capture.name);
  return names;
}

PresetLayer TunedLayer(const Tuner& tuner, const std::vector<std::string>& names) {
  const sparge_layer_preset found = tuner.Preset();
  PresetLayer layer{found.q_heads, found.kv_heads, found.qk_dim, found.v_dim, found.causal != 0, {}, {}, {}};
  for (size_t i = 0; i < names.size(); ++i) {
    (tuner.TunedOn(static_cast<int64_t>(i)) ? layer.samples : layer.held_out).push_back(names[i]);
  }
  for (int64_t i = 0; i < found.q_heads; ++i) {
    const TunedHead head = tuner.Head(i);
    layer.heads.push_back({head.precision,
                           head.select,
                           head.params,
                           {head.sparsity, head.work, head.l1, head.pv_l1, head.round_l1, head.verified_on}});
  }
  return layer;
}

}  // namespace sparge::io

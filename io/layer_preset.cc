// layer_preset.cc - the heads of a layer, side by side.
#include "io/layer_preset.h"

namespace sparge::io {

LayerPreset::LayerPreset(const Preset& preset, const PresetLayer& layer) {
  sparge_layer_preset_init(&preset_);
  preset_.q_heads = layer.q_heads;
  preset_.kv_heads = layer.kv_heads;
  preset_.qk_dim = layer.qk_dim;
  preset_.v_dim = layer.v_dim;
  preset_.causal = layer.causal ? 1 : 0;
  preset_.select = SPARGE_SELECT_ALL;
  for (const PresetHead& head : layer.heads) {
    if (!head.dense()) preset_.select = head.select;  // one rule for all; parameters of dense heads keep everything
    heads_.push_back(head.params);
    precision_.push_back(head.precision);
  }
  if (preset_.select != SPARGE_SELECT_ALL) preset_.predictor = preset.predictor;
  preset_.heads = heads_.data();
  preset_.head_precision = precision_.data();
}

}  // namespace sparge::io

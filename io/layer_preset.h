// layer_preset.h - from a preset's entry to what sparge_layer takes; for every client alike.
#ifndef SPARGE_IO_LAYER_PRESET_H_
#define SPARGE_IO_LAYER_PRESET_H_

#include <sparge/sparge.h>

#include <vector>

#include "io/preset.h"

namespace sparge::io {

// A layer of a preset as sparge_layer takes it. The descriptor points into this object.
class LayerPreset {
 public:
  LayerPreset(const Preset& preset, const PresetLayer& layer);
  LayerPreset(const LayerPreset&) = delete;
  LayerPreset& operator=(const LayerPreset&) = delete;
  const sparge_layer_preset* get() const { return &preset_; }

 private:
  sparge_layer_preset preset_;
  std::vector<sparge_head_params> heads_;
  std::vector<sparge_precision> precision_;
};

}  // namespace sparge::io
#endif  // SPARGE_IO_LAYER_PRESET_H_

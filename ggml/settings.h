// settings.h - what the environment says about the backend (docs/ggml.md).
#ifndef SPARGE_GGML_SETTINGS_H_
#define SPARGE_GGML_SETTINGS_H_

#include <cstdint>
#include <memory>
#include <sparge/sparge.hpp>
#include <string>

#include "io/preset.h"

namespace sparge::ggml {

enum class Mode {
  kAuto,   // skips within the target error, per layer and head
  kExact,  // every tile, in fp32
  kOff     // claims nothing
};

struct Settings {
  Mode mode = Mode::kAuto;
  LayerDesc bounds;  // its targets; 0: every tile, in `precision`
  sparge_precision precision = SPARGE_PRECISION_INT8;
  int64_t min_tokens = LayerDesc().min_keys;  // keys from which on tiles may be skipped
  std::shared_ptr<const io::Preset> preset;   // instead of calibrations; NULL = none
  std::string preset_path;
  std::string stats;       // where statistics go at the end: "", "stderr" or a file
  bool quiet = false;      // without the lines of usage.h
  bool decode = true;      // few queries take packed keys
  bool claim_all = false;  // every attention, also decoding: for tests

  // Packed keys are of use to few queries where they take fewer bytes than those of the tensors.
  bool Decodes() const { return decode && mode == Mode::kAuto && precision != SPARGE_PRECISION_FP32; }
};

// Throws std::runtime_error with one line that names variable and value.
Settings ReadSettings();

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_SETTINGS_H_

// preset.h - tuned parameters per layer and head in a versioned, readable JSON file (docs/tuning.md has the format).
#ifndef SPARGE_IO_PRESET_H_
#define SPARGE_IO_PRESET_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sparge::io {

// What was measured of a head with exactly these parameters.
struct PresetMeasured {
  double sparsity = 0, work = 1;
  double error = 0;         // sparse without PV skip against dense of the same precision, in the measure of the bounds
  double pv_error = 0;      // the same with PV skip
  double round_l1 = 0;      // the precision itself against exact
  int64_t verified_on = 0;  // samples that were computed in full for this
  bool operator==(const PresetMeasured&) const = default;
};

struct PresetHead {
  sparge_precision precision = SPARGE_PRECISION_INT8;
  sparge_select select = SPARGE_SELECT_ALL;  // or CDF or FLOOR
  // topk is not used. A dense head has tau 1 and no PV skip, so that `params` alone say the same.
  sparge_head_params params = {0, 1, 0, SPARGE_PV_SKIP_OFF};
  PresetMeasured measured;

  bool dense() const { return select == SPARGE_SELECT_ALL; }
};

struct PresetLayer {
  int64_t q_heads = 0, kv_heads = 0, qk_dim = 0, v_dim = 0;
  bool causal = false;
  std::vector<std::string> samples, held_out;  // tuned on; not tuned on, and verified
  std::vector<PresetHead> heads;               // q_heads entries; those that are not dense select by one rule
};

// Of a preset that is not finished: what it may be continued with.
struct PresetPartial {
  std::string options, captures;
};

// Bounds of the errors of every head, or one bound of what the model as a whole may lose: then heads have none.
struct PresetBounds {
  sparge_measure measure = SPARGE_MEASURE_L2;
  double target = 0, pv = 0, round_l1 = 0;
  double loss = 0;           // mean Kullback-Leibler divergence per token, in nats; 0: bounds per head
  double measured_loss = 0;  // what it was when these parameters were verified

  bool of_loss() const { return loss > 0; }
};

struct Preset {
  std::string made_by;
  PresetBounds bounds;
  sparge_predictor predictor = SPARGE_PREDICT_KEYS;
  uint64_t seed = 0;
  std::map<std::string, PresetLayer> layers;  // by exact name
  std::optional<PresetPartial> partial;
};

std::string TargetName(sparge_measure measure);         // "target_l1", "target_l2"
std::string PvName(sparge_measure measure);             // "pv_l1", "pv_l2"
const char* PrecisionName(sparge_precision precision);  // "fp32", "int16", "int8"
const char* PredictorName(sparge_predictor predictor);  // "keys", "paper"

// `name` is what messages call the file. Anything but a complete preset of a known version throws Error, in one line
// that names layer, head, field and value.
Preset ParsePreset(std::string_view text, std::string_view name);
Preset ReadPreset(const std::string& path);

// The same bytes for the same preset.
std::string PresetText(const Preset& preset);
// The file appears whole or not at all. Throws Error, also if a name is not valid UTF-8.
void WritePreset(const std::string& path, const Preset& preset);

// The layer, or Error with the names that are most like it. `name` as above.
const PresetLayer& FindLayer(const Preset& preset, const std::string& layer, std::string_view name);

}  // namespace sparge::io
#endif  // SPARGE_IO_PRESET_H_

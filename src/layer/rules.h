// What a layer decides for a call: which tiles, the last queries, samples, and whether keys stay packed. Pure functions
// of its settings, of what it remembers and of what is asked.
#ifndef SPARGE_SRC_LAYER_RULES_H_
#define SPARGE_SRC_LAYER_RULES_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "src/calibrate/bounds.h"

namespace sparge::impl {

struct PresetSettings {
  int64_t q_heads, kv_heads, qk_dim, v_dim;
  bool causal;
  sparge_select select;
  sparge_predictor predictor;
  std::vector<sparge_head_params> heads;
  std::vector<sparge_precision> precision;  // per head
};

// A checked sparge_layer_desc, with what its members stand for.
struct LayerSettings {
  Bounds bounds;  // a target of 0: every tile
  double round_l1;
  uint64_t seed;
  sparge_precision precision;
  std::optional<PresetSettings> preset;
  bool remembers, keep_keys;
  int64_t min_keys, dense_tail;

  bool Calibrates() const { return !preset && bounds.target > 0; }
};

enum class Tiles {
  kAll,
  kPreset,
  kUntuned,  // the preset is for other calls: all
  kAuto
};

// Throws Failure if a call's shapes are not those of the preset.
void CheckFits(const PresetSettings& preset, const sparge_plan_desc& desc);

// `dense`: the caller wants every tile. The descriptor has been checked.
Tiles ChooseTiles(const LayerSettings& settings, const sparge_plan_desc& desc, bool dense);

// Queries of the longest sequence.
int64_t MostQueries(const sparge_plan_desc& desc);

// Few queries, which could take the keys that calls before them left packed.
bool CanDecode(const LayerSettings& settings, const sparge_plan_desc& desc);
// Whether they go on from the last call of few queries, which had `before` keys; 0: there was none.
bool IsNextStep(const sparge_plan_desc& desc, int64_t before);
// Fills in what Fill does not, for tiles of prompts.
void FillDecode(const LayerSettings& settings, sparge_plan_desc& desc);

// The key cache serves prompts that come in batches, and whose keys stay where they are.
bool UsesKeys(const LayerSettings& settings, const sparge_plan_desc& desc);

// Fills in all that says how exactly, but for the calibration of Tiles::kAuto and the key cache. `most_queries`: of an
// earlier call of this kind, 0 if there was none. Points into `settings`.
void Fill(const LayerSettings& settings, Tiles tiles, int64_t most_queries, sparge_plan_desc& desc);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_LAYER_RULES_H_

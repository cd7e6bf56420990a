// tune_layer.h - parameters for the heads of one layer: found on some samples, verified in full on others.
#ifndef SPARGE_CLI_TUNE_LAYER_H_
#define SPARGE_CLI_TUNE_LAYER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sparge/sparge.hpp>
#include <utility>
#include <vector>

#include "cli/captures.h"
#include "cli/progress.h"
#include "cli/tune_verify.h"
#include "io/preset.h"

namespace sparge::cli {

struct TuneBounds {
  double l1 = 0.05;
  double l2 = 0.06;
  double round_l1 = 0.05;
  sparge_predictor predictor = SPARGE_PREDICT_KEYS;
  uint64_t seed = 0;
};

// Time of one layer against one dense int8 pass over all its samples and heads.
struct TuneTime {
  double ms = 0, dense_ms = 0;
};

// Samples of a layer, in the order of their names. Those held out are verified and not tuned on; a single one serves
// both.
struct SampleSplit {
  std::vector<size_t> tuning, verified, held_out;
};
// Held out: none of 1, one of up to 4, a quarter of more, at most 3. Verified: these and others, 2 and a quarter of
// all. Which ones depends on seed and layer.
SampleSplit SplitSamples(const LayerCaptures& layer, uint64_t seed);

// Steps of `Progress` that a layer takes.
int64_t TuneSteps(const LayerCaptures& layer, uint64_t seed);

class LayerTuner {
 public:
  // `between` is called between calls of the library; it throws to stop.
  LayerTuner(const Context& context, const LayerCaptures& layer, const TuneBounds& bounds, Progress& progress,
             std::function<void()> between);

  io::PresetLayer Tune();
  // After Tune.
  const TuneTime& time() const { return time_; }

 private:
  // One head on its way to a setting that was verified.
  struct Head {
    io::PresetHead setting;  // being tried
    io::PresetHead passed;   // verified and within the bounds; dense until there is one
    double l1 = 0, l2 = 0;   // bounds that the calibration works with
    double excess = 0;       // of the last verification: error / bound, the larger one
    double l1_excess = 0, l2_excess = 0;
    int tightened = 0;
    bool loosened = false, settled = false;
  };

  Problem Load(size_t sample) const;
  int64_t TuningTokens() const;
  void Calibrate(double effort);
  void VerifyOpenHeads();
  void TakeErrors(Head& head, const std::vector<HeadErrors>& samples) const;
  void Decide(int64_t index);
  void TryLooser(int64_t index);
  void TryTighter(int64_t index);
  bool Rechoose(int64_t index, double l1_factor, double l2_factor);
  void Settle(int64_t index);
  bool MayVerifyAgain(const Head& head, double most_work) const;
  io::PresetHead Dense(const io::PresetHead& like) const;
  void MeasureTime();
  io::PresetLayer Result() const;

  const Context& context_;
  const LayerCaptures& layer_;
  const TuneBounds& bounds_;
  Progress& progress_;
  std::function<void()> between_;
  SampleSplit split_;
  std::unique_ptr<Calibration> calibration_;
  std::vector<Head> heads_;
  std::map<std::pair<size_t, int64_t>, DenseResults> dense_;  // by sample and head; those that may be needed again
  Spent spent_;
  TuneTime time_;
  // Work in dense tiles of one head. Decided by counts and not by time, or results would depend on the machine's mood.
  double all_tiles_ = 0, verified_tiles_ = 0, work_ = 0;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_TUNE_LAYER_H_

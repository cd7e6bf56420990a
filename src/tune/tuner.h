// A layer to be tuned: its samples and bounds, checked before any work; and what the last search found.
#ifndef SPARGE_SRC_TUNE_TUNER_H_
#define SPARGE_SRC_TUNE_TUNER_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <string>
#include <vector>

#include "src/tune/search.h"
#include "src/tune/split.h"

namespace sparge::impl {

// The default of tuning; that of calibrations is kTargetL2.
inline constexpr double kTuneTargetL2 = 0.1;

class Tuner {
 public:
  // Throws Failure.
  Tuner(sparge_context* context, const TuneBounds& bounds, const std::string& name,
        std::vector<sparge_plan_desc> samples);

  int64_t q_heads() const { return samples_[0].desc.q_heads; }
  int64_t steps() const { return SearchSteps(split_, q_heads()); }
  uint32_t RolesOf(int64_t sample) const;  // SPARGE_SAMPLE_*

  void Run(TuneHost& host);  // throws Failure; then nothing is found
  bool finished() const { return !tuned_.heads.empty(); }
  const Tuned& tuned() const { return tuned_; }
  // Throws Failure unless a run has finished and there is such a head.
  const sparge_tuned_head& HeadAt(int64_t head) const;
  // Points into this object.
  sparge_layer_preset Preset() const;

 private:
  sparge_context* context_;
  TuneBounds bounds_;
  std::vector<TuneSample> samples_;
  SampleSplit split_;
  Tuned tuned_;
  std::vector<sparge_head_params> params_;
  std::vector<sparge_precision> precision_;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_TUNE_TUNER_H_

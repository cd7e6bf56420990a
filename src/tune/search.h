// The search for one layer: calibrates on sampled query blocks, verifies in full, tightens what fails, loosens what has
// room.
#ifndef SPARGE_SRC_TUNE_SEARCH_H_
#define SPARGE_SRC_TUNE_SEARCH_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "src/calibrate/bounds.h"
#include "src/tune/sample.h"
#include "src/tune/split.h"
#include "src/tune/verify.h"

namespace sparge::impl {

struct TuneBounds {
  Bounds skip;
  double round_l1;
  uint64_t seed;
};

// Who has the samples, and watches.
class TuneHost {
 public:
  virtual ~TuneHost() = default;
  // The tensors of a sample, until Close. Throws Failure.
  virtual sparge_run_args Open(int64_t sample) = 0;
  virtual void Close(int64_t sample) noexcept = 0;
  // Throws Failure to stop.
  virtual void Progress(int64_t steps_done, int64_t steps) = 0;
};

struct Tuned {
  std::vector<sparge_tuned_head> heads;
  double ms = 0, dense_ms = 0;  // sparge_tuner_info
};

// Steps that a search takes.
int64_t SearchSteps(const SampleSplit& split, int64_t q_heads);

// Lives for one search. What it is made of must outlive it.
class Search {
 public:
  Search(sparge_context* context, const TuneBounds& bounds, const std::vector<TuneSample>& samples,
         const SampleSplit& split, TuneHost& host);

  Tuned Run();  // throws Failure

 private:
  // One head on its way to a setting that was verified.
  struct Head {
    sparge_tuned_head setting;  // being tried
    sparge_tuned_head passed;   // verified and within the bounds; dense until there is one
    double target = 0, pv = 0;  // bounds that the calibration works with
    double excess = 0;          // of the last verification: error / bound, the larger of
    double target_excess = 0, pv_excess = 0;
    int tightened = 0;
    bool loosened = false, settled = false;

    bool first() const { return tightened == 0 && !loosened; }
    bool dense() const { return setting.select == SPARGE_SELECT_ALL; }
  };
  struct DestroyCalibration {
    void operator()(sparge_calibration* calibration) const { sparge_calibration_destroy(calibration); }
  };
  class OpenSample;

  int64_t q_heads() const { return static_cast<int64_t>(heads_.size()); }
  Head& At(int64_t head) { return heads_[static_cast<size_t>(head)]; }
  int64_t TuningQueries() const;
  void Step(int64_t steps);
  void Calibrate(double effort);
  void TakeChoices();
  void VerifyOpenHeads();
  void TakeErrors(Head& head, const std::vector<HeadErrors>& samples) const;
  void Decide(int64_t index);
  void TryLooser(int64_t index);
  void TryTighter(int64_t index);
  bool Rechoose(int64_t index, double target_factor, double pv_factor);
  void Settle(int64_t index);
  bool MayVerifyAgain(const Head& head, double most_work) const;
  sparge_head_estimate EstimateOf(int64_t index) const;
  sparge_tuned_head ChosenFor(int64_t index) const;
  Tuned Result();
  double DenseMs();

  const TuneBounds& bounds_;
  const std::vector<TuneSample>& samples_;
  const SampleSplit& split_;
  TuneHost& host_;
  Runner runner_;
  std::unique_ptr<sparge_calibration, DestroyCalibration> calibration_;
  std::vector<Head> heads_;
  // Dense results by sample and head, those that may be needed again. Bounds do not change a head's precision.
  std::map<std::pair<size_t, int64_t>, std::vector<float>> dense_;
  Spent spent_;
  int64_t steps_done_ = 0;
  // Work in dense tiles of one head. Decided by counts and not by time, or results would depend on the machine's mood.
  double all_tiles_ = 0, verified_tiles_ = 0, work_ = 0;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_TUNE_SEARCH_H_

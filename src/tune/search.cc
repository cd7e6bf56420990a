// From a calibration's choice to a verified one, head by head.
#include "src/tune/search.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "src/calibrate/calibration.h"

namespace sparge::impl {
namespace {

constexpr int kPasses = 2;  // of the calibration: theta and tau, then lambda
// Share of a dense run that a pass may take. A single sample is also verified in full, which needs most of the time.
constexpr double kEffort = 0.1, kEffortSingle = 0.075, kMostEffort = 0.25;
// Dense passes, so that 3 hold with what is not counted here: for what has to be mended, and for what might be
// improved.
constexpr double kMostWork = 2.2, kMostWorkLooser = 1.6;
constexpr int kMostTightened = 4;
constexpr double kSpread = 0.3;          // between samples of a text model, relative to the mean (docs/tuning.md)
constexpr double kSpreadSamples = 2;     // samples that this counts for
constexpr double kLargestSample = 1.15;  // of several samples one may lie this far beyond the bound, the mean may not
constexpr double kRoom = 0.8;            // error below this share of the bound: there may be a sparser setting
constexpr double kAim = 0.95;            // new bounds aim a little below, for errors do not follow them exactly
constexpr double kLargestStep = 4;       // of loosened bounds: an error of 0 does not say how far one may go
constexpr int64_t kVerifySteps = 4;      // a head and sample in full, against one pass of calibration

// Time of dense runs against int8 (docs/performance.md).
double PrecisionCost(sparge_precision precision) {
  return precision == SPARGE_PRECISION_INT8 ? 1 : precision == SPARGE_PRECISION_INT16 ? 1.7 : 3.2;
}

// The share of a dense run that a pass of calibration over so many queries takes: `usual`, and more where that would be
// fewer samples than a choice needs, up to `most`.
double EffortFor(double usual, int64_t queries, double most) {
  // The dense time of so many queries is that of 96 sampled rows, at about twice theirs. A choice needs 40, and the
  // standard error of so few is large.
  constexpr double kDenseQueries = 192;
  return std::clamp(kDenseQueries / static_cast<double>(std::max<int64_t>(queries, 1)), usual, most);
}

// Figures for people: six digits tell all that was measured.
double Rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::strtod(text, nullptr);
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Errors of a setting over its bound, 1 being just right. Three things must hold: the mean is within the bound, no
// sample is far beyond, and 19 of 20 new samples may be expected within SPARGE_SINGLE_CALL times the bound. Few samples
// say little about how much samples differ, so a usual spread counts like kSpreadSamples of them.
double Excess(const std::vector<double>& errors, double bound) {
  const double mean = Mean(errors);
  if (mean == 0) return 0;
  if (!std::isfinite(mean)) return std::numeric_limits<double>::infinity();
  double squares = kSpreadSamples * (kSpread * mean) * (kSpread * mean);
  for (const double error : errors) squares += (error - mean) * (error - mean);
  const double spread = std::sqrt(squares / (kSpreadSamples + static_cast<double>(errors.size()) - 1));
  const double largest = *std::max_element(errors.begin(), errors.end());
  return std::max({mean, largest / kLargestSample, (mean + kOneInTwenty * spread) / SPARGE_SINGLE_CALL}) / bound;
}

bool SameSetting(const sparge_tuned_head& a, const sparge_tuned_head& b) {
  return a.precision == b.precision && a.select == b.select && a.params.theta == b.params.theta &&
         a.params.tau == b.params.tau && a.params.pv_skip == b.params.pv_skip;
}

// A dense head has no error by definition: dense of the same precision is what errors are measured against.
sparge_tuned_head DenseHead(sparge_precision precision, size_t verified_on) {
  sparge_tuned_head head{};
  head.precision = precision;
  head.select = SPARGE_SELECT_ALL;
  head.params = {0, 1, 0, SPARGE_PV_SKIP_OFF};
  head.work = 1;
  head.verified_on = static_cast<int64_t>(verified_on);
  return head;
}

}  // namespace

int64_t SearchSteps(const SampleSplit& split, int64_t q_heads) {
  return q_heads * static_cast<int64_t>(kPasses * split.tuning.size() + kVerifySteps * split.verified.size());
}

// A sample whose tensors are there.
class Search::OpenSample {
 public:
  OpenSample(Search& search, size_t index) : host_(search.host_), index_(static_cast<int64_t>(index)) {
    asked_.desc = search.samples_[index].desc;
    asked_.args = host_.Open(index_);
  }
  ~OpenSample() { host_.Close(index_); }
  OpenSample(const OpenSample&) = delete;
  OpenSample& operator=(const OpenSample&) = delete;

  const Asked& asked() const { return asked_; }

 private:
  TuneHost& host_;
  int64_t index_;
  Asked asked_;
};

Search::Search(sparge_context* context, const TuneBounds& bounds, const std::vector<TuneSample>& samples,
               const SampleSplit& split, TuneHost& host)
    : bounds_(bounds),
      samples_(samples),
      split_(split),
      host_(host),
      runner_(context),
      heads_(static_cast<size_t>(samples[0].desc.q_heads)) {
  sparge_calibration_desc desc;
  sparge_calibration_desc_init(&desc);
  desc.q_heads = q_heads();
  const bool l1 = bounds.skip.measure == SPARGE_MEASURE_L1;
  (l1 ? desc.target_l1 : desc.target_l2) = bounds.skip.target;
  (l1 ? desc.pv_l1 : desc.pv_l2) = bounds.skip.pv;
  desc.round_l1 = bounds.round_l1;
  desc.seed = bounds.seed;
  sparge_calibration* calibration = nullptr;
  Require(sparge_calibration_create(&desc, &calibration));
  calibration_.reset(calibration);
  for (const TuneSample& sample : samples) all_tiles_ += static_cast<double>(sample.tiles);
  for (const size_t sample : split.verified) verified_tiles_ += static_cast<double>(samples[sample].tiles);
}

Tuned Search::Run() {
  Step(0);
  const double usual = split_.held_out.empty() ? kEffortSingle : kEffort;
  for (int pass = 0; pass < kPasses; ++pass) Calibrate(EffortFor(usual, TuningQueries(), kMostEffort));
  TakeChoices();
  const auto open = [](const Head& head) { return !head.settled; };
  while (std::any_of(heads_.begin(), heads_.end(), open)) {
    VerifyOpenHeads();
    for (int64_t i = 0; i < q_heads(); ++i) {
      if (open(At(i))) Decide(i);
    }
  }
  return Result();
}

void Search::Step(int64_t steps) {
  steps_done_ += steps;
  host_.Progress(steps_done_, SearchSteps(split_, q_heads()));
}

int64_t Search::TuningQueries() const {
  int64_t queries = 0;
  for (const size_t sample : split_.tuning) queries += samples_[sample].queries;
  return queries;
}

void Search::Calibrate(double effort) {
  for (const size_t sample : split_.tuning) {
    {
      const OpenSample open(*this, sample);
      Asked asked = open.asked();
      asked.desc.select = SPARGE_SELECT_AUTO;
      asked.desc.calibration = calibration_.get();
      spent_.ms += runner_.Calibrate(asked, effort);
    }
    work_ += effort * static_cast<double>(samples_[sample].tiles * q_heads());
    Step(q_heads());
  }
}

// Dense heads need no verification.
void Search::TakeChoices() {
  for (int64_t i = 0; i < q_heads(); ++i) {
    Head& head = At(i);
    head.target = bounds_.skip.target;
    head.pv = bounds_.skip.pv;
    head.setting = ChosenFor(i);
    head.passed = DenseHead(head.setting.precision, split_.verified.size());
    if (!head.dense()) continue;
    Settle(i);
    Step(kVerifySteps * static_cast<int64_t>(split_.verified.size()));
  }
}

sparge_head_estimate Search::EstimateOf(int64_t index) const {
  sparge_head_estimate estimate;
  sparge_head_estimate_init(&estimate);
  Require(sparge_calibration_head(calibration_.get(), index, &estimate));
  return estimate;
}

// What the calibration chose for a head; nothing is measured yet.
sparge_tuned_head Search::ChosenFor(int64_t index) const {
  const sparge_head_estimate estimate = EstimateOf(index);
  sparge_tuned_head head = DenseHead(estimate.precision, 0);
  if (estimate.state != SPARGE_HEAD_SPARSE) return head;
  head.select = SPARGE_SELECT_FLOOR;  // the rule of SELECT_AUTO
  head.params = estimate.params;
  return head;
}

void Search::VerifyOpenHeads() {
  std::vector<std::vector<HeadErrors>> errors(heads_.size());
  for (const size_t sample : split_.verified) {
    const OpenSample open(*this, sample);
    const HeadVerifier verifier(runner_, samples_[sample], open.asked(), bounds_.skip.measure, spent_);
    for (int64_t i = 0; i < q_heads(); ++i) {
      const Head& head = At(i);
      if (head.settled) continue;
      errors[static_cast<size_t>(i)].push_back(verifier.Verify(i, head.setting, dense_[{sample, i}]));
      Step(head.first() ? kVerifySteps : 0);
    }
  }
  for (size_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    if (head.settled) continue;
    TakeErrors(head, errors[i]);
    work_ += verified_tiles_ * ((head.first() ? PrecisionCost(head.setting.precision) : 0) + 2 * head.setting.work);
  }
}

void Search::TakeErrors(Head& head, const std::vector<HeadErrors>& samples) const {
  std::vector<double> plain, pv, sparsity, work;
  for (const HeadErrors& errors : samples) {
    plain.push_back(errors.error);
    pv.push_back(errors.pv_error);
    sparsity.push_back(errors.sparsity);
    work.push_back(errors.work);
  }
  head.target_excess = Excess(plain, bounds_.skip.target);
  head.pv_excess = Excess(pv, bounds_.skip.pv);
  head.excess = std::max(head.target_excess, head.pv_excess);
  head.setting.sparsity = Rounded(Mean(sparsity));
  head.setting.work = Rounded(Mean(work));
  head.setting.error = Rounded(Mean(plain));
  head.setting.pv_error = Rounded(Mean(pv));
  head.setting.verified_on = static_cast<int64_t>(samples.size());
}

void Search::Decide(int64_t index) {
  Head& head = At(index);
  if (head.excess <= 1) {
    head.passed = head.setting;
    if (head.excess < kRoom && head.first()) return TryLooser(index);
    return Settle(index);
  }
  if (head.loosened) return Settle(index);  // back to what passed
  TryTighter(index);
}

void Search::TryLooser(int64_t index) {
  Head& head = At(index);
  head.loosened = true;
  const auto factor = [](double excess) {
    return std::min(kLargestStep, kAim / std::max(excess, kAim / kLargestStep));
  };
  if (!MayVerifyAgain(head, kMostWorkLooser) || !Rechoose(index, factor(head.target_excess), factor(head.pv_excess)) ||
      head.dense()) {
    Settle(index);
  }
}

void Search::TryTighter(int64_t index) {
  Head& head = At(index);
  const bool again = head.tightened < kMostTightened && std::isfinite(head.excess) && MayVerifyAgain(head, kMostWork);
  ++head.tightened;
  const auto factor = [](double excess) { return excess > 1 ? kAim / excess : 1.0; };
  if (!again || !Rechoose(index, factor(head.target_excess), factor(head.pv_excess)) || head.dense()) Settle(index);
}

// Other bounds for the calibration; true if that changed the setting. Settings lie on a grid, so a small change of the
// bounds may not reach the next one: then the change is made larger.
bool Search::Rechoose(int64_t index, double target_factor, double pv_factor) {
  constexpr int kTries = 4;
  Head& head = At(index);
  const sparge_tuned_head before = head.setting;
  for (int i = 0; i < kTries && SameSetting(head.setting, before); ++i) {
    head.pv *= pv_factor;
    head.target = std::min(head.target * target_factor, head.pv);  // PV skip adds to the error of the selection
    Require(sparge_calibration_set_bounds(calibration_.get(), index, head.target, head.pv));
    head.setting = ChosenFor(index);
  }
  return !SameSetting(head.setting, before);
}

void Search::Settle(int64_t index) {
  At(index).settled = true;
  for (const size_t sample : split_.verified) dense_.erase({sample, index});
}

bool Search::MayVerifyAgain(const Head& head, double most_work) const {
  const double more = 2 * verified_tiles_ * head.setting.work;
  return work_ + more <= most_work * all_tiles_ * static_cast<double>(q_heads());
}

double Search::DenseMs() {
  if (spent_.int8_dense_tiles == 0) {  // no head is sparse and int8: one is run for its time
    const size_t sample = split_.verified[0];
    const OpenSample open(*this, sample);
    HeadVerifier(runner_, samples_[sample], open.asked(), bounds_.skip.measure, spent_)
        .RunDense(0, SPARGE_PRECISION_INT8);
  }
  const double ms_per_tile = spent_.int8_dense_ms / std::max(spent_.int8_dense_tiles, 1.0);
  return ms_per_tile * all_tiles_ * static_cast<double>(q_heads());
}

Tuned Search::Result() {
  Tuned tuned;
  tuned.ms = spent_.ms;  // before DenseMs, which may run something
  tuned.dense_ms = DenseMs();
  for (int64_t i = 0; i < q_heads(); ++i) {
    tuned.heads.push_back(At(i).passed);
    // Of the precision alone, which no choice of tiles changes: the estimate of the calibration is good enough.
    const double round_l1 = EstimateOf(i).round_l1;
    tuned.heads.back().round_l1 = std::isfinite(round_l1) ? Rounded(std::max(round_l1, 0.0)) : 0;
  }
  return tuned;
}

}  // namespace sparge::impl

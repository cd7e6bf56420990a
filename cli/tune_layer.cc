// tune_layer.cc - calibrates on sampled query blocks, verifies in full, tightens what fails, loosens what has room.
#include "cli/tune_layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>

#include "cli/check_bounds.h"
#include "cli/choice.h"
#include "cli/problem.h"
#include "cli/report.h"

namespace sparge::cli {
namespace {

constexpr int kPasses = 2;  // of the calibration: theta and tau, then lambda
// Share of a dense run that a pass may take. A single sample is also verified in full, which needs most of the time.
constexpr double kEffort = 0.2, kEffortSingle = 0.15, kMostEffort = 0.5;
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
// sample is far beyond, and 19 of 20 new samples may be expected within the slack that `sparge check` allows. Few
// samples say little about how much samples differ, so a usual spread counts like kSpreadSamples of them.
double Excess(const std::vector<double>& errors, double bound) {
  const double mean = Mean(errors);
  if (mean == 0) return 0;
  if (!std::isfinite(mean)) return std::numeric_limits<double>::infinity();
  double squares = kSpreadSamples * (kSpread * mean) * (kSpread * mean);
  for (const double error : errors) squares += (error - mean) * (error - mean);
  const double spread = std::sqrt(squares / (kSpreadSamples + static_cast<double>(errors.size()) - 1));
  constexpr double kNineteenOfTwenty = 1.645;
  const double largest = *std::max_element(errors.begin(), errors.end());
  return std::max({mean, largest / kLargestSample, (mean + kNineteenOfTwenty * spread) / kSlack}) / bound;
}

bool SameSetting(const io::PresetHead& a, const io::PresetHead& b) {
  return a.precision == b.precision && a.select == b.select && a.params.theta == b.params.theta &&
         a.params.tau == b.params.tau && a.params.pv_skip == b.params.pv_skip;
}

}  // namespace

SampleSplit SplitSamples(const LayerCaptures& layer, uint64_t seed) {
  const size_t count = layer.samples.size();
  SampleSplit split;
  if (count == 1) return {{0}, {0}, {}};
  const size_t held_out = count <= 4 ? 1 : std::clamp<size_t>(count / 4, 1, 3);
  // std::shuffle and distributions differ between libraries; engine and seed_seq do not.
  std::vector<uint32_t> words = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (const char c : layer.name) words.push_back(static_cast<unsigned char>(c));
  std::seed_seq sequence(words.begin(), words.end());
  std::mt19937_64 random(sequence);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = 0; i < held_out; ++i) std::swap(order[i], order[i + random() % (count - i)]);
  const auto border = order.begin() + static_cast<std::ptrdiff_t>(held_out);
  split.tuning.assign(border, order.end());
  split.held_out.assign(order.begin(), border);
  // Others are verified as well: what is within the bound on average over samples need not be on each.
  split.verified.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(count, 2 + count / 4)));
  std::sort(split.tuning.begin(), split.tuning.end());
  std::sort(split.verified.begin(), split.verified.end());
  std::sort(split.held_out.begin(), split.held_out.end());
  return split;
}

int64_t TuneSteps(const LayerCaptures& layer, uint64_t seed) {
  const SampleSplit split = SplitSamples(layer, seed);
  return layer.q_heads * static_cast<int64_t>(kPasses * split.tuning.size() + kVerifySteps * split.verified.size());
}

LayerTuner::LayerTuner(const Context& context, const LayerCaptures& layer, const TuneBounds& bounds, Progress& progress,
                       std::function<void()> between)
    : context_(context),
      layer_(layer),
      bounds_(bounds),
      progress_(progress),
      between_(std::move(between)),
      split_(SplitSamples(layer, bounds.seed)),
      heads_(static_cast<size_t>(layer.q_heads)) {
  CalibrationDesc desc;
  desc.q_heads = layer.q_heads;
  desc.target_l1 = bounds.l1;
  desc.pv_l1 = bounds.l2;
  desc.round_l1 = bounds.round_l1;
  desc.seed = bounds.seed;
  calibration_ = std::make_unique<Calibration>(desc);
  for (const Sample& sample : layer.samples) all_tiles_ += static_cast<double>(sample.tiles);
  for (const size_t sample : split_.verified) verified_tiles_ += static_cast<double>(layer.samples[sample].tiles);
}

io::PresetLayer LayerTuner::Tune() {
  for (int pass = 0; pass < kPasses; ++pass) {
    Calibrate(CalibrationEffort(split_.held_out.empty() ? kEffortSingle : kEffort, TuningTokens(), kMostEffort));
    progress_.Step(layer_.q_heads * static_cast<int64_t>(split_.tuning.size()));
  }
  for (int64_t i = 0; i < layer_.q_heads; ++i) {
    Head& head = heads_[static_cast<size_t>(i)];
    head.l1 = bounds_.l1;
    head.l2 = bounds_.l2;
    head.setting = ChosenHead(calibration_->Head(i));
    head.passed = Dense(head.setting);
    if (!head.setting.dense()) continue;
    Settle(i);
    progress_.Step(kVerifySteps * static_cast<int64_t>(split_.verified.size()));
  }
  const auto open = [](const Head& head) { return !head.settled; };
  while (std::any_of(heads_.begin(), heads_.end(), open)) {
    VerifyOpenHeads();
    for (int64_t i = 0; i < layer_.q_heads; ++i) {
      if (open(heads_[static_cast<size_t>(i)])) Decide(i);
    }
  }
  MeasureTime();
  return Result();
}

int64_t LayerTuner::TuningTokens() const {
  int64_t tokens = 0;
  for (const size_t sample : split_.tuning) tokens += layer_.samples[sample].q_tokens;
  return tokens;
}

void LayerTuner::MeasureTime() {
  time_.ms = spent_.ms;
  if (spent_.int8_dense_tiles == 0) {  // no head is sparse and int8: one is run for its time
    DenseResults unused;
    HeadVerifier(context_, Load(split_.verified[0]), spent_).RunDense(0, SPARGE_PRECISION_INT8, unused);
  }
  const double ms_per_tile = spent_.int8_dense_ms / std::max(spent_.int8_dense_tiles, 1.0);
  time_.dense_ms = ms_per_tile * all_tiles_ * static_cast<double>(layer_.q_heads);
}

Problem LayerTuner::Load(size_t sample) const {
  Problem problem = LoadProblem(Verb::kCheck, Options(), layer_.samples[sample].path);
  problem.desc.predictor = bounds_.predictor;
  return problem;
}

void LayerTuner::Calibrate(double effort) {
  for (const size_t sample : split_.tuning) {
    Problem problem = Load(sample);
    problem.desc.select = SPARGE_SELECT_AUTO;
    problem.desc.calibration = calibration_->get();
    between_();
    const auto start = std::chrono::steady_clock::now();
    Plan(context_, problem.desc).Calibrate(problem.args, effort);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    spent_.ms += time.count();
    work_ += effort * static_cast<double>(layer_.samples[sample].tiles * layer_.q_heads);
  }
}

void LayerTuner::VerifyOpenHeads() {
  std::vector<std::vector<HeadErrors>> errors(heads_.size());
  for (const size_t sample : split_.verified) {
    const Problem problem = Load(sample);
    const HeadVerifier verifier(context_, problem, spent_);
    for (int64_t i = 0; i < layer_.q_heads; ++i) {
      Head& head = heads_[static_cast<size_t>(i)];
      if (head.settled) continue;
      between_();
      const bool first = head.tightened == 0 && !head.loosened;
      errors[static_cast<size_t>(i)].push_back(verifier.Verify(i, head.setting, dense_[{sample, i}]));
      if (first) progress_.Step(kVerifySteps);
    }
  }
  for (size_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    if (head.settled) continue;
    TakeErrors(head, errors[i]);
    const bool first = head.tightened == 0 && !head.loosened;
    work_ += verified_tiles_ * ((first ? PrecisionCost(head.setting.precision) : 0) + 2 * head.setting.measured.work);
  }
}

void LayerTuner::TakeErrors(Head& head, const std::vector<HeadErrors>& samples) const {
  std::vector<double> l1, l2, sparsity, work;
  for (const HeadErrors& errors : samples) {
    l1.push_back(errors.l1.RelativeL1());
    l2.push_back(errors.l2.RelativeL1());
    sparsity.push_back(Sparsity(errors.stats));
    work.push_back(Work(errors.stats));
  }
  head.l1_excess = Excess(l1, bounds_.l1);
  head.l2_excess = Excess(l2, bounds_.l2);
  head.excess = std::max(head.l1_excess, head.l2_excess);
  head.setting.measured = {Rounded(Mean(sparsity)),
                           Rounded(Mean(work)),
                           Rounded(Mean(l1)),
                           Rounded(Mean(l2)),
                           0,
                           static_cast<int64_t>(samples.size())};
}

void LayerTuner::Decide(int64_t index) {
  Head& head = heads_[static_cast<size_t>(index)];
  if (head.excess <= 1) {
    head.passed = head.setting;
    if (head.excess < kRoom && head.tightened == 0 && !head.loosened) return TryLooser(index);
    return Settle(index);
  }
  if (head.loosened) return Settle(index);  // back to what passed
  TryTighter(index);
}

void LayerTuner::TryLooser(int64_t index) {
  Head& head = heads_[static_cast<size_t>(index)];
  head.loosened = true;
  const auto factor = [](double excess) {
    return std::min(kLargestStep, kAim / std::max(excess, kAim / kLargestStep));
  };
  if (!MayVerifyAgain(head, kMostWorkLooser) || !Rechoose(index, factor(head.l1_excess), factor(head.l2_excess)) ||
      head.setting.dense()) {
    Settle(index);
  }
}

void LayerTuner::TryTighter(int64_t index) {
  Head& head = heads_[static_cast<size_t>(index)];
  const bool again = head.tightened < kMostTightened && std::isfinite(head.excess) && MayVerifyAgain(head, kMostWork);
  ++head.tightened;
  const auto factor = [](double excess) { return excess > 1 ? kAim / excess : 1.0; };
  if (!again || !Rechoose(index, factor(head.l1_excess), factor(head.l2_excess)) || head.setting.dense()) Settle(index);
}

// Other bounds for the calibration; true if that changed the setting. Settings lie on a grid, so a small change of the
// bounds may not reach the next one: then the change is made larger.
bool LayerTuner::Rechoose(int64_t index, double l1_factor, double l2_factor) {
  constexpr int kTries = 4;
  Head& head = heads_[static_cast<size_t>(index)];
  const io::PresetHead before = head.setting;
  for (int i = 0; i < kTries && SameSetting(head.setting, before); ++i) {
    head.l2 *= l2_factor;
    head.l1 = std::min(head.l1 * l1_factor, head.l2);  // PV skip adds to the error of the selection
    calibration_->SetBounds(index, head.l1, head.l2);
    head.setting = ChosenHead(calibration_->Head(index));
  }
  return !SameSetting(head.setting, before);
}

void LayerTuner::Settle(int64_t index) {
  heads_[static_cast<size_t>(index)].settled = true;
  for (const size_t sample : split_.verified) dense_.erase({sample, index});
}

bool LayerTuner::MayVerifyAgain(const Head& head, double most_work) const {
  const double more = 2 * verified_tiles_ * head.setting.measured.work;
  return work_ + more <= most_work * all_tiles_ * static_cast<double>(layer_.q_heads);
}

// A dense head has no error by definition: dense of the same precision is what errors are measured against.
io::PresetHead LayerTuner::Dense(const io::PresetHead& like) const {
  io::PresetHead head;
  head.precision = like.precision;
  head.measured.verified_on = static_cast<int64_t>(split_.verified.size());
  return head;
}

io::PresetLayer LayerTuner::Result() const {
  io::PresetLayer result{layer_.q_heads, layer_.kv_heads, layer_.qk_dim, layer_.v_dim, layer_.causal, {}, {}, {}};
  for (const size_t sample : split_.tuning) result.samples.push_back(layer_.samples[sample].name);
  for (const size_t sample : split_.held_out) result.held_out.push_back(layer_.samples[sample].name);
  for (int64_t i = 0; i < layer_.q_heads; ++i) {
    result.heads.push_back(heads_[static_cast<size_t>(i)].passed);
    // Of the precision alone, which no choice of tiles changes: the estimate of the calibration is good enough.
    const double round_l1 = calibration_->Head(i).round_l1;
    result.heads.back().measured.round_l1 = std::isfinite(round_l1) ? Rounded(std::max(round_l1, 0.0)) : 0;
  }
  return result;
}

}  // namespace sparge::cli

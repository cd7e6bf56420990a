// choice.cc - fits a preset to a problem, or calibrates for it, and sets its parameters head by head.
#include "cli/choice.h"

#include <algorithm>
#include <chrono>

#include "cli/report.h"
#include "io/captures.h"

namespace sparge::cli {
namespace {

using io::Quoted;

// Of the time of a dense run, per pass: the first finds theta and tau, the second the PV skip for them.
constexpr double kEffort = 0.25;
constexpr int kPasses = 2;

void CheckFits(const io::PresetLayer& layer, const PlanDesc& desc, const std::string& which) {
  const auto same = [&which](const char* what, int64_t preset, int64_t input) {
    if (preset == input) return;
    throw UsageError(which + " is for " + what + " " + std::to_string(preset) + ", the input has " +
                     std::to_string(input));
  };
  same("q_heads", layer.q_heads, desc.q_heads);
  same("kv_heads", layer.kv_heads, desc.kv_heads);
  same("qk_dim", layer.qk_dim, desc.qk_dim);
  same("v_dim", layer.v_dim, desc.v_dim);
  if (layer.causal != (desc.causal != 0)) {
    throw UsageError(which + " is for " + (layer.causal ? "" : "non-") + "causal attention, the input is " +
                     (layer.causal ? "not causal" : "causal"));
  }
}

void Calibrate(const Context& context, const Options& options, Problem& problem) {
  CalibrationDesc desc;
  desc.q_heads = problem.desc.q_heads;
  if (options.target_l1) desc.target_l1 = *options.target_l1;
  desc.pv_l1 = options.pv_l1.value_or(SPARGE_PV_ROOM * desc.target_l1);
  if (options.round_l1) desc.round_l1 = *options.round_l1;
  desc.seed = static_cast<uint64_t>(options.seed.value_or(0));
  const Calibration calibration(desc);
  problem.desc.calibration = calibration.get();
  const auto start = std::chrono::steady_clock::now();
  {
    Plan plan(context, problem.desc);
    const double effort = CalibrationEffort(kEffort, problem.desc.batch * problem.desc.q_tokens, 1);
    for (int pass = 0; pass < kPasses; ++pass) plan.Calibrate(problem.args, effort);
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  std::vector<io::PresetHead> heads;
  std::vector<HeadEstimate> estimates;
  for (int64_t head = 0; head < desc.q_heads; ++head) {
    estimates.push_back(calibration.Head(head));
    heads.push_back(ChosenHead(estimates.back()));
    heads.back().precision = std::min(heads.back().precision, problem.desc.precision);  // more bits have lower numbers
  }
  SetHeads(heads, problem);
  problem.per_head->estimates = std::move(estimates);
  problem.per_head->calibrate_ms = time.count();
}

}  // namespace

double CalibrationEffort(double usual, int64_t q_tokens, double most) {
  // A sample is 12 or 16 queries and costs about twice their dense time: the dense time of so many queries is that of
  // 24 to 32 samples. A choice needs a dozen, and the standard error of so few is large.
  constexpr double kQueries = 768;
  return std::clamp(kQueries / static_cast<double>(std::max<int64_t>(q_tokens, 1)), usual, most);
}

io::PresetHead ChosenHead(const HeadEstimate& estimate) {
  io::PresetHead head;
  head.precision = estimate.precision;
  if (estimate.state != SPARGE_HEAD_SPARSE) return head;
  head.select = SPARGE_SELECT_FLOOR;  // the rule of SELECT_AUTO
  head.params = estimate.params;
  // Beyond these limits nothing changes: similarities lie between 0 and 1.
  head.params.theta = head.params.theta < 0 ? -1 : std::min(head.params.theta, 1.0);
  return head;
}

void SetHeads(const std::vector<io::PresetHead>& heads, Problem& problem) {
  PerHead per_head;
  problem.desc.select = SPARGE_SELECT_FLOOR;  // for dense heads alone any rule will do
  for (const io::PresetHead& head : heads) {
    if (!head.dense()) problem.desc.select = head.select;
    per_head.params.push_back(head.params);
    per_head.precision.push_back(head.precision);
  }
  problem.per_head = std::move(per_head);
  problem.desc.heads = problem.per_head->params.data();
  problem.desc.head_precision = problem.per_head->precision.data();
  problem.desc.calibration = nullptr;
}

HeadChooser::HeadChooser(const Options& options) : options_(options) {
  if (options.preset.empty()) return;
  try {
    preset_ = io::ReadPreset(options.preset);
  } catch (const io::Error& error) {
    throw UsageError(std::string("--preset ") + error.what());
  }
  if (preset_->partial) {
    throw UsageError("--preset " + options.preset + ": is unfinished; `sparge tune` has to be continued first");
  }
}

void HeadChooser::Choose(const Context& context, const std::string& file, Problem& problem) const {
  TakePreset(file, problem);
  if (problem.desc.select != SPARGE_SELECT_AUTO) return;
  if (!problem.v) {
    throw UsageError((file.empty() ? "--v is missing: " : file + ": has no tensor v: ") + SelectionOf(options_).flag +
                     " measures errors on the result; --tau X selects by predicted mass, without values");
  }
  Calibrate(context, options_, problem);
}

void HeadChooser::TakePreset(const std::string& file, Problem& problem) const {
  if (!preset_) return;
  const std::string name = options_.layer.empty() ? io::LayerOf(file) : options_.layer;
  const std::string where = options_.layer.empty() ? file + ": " : "";
  try {
    const io::PresetLayer& layer = io::FindLayer(*preset_, name, options_.preset);
    CheckFits(layer, problem.desc, where + "--preset " + options_.preset + ": layer " + Quoted(name));
    problem.desc.predictor = preset_->predictor;
    SetHeads(layer.heads, problem);
  } catch (const io::Error& error) {
    throw UsageError(where + "--preset " + error.what());
  }
  problem.per_head->preset = options_.preset;
  problem.per_head->layer = name;
}

std::string EstimatesText(const Problem& problem) {
  if (!problem.per_head || problem.per_head->estimates.empty()) return "";
  const std::vector<HeadEstimate>& estimates = problem.per_head->estimates;
  std::string text = Format("calibrated in %.1f ms:", problem.per_head->calibrate_ms);
  for (size_t i = 0; i < estimates.size(); ++i) {
    const HeadEstimate& e = estimates[i];
    const char* precision = io::PrecisionName(e.precision);
    text += Format("%s head %zu %s ", i == 0 ? "" : ";", i, precision);
    text += e.state == SPARGE_HEAD_SPARSE ? Format("sparsity %.1f %%, L1 %.2g", 100 * e.sparsity, e.pv_l1) : "dense";
  }
  return text + "\n";
}

}  // namespace sparge::cli

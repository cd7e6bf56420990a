// choice.cc - fits a preset to a call, and tells what a layer of the library chose for one.
#include "cli/choice.h"

#include <algorithm>

#include "cli/report.h"
#include "io/captures.h"

namespace sparge::cli {
namespace {

using io::Quoted;

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

// What a calibration chose for a head.
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

// Makes `call` a plan of these heads, one per query head.
void SetHeads(const std::vector<io::PresetHead>& heads, LoadedCall& call) {
  PerHead per_head;
  call.desc.select = SPARGE_SELECT_FLOOR;  // for dense heads alone any rule will do
  for (const io::PresetHead& head : heads) {
    if (!head.dense()) call.desc.select = head.select;
    per_head.params.push_back(head.params);
    per_head.precision.push_back(head.precision);
  }
  call.per_head = std::move(per_head);
  call.desc.heads = call.per_head->params.data();
  call.desc.head_precision = call.per_head->precision.data();
}

}  // namespace

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

void HeadChooser::TakePreset(const std::string& file, LoadedCall& call) const {
  if (!preset_) return;
  const std::string name = options_.layer.empty() ? io::LayerOf(file) : options_.layer;
  const std::string where = options_.layer.empty() ? file + ": " : "";
  try {
    const io::PresetLayer& layer = io::FindLayer(*preset_, name, options_.preset);
    CheckFits(layer, call.desc, where + "--preset " + options_.preset + ": layer " + Quoted(name));
    call.desc.predictor = preset_->predictor;
    SetHeads(layer.heads, call);
  } catch (const io::Error& error) {
    throw UsageError(where + "--preset " + error.what());
  }
  call.per_head->preset = options_.preset;
  call.per_head->layer = name;
}

void TakeChoice(const Layer& layer, int64_t calls, LoadedCall& call) {
  const auto least = static_cast<sparge_precision>(call.automatic->layer.precision);
  const std::vector<std::vector<HeadEstimate>> kinds = layer.Heads();  // of calls: all were of one kind
  PerHead per_head;
  per_head.calls = calls;
  if (!kinds.empty()) per_head.estimates = kinds[0];
  for (int64_t i = 0; i < call.desc.q_heads; ++i) {
    const io::PresetHead head = kinds.empty() ? io::PresetHead() : ChosenHead(kinds[0][static_cast<size_t>(i)]);
    per_head.params.push_back(head.params);
    per_head.precision.push_back(std::min(head.precision, least));  // more bits have lower numbers
  }
  call.per_head = std::move(per_head);
}

std::string ErrorText(const HeadEstimate& estimate) {
  return estimate.known != 0 ? Format("%.2e", estimate.pv_error) : Format("<%.1e", estimate.limit);
}

std::string ChoiceText(const LoadedCall& call) {
  if (!call.automatic || !call.per_head) return "";
  const LayerDesc& layer = call.automatic->layer;
  const std::vector<HeadEstimate>& estimates = call.per_head->estimates;
  if (estimates.empty()) {
    return BoundsOf(layer).target == 0
               ? "a target of 0: every tile\n"
               : Format(
                     "every tile: %lld queries on %lld keys; tiles are skipped with more than %d "
                     "queries and at least %lld keys\n",
                     static_cast<long long>(call.desc.q_tokens), static_cast<long long>(call.desc.kv_tokens),
                     SPARGE_FEW_QUERIES, static_cast<long long>(layer.min_keys));
  }
  std::string text = Format("call %lld of its layer:", static_cast<long long>(call.per_head->calls));
  bool unknown = false;
  for (size_t i = 0; i < estimates.size(); ++i) {
    const HeadEstimate& e = estimates[i];
    text += Format("%s head %zu %s ", i == 0 ? "" : ";", i, io::PrecisionName(call.per_head->precision[i]));
    text += e.state == SPARGE_HEAD_SPARSE ? Format("sparsity %.1f %%, error %s", 100 * e.sparsity, ErrorText(e).c_str())
            : e.state == SPARGE_HEAD_DENSE ? "dense"
                                           : "dense, too few rows measured yet";
    unknown = unknown || e.state == SPARGE_HEAD_UNKNOWN;
  }
  return text + (unknown ? " (--warm N makes N calls before this one)\n" : "\n");
}

}  // namespace sparge::cli

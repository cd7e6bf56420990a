// report.cc - turns statistics and parameters into JSON and text.
#include "cli/report.h"

#include <cmath>

#include "io/preset.h"

namespace sparge::cli {
namespace {

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
}

const char* SelectName(sparge_select select) {
  switch (select) {
    case SPARGE_SELECT_ALL:
      return "all";
    case SPARGE_SELECT_CDF:
      return "cdf";
    case SPARGE_SELECT_TOPK:
      return "topk";
    case SPARGE_SELECT_MAP:
      return "map";
    case SPARGE_SELECT_AUTO:
      return "auto";
    case SPARGE_SELECT_FLOOR:
      return "floor";
  }
  return "";
}

bool HasTau(const PlanDesc& desc) { return desc.select == SPARGE_SELECT_CDF || desc.select == SPARGE_SELECT_FLOOR; }
bool Predicted(const PlanDesc& desc) { return HasTau(desc) || desc.select == SPARGE_SELECT_TOPK; }
sparge_predictor PredictorInForce(const PlanDesc& desc) {
  if (desc.predictor != SPARGE_PREDICT_DEFAULT) return desc.predictor;
  return desc.select == SPARGE_SELECT_FLOOR ? SPARGE_PREDICT_KEYS : SPARGE_PREDICT_PAPER;
}
bool Uniform(const LoadedCall& call) { return !call.per_head; }
const char* SelectName(const LoadedCall& call) {
  if (Uniform(call)) return SelectName(call.desc.select);
  return call.per_head->preset.empty() ? "auto" : "preset";
}
Json PvSkip(const sparge_head_params& params) {
  return std::isinf(params.pv_skip) ? Json("off") : Json(params.pv_skip);
}
bool KeepsSink(const PlanDesc& desc) { return desc.keep_sink < 0 ? desc.causal != 0 : desc.keep_sink != 0; }
double ScaleInForce(const PlanDesc& desc) {
  return desc.scale != 0 ? desc.scale : 1.0 / std::sqrt(static_cast<double>(desc.qk_dim));
}
int64_t OffsetInForce(const PlanDesc& desc) {
  return desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT ? desc.kv_tokens - desc.q_tokens : desc.query_offset;
}

Json EstimateJson(const HeadEstimate& e) {
  Json json = {{"samples", e.samples}};
  const auto add = [&json](const std::string& name, double value, double standard_error) {
    json[name] = Number(value);
    json[name + "_error"] = Number(standard_error);
  };
  const std::string measure = sparge_measure_name(e.measure);
  add(measure, e.error, e.error_se);
  add("pv_" + measure, e.pv_error, e.pv_error_se);
  json["known"] = e.known != 0;
  json["limit"] = Number(e.limit);
  add("round_l1", e.round_l1, e.round_l1_error);
  json["sparsity"] = Number(e.sparsity);
  json["work"] = Number(e.work);
  return json;
}

// Where the parameters of the heads come from, and what they are. Dense: tau 1 and no PV skip.
void AddPerHead(Json& json, const PerHead& per_head) {
  const bool preset = !per_head.preset.empty();
  json["preset"] = preset ? Json(per_head.preset) : Json(nullptr);
  json["layer"] = preset ? Json(per_head.layer) : Json(nullptr);
  if (!preset) json["calls"] = per_head.calls;
  json["head_parameters"] = Json::array();
  for (size_t i = 0; i < per_head.params.size(); ++i) {
    const sparge_head_params& params = per_head.params[i];
    Json head = {{"head", i},
                 {"precision", io::PrecisionName(per_head.precision[i])},
                 {"theta", params.theta},
                 {"tau", params.tau},
                 {"pv_skip", PvSkip(params)}};
    if (!preset) head["estimate"] = per_head.estimates.empty() ? Json(nullptr) : EstimateJson(per_head.estimates[i]);
    json["head_parameters"].push_back(std::move(head));
  }
}

// What a layer was told.
void AddBounds(Json& json, const Automatic& automatic) {
  const LayerDesc& layer = automatic.layer;
  const Bounds bounds = BoundsOf(layer);
  json["measure"] = sparge_measure_name(bounds.measure);
  json[io::TargetName(bounds.measure)] = bounds.target;
  json[io::PvName(bounds.measure)] = bounds.pv;
  json["round_l1"] = layer.round_l1;
  json["seed"] = layer.seed;
}

Json Shapes(const LoadedCall& call) {
  std::vector<int64_t> o = call.q.shape;
  o.back() = call.desc.v_dim;
  Json shapes = {{"q", call.q.shape}, {"k", call.k.shape}};
  if (call.v) {
    shapes["v"] = call.v->shape;
    shapes["o"] = o;
  }
  shapes["map"] = {call.desc.batch, call.desc.q_heads, call.q_blocks(), call.k_blocks()};
  return shapes;
}

std::string UniformText(const PlanDesc& desc) {
  std::string text = std::string(io::PrecisionName(desc.precision)) + ", " + SelectName(desc.select);
  if (HasTau(desc)) text += Format(" tau %g", desc.params.tau);
  if (desc.select == SPARGE_SELECT_TOPK) text += Format(" %g", desc.params.topk);
  if (Predicted(desc)) text += Format(" theta %g", desc.params.theta);
  return text + (std::isinf(desc.params.pv_skip) ? ", pv-skip off" : Format(", pv-skip %g", desc.params.pv_skip));
}

}  // namespace

double Sparsity(const sparge_head_stats& stats) { return 1.0 - Share(stats.qk_computed, stats.qk_eligible); }

double Work(const sparge_head_stats& stats) {
  return 0.5 * (Share(stats.qk_computed, stats.qk_eligible) + Share(stats.pv_computed, stats.pv_eligible));
}

Json Number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

void AddTiles(Json& json, const sparge_head_stats& stats) {
  json["qk_tiles"] = {{"eligible", stats.qk_eligible}, {"computed", stats.qk_computed}};
  json["pv_tiles"] = {{"eligible", stats.pv_eligible}, {"computed", stats.pv_computed}};
  json["sparsity"] = Sparsity(stats);
  json["work"] = Work(stats);
}

void AddParameters(Json& json, const LoadedCall& call) {
  const PlanDesc desc = call.InForce();
  const Json none = nullptr;
  const bool placed = desc.causal != 0 || desc.window != 0;  // else the offset means nothing
  const bool uniform = Uniform(call);
  json["precision"] = uniform ? Json(io::PrecisionName(desc.precision)) : none;
  json["select"] = SelectName(call);
  json["predictor"] = Predicted(desc) ? Json(io::PredictorName(PredictorInForce(desc))) : none;
  json["tau"] = uniform && HasTau(desc) ? Json(desc.params.tau) : none;
  json["topk"] = desc.select == SPARGE_SELECT_TOPK ? Json(desc.params.topk) : none;
  json["theta"] = uniform && Predicted(desc) ? Json(desc.params.theta) : none;
  json["pv_skip"] = uniform ? PvSkip(desc.params) : none;
  if (call.automatic) AddBounds(json, *call.automatic);
  if (!uniform) AddPerHead(json, *call.per_head);
  json["sink"] = Predicted(desc) ? Json(KeepsSink(desc)) : none;
  json["causal"] = desc.causal != 0;
  json["query_offset"] = placed ? Json(OffsetInForce(desc)) : none;
  json["window"] = desc.window != 0 ? Json(desc.window) : none;
  json["scale"] = ScaleInForce(desc);
  json["mask"] = call.mask ? Json(io::DTypeName(call.mask->dtype)) : none;
  json["grid"] = call.grid ? Json(call.grid->sides) : none;
  json["text_tokens"] = call.grid ? Json(call.grid->text.count) : none;
  json["text_after"] = call.grid ? Json(call.grid->text.after) : none;
  json["order"] = call.grid ? Json(call.grid->hilbert ? "hilbert" : "raster") : none;
  json["block_q"] = SPARGE_BLOCK_Q;
  json["block_k"] = SPARGE_BLOCK_K;
  json["shapes"] = Shapes(call);
}

Json RunReport(const LoadedCall& call, const Stats& stats) {
  Json json;
  json["time_ms"] = Number(stats.total_ms);
  json["stages_ms"] = {{"pack", Number(stats.pack_ms)},
                       {"predict", Number(stats.predict_ms)},
                       {"schedule", Number(stats.schedule_ms)},
                       {"kernel", Number(stats.kernel_ms)},
                       {"calibrate", Number(stats.calibrate_ms)}};
  json["isa"] = stats.isa != nullptr ? stats.isa : "";
  json["threads"] = stats.threads;
  AddTiles(json, stats.total);
  AddParameters(json, call);
  json["group_rows"] = stats.group_rows;
  return json;
}

std::string Dump(const Json& json) {
  // File names need not be UTF-8; JSON must be.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ParameterText(const LoadedCall& call) {
  const PlanDesc desc = call.InForce();
  std::string text = Uniform(call) ? UniformText(desc) : SelectName(call);
  if (!Uniform(call) && !call.per_head->preset.empty()) {
    text += " " + call.per_head->preset + ", layer " + call.per_head->layer;
  }
  if (desc.causal != 0) text += ", causal";
  if (desc.window != 0) text += Format(", window %lld", static_cast<long long>(desc.window));
  if (call.mask) text += ", mask";
  if (call.grid && call.grid->hilbert) text += ", Hilbert order of " + io::GridText(call.grid->sides);
  return text;
}

std::string NotesText(const LoadedCall& call, const std::string& file) {
  if (call.notes.empty()) return "";
  std::string text;
  for (const std::string& note : call.notes) text += (text.empty() ? "" : ", ") + note;
  return file + ": from its metadata: " + text + "\n";
}

}  // namespace sparge::cli

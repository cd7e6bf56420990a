// report.cc - turns statistics and parameters into JSON and text.
#include "cli/report.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace sparge::cli {
namespace {

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
}

const char* PrecisionName(sparge_precision precision) {
  return precision == SPARGE_FP32 ? "fp32" : precision == SPARGE_INT16 ? "int16" : "int8";
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
  }
  return "";
}

bool Predicted(const PlanDesc& desc) { return desc.select == SPARGE_SELECT_CDF || desc.select == SPARGE_SELECT_TOPK; }
bool KeepsSink(const PlanDesc& desc) { return desc.keep_sink < 0 ? desc.causal != 0 : desc.keep_sink != 0; }
double ScaleInForce(const PlanDesc& desc) {
  return desc.scale != 0 ? desc.scale : 1.0 / std::sqrt(static_cast<double>(desc.qk_dim));
}
int64_t OffsetInForce(const PlanDesc& desc) {
  return desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT ? desc.kv_tokens - desc.q_tokens : desc.query_offset;
}

Json Shapes(const Problem& problem) {
  std::vector<int64_t> o = problem.q.shape;
  o.back() = problem.desc.v_dim;
  Json shapes = {{"q", problem.q.shape}, {"k", problem.k.shape}};
  if (problem.v) {
    shapes["v"] = problem.v->shape;
    shapes["o"] = o;
  }
  shapes["map"] = {problem.desc.batch, problem.desc.q_heads, problem.q_blocks(), problem.k_blocks()};
  return shapes;
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

void AddParameters(Json& json, const Problem& problem) {
  const PlanDesc& desc = problem.desc;
  const Json none = nullptr;
  const bool placed = desc.causal != 0 || desc.window != 0;  // else the offset means nothing
  json["precision"] = PrecisionName(desc.precision);
  json["select"] = SelectName(desc.select);
  json["tau"] = desc.select == SPARGE_SELECT_CDF ? Json(desc.params.tau) : none;
  json["topk"] = desc.select == SPARGE_SELECT_TOPK ? Json(desc.params.topk) : none;
  json["theta"] = Predicted(desc) ? Json(desc.params.theta) : none;
  json["pv_skip"] = std::isinf(desc.params.pv_skip) ? Json("off") : Json(desc.params.pv_skip);
  json["sink"] = Predicted(desc) ? Json(KeepsSink(desc)) : none;
  json["causal"] = desc.causal != 0;
  json["query_offset"] = placed ? Json(OffsetInForce(desc)) : none;
  json["window"] = desc.window != 0 ? Json(desc.window) : none;
  json["scale"] = ScaleInForce(desc);
  json["mask"] = problem.mask ? Json(io::DTypeName(problem.mask->dtype)) : none;
  json["grid"] = problem.grid ? Json(problem.grid->sides) : none;
  json["text_tokens"] = problem.grid ? Json(problem.grid->text.count) : none;
  json["text_after"] = problem.grid ? Json(problem.grid->text.after) : none;
  json["order"] = problem.grid ? Json(problem.grid->hilbert ? "hilbert" : "raster") : none;
  json["block_q"] = SPARGE_BLOCK_Q;
  json["block_k"] = SPARGE_BLOCK_K;
  json["shapes"] = Shapes(problem);
}

Json RunReport(const Problem& problem, const Stats& stats) {
  Json json;
  json["time_ms"] = Number(stats.total_ms);
  json["stages_ms"] = {{"pack", Number(stats.pack_ms)},
                       {"predict", Number(stats.predict_ms)},
                       {"schedule", Number(stats.schedule_ms)},
                       {"kernel", Number(stats.kernel_ms)}};
  json["isa"] = stats.isa != nullptr ? stats.isa : "";
  json["threads"] = stats.threads;
  AddTiles(json, stats.total);
  AddParameters(json, problem);
  json["group_rows"] = stats.group_rows;
  return json;
}

std::string Dump(const Json& json) {
  // File names need not be UTF-8; JSON must be.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ParameterText(const Problem& problem) {
  const PlanDesc& desc = problem.desc;
  std::string text = std::string(PrecisionName(desc.precision)) + ", " + SelectName(desc.select);
  if (desc.select == SPARGE_SELECT_CDF) text += Format(" tau %g", desc.params.tau);
  if (desc.select == SPARGE_SELECT_TOPK) text += Format(" %g", desc.params.topk);
  if (Predicted(desc)) text += Format(" theta %g", desc.params.theta);
  text += std::isinf(desc.params.pv_skip) ? ", pv-skip off" : Format(", pv-skip %g", desc.params.pv_skip);
  if (desc.causal != 0) text += ", causal";
  if (desc.window != 0) text += Format(", window %lld", static_cast<long long>(desc.window));
  if (problem.mask) text += ", mask";
  if (problem.grid && problem.grid->hilbert) text += ", Hilbert order of " + GridText(problem.grid->sides);
  return text;
}

std::string NotesText(const Problem& problem, const std::string& file) {
  if (problem.notes.empty()) return "";
  std::string text;
  for (const std::string& note : problem.notes) text += (text.empty() ? "" : ", ") + note;
  return file + ": from its metadata: " + text + "\n";
}

std::string Format(const char* format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  const int size = std::vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::string text(size > 0 ? static_cast<size_t>(size) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

}  // namespace sparge::cli

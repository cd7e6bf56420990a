// bench_report.cc - formats the results of `sparge bench`.
#include "cli/bench_report.h"

#include <algorithm>
#include <cmath>

#include "cli/report.h"

namespace sparge::cli {
namespace {

double Best(const BenchResult& result) {
  return result.times_ms.empty() ? 0 : *std::min_element(result.times_ms.begin(), result.times_ms.end());
}

double Kept(const BenchResult& result) { return 1 - Sparsity(result.tiles); }

// 10^9 per second in the best run; 0 if there is none.
double Rate(const BenchResult& result, double flops) {
  const double best_ms = Best(result);
  return best_ms > 0 ? flops / best_ms * 1e-6 : 0;
}

double PeakShare(const BenchResult& result) {
  return result.peak_gops > 0 ? Rate(result, result.computed_flops) / result.peak_gops : 0;
}

// Four digits that count, whatever the size.
std::string Short(double value) {
  return Format("%.*f", value >= 1000 ? 0 : value >= 100 ? 1 : value >= 10 ? 2 : 3, value);
}

// A figure, or "-" where there is none.
std::string OrDash(bool known, const std::string& text) { return known ? text : "-"; }

// What all cases share: these flags take no lists.
std::string CommonText(const BenchReport& report) {
  const BenchCase& c = report.results.front().c;
  std::string text = report.cpu + ", " + report.isa + "\n";
  text += Format("%lld head%s", static_cast<long long>(c.heads), c.heads == 1 ? "" : "s");
  if (c.kv_heads != c.heads) text += Format(" on %lld of keys", static_cast<long long>(c.kv_heads));
  text += c.queries == c.tokens ? ", queries = tokens" : Format(", queries %lld", static_cast<long long>(c.queries));
  text += std::string(", ") + NameOf(c.dtype) + " tensors, " + (c.causal ? "causal" : "not causal");
  return text + Format(", seed %llu\n", static_cast<unsigned long long>(c.seed));
}

std::string PeakText(const BenchReport& report) {
  std::string text;
  for (const auto& [key, peak] : report.peaks) {
    if (peak.gops == 0) continue;
    text += Format("measured peak, %2d thread%s %-5s %6s G%s/s (%s)\n", key.first, key.first == 1 ? ", " : "s,",
                   NameOf(key.second), Short(peak.gops).c_str(), key.second == SPARGE_PRECISION_FP32 ? "FLOP" : "OP",
                   peak.text);
  }
  return text;
}

std::string TimeLine(size_t number, const BenchResult& result) {
  const BenchCase& c = result.c;
  const bool timed = !result.times_ms.empty();
  const bool checked = result.verdict.has_value();
  std::string line = Format("%3zu %7lld %4lld %-5s %-11s %7d", number, static_cast<long long>(c.tokens),
                            static_cast<long long>(c.dim), NameOf(c.precision), SelectText(c).c_str(), c.threads);
  line += Format(" %8s %8s", timed ? Short(Best(result)).c_str() : "WRONG",
                 OrDash(timed, Short(Median(result.times_ms))).c_str());
  line += Format(" %6s %4.0f%%",
                 OrDash(result.times_ms.size() > 2, Format("%.1f%%", 100 * Spread(result.times_ms))).c_str(),
                 100 * Kept(result));
  line += Format(" %7s %5s", OrDash(timed && checked, Short(Rate(result, result.computed_flops))).c_str(),
                 OrDash(timed && result.peak_gops > 0,
                        Format("%.*f%%", PeakShare(result) < 0.0995 ? 1 : 0, 100 * PeakShare(result)))
                     .c_str());
  return line + Format(" %9s\n", OrDash(checked, checked ? Format("%.1e", result.verdict->relative_l1) : "").c_str());
}

std::string StageLine(size_t number, const BenchResult& result) {
  const StageTimes& stages = result.stages;
  std::string line = Format("%3zu", number);
  for (const auto* times_ms : {&stages.pack_ms, &stages.predict_ms, &stages.schedule_ms, &stages.kernel_ms}) {
    line += Format(" %8s", OrDash(!times_ms->empty(), Short(Median(*times_ms))).c_str());
  }
  line += Format(" %9s %4zu", OrDash(!result.times_ms.empty(), Short(Rate(result, result.dense_flops))).c_str(),
                 result.times_ms.size());
  if (!result.verdict) return line + "   not checked\n";
  const Verdict& v = *result.verdict;
  const std::string rows =
      Format("%lld of %lld", static_cast<long long>(v.rows_checked), static_cast<long long>(v.rows));
  return line + Format(" %16s %8.1e %9.1e %9.1e\n", rows.c_str(), v.bound, v.worst_row, v.row_bound);
}

Json StagesJson(const StageTimes& stages) {
  return {{"pack", Median(stages.pack_ms)},
          {"predict", Median(stages.predict_ms)},
          {"schedule", Median(stages.schedule_ms)},
          {"kernel", Median(stages.kernel_ms)}};
}

Json VerdictJson(const Verdict& v) {
  return {{"relative_l1", Number(v.relative_l1)},
          {"bound", v.bound},
          {"worst_row", Number(v.worst_row)},
          {"row_bound", v.row_bound},
          {"rows_checked", v.rows_checked},
          {"rows", v.rows},
          {"passed", v.passed}};
}

Json ParametersJson(const BenchCase& c) {
  const Json none = nullptr;
  return {{"tokens", c.tokens},
          {"queries", c.queries},
          {"dim", c.dim},
          {"heads", c.heads},
          {"kv_heads", c.kv_heads},
          {"causal", c.causal},
          {"dtype", NameOf(c.dtype)},
          {"data", NameOf(c.data)},
          {"seed", c.seed},
          {"precision", NameOf(c.precision)},
          {"select", NameOf(c.select)},
          {"tau", c.select == BenchSelect::kCdf ? Json(c.share) : none},
          {"topk", c.select == BenchSelect::kTopk ? Json(c.share) : none},
          {"keep", c.select == BenchSelect::kRandom ? Json(c.share) : none},
          {"pv_skip", std::isinf(c.pv_skip) ? Json("off") : Json(c.pv_skip)},
          {"threads", c.threads}};
}

Json ResultJson(const BenchResult& result, const std::string& repeat) {
  const Json none = nullptr;
  const bool timed = !result.times_ms.empty();
  const bool computed = timed && result.verdict;
  Json json = ParametersJson(result.c);
  json["min_ms"] = timed ? Json(Best(result)) : none;
  json["median_ms"] = timed ? Json(Median(result.times_ms)) : none;
  json["spread"] = timed ? Json(Spread(result.times_ms)) : none;
  json["times_ms"] = result.times_ms;
  json["stages_ms"] = timed ? StagesJson(result.stages) : none;
  json["dense_gflop"] = result.dense_flops * 1e-9;
  json["dense_gflops"] = timed ? Json(Rate(result, result.dense_flops)) : none;
  json["computed_gflops"] = computed ? Json(Rate(result, result.computed_flops)) : none;
  json["peak_gops"] = result.peak_gops > 0 ? Json(result.peak_gops) : none;
  json["peak_share"] = computed && result.peak_gops > 0 ? Json(PeakShare(result)) : none;
  json["kept"] = Kept(result);
  AddTiles(json, result.tiles);
  json["verification"] = result.verdict ? VerdictJson(*result.verdict) : none;
  json["steady"] = result.steady;
  json["passed"] = result.passed();
  json["repeat"] = repeat;
  return json;
}

}  // namespace

bool BenchReport::passed() const {
  return std::all_of(results.begin(), results.end(), [](const BenchResult& result) { return result.passed(); });
}

std::string BenchText(const BenchReport& report) {
  std::string text = CommonText(report) + PeakText(report) + "\n";
  text += Format("%3s %7s %4s %-5s %-11s %7s %8s %8s %6s %5s %7s %5s %9s\n", "no", "tokens", "dim", "prec.", "select",
                 "threads", "min ms", "median", "spread", "kept", "GFLOP/s", "peak", "error");
  for (size_t i = 0; i < report.results.size(); ++i) text += TimeLine(i + 1, report.results[i]);
  text += Format("\n%3s %35s %9s %4s %16s %8s %9s %9s\n", "", "median ms of each stage", "dense", "", "rows", "error",
                 "worst", "bound of");
  text += Format("%3s %8s %8s %8s %8s %9s %4s %16s %8s %9s %9s\n", "no", "pack", "predict", "schedule", "kernel",
                 "GFLOP/s", "runs", "checked", "bound", "row", "a row");
  for (size_t i = 0; i < report.results.size(); ++i) text += StageLine(i + 1, report.results[i]);
  text += "\nTo repeat a case alone:\n";
  for (size_t i = 0; i < report.repeat.size(); ++i) text += Format("%3zu %s\n", i + 1, report.repeat[i].c_str());
  return text;
}

std::string BenchJson(const BenchReport& report) {
  Json machine = {{"cpu", report.cpu}, {"isa", report.isa}, {"threads", report.all_threads}, {"peaks", Json::array()}};
  for (const auto& [key, peak] : report.peaks) {
    if (peak.gops == 0) continue;
    machine["peaks"].push_back(
        {{"threads", key.first}, {"precision", NameOf(key.second)}, {"gops", peak.gops}, {"instructions", peak.text}});
  }
  Json json = {{"version", sparge_version()}, {"machine", std::move(machine)}, {"cases", Json::array()}};
  for (size_t i = 0; i < report.results.size(); ++i) {
    json["cases"].push_back(ResultJson(report.results[i], report.repeat[i]));
  }
  json["passed"] = report.passed();
  return Dump(json);
}

std::string BenchFailures(const BenchReport& report) {
  std::string text;
  for (size_t i = 0; i < report.results.size(); ++i) {
    const BenchResult& result = report.results[i];
    if (result.passed()) continue;
    text += Format("sparge bench: case %zu is wrong: ", i + 1);
    if (result.verdict && !result.verdict->passed) {
      const Verdict& v = *result.verdict;
      text += Format("relative L1 %.1e (bound %.1e), worst row %.1e (bound %.1e)", v.relative_l1, v.bound, v.worst_row,
                     v.row_bound);
    } else {
      text += "a later run gave other bits than the checked one";
    }
    text += "; repeat with: " + report.repeat[i] + "\n";
  }
  return text;
}

}  // namespace sparge::cli

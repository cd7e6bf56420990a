// tune_report.cc - sums up the heads of each layer.
#include "cli/tune_report.h"

#include <algorithm>

namespace sparge::cli {
namespace {

struct LayerSummary {
  int64_t heads = 0, sparse = 0, dense = 0, int16 = 0;
  double sparsity = 0, work = 0;  // means
  double worst = 0, worst_pv = 0, worst_round_l1 = 0;
};

LayerSummary Summarise(const io::PresetLayer& layer) {
  LayerSummary sum;
  sum.heads = layer.q_heads;
  for (const io::PresetHead& head : layer.heads) {
    (head.dense() ? sum.dense : sum.sparse) += 1;
    sum.int16 += head.precision == SPARGE_PRECISION_INT16 ? 1 : 0;
    sum.sparsity += head.measured.sparsity / static_cast<double>(sum.heads);
    sum.work += head.measured.work / static_cast<double>(sum.heads);
    sum.worst = std::max(sum.worst, head.measured.error);
    sum.worst_pv = std::max(sum.worst_pv, head.measured.pv_error);
    sum.worst_round_l1 = std::max(sum.worst_round_l1, head.measured.round_l1);
  }
  return sum;
}

io::TuneTime TotalTime(const TuneReport& report) {
  io::TuneTime total;
  for (const auto& [name, time] : report.times) {
    total.ms += time.ms;
    total.dense_ms += time.dense_ms;
  }
  return total;
}

// Nothing was measured if all layers were there already.
Json RatioJson(const io::TuneTime& time) { return time.dense_ms > 0 ? Json(time.ms / time.dense_ms) : Json(nullptr); }

}  // namespace

std::string TuneText(const TuneReport& report) {
  size_t width = 5;
  for (const auto& [name, layer] : report.preset.layers) width = std::max(width, name.size());
  width = std::min<size_t>(width, 40);
  const int w = static_cast<int>(width);
  const std::string measure = sparge_measure_name(report.preset.bounds.measure);
  std::string text = Format("%-*s %6s %6s %6s %6s %9s %9s %11s %9s\n", w, "layer", "heads", "sparse", "dense", "int16",
                            "sparsity", ("worst " + measure).c_str(), ("worst pv_" + measure).c_str(), "time");
  for (const auto& [name, layer] : report.preset.layers) {
    const LayerSummary sum = Summarise(layer);
    const auto time = report.times.find(name);
    const std::string shown = name.size() <= width ? name : "..." + name.substr(name.size() - width + 3);
    text +=
        Format("%-*s %6lld %6lld %6lld %6lld %7.1f %% %9.3g %11.3g %9s\n", w, shown.c_str(),
               static_cast<long long>(sum.heads), static_cast<long long>(sum.sparse), static_cast<long long>(sum.dense),
               static_cast<long long>(sum.int16), 100 * sum.sparsity, sum.worst, sum.worst_pv,
               time == report.times.end() ? "earlier" : Format("%.2f s", time->second.ms / 1e3).c_str());
  }
  const io::TuneTime total = TotalTime(report);
  if (total.dense_ms > 0) {
    text += Format("%.2f s in the library: %.2f times a dense int8 pass over the same tensors\n", total.ms / 1e3,
                   total.ms / total.dense_ms);
  }
  if (report.preset.layers.empty()) return text;
  return text + "use it: sparge run --preset " + report.file + " --layer " + report.preset.layers.begin()->first +
         " --tensors FILE --out o.npy; check it: sparge check --preset " + report.file + " CAPTURES\n";
}

Json TuneJson(const TuneReport& report) {
  const io::Preset& preset = report.preset;
  const io::PresetBounds& bounds = preset.bounds;
  const std::string measure = sparge_measure_name(bounds.measure);
  Json json = {{"preset", report.file},
               {"isa", report.isa},
               {"threads", report.threads},
               {"bounds",
                {{io::TargetName(bounds.measure), bounds.target},
                 {io::PvName(bounds.measure), bounds.pv},
                 {"round_l1", bounds.round_l1}}},
               {"predictor", io::PredictorName(preset.predictor)},
               {"seed", preset.seed},
               {"layers", Json::array()}};
  for (const auto& [name, layer] : preset.layers) {
    const LayerSummary sum = Summarise(layer);
    const auto time = report.times.find(name);
    const bool resumed = time == report.times.end();
    json["layers"].push_back({{"layer", name},
                              {"samples", layer.samples},
                              {"held_out", layer.held_out},
                              {"heads", sum.heads},
                              {"sparse", sum.sparse},
                              {"dense", sum.dense},
                              {"int16", sum.int16},
                              {"mean_sparsity", sum.sparsity},
                              {"mean_work", sum.work},
                              {"worst_" + measure, sum.worst},
                              {"worst_pv_" + measure, sum.worst_pv},
                              {"worst_round_l1", sum.worst_round_l1},
                              {"resumed", resumed},
                              {"time_ms", resumed ? Json(nullptr) : Json(time->second.ms)},
                              {"dense_ms", resumed ? Json(nullptr) : Json(time->second.dense_ms)}});
  }
  const io::TuneTime total = TotalTime(report);
  json["time_ms"] = total.ms;
  json["dense_ms"] = total.dense_ms;
  json["time_ratio"] = RatioJson(total);
  json["wall_ms"] = report.wall_ms;
  return json;
}

}  // namespace sparge::cli

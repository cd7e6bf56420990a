#include "ggml/statistics.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>

namespace sparge::ggml {
namespace {

// __fattn__-2 before __fattn__-10.
bool ByNumber(const LayerReport& a, const LayerReport& b) {
  return a.name.size() != b.name.size() ? a.name.size() < b.name.size() : a.name < b.name;
}

double Mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}
double Most(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

void PrintLine(std::FILE* file, const LayerReport& layer) {
  std::fprintf(file, "%-20s %6lld %10.1f %7.1f%%", layer.name.c_str(), static_cast<long long>(layer.totals.calls),
               layer.totals.total_ms, 100 * layer.totals.Sparsity());
  const auto print = [file](const std::vector<double>& of, double value) {
    of.empty() ? std::fprintf(file, " %8s", "-") : std::fprintf(file, " %8.4f", value);
  };
  print(layer.errors, Mean(layer.errors));
  print(layer.limits, Most(layer.limits));
  print(layer.rounding, Mean(layer.rounding));
  std::fprintf(file, "\n");
}

}  // namespace

void PrintStatistics(const std::string& where, const char* isa, int threads, std::vector<LayerReport> layers) {
  if (layers.empty()) return;
  std::FILE* file = where == "stderr" ? stderr : std::fopen(where.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "sparge: SPARGE_STATS=%s cannot be written: %s\n", where.c_str(), std::strerror(errno));
    return;
  }
  std::sort(layers.begin(), layers.end(), ByNumber);
  LayerReport all{"all layers", {}, {}, {}, {}};
  for (const LayerReport& layer : layers) {
    all.totals.Add(layer.totals);
    all.errors.insert(all.errors.end(), layer.errors.begin(), layer.errors.end());
    all.limits.insert(all.limits.end(), layer.limits.begin(), layer.limits.end());
    all.rounding.insert(all.rounding.end(), layer.rounding.begin(), layer.rounding.end());
  }
  std::fprintf(file, "sparge: %s, %d threads\n", isa, threads);
  std::fprintf(file, "%-20s %6s %10s %8s %8s %8s %8s\n", "layer", "calls", "ms", "skipped", "error", "at most",
               "rounding");
  for (const LayerReport& layer : layers) PrintLine(file, layer);
  PrintLine(file, all);
  const Totals& sum = all.totals;
  const double reused =
      static_cast<double>(sum.runs.key_blocks_reused) / static_cast<double>(std::max<int64_t>(sum.runs.key_blocks, 1));
  std::fprintf(file,
               "of these ms: mask %.1f, conversion %.1f, packing %.1f (%.1f%% of the keys reused), calibration %.1f\n",
               sum.mask_ms, sum.convert_ms, sum.runs.pack_ms, 100 * reused, sum.runs.calibrate_ms);
  if (file != stderr) std::fclose(file);
}

}  // namespace sparge::ggml

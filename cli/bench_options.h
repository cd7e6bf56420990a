// bench_options.h - the flags of `sparge bench`, and the cases that they ask for.
#ifndef SPARGE_CLI_BENCH_OPTIONS_H_
#define SPARGE_CLI_BENCH_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_case.h"

namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

struct BenchOptions {
  std::vector<int64_t> tokens, dims;  // empty = the default
  std::optional<int64_t> queries;
  std::optional<int64_t> heads;  // kHeads if not given
  std::optional<int64_t> kv_heads;
  bool causal = false;
  sparge_dtype dtype = SPARGE_F32;
  std::optional<BenchData> data;
  uint64_t seed = 1;

  std::vector<sparge_precision> precisions{SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};
  std::vector<BenchSelect> selects{BenchSelect::kDense};
  std::vector<double> keeps, taus, topks;  // empty = not given
  std::optional<double> pv_skip;           // infinity = off

  std::vector<int32_t> threads;  // empty = all cores
  std::optional<int64_t> rounds;
  std::optional<double> seconds;
  bool once = false, json = false, decode = false;

  static constexpr int64_t kHeads = 2;
};

// Adds the flags to `app`; `options` must outlive it.
void RegisterBenchOptions(CLI::App& app, BenchOptions& options);

// Every combination, and so the order of the table. Throws UsageError if flags contradict each other. `all_threads`
// is what no --threads means.
std::vector<BenchCase> ExpandCases(const BenchOptions& options, int32_t all_threads);

// The command line that runs this case alone, with the budget and the instruction set in force.
std::string RepeatLine(const BenchOptions& options, const BenchCase& c);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_OPTIONS_H_

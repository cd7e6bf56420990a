// bench_run.h - one case at work: its memory, its checked run, its timed runs, and what came out.
#ifndef SPARGE_CLI_BENCH_RUN_H_
#define SPARGE_CLI_BENCH_RUN_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cli/bench_case.h"
#include "cli/bench_data.h"
#include "cli/bench_verify.h"

namespace sparge::cli {

struct StageTimes {
  std::vector<double> pack_ms, predict_ms, schedule_ms, kernel_ms;  // one entry per timed run
};

struct BenchResult {
  BenchCase c;
  std::optional<Verdict> verdict;  // nothing with --once
  bool steady = true;              // the last timed run gave the bits of the checked one
  std::vector<double> times_ms;    // in the order of the rounds; empty if the result is wrong
  StageTimes stages;
  sparge_head_stats tiles = {};
  double dense_flops = 0, computed_flops = 0;  // computed: 0 with --once
  double peak_gops = 0;                        // of this precision and number of threads; 0 = not known

  bool passed() const { return steady && (!verdict || verdict->passed); }
};

class BenchRun {
 public:
  // The context must outlive this.
  BenchRun(const Context& context, const BenchCase& c, std::shared_ptr<const BenchInputs> inputs);
  BenchRun(const BenchRun&) = delete;
  BenchRun& operator=(const BenchRun&) = delete;

  // Runs once and compares with the reference.
  void Verify();
  // Runs and keeps the times. A case whose last run was short runs once before, untimed: others had the caches since.
  void Time();
  // Milliseconds that one call of Time will take, the untimed run included.
  double Probe();
  // After the last Time: does the result still have the bits that were checked?
  void CheckSteady();

  BenchResult& result() { return result_; }
  const BenchResult& result() const { return result_; }

 private:
  double RunOnce();

  const Context& context_;
  std::shared_ptr<const BenchInputs> inputs_;
  std::vector<uint8_t> random_map_;
  std::vector<std::byte> o_, checked_;
  Plan plan_;
  RunArgs args_;
  Stats stats_;
  double last_ms_ = std::numeric_limits<double>::infinity();
  BenchResult result_;
};

// Middle, and (p75 - p25) / median; 0 for no times.
double Median(std::vector<double> values);
double Spread(std::vector<double> values);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_RUN_H_

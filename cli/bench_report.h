// bench_report.h - what `sparge bench` found, as a table and as JSON.
#ifndef SPARGE_CLI_BENCH_REPORT_H_
#define SPARGE_CLI_BENCH_REPORT_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_run.h"
#include "cli/peak.h"

namespace sparge::cli {

struct BenchReport {
  std::string cpu, isa;
  int32_t all_threads = 0;                                     // what the library takes if not told
  std::map<std::pair<int32_t, sparge_precision>, Peak> peaks;  // by threads and precision; those that cases need
  std::vector<BenchResult> results;
  std::vector<std::string> repeat;  // a command line for each result

  bool passed() const;
};

// For a terminal of 100 columns.
std::string BenchText(const BenchReport& report);
// One object, with a newline.
std::string BenchJson(const BenchReport& report);
// A line for each case that failed; empty if none did.
std::string BenchFailures(const BenchReport& report);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_REPORT_H_

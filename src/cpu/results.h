// What a call reports beside its output: times, counts of tiles, the map.
#ifndef SPARGE_SRC_CPU_RESULTS_H_
#define SPARGE_SRC_CPU_RESULTS_H_

#include <sparge/sparge.h>

#include <chrono>

#include "src/cpu/plan.h"
#include "src/cpu/workspace.h"

namespace sparge::impl {

class Stopwatch {
 public:
  // Milliseconds since the last call.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    return ms;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

inline void AddStats(const sparge_head_stats& from, sparge_head_stats& to) {
  to.qk_eligible += from.qk_eligible;
  to.qk_computed += from.qk_computed;
  to.pv_eligible += from.pv_eligible;
  to.pv_computed += from.pv_computed;
}

// What passes add to begins with zeros.
void ClearResults(const Plan& plan, const sparge_run_args& args);

// The figures of one pass, added to those of the passes before.
void CountPass(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w,
               sparge_stats& stats);

void WriteStats(const Plan& plan, const sparge_run_args& args, sparge_stats& stats);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_RESULTS_H_

// runner.h - the call that a verb is about: through a layer of the library where --select auto leaves to it how
// exactly, as every other client does, else by a plan.
#ifndef SPARGE_CLI_RUNNER_H_
#define SPARGE_CLI_RUNNER_H_

#include <limits>
#include <optional>
#include <sparge/sparge.hpp>
#include <vector>

#include "cli/loaded_call.h"

namespace sparge::cli {

class Runner {
 public:
  // For a call or one of its heads. Both must outlive it.
  Runner(const Context& context, const PlanDesc& asked, const std::optional<Automatic>& automatic);

  // Calls until the one that counts, which leaves its results in `args`: for a plan the first; for a layer the one
  // after those of --warm, or else the first in which it has a choice for every head.
  void RunSettled(const RunArgs& args);
  // One more.
  void Run(const RunArgs& args);
  const std::optional<Layer>& layer() const { return layer_; }
  int64_t calls() const { return calls_; }

 private:
  bool Settled() const;

  const Context& context_;
  const PlanDesc& asked_;
  std::optional<int64_t> warm_;
  int64_t calls_ = 0;
  std::optional<Layer> layer_;
  std::optional<Plan> plan_;
};

// A call with its result, its best time and its worst. It has been made until it settled; that counts as no time.
class TimedCall {
 public:
  // The context must outlive it, and what `args` point to.
  TimedCall(const Context& context, const PlanDesc& asked, const std::optional<Automatic>& automatic,
            const RunArgs& args);
  TimedCall(const TimedCall&) = delete;
  TimedCall& operator=(const TimedCall&) = delete;

  void Run();
  double best_ms() const { return best_ms_; }
  double worst_ms() const { return worst_ms_; }
  const Stats& stats() const { return stats_; }
  const std::vector<float>& o() const { return o_; }

 private:
  PlanDesc asked_;
  Runner runner_;
  RunArgs args_;
  Stats stats_;
  std::vector<float> o_;
  double best_ms_ = std::numeric_limits<double>::infinity(), worst_ms_ = 0;
};

// RunSettled for all heads; what a layer chose goes into `call`.
void RunProblem(const Context& context, LoadedCall& call, const RunArgs& args);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_RUNNER_H_

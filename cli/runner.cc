// runner.cc - makes the layer or the plan, and calls it.
#include "cli/runner.h"

#include <algorithm>
#include <chrono>

#include "cli/choice.h"

namespace sparge::cli {

Runner::Runner(const Context& context, const PlanDesc& asked, const std::optional<Automatic>& automatic)
    : context_(context), asked_(asked) {
  if (automatic) {
    warm_ = automatic->warm;
    layer_.emplace(automatic->layer);
  } else {
    plan_.emplace(context, asked);
  }
}

bool Runner::Settled() const {
  // By then even the shortest call that skips anything has had the samples for a choice, if its input allows one.
  constexpr int64_t kMostCalls = 16;
  if (!layer_) return true;
  if (warm_) return calls_ > *warm_;
  if (calls_ >= kMostCalls) return true;
  for (const std::vector<HeadEstimate>& heads : layer_->Heads()) {
    for (const HeadEstimate& head : heads) {
      if (head.state == SPARGE_HEAD_UNKNOWN) return false;
    }
  }
  return true;
}

void Runner::RunSettled(const RunArgs& args) {
  do {
    Run(args);
  } while (!Settled());
}

void Runner::Run(const RunArgs& args) {
  ++calls_;
  if (layer_) {
    layer_->Run(context_, asked_, args);
  } else {
    plan_->Run(args);
  }
}

TimedCall::TimedCall(const Context& context, const PlanDesc& asked, const std::optional<Automatic>& automatic,
                     const RunArgs& args)
    : asked_(asked), runner_(context, asked_, automatic), args_(args) {
  args_.o = OutputView(o_, asked_);
  args_.stats = &stats_;
  runner_.RunSettled(args_);
}

void TimedCall::Run() {
  const auto start = std::chrono::steady_clock::now();
  runner_.Run(args_);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  best_ms_ = std::min(best_ms_, elapsed.count());
  worst_ms_ = std::max(worst_ms_, elapsed.count());
}

void RunProblem(const Context& context, LoadedCall& call, const RunArgs& args) {
  Runner runner(context, call.desc, call.automatic);
  runner.RunSettled(args);
  if (runner.layer()) TakeChoice(*runner.layer(), runner.calls(), call);
}

}  // namespace sparge::cli

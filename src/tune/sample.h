// A recorded call of a layer, as a whole and head by head, and the calls of the library that tuning makes with it.
#ifndef SPARGE_SRC_TUNE_SAMPLE_H_
#define SPARGE_SRC_TUNE_SAMPLE_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sparge::impl {

struct TuneSample {
  sparge_plan_desc desc;
  int64_t tiles;    // of 128 queries x 64 keys that one head sees by position, over the batch
  int64_t queries;  // of one head, over the batch
};
// Throws Failure if there is no such plan, or nothing to measure.
TuneSample MakeSample(const sparge_plan_desc& desc);

// A plan and its arguments. Outputs and workspace are set by who runs it.
struct Asked {
  sparge_plan_desc desc;
  sparge_run_args args;
};
// One query head with its key/value head, as a call of its own.
Asked SliceHead(const Asked& whole, int64_t head);

// Makes plans and runs them in a workspace that stays. Throws Failure.
class Runner {
 public:
  explicit Runner(sparge_context* context) : context_(context) {}

  // Each returns its time in ms.
  double Calibrate(const Asked& asked, double effort);
  double Run(const Asked& asked);

 private:
  struct Destroy {
    void operator()(sparge_plan* plan) const { sparge_plan_destroy(plan); }
  };
  using PlanHandle = std::unique_ptr<sparge_plan, Destroy>;

  PlanHandle MakePlan(const sparge_plan_desc& desc) const;
  sparge_run_args WithWorkspace(const sparge_plan* plan, sparge_run_args args);

  sparge_context* context_;
  std::unique_ptr<std::byte[]> workspace_;
  size_t workspace_size_ = 0;
};

// A failed call inside the library becomes the failure of the call that made it.
void Require(sparge_status status);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_TUNE_SAMPLE_H_

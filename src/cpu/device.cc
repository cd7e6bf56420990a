// The verbs of a device, by the rooms of the CPU.
#include "src/cpu/device.h"

#include <utility>

#include "src/cpu/attend.h"
#include "src/cpu/merge.h"
#include "src/cpu/workspace.h"

namespace sparge::impl {
namespace {

class CpuPlan final : public DevicePlan {
 public:
  CpuPlan(std::vector<Problem> problems, const Machine& machine) {
    for (Problem& problem : problems) plans_.emplace_back(std::move(problem), machine);
    needs_ = SizesOf(plans_);
  }
  const Problem& problem() const override { return plans_.front(); }
  Needs needs() const override { return needs_; }
  int64_t pools() const override { return plans_.front().pools(); }
  void Run(const sparge_run_args& args) const override { Attend(plans_, args); }
  void Predict(const sparge_run_args& args) const override { impl::Predict(plans_, args); }
  void Calibrate(const sparge_run_args& args, double effort) const override { impl::Calibrate(plans_, args, effort); }

 private:
  std::vector<Plan> plans_;
  Needs needs_;
};

class CpuDevice final : public Device {
 public:
  CpuDevice(const sparge_executor& executor, const InstructionSet& set) : machine_{executor, set.name, set.ops()} {}
  const char* isa() const override { return machine_.isa; }
  int32_t threads() const override { return machine_.executor.workers; }
  bool on_host() const override { return true; }
  std::unique_ptr<DevicePlan> Prepare(std::vector<Problem> problems) const override {
    return std::make_unique<CpuPlan>(std::move(problems), machine_);
  }
  void Merge(const MergeShape& shape, std::span<const sparge_partial> parts, const sparge_partial& out) const override {
    MergeParts(machine_.executor, shape, parts, out);
  }

 private:
  Machine machine_;
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(const sparge_executor& executor, const char* isa) {
  return std::make_unique<CpuDevice>(executor, ChooseInstructionSet(isa));
}

}  // namespace sparge::impl

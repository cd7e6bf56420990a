// The verbs of a device, by the rooms of the GPU.
#include "src/cuda/device.h"

#include <utility>

#include "src/cuda/gpu.h"
#include "src/cuda/merge.h"
#include "src/cuda/plan.h"

namespace sparge::impl {
namespace {

class CudaGpu final : public Device {
 public:
  explicit CudaGpu(int ordinal) : gpu_(ordinal) {}
  const char* isa() const override { return gpu_.isa(); }
  int32_t threads() const override { return 0; }
  bool on_host() const override { return false; }
  std::unique_ptr<DevicePlan> Prepare(std::vector<Problem> problems) const override {
    RefuseForGpu(problems);
    return std::make_unique<CudaPlan>(gpu_, std::move(problems.front()));
  }
  void Merge(const MergeShape& shape, std::span<const sparge_partial> parts, const sparge_partial& out) const override {
    MergeOnGpu(gpu_, shape, parts, out);
  }

 private:
  Gpu gpu_;
};

}  // namespace

std::unique_ptr<Device> MakeCudaDevice(int ordinal) { return std::make_unique<CudaGpu>(ordinal); }

}  // namespace sparge::impl

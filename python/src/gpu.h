// Calls on NVIDIA GPUs. They go on after they have returned, so that what they need is kept: contexts, and plans, whose
// tables are memory of the GPU.
#ifndef SPARGE_PYTHON_SRC_GPU_H_
#define SPARGE_PYTHON_SRC_GPU_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "python/src/options.h"

namespace sparge::python {

// Without the GIL. Destroyed, it waits for the GPU.
struct GpuPlan {
  std::shared_ptr<Context> context;
  Plan plan;
};

// All functions may be called from any thread.
class GpuPlans {
 public:
  static GpuPlans& Get();

  // Made at the first call of its kind. `captured`: a CUDA graph will launch it again, so that it stays for good.
  std::shared_ptr<const GpuPlan> PlanFor(int32_t gpu, const Described& described, bool captured);

  // In the child of a fork, which has no GPU: CUDA cannot be used on both sides.
  void Forget();

 private:
  struct Kept {
    std::shared_ptr<const GpuPlan> plan;
    uint64_t last_used = 0;
    bool captured = false;
  };
  std::shared_ptr<const GpuPlan> DropOldest();

  std::mutex mutex_;
  uint64_t uses_ = 0;
  std::map<int32_t, std::shared_ptr<Context>> contexts_;
  std::map<std::string, Kept> plans_;
};

void BindGpu(nb::module_& m);

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_GPU_H_

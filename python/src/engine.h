// What outlives a call: thread pools, workspaces, and the plans of token grids.
#ifndef SPARGE_PYTHON_SRC_ENGINE_H_
#define SPARGE_PYTHON_SRC_ENGINE_H_

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <sparge/sparge.hpp>
#include <vector>

namespace sparge::python {

struct FreeAligned {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
};

struct Workspace {
  std::unique_ptr<std::byte[], FreeAligned> bytes;
  size_t size = 0;
};

struct DestroyPlan {
  void operator()(sparge_plan* plan) const { sparge_plan_destroy(plan); }
};
using PlanPtr = std::shared_ptr<sparge_plan>;

// A number of threads as a caller gives it; raises unless the library can make a pool of so many.
int32_t CheckedThreads(int64_t threads);

// All functions may be called from any thread, with or without the GIL.
class Engine {
 public:
  static Engine& Get();

  // 0: the default number, which set_num_threads changes.
  std::shared_ptr<Context> ContextFor(int32_t threads);
  void SetThreads(int64_t threads);
  int32_t threads();

  // A plan costs less than a microsecond, unless it has to lay a curve through a grid: those are kept if `keep`.
  // `calibration` stays alive with it.
  PlanPtr PlanFor(const std::shared_ptr<Context>& context, const sparge_plan_desc& desc,
                  const std::shared_ptr<Calibration>& calibration, bool keep);
  int64_t grids_laid();

  Workspace TakeWorkspace(size_t size);
  void ReturnWorkspace(Workspace workspace);

  // In the child of a fork: its parent's threads are not there.
  void ForgetThreads();

 private:
  struct GridPlan {
    sparge_plan_desc desc;
    std::shared_ptr<Context> context;
    std::shared_ptr<Calibration> calibration;
    PlanPtr plan;
  };

  std::mutex mutex_;
  int32_t threads_ = 0;
  std::map<int32_t, std::shared_ptr<Context>> contexts_;
  std::list<GridPlan> grid_plans_;  // the latest first
  int64_t grids_laid_ = 0;
  std::vector<Workspace> workspaces_;
};

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_ENGINE_H_

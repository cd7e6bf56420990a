#include "python/src/engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "python/src/arrays.h"

namespace sparge::python {
namespace {

// A model has few grids, but a calibration per layer: enough for the layers of a large one.
constexpr size_t kGridPlans = 128;
// Larger workspaces go back to the system after their call, whose work then hides the cost of new pages.
constexpr size_t kLargestKept = size_t{64} << 20;
constexpr size_t kMostKept = 4;
// What sparge_context_create takes: said here, too, because few calls make a context.
constexpr int64_t kMostThreads = 4096;

// Plans with arrays of the caller are not kept: equal pointers need not mean equal values.
bool Keepable(const sparge_plan_desc& d) {
  return d.grid[0] > 0 && d.q_offsets == nullptr && d.kv_offsets == nullptr && d.alibi_slopes == nullptr &&
         d.sink_logits == nullptr && d.heads == nullptr && d.head_precision == nullptr;
}

PlanPtr MakePlan(const Context& context, const sparge_plan_desc& desc) {
  sparge_plan* plan = nullptr;
  Check(sparge_plan_create(context.get(), &desc, &plan));
  return PlanPtr(plan, DestroyPlan());
}

}  // namespace

int32_t CheckedThreads(int64_t threads) {
  if (threads < 0 || threads > kMostThreads) {
    RaiseValue("threads=" + std::to_string(threads) + " is outside 0.." + std::to_string(kMostThreads));
  }
  return static_cast<int32_t>(threads);
}

Engine& Engine::Get() {
  static Engine* const engine = new Engine;  // never destroyed: at exit, other threads may still be at work
  return *engine;
}

std::shared_ptr<Context> Engine::ContextFor(int32_t threads) {
  const std::lock_guard lock(mutex_);
  if (threads == 0) threads = threads_ > 0 ? threads_ : static_cast<int32_t>(std::thread::hardware_concurrency());
  std::shared_ptr<Context>& context = contexts_[std::max(threads, 1)];
  if (!context) context = std::make_shared<Context>(std::max(threads, 1));
  return context;
}

void Engine::SetThreads(int64_t threads) {
  const int32_t checked = CheckedThreads(threads);
  const std::lock_guard lock(mutex_);
  threads_ = checked;
}

int32_t Engine::threads() { return ContextFor(0)->threads(); }

PlanPtr Engine::PlanFor(const std::shared_ptr<Context>& context, const sparge_plan_desc& desc,
                        const std::shared_ptr<Calibration>& calibration, bool keep) {
  if (!keep || !Keepable(desc)) return MakePlan(*context, desc);
  std::list<GridPlan> dropped;  // destroyed after the lock: that of a calibration may wait for the GIL
  const std::lock_guard lock(mutex_);
  const auto same = [&](const GridPlan& kept) {
    return kept.context == context && std::memcmp(&kept.desc, &desc, sizeof(desc)) == 0;
  };
  auto found = std::find_if(grid_plans_.begin(), grid_plans_.end(), same);
  if (found == grid_plans_.end()) {
    PlanPtr plan = MakePlan(*context, desc);
    ++grids_laid_;
    grid_plans_.push_front({desc, context, calibration, std::move(plan)});
    if (grid_plans_.size() > kGridPlans) dropped.splice(dropped.begin(), grid_plans_, std::prev(grid_plans_.end()));
  } else {
    grid_plans_.splice(grid_plans_.begin(), grid_plans_, found);
  }
  return grid_plans_.front().plan;
}

int64_t Engine::grids_laid() {
  const std::lock_guard lock(mutex_);
  return grids_laid_;
}

Workspace Engine::TakeWorkspace(size_t size) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [size](const Workspace& w) { return w.size >= size; };
    const auto found = std::find_if(workspaces_.begin(), workspaces_.end(), fits);
    if (found != workspaces_.end()) {
      Workspace taken = std::move(*found);
      workspaces_.erase(found);
      return taken;
    }
  }
  // Powers of two, so that slowly growing problems (decoding) do not need a new one each time.
  size_t room = 1 << 16;
  while (room < size) room *= 2;
  if (room > kLargestKept) room = size;
  return {
      std::unique_ptr<std::byte[], FreeAligned>(static_cast<std::byte*>(::operator new[](room, std::align_val_t{64}))),
      room};
}

void Engine::ReturnWorkspace(Workspace workspace) {
  if (workspace.size > kLargestKept) return;
  const std::lock_guard lock(mutex_);
  workspaces_.push_back(std::move(workspace));
  if (workspaces_.size() <= kMostKept) return;
  const auto smaller = [](const Workspace& a, const Workspace& b) { return a.size < b.size; };
  workspaces_.erase(std::min_element(workspaces_.begin(), workspaces_.end(), smaller));
}

void Engine::ForgetThreads() {
  // Nothing can be destroyed: joining a thread that is not there would wait for ever. The lock may be held by one, too.
  new (&mutex_) std::mutex;
  new std::list<GridPlan>(std::move(grid_plans_));
  new std::map<int32_t, std::shared_ptr<Context>>(std::move(contexts_));
  grid_plans_.clear();
  contexts_.clear();
}

}  // namespace sparge::python

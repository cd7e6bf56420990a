#include "python/src/engine.h"

#include <algorithm>
#include <new>
#include <string>
#include <thread>

#include "python/src/arrays.h"

namespace sparge::python {
namespace {

// Larger workspaces go back to the system after their call, whose work then hides the cost of new pages.
constexpr size_t kLargestKept = size_t{64} << 20;
constexpr size_t kMostKept = 4;
// What sparge_context_create takes: said here, too, because few calls make a context.
constexpr int64_t kMostThreads = 4096;

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
  new std::map<int32_t, std::shared_ptr<Context>>(std::move(contexts_));
  contexts_.clear();
}

}  // namespace sparge::python

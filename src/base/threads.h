// Threads: the built-in pool, and a loop over independent tasks on whichever executor the context holds.
#ifndef SPARGE_SRC_BASE_THREADS_H_
#define SPARGE_SRC_BASE_THREADS_H_

#include <sparge/sparge.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace sparge::impl {

// A fixed set of threads behind the public executor interface. If two callers come at once, the second one does its
// work alone rather than wait.
class Pool {
 public:
  explicit Pool(int32_t threads);  // 1 or more, the caller's included
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  sparge_executor executor();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Calls task(worker, i) once for each i in [0, count), on at most executor.workers workers; tasks are handed out in
// order, so put the largest first. A task must not depend on which worker runs it.
template <class Task>
void ForEach(const sparge_executor& executor, int64_t count, const Task& task) {
  if (count <= 0) return;
  const int32_t workers = static_cast<int32_t>(std::min<int64_t>(executor.workers, count));
  if (workers == 1) {
    for (int64_t i = 0; i < count; ++i) task(0, i);
    return;
  }
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{task, count, 0};
  executor.run(
      executor.self, workers,
      [](void* arg, int32_t worker) {
        auto& s = *static_cast<Shared*>(arg);
        for (int64_t i = s.next.fetch_add(1); i < s.count; i = s.next.fetch_add(1)) s.task(worker, i);
      },
      &shared);
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_THREADS_H_

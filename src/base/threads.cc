// The built-in pool: threads that sleep until there is work.
#include "src/base/threads.h"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sparge {

struct Pool::Impl {
  std::mutex busy;  // held by the caller whose work the threads are doing
  std::mutex mutex;
  std::condition_variable wake, done;
  uint64_t round = 0;   // counts the calls, so that a thread knows that there is new work
  int32_t active = 0;   // workers of this round, the caller being worker 0
  int32_t running = 0;  // threads that have not finished this round
  bool stop = false;
  sparge_task task = nullptr;
  void* arg = nullptr;
  std::vector<std::thread> threads;

  void Loop(int32_t worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return stop || round != seen; });
      if (stop) return;
      seen = round;
      if (worker >= active) continue;
      lock.unlock();
      task(arg, worker);
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }

  void Run(int32_t workers, sparge_task work, void* work_arg) {
    if (workers == 1 || !busy.try_lock()) {
      for (int32_t worker = 0; worker < workers; ++worker) work(work_arg, worker);
      return;
    }
    std::lock_guard hold(busy, std::adopt_lock);
    {
      std::lock_guard lock(mutex);
      task = work;
      arg = work_arg;
      active = workers;
      running = workers - 1;
      ++round;
    }
    wake.notify_all();
    work(work_arg, 0);
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return running == 0; });
  }
};

Pool::Pool(int32_t threads) : impl_(std::make_unique<Impl>()) {
  try {
    for (int32_t worker = 1; worker < threads; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get(), worker] { impl->Loop(worker); });
    }
  } catch (const std::system_error&) {
    // The system has no more threads to give: go on with those there are; executor() tells how many.
  }
}

Pool::~Pool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

sparge_executor Pool::executor() {
  return {sizeof(sparge_executor), impl_.get(), static_cast<int32_t>(impl_->threads.size()) + 1,
          [](void* self, int32_t workers, sparge_task task, void* arg) {
            static_cast<Impl*>(self)->Run(workers, task, arg);
          }};
}

}  // namespace sparge

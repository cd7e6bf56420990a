// The built-in pool: threads that watch for work for a moment, and then sleep until there is some.
#include "src/base/threads.h"

#include <hwy/cache_control.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sparge::impl {

namespace {

// Waking a sleeping thread takes longer than many a stage of a call, so threads watch for the next one a while first.
constexpr std::chrono::microseconds kWatch{50};

// Returns as soon as ready() holds, or when kWatch is over.
template <class Ready>
void WatchFor(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kWatch;
  while (!ready() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 16; ++i) hwy::Pause();
  }
}

struct Job {
  sparge_task task;
  void* arg;
  int32_t workers;
  std::atomic<int32_t> next{0};

  // Takes whatever part of the work nobody has begun yet.
  void Work() {
    for (int32_t worker = next.fetch_add(1); worker < workers; worker = next.fetch_add(1)) task(arg, worker);
  }
};

}  // namespace

struct Pool::Impl {
  std::mutex busy;  // held by the caller whose work the threads are doing
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<uint64_t> round{0};  // counts the calls, so that a thread knows that there is new work
  std::atomic<int32_t> inside{0};  // threads that are at work on `job`
  std::atomic<bool> stop{false};
  Job* job = nullptr;
  std::vector<std::thread> threads;

  void Loop() {
    uint64_t seen = 0;
    const auto called = [&] { return stop || round != seen; };
    while (true) {
      WatchFor(called);
      std::unique_lock lock(mutex);
      wake.wait(lock, called);
      if (stop) return;
      seen = round;
      if (job == nullptr) continue;  // too late: the work is done
      Job& mine = *job;
      ++inside;
      lock.unlock();
      mine.Work();
      lock.lock();
      if (--inside == 0) done.notify_one();
    }
  }

  // Waits for threads that have begun, never for one that is still asleep.
  void Run(int32_t workers, sparge_task task, void* arg) {
    Job mine{task, arg, workers};
    if (workers == 1 || !busy.try_lock()) return mine.Work();
    std::lock_guard hold(busy, std::adopt_lock);
    {
      std::lock_guard lock(mutex);
      job = &mine;
      ++round;
    }
    wake.notify_all();
    mine.Work();
    WatchFor([&] { return inside == 0; });
    std::unique_lock lock(mutex);
    job = nullptr;
    done.wait(lock, [&] { return inside == 0; });
  }
};

Pool::Pool(int32_t threads) : impl_(std::make_unique<Impl>()) {
  try {
    for (int32_t worker = 1; worker < threads; ++worker) {
      impl_->threads.emplace_back([impl = impl_.get()] { impl->Loop(); });
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

}  // namespace sparge::impl

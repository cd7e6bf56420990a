// What outlives a call: thread pools, and workspaces for calls that are not a layer's.
#ifndef SPARGE_PYTHON_SRC_ENGINE_H_
#define SPARGE_PYTHON_SRC_ENGINE_H_

#include <cstddef>
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

  Workspace TakeWorkspace(size_t size);
  void ReturnWorkspace(Workspace workspace);

  // In the child of a fork: its parent's threads are not there.
  void ForgetThreads();

 private:
  std::mutex mutex_;
  int32_t threads_ = 0;
  std::map<int32_t, std::shared_ptr<Context>> contexts_;
  std::vector<Workspace> workspaces_;
};

}  // namespace sparge::python
#endif  // SPARGE_PYTHON_SRC_ENGINE_H_

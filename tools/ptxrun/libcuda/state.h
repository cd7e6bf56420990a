// What the stand-in for the driver keeps, and how its functions are written.
//
// Environment, read whenever it matters, so that a test may change it:
//   SPARGE_FAKE_GPU=8.9         compute capability (8.0); the newest PTX that is not newer is run. none: there is no
//   GPU SPARGE_FAKE_VERSION=13000   version of the driver SPARGE_FAKE_FAILURE=cuMemAlloc=2@3   the function gives this
//   result, at its third call since this was set; without
//                               @3 at every call
//   PTXRUN_MEMORY=bytes         of the GPU (8 GB)
//   PTXRUN_SEED=n               errors of approximations, order of blocks (1; 0: none)
//   PTXRUN_UNDEFINED=1          memory that nothing wrote may be read
//   PTXRUN_FP8_BITS=13          fraction bits that 8-bit mma keeps in its sums (23)
//   PTXRUN_PTX=file             its kernels take the place of those of the same names (mutants)
//   PTXRUN_REPORT=file          at the end: instructions and conflicts of banks per kernel
#ifndef SPARGE_TOOLS_PTXRUN_LIBCUDA_STATE_H_
#define SPARGE_TOOLS_PTXRUN_LIBCUDA_STATE_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tools/ptxrun/ptxrun.h"

// Handles are pointers to these.
struct CUctx_st {
  int retained = 0;
};

namespace ptxrun {

struct Function {
  Kernel kernel;
  uint32_t dynamic_limit = 48 * 1024;  // cuFuncSetAttribute raises it
};
using Work = std::function<CUresult()>;

}  // namespace ptxrun

struct CUmod_st {
  std::unique_ptr<ptxrun::Module> module, replacement;
  std::map<std::string, std::unique_ptr<ptxrun::Function>> functions;
};
struct CUstream_st {
  bool captures = false, spoilt = false;  // spoilt: something happened that must not while capturing
  std::vector<ptxrun::Work> captured;
};
struct CUevent_st {
  bool recorded = false, timed = true;
  double milliseconds = 0;
};
struct CUgraph_st {
  std::vector<ptxrun::Work> work;
};
struct CUgraphExec_st {
  std::vector<ptxrun::Work> work;
};

namespace ptxrun {

struct Driver {
  ~Driver();

  bool has_device() const;
  int sm() const;  // 80 of 8.0
  int version() const;
  uint64_t memory_bytes() const;
  Options options() const;
  std::string replacement() const;  // file
  // What SPARGE_FAKE_FAILURE wants the function to give.
  CUresult FailureOf(const char* function);

  std::recursive_mutex mutex;
  bool is_started = false;
  Memory memory;
  CUctx_st context;
  CUresult lost = CUDA_SUCCESS;  // a kernel did what it must not: all that follows fails, as on hardware
  std::map<std::string, Statistics> statistics;
  CUstream_st null_stream;
  int capturing = 0;                  // streams
  std::vector<CUstream_st*> streams;  // all but the null stream

 private:
  std::string failure_;  // as it was set when its calls were counted
  int failing_calls_ = 0;
};

Driver& TheDriver();
std::vector<CUctx_st*>& ContextStack();  // of this thread
// A line on standard error: why something failed.
void Say(const std::string& line);

// Why a call that needs a context cannot be made.
CUresult NeedContext();
// As NeedContext, and marks captures as spoilt: what allocates or waits must not happen during one.
CUresult NeedContextOutsideCaptures(const char* function);
// Does `work`, or remembers it if the stream captures.
CUresult Enqueue(CUstream stream, Work work);
CUstream_st* StreamOf(CUstream stream);  // nullptr: no such stream

// Runs the body of a driver function, by whose name failures are injected, with the driver locked. A Fault is the
// caller's mistake.
template <typename F>
CUresult Locked(F body, const char* function = __builtin_FUNCTION()) {
  Driver& driver = TheDriver();
  const std::lock_guard lock(driver.mutex);
  if (const CUresult failure = driver.FailureOf(function); failure != CUDA_SUCCESS) return failure;
  try {
    return body(driver);
  } catch (const Fault& fault) {
    Say(std::string(function) + ": " + fault.what());
    return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_LIBCUDA_STATE_H_

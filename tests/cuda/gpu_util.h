// Runs problems of test_util.h on a GPU, whichever driver the loader finds: that of this folder, an interpreter of PTX,
// or a real one.
#ifndef SPARGE_TESTS_CUDA_GPU_UTIL_H_
#define SPARGE_TESTS_CUDA_GPU_UTIL_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tests/test_util.h"

namespace sparge::testing {

// Memory of the GPU.
class GpuMemory {
 public:
  GpuMemory() = default;
  explicit GpuMemory(size_t bytes);
  GpuMemory(const void* data, size_t bytes);
  GpuMemory(GpuMemory&& other) noexcept;
  GpuMemory& operator=(GpuMemory&& other) noexcept;
  ~GpuMemory();
  void* data() const { return reinterpret_cast<void*>(address_); }
  void Read(void* to, size_t bytes) const;

 private:
  unsigned long long address_ = 0;
};

// A context on GPU 0, with PV in f16 or in e4m3 if the driver is one that can be told (SPARGE_FAKE_GPU).
Context GpuContext(bool fp8 = false);
bool UsesFp8(const Context& context);

struct GpuResult : Result {
  std::vector<float> masses;  // of predict
};
GpuResult RunOnGpu(const Context& context, const Problem& problem);
// The same from a CUDA graph that is launched twice; nothing of it may allocate or wait.
GpuResult RunCaptured(const Context& context, const Problem& problem);
GpuResult PredictOnGpu(const Context& context, const Problem& problem, bool with_masses = false);

}  // namespace sparge::testing
#endif  // SPARGE_TESTS_CUDA_GPU_UTIL_H_

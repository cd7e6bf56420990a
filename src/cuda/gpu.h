// One GPU: its context, and the kernels that it runs.
#ifndef SPARGE_SRC_CUDA_GPU_H_
#define SPARGE_SRC_CUDA_GPU_H_

#include <string>

#include "src/cuda/driver.h"
#include "src/cuda/images.h"

namespace sparge::impl {

// Which kernels of a head size there are.
enum HeadSize : int { kHead64, kHead128, kHead256, kHeadSizes };
inline HeadSize HeadSizeFor(int64_t dim) { return dim <= 64 ? kHead64 : dim <= 128 ? kHead128 : kHead256; }
inline int DimOf(HeadSize size) { return size == kHead64 ? 64 : size == kHead128 ? 128 : 256; }

struct Kernel {
  const char* name;
  CudaFunction function;
};
// Of one head size.
struct Kernels {
  Kernel survey, units, pack_keys, pack_queries, score_keys, score_means, attend;
};

// The GPU with a number. Throws Failure if there is none, or if it cannot run the kernels.
class Gpu {
 public:
  explicit Gpu(int ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const Driver& driver() const { return driver_; }
  CudaContext context() const { return context_; }
  const char* isa() const { return isa_.c_str(); }
  bool fp8() const { return fp8_; }  // PV is computed in e4m3, else in f16
  const Kernels& kernels(HeadSize size) const { return kernels_[size]; }
  const Kernel& select() const { return select_; }
  const Kernel& write_empty() const { return write_empty_; }
  const Kernel& merge() const { return merge_; }

 private:
  void Load();
  Kernel Find(Image image, const char* name, int dim, const char* pv) const;
  // A kernel may be launched with so many bytes of shared memory; 48 KB need no word.
  void AllowShared(const Kernel& kernel, int bytes) const;

  const Driver& driver_;
  CudaDevice device_ = 0;
  CudaContext context_ = nullptr;
  std::string isa_;
  bool fp8_ = false;
  CudaModule modules_[kImages] = {};
  Kernels kernels_[kHeadSizes] = {};
  Kernel select_{}, write_empty_{}, merge_{};
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_GPU_H_

// NVIDIA's driver, opened at run time: nothing of CUDA is linked, and machines without a GPU need nothing of it. Types
// and numbers are those of the driver's documented binary interface, as far as this room uses them.
#ifndef SPARGE_SRC_CUDA_DRIVER_H_
#define SPARGE_SRC_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>

namespace sparge::impl {

using CudaResult = int;  // CUresult
using CudaDevice = int;  // CUdevice
using CudaContext = struct CudaContextOpaque*;
using CudaModule = struct CudaModuleOpaque*;
using CudaFunction = struct CudaFunctionOpaque*;
using CudaStream = struct CudaStreamOpaque*;
using CudaAddress = unsigned long long;  // CUdeviceptr

inline constexpr CudaResult kCudaSuccess = 0;
inline constexpr CudaResult kCudaOutOfMemory = 2;
inline constexpr CudaResult kCudaNoDevice = 100;
inline constexpr CudaResult kCudaNoBinaryForGpu = 209;
inline constexpr CudaResult kCudaUnsupportedPtxVersion = 222;
inline constexpr int kCudaCapabilityMajor = 75;  // CUdevice_attribute
inline constexpr int kCudaCapabilityMinor = 76;
inline constexpr int kCudaMostLaunchedShared = 8;  // CUfunction_attribute

// The functions of the driver that this library calls.
struct Driver {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuDriverGetVersion)(int* version);
  CudaResult (*cuDeviceGetCount)(int* count);
  CudaResult (*cuDeviceGet)(CudaDevice* device, int ordinal);
  CudaResult (*cuDeviceGetName)(char* name, int size, CudaDevice device);
  CudaResult (*cuDeviceGetAttribute)(int* value, int attribute, CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxRelease)(CudaDevice device);
  CudaResult (*cuCtxPushCurrent)(CudaContext context);
  CudaResult (*cuCtxPopCurrent)(CudaContext* context);
  CudaResult (*cuCtxSynchronize)();
  CudaResult (*cuModuleLoadData)(CudaModule* module, const void* image);
  CudaResult (*cuModuleUnload)(CudaModule module);
  CudaResult (*cuModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name);
  CudaResult (*cuFuncSetAttribute)(CudaFunction function, int attribute, int value);
  CudaResult (*cuLaunchKernel)(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               CudaStream stream, void** parameters, void** extra);
  CudaResult (*cuMemAlloc)(CudaAddress* address, size_t bytes);
  CudaResult (*cuMemFree)(CudaAddress address);
  CudaResult (*cuMemcpyHtoD)(CudaAddress to, const void* from, size_t bytes);
  CudaResult (*cuMemsetD8Async)(CudaAddress to, unsigned char value, size_t bytes, CudaStream stream);
  CudaResult (*cuGetErrorName)(CudaResult result, const char** name);
  CudaResult (*cuGetErrorString)(CudaResult result, const char** text);

  int version;  // 1000 * major + 10 * minor
};

// The driver of this machine, opened once. Throws Failure with a line that says what is missing.
const Driver& OpenDriver();

// Throws Failure unless the result is success; `what` says in words what was tried.
void CheckCuda(const Driver& driver, CudaResult result, const char* what);

// The driver's current context, while it lives.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CudaContext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

// Memory of the current context that goes with its owner, when what was put into the GPU's queues is done: it may use
// it.
class CudaMemory {
 public:
  CudaMemory() = default;
  CudaMemory(const Driver& driver, CudaContext context, const void* data, size_t bytes);
  CudaMemory(CudaMemory&& other) noexcept;
  CudaMemory& operator=(CudaMemory&& other) noexcept;
  ~CudaMemory();
  // The driver hands out numbers, kernels and callers take pointers.
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT(performance-no-int-to-ptr)

 private:
  const Driver* driver_ = nullptr;
  CudaContext context_ = nullptr;
  CudaAddress address_ = 0;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_DRIVER_H_

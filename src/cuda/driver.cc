// Opens the driver and reports what it says.
#include "src/cuda/driver.h"

#include <dlfcn.h>

#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// What the kernels and their format ask for: PTX 8.x and cubins of CUDA 12.
constexpr int kLeastVersion = 12000;

using GetProcAddress = CudaResult (*)(const char* name, void** function, int version, uint64_t flags, int* found);

template <class Function>
void Fetch(GetProcAddress get, const char* name, Function*& function) {
  void* address = nullptr;
  const CudaResult result = get(name, &address, kLeastVersion, 0, nullptr);
  if (result != kCudaSuccess || address == nullptr) {
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "the CUDA driver has no %s: it is older than CUDA %d.%d", name,
         kLeastVersion / 1000, kLeastVersion % 1000 / 10);
  }
  function = reinterpret_cast<Function*>(address);
}

Driver Open() {
  // Never closed: what it hands out may be in use until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "no CUDA driver on this machine (%s)", why == nullptr ? "libcuda.so.1" : why);
  }
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "the CUDA driver has no cuGetProcAddress_v2: it is older than CUDA %d.%d",
         kLeastVersion / 1000, kLeastVersion % 1000 / 10);
  }
  Driver driver{};
#define SPARGE_FETCH(name) Fetch(get, #name, driver.name)
  SPARGE_FETCH(cuGetErrorName);
  SPARGE_FETCH(cuGetErrorString);
  SPARGE_FETCH(cuDriverGetVersion);
  CheckCuda(driver, driver.cuDriverGetVersion(&driver.version), "asking for the driver's version");
  if (driver.version < kLeastVersion) {
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "the CUDA driver is of CUDA %d.%d, and %d.%d is needed", driver.version / 1000,
         driver.version % 1000 / 10, kLeastVersion / 1000, kLeastVersion % 1000 / 10);
  }
  SPARGE_FETCH(cuInit);
  SPARGE_FETCH(cuDeviceGetCount);
  SPARGE_FETCH(cuDeviceGet);
  SPARGE_FETCH(cuDeviceGetName);
  SPARGE_FETCH(cuDeviceGetAttribute);
  SPARGE_FETCH(cuDevicePrimaryCtxRetain);
  SPARGE_FETCH(cuDevicePrimaryCtxRelease);
  SPARGE_FETCH(cuCtxPushCurrent);
  SPARGE_FETCH(cuCtxPopCurrent);
  SPARGE_FETCH(cuCtxSynchronize);
  SPARGE_FETCH(cuModuleLoadData);
  SPARGE_FETCH(cuModuleUnload);
  SPARGE_FETCH(cuModuleGetFunction);
  SPARGE_FETCH(cuFuncSetAttribute);
  SPARGE_FETCH(cuLaunchKernel);
  SPARGE_FETCH(cuMemAlloc);
  SPARGE_FETCH(cuMemFree);
  SPARGE_FETCH(cuMemcpyHtoD);
  SPARGE_FETCH(cuMemsetD8Async);
#undef SPARGE_FETCH
  const CudaResult started = driver.cuInit(0);
  if (started == kCudaNoDevice) Fail(SPARGE_UNSUPPORTED_HARDWARE, "the CUDA driver finds no GPU");
  CheckCuda(driver, started, "starting the CUDA driver");
  return driver;
}

}  // namespace

const Driver& OpenDriver() {
  static const Driver driver = Open();  // tried again after a failure
  return driver;
}

void CheckCuda(const Driver& driver, CudaResult result, const char* what) {
  if (result == kCudaSuccess) return;
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  const sparge_status status = result == kCudaOutOfMemory ? SPARGE_OUT_OF_MEMORY
                               : result == kCudaNoBinaryForGpu || result == kCudaUnsupportedPtxVersion
                                   ? SPARGE_UNSUPPORTED_HARDWARE
                                   : SPARGE_DEVICE_ERROR;
  Fail(status, "%s failed: %s (%d), %s", what, name == nullptr ? "unknown error" : name, result,
       text == nullptr ? "which the driver has no text for" : text);
}

CurrentContext::CurrentContext(const Driver& driver, CudaContext context) : driver_(driver) {
  CheckCuda(driver, driver.cuCtxPushCurrent(context), "making the GPU's context current");
}
CurrentContext::~CurrentContext() {
  CudaContext ignored = nullptr;
  driver_.cuCtxPopCurrent(&ignored);
}

CudaMemory::CudaMemory(const Driver& driver, CudaContext context, const void* data, size_t bytes)
    : driver_(&driver), context_(context) {
  if (bytes == 0) return;
  const CurrentContext current(driver, context);
  CheckCuda(driver, driver.cuMemAlloc(&address_, bytes), "allocating a plan's tables on the GPU");
  const CudaResult copied = driver.cuMemcpyHtoD(address_, data, bytes);
  if (copied == kCudaSuccess) return;
  driver.cuMemFree(address_);
  CheckCuda(driver, copied, "copying a plan's tables to the GPU");
}
CudaMemory::CudaMemory(CudaMemory&& other) noexcept
    : driver_(other.driver_), context_(other.context_), address_(std::exchange(other.address_, 0)) {}
CudaMemory& CudaMemory::operator=(CudaMemory&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(context_, other.context_);
  std::swap(address_, other.address_);
  return *this;
}
CudaMemory::~CudaMemory() {
  if (address_ == 0) return;
  // A context that is gone has taken its memory along.
  if (driver_->cuCtxPushCurrent(context_) != kCudaSuccess) return;
  driver_->cuCtxSynchronize();
  driver_->cuMemFree(address_);
  CudaContext ignored = nullptr;
  driver_->cuCtxPopCurrent(&ignored);
}

}  // namespace sparge::impl

// Finds a GPU and loads the kernels.
#include "src/cuda/gpu.h"

#include <cstdio>

#include "src/base/status.h"
#include "src/cuda/kernel/params.h"

namespace sparge::impl {
namespace {

// cp.async, and the products of 8-bit integers that the kernels are made of.
constexpr int kLeastMajor = 8;

}  // namespace

Gpu::Gpu(int ordinal) : driver_(OpenDriver()) {
  int count = 0;
  CheckCuda(driver_, driver_.cuDeviceGetCount(&count), "counting GPUs");
  if (ordinal < 0 || ordinal >= count) {
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "device=cuda:%d: this machine has %d GPUs", ordinal, count);
  }
  CheckCuda(driver_, driver_.cuDeviceGet(&device_, ordinal), "taking the GPU");
  int major = 0, minor = 0;
  CheckCuda(driver_, driver_.cuDeviceGetAttribute(&major, kCudaCapabilityMajor, device_), "asking what the GPU is");
  CheckCuda(driver_, driver_.cuDeviceGetAttribute(&minor, kCudaCapabilityMinor, device_), "asking what the GPU is");
  if (major < kLeastMajor) {
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "device=cuda:%d: its compute capability is %d.%d, and %d.0 is needed", ordinal,
         major, minor, kLeastMajor);
  }
  // Where e4m3 has an instruction of its own, and f16 with sums in fp32 is half as fast.
  fp8_ = (major == 8 && minor == 9) || major == 12;
  char text[64];
  std::snprintf(text, sizeof(text), "cuda sm_%d%d, PV in %s", major, minor, fp8_ ? "e4m3" : "f16");
  isa_ = text;
  CheckCuda(driver_, driver_.cuDevicePrimaryCtxRetain(&context_, device_), "making a context on the GPU");
  try {
    Load();
  } catch (...) {
    driver_.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

Gpu::~Gpu() {
  if (driver_.cuCtxPushCurrent(context_) == kCudaSuccess) {
    for (const CudaModule module : modules_) driver_.cuModuleUnload(module);
    CudaContext ignored = nullptr;
    driver_.cuCtxPopCurrent(&ignored);
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
}

Kernel Gpu::Find(Image image, const char* name, int dim, const char* pv) const {
  char full[64];
  std::snprintf(full, sizeof(full), dim == 0 ? "%s" : *pv == '\0' ? "%s_%d" : "%s_%d_%s", name, dim, pv);
  CudaFunction function = nullptr;
  CheckCuda(driver_, driver_.cuModuleGetFunction(&function, modules_[image], full), full);
  return {name, function};
}

void Gpu::AllowShared(const Kernel& kernel, int bytes) const {
  if (bytes <= 48 * 1024) return;
  CheckCuda(driver_, driver_.cuFuncSetAttribute(kernel.function, kCudaMostLaunchedShared, bytes), kernel.name);
}

void Gpu::Load() {
  const CurrentContext current(driver_, context_);
  for (int i = 0; i < kImages; ++i) {
    CheckCuda(driver_, driver_.cuModuleLoadData(&modules_[i], ImageOf(static_cast<Image>(i))),
              "loading the kernels for this GPU");
  }
  const char* pv = fp8_ ? "fp8" : "f16";
  for (const HeadSize size : {kHead64, kHead128, kHead256}) {
    const int dim = DimOf(size);
    kernels_[size] = {
        Find(kPackKeysImage, "sparge_survey", dim, ""),    Find(kPackKeysImage, "sparge_units", dim, pv),
        Find(kPackKeysImage, "sparge_pack_keys", dim, pv), Find(kPackQueriesImage, "sparge_pack_queries", dim, ""),
        Find(kScoreImage, "sparge_score_keys", dim, ""),   Find(kScoreImage, "sparge_score_means", dim, ""),
        Find(kAttendImage, "sparge_attend", dim, pv)};
    AllowShared(kernels_[size].pack_queries, cuda::LaunchedPackBytes(dim));
    AllowShared(kernels_[size].attend, cuda::LaunchedAttendBytes(dim, fp8_));
  }
  select_ = Find(kSelectImage, "sparge_select", 0, "");
  merge_ = Find(kMergeImage, "sparge_merge", 0, "");
  write_empty_ = Find(kSelectImage, "sparge_write_empty", 0, "");
}

}  // namespace sparge::impl

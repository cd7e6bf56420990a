// A CUDA driver whose only device is this process: kernels are those of kernel_host.h, memory is the host's. The
// environment says what the device is and what fails:
//   SPARGE_FAKE_GPU       compute capability, "8.0" if unset; "none": there is no GPU
//   SPARGE_FAKE_VERSION   of the driver, 13000 if unset
//   SPARGE_FAKE_FAILURE   NAME=RESULT: the function NAME returns RESULT
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "src/cuda/kernel/params.h"
#include "tests/cuda/host/fibers.h"

using namespace sparge::cuda;  // NOLINT: the kernels' names
namespace host = sparge::testing::host;

#define SPARGE_KERNELS(X)                       \
  X(sparge_survey_64, SurveyParams)             \
  X(sparge_survey_128, SurveyParams)            \
  X(sparge_survey_256, SurveyParams)            \
  X(sparge_units_64_f16, SurveyParams)          \
  X(sparge_units_128_f16, SurveyParams)         \
  X(sparge_units_256_f16, SurveyParams)         \
  X(sparge_units_64_fp8, SurveyParams)          \
  X(sparge_units_128_fp8, SurveyParams)         \
  X(sparge_units_256_fp8, SurveyParams)         \
  X(sparge_pack_keys_64_f16, PackKeysParams)    \
  X(sparge_pack_keys_128_f16, PackKeysParams)   \
  X(sparge_pack_keys_256_f16, PackKeysParams)   \
  X(sparge_pack_keys_64_fp8, PackKeysParams)    \
  X(sparge_pack_keys_128_fp8, PackKeysParams)   \
  X(sparge_pack_keys_256_fp8, PackKeysParams)   \
  X(sparge_pack_queries_64, PackQueriesParams)  \
  X(sparge_pack_queries_128, PackQueriesParams) \
  X(sparge_pack_queries_256, PackQueriesParams) \
  X(sparge_score_keys_64, StageParams)          \
  X(sparge_score_keys_128, StageParams)         \
  X(sparge_score_keys_256, StageParams)         \
  X(sparge_score_means_64, StageParams)         \
  X(sparge_score_means_128, StageParams)        \
  X(sparge_score_means_256, StageParams)        \
  X(sparge_select, StageParams)                 \
  X(sparge_write_empty, EmptyParams)            \
  X(sparge_merge, MergeParams)                  \
  X(sparge_attend_64_f16, AttendParams)         \
  X(sparge_attend_128_f16, AttendParams)        \
  X(sparge_attend_256_f16, AttendParams)        \
  X(sparge_attend_64_fp8, AttendParams)         \
  X(sparge_attend_128_fp8, AttendParams)        \
  X(sparge_attend_256_fp8, AttendParams)

namespace sparge::cuda {
#define SPARGE_DECLARE(name, Params) extern "C" void name(const Params p);
SPARGE_KERNELS(SPARGE_DECLARE)
}  // namespace sparge::cuda

namespace {

using Kernel = void (*)(const void* params);
#define SPARGE_ENTRY(name, Params) \
  {#name, [](const void* params) { sparge::cuda::name(*static_cast<const Params*>(params)); }},
const std::map<std::string, Kernel>& Kernels() {
  static const std::map<std::string, Kernel> kernels{SPARGE_KERNELS(SPARGE_ENTRY)};
  return kernels;
}

const char* Capability() {
  const char* given = std::getenv("SPARGE_FAKE_GPU");
  return given == nullptr ? "8.0" : given;
}

int Failure(const char* name) {
  const char* given = std::getenv("SPARGE_FAKE_FAILURE");
  const size_t length = std::strlen(name);
  if (given == nullptr || std::strncmp(given, name, length) != 0 || given[length] != '=') return 0;
  return std::atoi(given + length + 1);
}
#define SPARGE_MAY_FAIL(name) \
  if (const int failure = Failure(#name)) return failure

int Init(unsigned) { return std::strcmp(Capability(), "none") == 0 ? 100 : Failure("cuInit"); }
int DriverGetVersion(int* version) {
  const char* given = std::getenv("SPARGE_FAKE_VERSION");
  *version = given == nullptr ? 13000 : std::atoi(given);
  return 0;
}
int DeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int DeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
int DeviceGetName(char* name, int size, int) {
  std::snprintf(name, static_cast<size_t>(size), "this process");
  return 0;
}
int DeviceGetAttribute(int* value, int attribute, int) {
  const char* dot = std::strchr(Capability(), '.');
  *value = attribute == 75 ? std::atoi(Capability()) : attribute == 76 ? std::atoi(dot + 1) : 0;
  return 0;
}
int PrimaryCtxRetain(void** context, int) {
  static int one;
  *context = &one;
  return Failure("cuDevicePrimaryCtxRetain");
}
int PrimaryCtxRelease(int) { return 0; }
int CtxPushCurrent(void*) { return 0; }
int CtxPopCurrent(void**) { return 0; }
int ModuleLoadData(void** module, const void* image) {
  SPARGE_MAY_FAIL(cuModuleLoadData);
  uint32_t magic;
  std::memcpy(&magic, image, sizeof(magic));
  *module = const_cast<void*>(image);
  return magic == 0xBA55ED50 ? 0 : 200;  // a fat binary, or "invalid image"
}
int ModuleUnload(void*) { return 0; }
int ModuleGetFunction(void** function, void*, const char* name) {
  const auto found = Kernels().find(name);
  if (found == Kernels().end()) return 500;
  *function = reinterpret_cast<void*>(found->second);
  return 0;
}
int FuncSetAttribute(void*, int, int) { return 0; }  // there is room for all
int LaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                 unsigned shared_bytes, void*, void** parameters, void**) {
  SPARGE_MAY_FAIL(cuLaunchKernel);
  const auto kernel = reinterpret_cast<Kernel>(function);
  host::Launch({x, y, z}, threads, shared_bytes, [&] { kernel(parameters[0]); });
  return 0;
}
int CtxSynchronize() { return 0; }  // launches run to their end
int MemAlloc(unsigned long long* address, size_t bytes) {
  SPARGE_MAY_FAIL(cuMemAlloc);
  // What nobody wrote reads as NaN.
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xFF, bytes);
  *address = reinterpret_cast<unsigned long long>(memory);
  return 0;
}
int MemFree(unsigned long long address) {
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
int MemcpyHtoD(unsigned long long to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int MemcpyDtoH(void* to, unsigned long long from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int MemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
int GetErrorName(int result, const char** name) {
  *name = result == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : result == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
                          : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int GetErrorString(int, const char** text) {
  *text = "as the environment said";
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* name, void** function, int,
                                                                          uint64_t, int*) {
  static const std::map<std::string, void*> functions{
      {"cuInit", reinterpret_cast<void*>(&Init)},
      {"cuDriverGetVersion", reinterpret_cast<void*>(&DriverGetVersion)},
      {"cuDeviceGetCount", reinterpret_cast<void*>(&DeviceGetCount)},
      {"cuDeviceGet", reinterpret_cast<void*>(&DeviceGet)},
      {"cuDeviceGetName", reinterpret_cast<void*>(&DeviceGetName)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&DeviceGetAttribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&PrimaryCtxRetain)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&PrimaryCtxRelease)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&CtxPushCurrent)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&CtxPopCurrent)},
      {"cuFuncSetAttribute", reinterpret_cast<void*>(&FuncSetAttribute)},
      {"cuCtxSynchronize", reinterpret_cast<void*>(&CtxSynchronize)},
      {"cuModuleLoadData", reinterpret_cast<void*>(&ModuleLoadData)},
      {"cuModuleUnload", reinterpret_cast<void*>(&ModuleUnload)},
      {"cuModuleGetFunction", reinterpret_cast<void*>(&ModuleGetFunction)},
      {"cuLaunchKernel", reinterpret_cast<void*>(&LaunchKernel)},
      {"cuMemAlloc", reinterpret_cast<void*>(&MemAlloc)},
      {"cuMemFree", reinterpret_cast<void*>(&MemFree)},
      {"cuMemcpyHtoD", reinterpret_cast<void*>(&MemcpyHtoD)},
      {"cuMemcpyDtoH", reinterpret_cast<void*>(&MemcpyDtoH)},
      {"cuMemsetD8Async", reinterpret_cast<void*>(&MemsetD8Async)},
      {"cuGetErrorName", reinterpret_cast<void*>(&GetErrorName)},
      {"cuGetErrorString", reinterpret_cast<void*>(&GetErrorString)},
  };
  const auto found = functions.find(name);
  *function = found == functions.end() ? nullptr : found->second;
  return *function == nullptr ? 500 : 0;
}

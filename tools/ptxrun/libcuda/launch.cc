// Launches.
#include <cstring>

#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

// The parameters in one buffer, from pointers to each or from the caller's buffer.
CUresult GatherParams(const Kernel& kernel, void** pointers, void** extra, std::vector<uint8_t>* params) {
  params->assign(kernel.param_buffer_bytes(), 0);
  if (pointers != nullptr) {
    for (size_t i = 0; i < kernel.param_count(); ++i) {
      if (pointers[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(params->data() + kernel.param_offset(i), pointers[i], kernel.param_bytes(i));
    }
    return CUDA_SUCCESS;
  }
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(extra[1]);
  }
  if (bytes < params->size() || (buffer == nullptr && !params->empty())) return CUDA_ERROR_INVALID_VALUE;
  if (!params->empty()) std::memcpy(params->data(), buffer, params->size());
  return CUDA_SUCCESS;
}

// What a kernel does wrong shows in the calls that follow, as on hardware; why, on standard error at once.
CUresult RunKernel(const Kernel& kernel, const LaunchShape& shape, const std::vector<uint8_t>& params) {
  Driver& driver = TheDriver();
  try {
    driver.statistics[kernel.name()].Add(kernel.Run(shape, params, driver.memory, driver.options()));
  } catch (const Fault& fault) {
    Say(fault.what());
    driver.lost = CUDA_ERROR_LAUNCH_FAILED;
  }
  return CUDA_SUCCESS;
}

CUresult Launch(const Function& function, const LaunchShape& shape, CUstream stream, void** pointers, void** extra,
                const char* caller = __builtin_FUNCTION()) {
  const auto body = [&](Driver&) {
    if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
    const uint64_t threads = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
    if (threads == 0 || threads > 1024 || shape.block[2] > 64) return CUDA_ERROR_INVALID_VALUE;
    if (shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[2] == 0 || shape.grid[1] > 65535 ||
        shape.grid[2] > 65535)
      return CUDA_ERROR_INVALID_VALUE;
    if (shape.shared_bytes > function.dynamic_limit) {
      Say(function.kernel.name() + ": " + std::to_string(shape.shared_bytes) + " bytes of shared memory, allowed are " +
          std::to_string(function.dynamic_limit));
      return CUDA_ERROR_INVALID_VALUE;
    }
    std::vector<uint8_t> params;
    if (const CUresult result = GatherParams(function.kernel, pointers, extra, &params); result != CUDA_SUCCESS)
      return result;
    return Enqueue(stream, [kernel = function.kernel, shape, params] { return RunKernel(kernel, shape, params); });
  };
  return Locked(body, caller);
}

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;

extern "C" {

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void** params, void** extra) {
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const LaunchShape shape{
      .grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z}, .shared_bytes = shared_bytes};
  return Launch(*reinterpret_cast<Function*>(function), shape, stream, params, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  if (config->numAttrs != 0) {
    Say("cuLaunchKernelEx with attributes is not modelled");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
}

}  // extern "C"

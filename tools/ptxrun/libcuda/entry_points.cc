// cuGetProcAddress: names without version, and since which version of the driver they exist.
#include <cstring>

#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

struct EntryPoint {
  const char* name;
  void* function;
  int since;
};

// PTXRUN_ENTRY(cuMemAlloc, 3020): cuda.h renames functions to their newest version, the text stays.
#define PTXRUN_ENTRY(name, since) \
  { #name, reinterpret_cast < void*>(&name), since }
#define PTXRUN_VERSIONED(name, version, since) \
  { #name, reinterpret_cast < void*>(&name##version), since }

const EntryPoint kEntryPoints[] = {PTXRUN_ENTRY(cuGetErrorName, 6000),
                                   PTXRUN_ENTRY(cuGetErrorString, 6000),
                                   PTXRUN_ENTRY(cuInit, 2000),
                                   PTXRUN_ENTRY(cuDriverGetVersion, 2020),
                                   PTXRUN_ENTRY(cuDeviceGetCount, 2000),
                                   PTXRUN_ENTRY(cuDeviceGet, 2000),
                                   PTXRUN_ENTRY(cuDeviceGetName, 2000),
                                   PTXRUN_VERSIONED(cuDeviceGetUuid, _v2, 9020),
                                   PTXRUN_ENTRY(cuDeviceGetAttribute, 2000),
                                   PTXRUN_VERSIONED(cuDeviceTotalMem, _v2, 3020),
                                   PTXRUN_ENTRY(cuDevicePrimaryCtxRetain, 7000),
                                   PTXRUN_VERSIONED(cuDevicePrimaryCtxRelease, _v2, 11000),
                                   PTXRUN_ENTRY(cuDevicePrimaryCtxGetState, 7000),
                                   PTXRUN_VERSIONED(cuCtxPushCurrent, _v2, 4000),
                                   PTXRUN_VERSIONED(cuCtxPopCurrent, _v2, 4000),
                                   PTXRUN_ENTRY(cuCtxSetCurrent, 4000),
                                   PTXRUN_ENTRY(cuCtxGetCurrent, 4000),
                                   PTXRUN_ENTRY(cuCtxGetDevice, 2000),
                                   PTXRUN_ENTRY(cuCtxSynchronize, 2000),
                                   PTXRUN_VERSIONED(cuMemGetInfo, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemAlloc, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemFree, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemAllocHost, _v2, 3020),
                                   PTXRUN_ENTRY(cuMemFreeHost, 2000),
                                   PTXRUN_VERSIONED(cuMemcpyHtoD, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemcpyDtoH, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemcpyDtoD, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemcpyHtoDAsync, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemcpyDtoHAsync, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemcpyDtoDAsync, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemsetD8, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemsetD16, _v2, 3020),
                                   PTXRUN_VERSIONED(cuMemsetD32, _v2, 3020),
                                   PTXRUN_ENTRY(cuMemsetD8Async, 3020),
                                   PTXRUN_ENTRY(cuMemsetD16Async, 3020),
                                   PTXRUN_ENTRY(cuMemsetD32Async, 3020),
                                   PTXRUN_VERSIONED(cuMemGetAddressRange, _v2, 3020),
                                   PTXRUN_ENTRY(cuPointerGetAttribute, 4000),
                                   PTXRUN_ENTRY(cuPointerGetAttributes, 7000),
                                   PTXRUN_ENTRY(cuModuleLoadData, 2000),
                                   PTXRUN_ENTRY(cuModuleLoadDataEx, 2010),
                                   PTXRUN_ENTRY(cuModuleLoadFatBinary, 2000),
                                   PTXRUN_ENTRY(cuModuleUnload, 2000),
                                   PTXRUN_ENTRY(cuModuleGetFunction, 2000),
                                   PTXRUN_VERSIONED(cuModuleGetGlobal, _v2, 3020),
                                   PTXRUN_ENTRY(cuLibraryLoadData, 12000),
                                   PTXRUN_ENTRY(cuLibraryUnload, 12000),
                                   PTXRUN_ENTRY(cuLibraryGetKernel, 12000),
                                   PTXRUN_ENTRY(cuLibraryGetModule, 12000),
                                   PTXRUN_ENTRY(cuKernelGetFunction, 12000),
                                   PTXRUN_ENTRY(cuFuncSetAttribute, 9000),
                                   PTXRUN_ENTRY(cuKernelSetAttribute, 12000),
                                   PTXRUN_ENTRY(cuFuncGetAttribute, 2020),
                                   PTXRUN_ENTRY(cuLaunchKernel, 4000),
                                   PTXRUN_ENTRY(cuLaunchKernelEx, 11060),
                                   PTXRUN_ENTRY(cuStreamCreate, 2000),
                                   PTXRUN_ENTRY(cuStreamCreateWithPriority, 5050),
                                   PTXRUN_VERSIONED(cuStreamDestroy, _v2, 4000),
                                   PTXRUN_ENTRY(cuStreamSynchronize, 2000),
                                   PTXRUN_ENTRY(cuStreamQuery, 2000),
                                   PTXRUN_ENTRY(cuStreamGetCtx, 9020),
                                   PTXRUN_ENTRY(cuStreamWaitEvent, 3020),
                                   PTXRUN_VERSIONED(cuStreamBeginCapture, _v2, 10010),
                                   PTXRUN_ENTRY(cuStreamEndCapture, 10000),
                                   PTXRUN_ENTRY(cuStreamIsCapturing, 10000),
                                   PTXRUN_VERSIONED(cuGraphInstantiate, WithFlags, 11040),
                                   PTXRUN_ENTRY(cuGraphInstantiateWithFlags, 11040),
                                   PTXRUN_ENTRY(cuGraphGetNodes, 10000),
                                   PTXRUN_ENTRY(cuGraphLaunch, 10000),
                                   PTXRUN_ENTRY(cuGraphDestroy, 10000),
                                   PTXRUN_ENTRY(cuGraphExecDestroy, 10000),
                                   PTXRUN_ENTRY(cuEventCreate, 2000),
                                   PTXRUN_ENTRY(cuEventRecord, 2000),
                                   PTXRUN_ENTRY(cuEventSynchronize, 2000),
                                   PTXRUN_ENTRY(cuEventQuery, 2000),
                                   PTXRUN_VERSIONED(cuEventElapsedTime, _v2, 2000),
                                   PTXRUN_VERSIONED(cuEventDestroy, _v2, 4000)};

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;

extern "C" CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                                        CUdriverProcAddressQueryResult* found) {
  const auto answer = [&](CUdriverProcAddressQueryResult status) {
    if (found != nullptr) *found = status;
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
  };
  *function = nullptr;
  if (std::strcmp(name, "cuGetProcAddress") == 0) {
    *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
    return answer(CU_GET_PROC_ADDRESS_SUCCESS);
  }
  for (const EntryPoint& entry : kEntryPoints) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (entry.since > version) return answer(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    if (entry.since > TheDriver().version()) return answer(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    *function = entry.function;
    return answer(CU_GET_PROC_ADDRESS_SUCCESS);
  }
  return answer(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}

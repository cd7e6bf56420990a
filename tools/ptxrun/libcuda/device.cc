// Devices, contexts and errors.
#include <cstdio>
#include <cstring>

#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

bool IsDevice(CUdevice device) { return device == 0 && TheDriver().has_device(); }

// Shared memory that a block may ask for, per architecture (CUDA C++ programming guide, technical specifications).
int SharedLimit(int sm) {
  if (sm == 80 || sm == 87) return 163 * 1024;
  if (sm == 90 || sm == 100 || sm == 103) return 227 * 1024;
  return 99 * 1024;  // 86, 89, 120
}

CUresult AttributeOf(CUdevice_attribute attribute, int sm, int* value) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = sm / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = sm % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      break;  // few: launches that depend on it stay small
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      *value = 64;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      *value = 0x7FFFFFFF;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      *value = 65535;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      *value = 48 * 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = SharedLimit(sm);
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = SharedLimit(sm) + 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      *value = 65536;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      *value = sm == 80 || sm == 90 || sm == 100 ? 2048 : 1536;
      break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      *value = 0;
      break;
    default:
      Say("attribute " + std::to_string(attribute) + " of a device is not modelled");
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

struct Error {
  CUresult code;
  const char *name, *text;
};
constexpr Error kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
};

const Error* FindError(CUresult code) {
  for (const Error& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;  // the functions below are the driver's, outside of any namespace

extern "C" {

CUresult cuGetErrorName(CUresult code, const char** name) {
  const Error* error = FindError(code);
  *name = error == nullptr ? nullptr : error->name;
  return error == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  const Error* error = FindError(code);
  *text = error == nullptr ? nullptr : error->text;
  return error == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
  return Locked([&](Driver& driver) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.has_device()) return CUDA_ERROR_NO_DEVICE;
    driver.is_started = true;
    return CUDA_SUCCESS;
  });
}

CUresult cuDriverGetVersion(int* version) {
  return Locked([&](Driver& driver) {
    *version = driver.version();
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    *count = driver.has_device() ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    if (!IsDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return Locked([&](Driver& driver) {
    if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(length), "ptxrun sm_%d (emulated)", driver.sm());
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return Locked([&](Driver&) {
    if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memset(uuid, 0, sizeof(*uuid));
    uuid->bytes[15] = static_cast<char>(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return Locked([&](Driver& driver) {
    return IsDevice(device) ? AttributeOf(attribute, driver.sm(), value) : CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return Locked([&](Driver& driver) {
    if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = driver.memory_bytes();
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *context = &driver.context;
    ++(*context)->retained;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return Locked([&](Driver& driver) {
    if (!IsDevice(device) || driver.context.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --driver.context.retained;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return Locked([&](Driver& driver) {
    if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = driver.context.retained > 0 ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    if (context == nullptr || context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    ContextStack().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return Locked([&](Driver&) {
    if (ContextStack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) *context = ContextStack().back();
    ContextStack().pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    if (!ContextStack().empty()) ContextStack().pop_back();
    if (context != nullptr) ContextStack().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    *context = ContextStack().empty() ? nullptr : ContextStack().back();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return Locked([&](Driver&) {
    if (ContextStack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return Locked([&](Driver&) { return NeedContextOutsideCaptures("cuCtxSynchronize"); });
}

}  // extern "C"

// Memory of the device: rooms, copies, fills, and questions about pointers.
#include <cstdlib>
#include <cstring>

#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

// Copies that the host waits for: not while a stream captures.
CUresult Now(const std::function<void(Driver&)>& work, const char* function = __builtin_FUNCTION()) {
  const auto body = [&](Driver& driver) {
    if (driver.capturing > 0 && NeedContext() == CUDA_SUCCESS) {
      NeedContextOutsideCaptures(function);
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
    work(driver);
    return CUDA_SUCCESS;
  };
  return Locked(body, function);
}

CUresult Later(CUstream stream, std::function<void(Driver&)> work, const char* function = __builtin_FUNCTION()) {
  const auto body = [&](Driver&) {
    return Enqueue(stream, [work = std::move(work)] {
      work(TheDriver());
      return CUDA_SUCCESS;
    });
  };
  return Locked(body, function);
}

CUresult AllocateIn(Driver& driver, CUdeviceptr* address, size_t bytes) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > driver.memory_bytes() - driver.memory.used()) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = driver.memory.Allocate(bytes);
  return CUDA_SUCCESS;
}

CUresult AttributeOf(Driver& driver, void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const Allocation* allocation = driver.memory.Find(pointer);
  if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;  // memory of the host, as far as the driver knows
  const auto put = [&](auto value) { std::memcpy(data, &value, sizeof(value)); };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      put(&driver.context);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      put(static_cast<unsigned int>(CU_MEMORYTYPE_DEVICE));
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      put(pointer);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put(0);
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      put(0u);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      put(allocation->base);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      put(allocation->size);
      break;
    default:
      Say("attribute " + std::to_string(attribute) + " of a pointer is not modelled");
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;

extern "C" {

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return Locked([&](Driver& driver) {
    *total = driver.memory_bytes();
    *free = driver.memory_bytes() - driver.memory.used();
    return NeedContext();
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return Locked([&](Driver& driver) {
    const CUresult result = NeedContextOutsideCaptures("cuMemAlloc");
    return result != CUDA_SUCCESS ? result : AllocateIn(driver, address, bytes);
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return Locked([&](Driver& driver) {
    if (address == 0) return CUDA_SUCCESS;
    if (const CUresult result = NeedContextOutsideCaptures("cuMemFree"); result != CUDA_SUCCESS) return result;
    return driver.memory.Free(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMemAllocHost_v2(void** host, size_t bytes) {
  *host = std::malloc(bytes);
  return *host == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* host) {
  std::free(host);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return Now([=](Driver& driver) { driver.memory.Write(to, from, bytes); });
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return Now([=](Driver& driver) { driver.memory.Read(from, to, bytes); });
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return Now([=](Driver& driver) { driver.memory.Copy(to, from, bytes); });
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Write(to, from, bytes); });
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Read(from, to, bytes); });
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Copy(to, from, bytes); });
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return Now([=](Driver& driver) { driver.memory.Fill(to, value, 1, count); });
}
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  return Now([=](Driver& driver) { driver.memory.Fill(to, value, 2, count); });
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
  return Now([=](Driver& driver) { driver.memory.Fill(to, value, 4, count); });
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Fill(to, value, 1, count); });
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Fill(to, value, 2, count); });
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  return Later(stream, [=](Driver& driver) { driver.memory.Fill(to, value, 4, count); });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  return Locked([&](Driver& driver) {
    const Allocation* allocation = driver.memory.Find(pointer);
    if (allocation == nullptr) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = allocation->base;
    if (bytes != nullptr) *bytes = allocation->size;
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return Locked([&](Driver& driver) {
    return driver.is_started ? AttributeOf(driver, data, attribute, pointer) : CUDA_ERROR_NOT_INITIALIZED;
  });
}

// As the driver: what a pointer does not have is left zero, and that is no error.
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data, CUdeviceptr pointer) {
  return Locked([&](Driver& driver) {
    if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
    for (unsigned int i = 0; i < count; ++i) {
      const bool is_int = attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ||
                          attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                          attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED;
      std::memset(data[i], 0, is_int ? sizeof(int) : sizeof(void*));
      if (driver.memory.Find(pointer) == nullptr) {
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) std::memset(data[i], 0xFE, sizeof(int));  // negative
        continue;
      }
      if (const CUresult result = AttributeOf(driver, data[i], attributes[i], pointer); result != CUDA_SUCCESS)
        return result;
    }
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

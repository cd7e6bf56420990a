// Modules, libraries and the kernels in them.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "tools/ptxrun/libcuda/fatbin.h"
#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

// The module whose kernels go before those of images, or nullptr.
std::unique_ptr<Module> Replacement(Driver& driver) {
  if (driver.replacement().empty()) return nullptr;
  std::ifstream file(driver.replacement());
  if (!file) throw NoPtx("PTXRUN_PTX=" + driver.replacement() + " cannot be read");
  std::stringstream text;
  text << file.rdbuf();
  return std::make_unique<Module>(text.str(), driver.memory);
}

bool Has(const Module& module, const char* name) {
  const std::vector<std::string> names = module.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

CUresult LoadInto(CUmodule* module, const void* image, const char* caller = __builtin_FUNCTION()) {
  const auto body = [&](Driver& driver) {
    if (const CUresult result = NeedContextOutsideCaptures("cuModuleLoadData"); result != CUDA_SUCCESS) return result;
    if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    try {
      auto loaded = std::make_unique<CUmod_st>();
      loaded->module = std::make_unique<Module>(PtxOf(image, driver.sm()), driver.memory);
      loaded->replacement = Replacement(driver);
      if (loaded->module->target() > driver.sm()) {
        Say("PTX for sm_" + std::to_string(loaded->module->target()) + " on sm_" + std::to_string(driver.sm()));
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
      }
      *module = loaded.release();
      return CUDA_SUCCESS;
    } catch (const NoPtx& error) {
      Say(error.what());
      return CUDA_ERROR_NO_BINARY_FOR_GPU;
    } catch (const SyntaxError& error) {
      Say(error.what());
      return CUDA_ERROR_INVALID_PTX;
    }
  };
  return Locked(body, caller);
}

CUresult FindIn(CUmodule module, const char* name, Function** function, const char* caller = __builtin_FUNCTION()) {
  const auto body = [&](Driver&) {
    if (!Has(*module->module, name)) return CUDA_ERROR_NOT_FOUND;
    const bool is_replaced = module->replacement != nullptr && Has(*module->replacement, name);
    auto& found = module->functions[name];
    try {
      if (!found)
        found = std::make_unique<Function>(
            Function{.kernel = (is_replaced ? module->replacement : module->module)->Find(name)});
      *function = found.get();
      return CUDA_SUCCESS;
    } catch (const SyntaxError& error) {
      Say(std::string(name) + ": " + error.what());
      return CUDA_ERROR_INVALID_PTX;
    }
  };
  return Locked(body, caller);
}

int SharedLimit() {
  int limit = 0;
  cuDeviceGetAttribute(&limit, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0);
  return limit;
}

CUresult Unload(CUmodule module) {
  return Locked([&](Driver&) {
    const CUresult result = NeedContextOutsideCaptures("cuModuleUnload");
    if (result == CUDA_SUCCESS) delete module;
    return result;
  });
}

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return LoadInto(module, image); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int, CUjit_option*, void**) {
  return LoadInto(module, image);
}
CUresult cuModuleLoadFatBinary(CUmodule* module, const void* image) { return LoadInto(module, image); }
CUresult cuModuleUnload(CUmodule module) { return Unload(module); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return FindIn(module, name, reinterpret_cast<Function**>(function));
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  return Locked([&](Driver&) {
    const Module::Global* global = module->module->FindGlobal(name);
    if (global == nullptr) return CUDA_ERROR_NOT_FOUND;
    if (address != nullptr) *address = global->address;
    if (bytes != nullptr) *bytes = global->bytes;
    return CUDA_SUCCESS;
  });
}

// A library is a module here, and a kernel the function of it.
CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned int, CUlibraryOption*,
                           void**, unsigned int) {
  return LoadInto(reinterpret_cast<CUmodule*>(library), image);
}
CUresult cuLibraryUnload(CUlibrary library) { return Unload(reinterpret_cast<CUmodule>(library)); }
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return FindIn(reinterpret_cast<CUmodule>(library), name, reinterpret_cast<Function**>(kernel));
}
CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
  *module = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return Locked([&](Driver&) {
    auto& function = *reinterpret_cast<Function*>(handle);
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;  // a hint
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    if (value < 0 || value + static_cast<int>(function.kernel.static_shared()) > SharedLimit())
      return CUDA_ERROR_INVALID_VALUE;
    function.dynamic_limit = static_cast<uint32_t>(value);
    return CUDA_SUCCESS;
  });
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  return cuFuncSetAttribute(reinterpret_cast<CUfunction>(kernel), attribute, value);
}

// Registers are a matter of machine code, which is not there.
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  return Locked([&](Driver& driver) {
    const auto& function = *reinterpret_cast<Function*>(handle);
    switch (attribute) {
      case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
      case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = static_cast<int>(function.kernel.static_shared());
        break;
      case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = static_cast<int>(function.kernel.local_bytes());
        break;
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = static_cast<int>(function.dynamic_limit);
        break;
      case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = driver.sm();
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
  });
}

}  // extern "C"

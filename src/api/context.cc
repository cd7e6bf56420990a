// Status, version, contexts and the instruction sets they choose from.
#include <sparge/sparge.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/base/status.h"
#include "src/base/threads.h"
#include "src/cpu/device.h"
#include "src/cpu/instruction_sets.h"
#ifdef SPARGE_WITH_CUDA
#include "src/cuda/device.h"
#endif

namespace sparge::impl {
namespace {

thread_local char last_error[sizeof(Failure::detail)] = "";

sparge_executor CheckedExecutor(const sparge_executor* given) {
  const sparge_executor executor = CopySized("executor", given, sparge_executor{});
  SPARGE_REQUIRE(executor.workers >= 1 && executor.workers <= 4096, "executor.workers=%d is outside 1..4096",
                 executor.workers);
  SPARGE_REQUIRE(executor.run != nullptr, "executor.run is NULL");
  return executor;
}

// The number of the GPU that a device names; -1 for the CPU.
int GpuNumber(const char* device) {
  constexpr char kPrefix[] = "cuda:";
  if (device == nullptr || std::strcmp(device, "cpu") == 0) return -1;
  const size_t length = std::strlen(kPrefix);
  const char* number = device + length;
  const bool named = std::strncmp(device, kPrefix, length) == 0 && *number != '\0';
  const size_t digits = named ? std::strspn(number, "0123456789") : 0;
  SPARGE_REQUIRE(digits > 0 && digits <= 4 && number[digits] == '\0', "device=%s is neither \"cpu\" nor \"cuda:N\"",
                 device);
  return std::atoi(number);
}

std::unique_ptr<Device> MakeGpu(const sparge_context_desc& desc) {
  SPARGE_REQUIRE(desc.threads == 0, "threads=%d is given, but device=%s has none", desc.threads, desc.device);
  SPARGE_REQUIRE(desc.executor == nullptr, "executor is given, but device=%s has no threads", desc.device);
  SPARGE_REQUIRE(desc.isa == nullptr, "isa=%s is given, but device=%s has none to choose", desc.isa, desc.device);
#ifdef SPARGE_WITH_CUDA
  return MakeCudaDevice(GpuNumber(desc.device));
#else
  Fail(SPARGE_UNSUPPORTED_HARDWARE, "device=%s: this library was built without CUDA (SPARGE_CUDA=OFF)", desc.device);
#endif
}

}  // namespace

void RequireHost(const sparge_context& context, const char* what) {
  SPARGE_REQUIRE(context.device->on_host(), "%s runs on a CPU only, and the context's device is %s", what,
                 context.device->isa());
}

void SetLastError(const char* detail) { std::snprintf(last_error, sizeof(last_error), "%s", detail); }

}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

const char* sparge_status_text(sparge_status status) {
  switch (status) {
    case SPARGE_OK:
      return "ok";
    case SPARGE_INVALID_ARGUMENT:
      return "invalid argument";
    case SPARGE_UNSUPPORTED_HARDWARE:
      return "this machine lacks the hardware or its driver";
    case SPARGE_OUT_OF_MEMORY:
      return "out of memory";
    case SPARGE_INTERNAL_ERROR:
      return "internal error";
    case SPARGE_STOPPED:
      return "stopped by the caller";
    case SPARGE_DEVICE_ERROR:
      return "the device failed";
    case SPARGE_RANK_LOST:
      return "another rank is lost";
  }
  return "unknown status";
}

const char* sparge_last_error(void) { return last_error; }

#define SPARGE_TEXT_OF(x) #x
#define SPARGE_DOTTED(major, minor, patch) SPARGE_TEXT_OF(major) "." SPARGE_TEXT_OF(minor) "." SPARGE_TEXT_OF(patch)
const char* sparge_version(void) {
  return SPARGE_DOTTED(SPARGE_VERSION_MAJOR, SPARGE_VERSION_MINOR, SPARGE_VERSION_PATCH);
}

void sparge_executor_init_sized(sparge_executor* executor, size_t size) { InitSized(executor, size, {}); }
void sparge_context_desc_init_sized(sparge_context_desc* desc, size_t size) { InitSized(desc, size, {}); }

sparge_status sparge_context_create(const sparge_context_desc* given, sparge_context** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    const auto defaults = Defaults(&sparge_context_desc_init_sized);
    const sparge_context_desc desc = given == nullptr ? defaults : CopySized("desc", given, defaults);
    SPARGE_REQUIRE(desc.threads >= 0 && desc.threads <= 4096, "threads=%d is outside 0..4096", desc.threads);
    auto context = std::make_unique<sparge_context>();
    if (GpuNumber(desc.device) >= 0) {
      context->device = MakeGpu(desc);
      *out = context.release();
      return;
    }
    if (desc.executor != nullptr) {
      context->executor = CheckedExecutor(desc.executor);
    } else {
      const auto cores = static_cast<int32_t>(std::thread::hardware_concurrency());
      context->pool = std::make_unique<Pool>(desc.threads > 0 ? desc.threads : std::max(cores, 1));
      context->executor = context->pool->executor();
    }
    context->device = MakeCpuDevice(context->executor, desc.isa);
    *out = context.release();
  });
}

void sparge_context_destroy(sparge_context* context) { delete context; }
const char* sparge_context_isa(const sparge_context* context) {
  return context == nullptr ? "" : context->device->isa();
}
int32_t sparge_context_threads(const sparge_context* context) {
  return context == nullptr ? 0 : context->device->threads();
}

int32_t sparge_isa_count(void) { return static_cast<int32_t>(InstructionSets().size()); }

void sparge_isa_init_sized(sparge_isa* isa, size_t size) { InitSized(isa, size, {}); }

sparge_status sparge_isa_at(int32_t index, sparge_isa* out) {
  return Guard([&] {
    CheckSized("out", out);
    const std::span<const InstructionSet> sets = InstructionSets();
    SPARGE_REQUIRE(index >= 0 && index < sparge_isa_count(), "index=%d is outside 0..%d", index,
                   sparge_isa_count() - 1);
    const InstructionSet& set = sets[static_cast<size_t>(index)];
    const KernelOps& kernel = *set.ops().kernel;
    StoreSized({0, set.name, set.runnable(), kernel.group_rows, kernel.int8_text}, out);
  });
}

}  // extern "C"

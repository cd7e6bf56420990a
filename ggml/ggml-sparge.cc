// ggml-sparge.cc - a ggml backend: takes attention over prompts, and leaves everything else to the CPU.
//
// An unmodified llama.cpp loads it by GGML_BACKEND_PATH. It shares the CPU's memory, so nothing is copied, and claims
// an operation only where it is the faster one. Versions of ggml differ in op numbers and in the table of a backend
// though they call themselves API version 2: ops are found by name, and the table is laid as ggml_version() needs it.
#include <ggml-backend-impl.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "ggml/attention.h"
#include "ggml/settings.h"
#include "ggml/usage.h"
#include "ggml/versions.h"

namespace sparge::ggml {
namespace {

// What the registry, its one device and all its backends share.
struct Plugin {
  Settings settings;
  Layout layout;
  ggml_op attention;  // number of FLASH_ATTN_EXT in this ggml
};
// Never deleted: a backend may be freed after the destructors of this object have run.
const Plugin* plugin = nullptr;

// Backends that have not computed anything yet: their programs may still probe (see IsWorthwhile).
std::atomic<int> not_begun = 0;

// ------------------------------------------------------------------ backend

// A ggml_backend is pointers throughout (guid, table, device, context), so that one array serves every layout.
struct Backend {
  std::array<void*, kMostPointers> pointers{};
  Attention attention;
  bool begun = false;

  explicit Backend(const Settings& settings) : attention(settings) { ++not_begun; }
  ~Backend() { Begin(); }
  void Begin() {
    if (!std::exchange(begun, true)) --not_begun;
  }
};

Backend* BackendOf(ggml_backend_t backend) {
  return static_cast<Backend*>(reinterpret_cast<void**>(backend)[plugin->layout.context()]);
}

const char* BackendName(ggml_backend_t) { return "SPARGE"; }

void FreeBackend(ggml_backend_t backend) { delete BackendOf(backend); }

ggml_status Compute(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
      const ggml_tensor* node = ggml_graph_node(graph, i);
      if (node->op != plugin->attention || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;  // views
      BackendOf(backend)->Begin();
      BackendOf(backend)->attention.Compute(Operands(node));
    }
    return GGML_STATUS_SUCCESS;
  } catch (const std::bad_alloc&) {
    return GGML_STATUS_ALLOC_FAILED;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sparge: %s\n", error.what());
    return GGML_STATUS_FAILED;
  }
}

// Programs say so before they compute, and not before.
void SetThreads(ggml_backend_t backend, int threads) {
  BackendOf(backend)->Begin();
  BackendOf(backend)->attention.SetThreads(threads);
}

ggml_guid_t Guid() {
  static ggml_guid guid = {'s', 'p', 'a', 'r', 'g', 'e', '-', 'a', 't', 't', 'e', 'n', 't', 'i', 'o', 'n'};
  return &guid;
}

ggml_backend_t InitBackend(ggml_backend_dev_t device, const char*) {
  try {
    auto backend = std::make_unique<Backend>(plugin->settings);
    const Layout& layout = plugin->layout;
    backend->pointers[layout.guid()] = Guid();
    backend->pointers[layout.get_name()] = reinterpret_cast<void*>(BackendName);
    backend->pointers[layout.free()] = reinterpret_cast<void*>(FreeBackend);
    backend->pointers[layout.graph_compute()] = reinterpret_cast<void*>(Compute);
    backend->pointers[layout.device()] = device;
    backend->pointers[layout.context()] = backend.get();
    return reinterpret_cast<ggml_backend_t>(backend.release()->pointers.data());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sparge: %s\n", error.what());
    return nullptr;
  }
}

// ------------------------------------------------------------------ device

const char* DeviceName(ggml_backend_dev_t) { return "SPARGE"; }
const char* DeviceDescription(ggml_backend_dev_t) { return "sparse attention on the CPU (sparge)"; }
enum ggml_backend_dev_type DeviceType(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void DeviceMemory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }  // none of its own

// Members up to the first one that versions differ in; the capabilities after it stay as the caller cleared them.
void DeviceProperties(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  props->name = DeviceName(device);
  props->description = DeviceDescription(device);
  props->type = DeviceType(device);
  DeviceMemory(device, &props->memory_free, &props->memory_total);
  props->caps.buffer_from_host_ptr = true;
}

// Exactly the CPU's: the scheduler then copies nothing.
ggml_backend_buffer_type_t BufferType(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }
ggml_backend_buffer_t BufferFromPointer(ggml_backend_dev_t, void* data, size_t size, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, size);
}
bool SupportsBuffer(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(type); }

// llama.cpp probes with one token per sequence whether flash attention may be used at all, and switches it off if that
// lands on another device than its layer. It does so when it makes its backends, before it computes anything: few
// queries stay on the CPU until then. Those of short prompts, too: between SPARGE_FEW_QUERIES and the 256 that would be
// safe always no program was seen to probe.
bool IsWorthwhile(const Operands& op) {
  if (plugin->settings.claim_all || op.queries() > SPARGE_FEW_QUERIES) return true;
  return not_begun == 0 && plugin->settings.Decodes() && CanDecode(op) && op.keys() > SPARGE_DECODE_KEYS;
}

bool SupportsOp(ggml_backend_dev_t, const ggml_tensor* op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    default:
      break;
  }
  if (op->op != plugin->attention || plugin->settings.mode == Mode::kOff) return false;
  const Operands operands(op);
  const bool possible = CanCompute(operands);
  const bool taken = possible && IsWorthwhile(operands);
  NoteAsked(taken ? &Usage::taken : possible ? &Usage::few : &Usage::impossible);
  return taken;
}

ggml_backend_device_i DeviceTable() {
  ggml_backend_device_i table{};
  table.get_name = DeviceName;
  table.get_description = DeviceDescription;
  table.get_memory = DeviceMemory;
  table.get_type = DeviceType;
  table.get_props = DeviceProperties;
  table.init_backend = InitBackend;
  table.get_buffer_type = BufferType;
  table.buffer_from_host_ptr = BufferFromPointer;
  table.supports_op = SupportsOp;
  table.supports_buft = SupportsBuffer;
  return table;
}

// ------------------------------------------------------------------ registry

const char* RegistryName(ggml_backend_reg_t) { return "SPARGE"; }
size_t DeviceCount(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t Device(ggml_backend_reg_t registry, size_t) {
  static ggml_backend_device device{DeviceTable(), registry, nullptr};
  return &device;
}

void* Procedure(ggml_backend_reg_t, const char* name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0 ? reinterpret_cast<void*>(SetThreads) : nullptr;
}

// The number of an op in the ggml that loaded us. It is there in every version: the search ends before the last op.
ggml_op FindOp(const char* name) {
  int op = 0;
  while (std::strcmp(ggml_op_name(static_cast<ggml_op>(op)), name) != 0) ++op;
  return static_cast<ggml_op>(op);
}

}  // namespace
}  // namespace sparge::ggml

// NULL: the program goes on without us.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
  using namespace sparge::ggml;
  static ggml_backend_reg registry{GGML_BACKEND_API_VERSION, {RegistryName, DeviceCount, Device, Procedure}, nullptr};
  if (plugin != nullptr) return &registry;  // programs may load their backends more than once
  const std::optional<Layout> layout = LayoutOf(ggml_version());
  if (!layout) {
    std::fprintf(stderr, "sparge: ggml %s is not known to this build (it knows %s); going on without sparge\n",
                 ggml_version(), kKnownVersions);
    return nullptr;
  }
  try {
    auto made = std::make_unique<Plugin>(Plugin{ReadSettings(), *layout, FindOp("FLASH_ATTN_EXT")});
    // An instruction set that cannot be is refused here: a backend that cannot be made ends the program.
    const sparge::Context context(1);
    SayLoaded(made->settings, ggml_version(), context.isa());
    plugin = made.release();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sparge: %s; going on without sparge\n", error.what());
    return nullptr;
  }
  return &registry;
}

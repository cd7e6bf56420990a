// Copies to the GPU and back; opens the driver by itself, for the library hands out no memory.
#include "tests/cuda/gpu_util.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace sparge::testing {
namespace {

using Address = unsigned long long;

template <class Function>
Function* Find(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  using Get = int (*)(const char*, void**, int, uint64_t, int*);
  static const auto get = reinterpret_cast<Get>(dlsym(library, "cuGetProcAddress_v2"));
  void* found = nullptr;
  if (get == nullptr || get(name, &found, 12000, 0, nullptr) != 0 || found == nullptr) {
    throw std::runtime_error(std::string("the driver has no ") + name);
  }
  return reinterpret_cast<Function*>(found);
}

void MustWork(int result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + " gave " + std::to_string(result));
}

// The context that the library's contexts use is current while a test copies.
class Current {
 public:
  Current() {
    static void* context = [] {
      void* made = nullptr;
      MustWork(Find<int(unsigned)>("cuInit")(0), "cuInit");
      MustWork(Find<int(void**, int)>("cuDevicePrimaryCtxRetain")(&made, 0), "cuDevicePrimaryCtxRetain");
      return made;
    }();
    MustWork(Find<int(void*)>("cuCtxPushCurrent")(context), "cuCtxPushCurrent");
  }
  ~Current() {
    void* ignored = nullptr;
    Find<int(void**)>("cuCtxPopCurrent")(&ignored);
  }
};

GpuMemory Upload(const TestTensor& tensor, sparge_tensor& view) {
  GpuMemory memory(tensor.bytes().data(), tensor.bytes().size());
  view = tensor.view();
  view.data = memory.data();
  return memory;
}

template <class T>
GpuMemory UploadArray(const std::vector<T>& array) {
  return GpuMemory(array.data(), array.size() * sizeof(T));
}
template <class T>
void Download(const GpuMemory& memory, std::vector<T>& array) {
  memory.Read(array.data(), array.size() * sizeof(T));
}

// Calls `run` with a stream that captures, and launches the graph `times` times.
template <class Run>
void Capture(int times, const Run& run) {
  const Current current;
  void *stream = nullptr, *graph = nullptr, *executable = nullptr;
  MustWork(Find<int(void**, unsigned)>("cuStreamCreate")(&stream, 0), "cuStreamCreate");
  MustWork(Find<int(void*, int)>("cuStreamBeginCapture")(stream, 0), "cuStreamBeginCapture");
  run(stream);
  MustWork(Find<int(void*, void**)>("cuStreamEndCapture")(stream, &graph), "cuStreamEndCapture");
  MustWork(Find<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags")(&executable, graph, 0),
           "cuGraphInstantiateWithFlags");
  for (int i = 0; i < times; ++i)
    MustWork(Find<int(void*, void*)>("cuGraphLaunch")(executable, stream), "cuGraphLaunch");
  MustWork(Find<int(void*)>("cuStreamSynchronize")(stream), "cuStreamSynchronize");
  Find<int(void*)>("cuGraphExecDestroy")(executable);
  Find<int(void*)>("cuGraphDestroy")(graph);
}

enum class How { kRun, kCaptured, kPredict };

GpuResult Call(const Context& context, const Problem& problem, How how, bool with_masses) {
  const bool runs = how != How::kPredict;
  const Case& shape = problem.shape;
  Plan plan(context, problem.desc);
  GpuResult result;
  std::tie(result.q_blocks, result.k_blocks) = plan.map_shape();
  const auto tiles = static_cast<size_t>(problem.desc.batch * shape.q_heads * result.q_blocks * result.k_blocks);
  result.o = TestTensor(shape.batch, shape.q_heads, shape.q_tokens, shape.v_dim, shape.o_type, shape.layout);
  result.lse.assign(static_cast<size_t>(shape.batch * shape.q_heads * shape.q_tokens), 12345.0f);
  result.map.assign(tiles, 7);
  result.masses.assign(with_masses ? tiles : 0, -1.0f);
  result.head_stats.resize(static_cast<size_t>(problem.desc.batch * shape.q_heads));

  RunArgs args;
  const GpuMemory q = Upload(problem.q, args.q), k = Upload(problem.k, args.k);
  GpuMemory v, o, lse = UploadArray(result.lse), map_out = UploadArray(result.map), map;
  GpuMemory masses = UploadArray(result.masses), stats = UploadArray(result.head_stats);
  if (runs) {
    v = Upload(problem.v, args.v);
    o = Upload(result.o, args.o);
    args.lse = {static_cast<float*>(lse.data()), shape.q_heads * shape.q_tokens, shape.q_tokens};
  }
  if (problem.desc.select == SPARGE_SELECT_MAP) {
    map = UploadArray(problem.map);
    args.map = static_cast<const uint8_t*>(map.data());
    args.map_batch_stride = problem.map_batch_stride;
    args.map_head_stride = problem.map_head_stride;
  }
  args.map_out = static_cast<uint8_t*>(map_out.data());
  args.head_stats = static_cast<sparge_head_stats*>(stats.data());
  if (with_masses) args.mass_out = static_cast<float*>(masses.data());
  const GpuMemory workspace(plan.workspace_size() + 1);
  args.workspace = workspace.data();
  args.workspace_size = plan.workspace_size();
  if (runs) {
    if (how == How::kRun) {
      plan.Run(args);
    } else {
      Capture(2, [&](void* stream) {
        args.stream = stream;
        plan.Run(args);
      });
    }
    o.Read(result.o.view().data, result.o.bytes().size());
    Download(lse, result.lse);
  } else {
    plan.Predict(args);
  }
  Download(map_out, result.map);
  Download(stats, result.head_stats);
  if (with_masses) Download(masses, result.masses);
  return result;
}

}  // namespace

GpuMemory::GpuMemory(size_t bytes) {
  const Current current;
  MustWork(Find<int(Address*, size_t)>("cuMemAlloc")(&address_, bytes + 1), "cuMemAlloc");
}
GpuMemory::GpuMemory(const void* data, size_t bytes) : GpuMemory(bytes) {
  const Current current;
  if (bytes > 0)
    MustWork(Find<int(Address, const void*, size_t)>("cuMemcpyHtoD")(address_, data, bytes), "cuMemcpyHtoD");
}
GpuMemory::GpuMemory(GpuMemory&& other) noexcept : address_(std::exchange(other.address_, 0)) {}
GpuMemory& GpuMemory::operator=(GpuMemory&& other) noexcept {
  std::swap(address_, other.address_);
  return *this;
}
GpuMemory::~GpuMemory() {
  if (address_ == 0) return;
  const Current current;
  Find<int(Address)>("cuMemFree")(address_);
}
void GpuMemory::Read(void* to, size_t bytes) const {
  const Current current;
  if (bytes > 0) MustWork(Find<int(void*, Address, size_t)>("cuMemcpyDtoH")(to, address_, bytes), "cuMemcpyDtoH");
}

Context GpuContext(bool fp8) {
  setenv("SPARGE_FAKE_GPU", fp8 ? "8.9" : "8.0", 1);
  ContextDesc desc;
  desc.device = "cuda:0";
  return Context(desc);
}
bool UsesFp8(const Context& context) { return std::strstr(context.isa(), "e4m3") != nullptr; }

GpuResult RunOnGpu(const Context& context, const Problem& problem) { return Call(context, problem, How::kRun, false); }
GpuResult RunCaptured(const Context& context, const Problem& problem) {
  return Call(context, problem, How::kCaptured, false);
}
GpuResult PredictOnGpu(const Context& context, const Problem& problem, bool with_masses) {
  return Call(context, problem, How::kPredict, with_masses);
}

}  // namespace sparge::testing

#include "python/src/gpu.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <new>
#include <utility>

#include "python/src/call.h"

namespace sparge::python {
namespace {

// Kilobytes of the GPU each. Answers of a language model have a length of their own at every step.
constexpr size_t kMostPlans = 256;

template <class T>
void Append(std::string& key, const T* values, size_t count) {
  key.append(reinterpret_cast<const char*>(&count), sizeof(count));
  key.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}
template <class T>
void Append(std::string& key, const std::vector<T>& values) {
  Append(key, values.data(), values.size());
}

// All that a plan is made of: the descriptor, byte by byte, and the arrays that it points to instead of their
// addresses.
std::string KeyOf(int32_t gpu, const Described& described) {
  PlanDesc desc = described.desc;
  desc.heads = nullptr;
  desc.head_precision = nullptr;
  desc.q_offsets = desc.kv_offsets = nullptr;
  desc.alibi_slopes = desc.sink_logits = nullptr;
  std::string key;
  Append(key, &gpu, 1);
  Append(key, &desc, 1);
  Append(key, described.heads);
  Append(key, described.head_precision);
  Append(key, described.q_offsets);
  Append(key, described.kv_offsets);
  Append(key, described.alibi_slopes);
  Append(key, described.sink_logits);
  return key;
}

ContextDesc DescOf(const std::string& device) {
  ContextDesc desc;
  desc.device = device.c_str();
  return desc;
}

// q, k, v, out and lse, the last perhaps None; `allocate` gives memory of the GPU for so many bytes, which must stay
// its own until what the stream has got by the end of this call is done.
void AttentionOnGpu(int32_t gpu, uintptr_t stream, bool captured, nb::tuple arrays, bool with_stats,
                    nb::callable allocate, nb::dict options) {
  const Place place = OnGpu(gpu);
  Outputs outputs{OptionalOutput("lse", arrays[4], place), {}, with_stats ? std::make_shared<CallStats>() : nullptr};
  Call call(arrays[0], arrays[1], arrays[2], arrays[3], options, Asker::kCaller, std::move(outputs), place);
  std::shared_ptr<const GpuPlan> kept;
  {
    nb::gil_scoped_release release;
    kept = GpuPlans::Get().PlanFor(gpu, call.described(), captured);
  }
  RunArgs& args = call.args();
  args.stream = reinterpret_cast<void*>(stream);  // NOLINT(performance-no-int-to-ptr)
  args.workspace_size = kept->plan.workspace_size();
  Array workspace;
  if (args.workspace_size > 0) {
    workspace = ImportOutput("workspace", allocate(args.workspace_size), place);
    if (workspace.dims() != 1 || static_cast<size_t>(workspace.shape[0]) < args.workspace_size) {
      RaiseValue("workspace: has not the " + std::to_string(args.workspace_size) + " bytes that were asked for");
    }
    args.workspace = workspace.data;
  }
  nb::gil_scoped_release release;
  const sparge_status status = sparge_run(kept->plan.get(), &args);
  kept.reset();  // without the GIL, should it have been dropped meanwhile
  Check(status);
}

}  // namespace

GpuPlans& GpuPlans::Get() {
  static GpuPlans* const plans = new GpuPlans;  // never destroyed: at exit, the driver may be gone
  return *plans;
}

std::shared_ptr<const GpuPlan> GpuPlans::PlanFor(int32_t gpu, const Described& described, bool captured) {
  const std::string key = KeyOf(gpu, described);
  std::shared_ptr<const GpuPlan> dropped;  // outlives the lock: destroying it waits
  const std::lock_guard lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    std::shared_ptr<Context>& context = contexts_[gpu];
    if (!context) context = std::make_shared<Context>(DescOf("cuda:" + std::to_string(gpu)));
    // First the new one: while a graph is captured this fails, and nothing may be destroyed.
    auto plan = std::make_shared<const GpuPlan>(GpuPlan{context, Plan(*context, described.desc)});
    if (plans_.size() >= kMostPlans) dropped = DropOldest();
    found = plans_.emplace(key, Kept{std::move(plan)}).first;
  }
  found->second.last_used = ++uses_;
  found->second.captured |= captured;
  return found->second.plan;
}

std::shared_ptr<const GpuPlan> GpuPlans::DropOldest() {
  const auto age = [](const auto& entry) { return entry.second.captured ? UINT64_MAX : entry.second.last_used; };
  const auto oldest =
      std::min_element(plans_.begin(), plans_.end(), [&](const auto& a, const auto& b) { return age(a) < age(b); });
  if (oldest == plans_.end() || oldest->second.captured) return nullptr;
  return plans_.extract(oldest).mapped().plan;
}

void GpuPlans::Forget() {
  new (&mutex_) std::mutex;
  new std::map<int32_t, std::shared_ptr<Context>>(std::move(contexts_));
  new std::map<std::string, Kept>(std::move(plans_));
  contexts_.clear();
  plans_.clear();
}

void BindGpu(nb::module_& m) {
  m.def("attention_on_gpu", &AttentionOnGpu, nb::arg("gpu"), nb::arg("stream"), nb::arg("captured"), nb::arg("arrays"),
        nb::arg("with_stats"), nb::arg("allocate"), nb::arg("options"));
}

}  // namespace sparge::python

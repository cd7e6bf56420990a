// sparge.hpp - header-only C++20 over sparge.h: ownership, exceptions, views. It adds no behaviour.
#ifndef SPARGE_SPARGE_HPP_
#define SPARGE_SPARGE_HPP_

#include <sparge/sparge.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Symbols carry the version of the header: two parts of one process may be compiled with different ones, and the loader
// must not give the constructor of a smaller struct to a larger one.
#define SPARGE_HPP_JOIN(major, minor) v##major##_##minor
#define SPARGE_HPP_VERSION(major, minor) SPARGE_HPP_JOIN(major, minor)
#define SPARGE_HPP_NAMESPACE SPARGE_HPP_VERSION(SPARGE_VERSION_MAJOR, SPARGE_VERSION_MINOR)

namespace sparge {
inline namespace SPARGE_HPP_NAMESPACE {

// A failed call: the status, and as text the detail that names the argument and the value.
class Error : public std::runtime_error {
 public:
  explicit Error(sparge_status status) : std::runtime_error(Text(status)), status_(status) {}
  sparge_status status() const noexcept { return status_; }

 private:
  static std::string Text(sparge_status status) {
    const char* detail = sparge_last_error();
    return *detail != '\0' ? detail : sparge_status_text(status);
  }
  sparge_status status_;
};

inline void Check(sparge_status status) {
  if (status != SPARGE_OK) throw Error(status);
}

// Descriptors with the defaults filled in.
struct ContextDesc : sparge_context_desc {
  ContextDesc() { sparge_context_desc_init(this); }
};
struct PlanDesc : sparge_plan_desc {
  PlanDesc() { sparge_plan_desc_init(this); }
};
struct RunArgs : sparge_run_args {
  RunArgs() { sparge_run_args_init(this); }
};
struct Stats : sparge_stats {
  Stats() { sparge_stats_init(this); }
  // 1 - QK tiles computed / eligible; 0 where nothing is eligible.
  double sparsity() const { return 1.0 - Share(total.qk_computed, total.qk_eligible); }
  double work() const {
    return 0.5 * (Share(total.qk_computed, total.qk_eligible) + Share(total.pv_computed, total.pv_eligible));
  }

 private:
  static double Share(int64_t part, int64_t whole) {
    return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
  }
};

struct CalibrationDesc : sparge_calibration_desc {
  CalibrationDesc() { sparge_calibration_desc_init(this); }
};
// The bounds that a descriptor names: BoundsOf a CalibrationDesc, a LayerDesc or a TunerDesc.
struct Bounds {
  sparge_measure measure;
  double target, pv;
};
inline Bounds BoundsOf(const sparge_calibration_desc& desc) {
  Bounds bounds;
  Check(sparge_calibration_desc_bounds(&desc, &bounds.measure, &bounds.target, &bounds.pv));
  return bounds;
}
inline Bounds BoundsOf(const sparge_layer_desc& desc) {
  Bounds bounds;
  Check(sparge_layer_desc_bounds(&desc, &bounds.measure, &bounds.target, &bounds.pv));
  return bounds;
}
inline Bounds BoundsOf(const sparge_tuner_desc& desc) {
  Bounds bounds;
  Check(sparge_tuner_desc_bounds(&desc, &bounds.measure, &bounds.target, &bounds.pv));
  return bounds;
}
// Another target in the measure that it has, and the usual room for the PV skip.
template <class Desc>
void SetTarget(double target, Desc& desc) {
  (desc.target_l1 != SPARGE_NOT_NAMED ? desc.target_l1 : desc.target_l2) = target;
  desc.pv_l1 = desc.pv_l2 = SPARGE_NOT_NAMED;
}

struct HeadEstimate : sparge_head_estimate {
  HeadEstimate() { sparge_head_estimate_init(this); }
};
struct LayerDesc : sparge_layer_desc {
  LayerDesc() { sparge_layer_desc_init(this); }
};
struct LayerPreset : sparge_layer_preset {
  LayerPreset() { sparge_layer_preset_init(this); }
};
struct LayerTotals : sparge_layer_totals {
  LayerTotals() { sparge_layer_totals_init(this); }
};

// Views of contiguous tensors: ViewHeads of (batch, heads, tokens, dim), ViewTokens of (batch, tokens, heads, dim).
inline sparge_tensor ViewHeads(const void* data, sparge_dtype dtype, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), dtype, heads * tokens * dim, tokens * dim, dim};
}
inline sparge_tensor ViewTokens(const void* data, sparge_dtype dtype, int64_t heads, int64_t tokens, int64_t dim) {
  return {const_cast<void*>(data), dtype, heads * tokens * dim, dim, heads * dim};
}

// The tokens of a grid (T, H, W) in that order, as raster indices.
inline std::vector<int64_t> TokenOrder(sparge_order order, const std::array<int64_t, 3>& grid, uint64_t seed = 0) {
  // A bad grid is refused before anything is written: no need for room then.
  int64_t cells = 1;
  for (const int64_t side : grid) cells = cells > 0 && side > 0 && side <= INT32_MAX / cells ? cells * side : 0;
  std::vector<int64_t> out(static_cast<size_t>(cells) + 1);
  Check(sparge_token_order(order, grid.data(), seed, out.data()));
  out.pop_back();
  return out;
}

class Context {
 public:
  explicit Context(int32_t threads = 0, const char* isa = nullptr) {
    ContextDesc desc;
    desc.threads = threads;
    desc.isa = isa;
    Create(desc);
  }
  explicit Context(const sparge_executor& executor, const char* isa = nullptr) {
    ContextDesc desc;
    desc.executor = &executor;
    desc.isa = isa;
    Create(desc);
  }
  explicit Context(const sparge_context_desc& desc) { Create(desc); }
  const char* isa() const { return sparge_context_isa(context_.get()); }
  int32_t threads() const { return sparge_context_threads(context_.get()); }
  sparge_context* get() const { return context_.get(); }

 private:
  struct Destroy {
    void operator()(sparge_context* context) const { sparge_context_destroy(context); }
  };
  void Create(const sparge_context_desc& desc) {
    sparge_context* context = nullptr;
    Check(sparge_context_create(&desc, &context));
    context_.reset(context);
  }
  std::unique_ptr<sparge_context, Destroy> context_;
};

namespace detail {

// What a `save` function of the C interface gives, `save(buffer, &size)`. Another thread may make it longer
// meanwhile.
template <class Save>
std::vector<std::byte> SavedBytes(const Save& save) {
  size_t size = 0;
  Check(save(nullptr, &size));
  for (;;) {
    std::vector<std::byte> bytes(size);
    const sparge_status status = save(bytes.data(), &size);
    if (status != SPARGE_OK && size <= bytes.size()) throw Error(status);
    if (status != SPARGE_OK) continue;
    bytes.resize(size);
    return bytes;
  }
}

}  // namespace detail

// A calibration that somebody else owns.
class CalibrationView {
 public:
  explicit CalibrationView(const sparge_calibration* calibration) : calibration_(calibration) {}
  int64_t heads() const { return sparge_calibration_heads(calibration_); }
  HeadEstimate Head(int64_t head) const {
    HeadEstimate estimate;
    Check(sparge_calibration_head(calibration_, head, &estimate));
    return estimate;
  }
  std::vector<std::byte> Save() const {
    return detail::SavedBytes([&](void* to, size_t* size) { return sparge_calibration_save(calibration_, to, size); });
  }
  const sparge_calibration* get() const { return calibration_; }

 private:
  const sparge_calibration* calibration_;
};

// Error bounds instead of parameters: for plans with SPARGE_SELECT_AUTO. Outlives its plans.
class Calibration {
 public:
  explicit Calibration(const sparge_calibration_desc& desc) {
    sparge_calibration* calibration = nullptr;
    Check(sparge_calibration_create(&desc, &calibration));
    calibration_.reset(calibration);
  }
  explicit Calibration(std::span<const std::byte> saved) {
    sparge_calibration* calibration = nullptr;
    Check(sparge_calibration_load(saved.data(), saved.size(), &calibration));
    calibration_.reset(calibration);
  }
  CalibrationView view() const { return CalibrationView(calibration_.get()); }
  int64_t heads() const { return view().heads(); }
  HeadEstimate Head(int64_t head) const { return view().Head(head); }
  std::vector<std::byte> Save() const { return view().Save(); }
  void SetBounds(int64_t head, double target, double pv) {
    Check(sparge_calibration_set_bounds(calibration_.get(), head, target, pv));
  }
  sparge_calibration* get() const { return calibration_.get(); }

 private:
  struct Destroy {
    void operator()(sparge_calibration* calibration) const { sparge_calibration_destroy(calibration); }
  };
  std::unique_ptr<sparge_calibration, Destroy> calibration_;
};

// A plan with a workspace of its own: one thread at a time may call Run and Predict of one Plan object.
class Plan {
 public:
  Plan(const Context& context, const sparge_plan_desc& desc) {
    sparge_plan* plan = nullptr;
    Check(sparge_plan_create(context.get(), &desc, &plan));
    plan_.reset(plan);
    size_ = sparge_plan_workspace_size(plan);
  }
  void Run(RunArgs args) { Check(sparge_run(plan_.get(), &WithWorkspace(args))); }
  void Predict(RunArgs args) { Check(sparge_predict(plan_.get(), &WithWorkspace(args))); }
  // Measures for the plan's calibration, without a result.
  void Calibrate(RunArgs args, double effort) { Check(sparge_calibrate(plan_.get(), &WithWorkspace(args), effort)); }
  void Reference(const RunArgs& args) const { Check(sparge_reference(plan_.get(), &args)); }
  size_t workspace_size() const { return size_; }
  size_t cache_size() const { return sparge_plan_cache_size(plan_.get()); }
  std::pair<int64_t, int64_t> map_shape() const {
    int64_t q_blocks = 0;
    int64_t k_blocks = 0;
    sparge_plan_map_shape(plan_.get(), &q_blocks, &k_blocks);
    return {q_blocks, k_blocks};
  }
  sparge_plan* get() const { return plan_.get(); }

 private:
  struct DestroyPlan {
    void operator()(sparge_plan* plan) const { sparge_plan_destroy(plan); }
  };
  struct FreeAligned {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
  };
  // Unless the caller gave a workspace, uses this plan's own, made at the first call.
  RunArgs& WithWorkspace(RunArgs& args) {
    if (args.workspace == nullptr) {
      if (!workspace_) {
        workspace_.reset(static_cast<std::byte*>(::operator new[](size_ + 1, std::align_val_t{64})));
      }
      args.workspace = workspace_.get();
      args.workspace_size = size_;
    }
    return args;
  }
  std::unique_ptr<sparge_plan, DestroyPlan> plan_;
  std::unique_ptr<std::byte[], FreeAligned> workspace_;
  size_t size_ = 0;
};

// Results of a part of the keys each, to the result of all keys; `out` may be one of the parts.
struct MergeShape {
  int64_t batch, heads, tokens, dim;
};
inline void MergeParts(const Context& context, const MergeShape& shape, std::span<const sparge_partial> parts,
                       const sparge_partial& out) {
  Check(sparge_merge_parts(context.get(), shape.batch, shape.heads, shape.tokens, shape.dim, parts.data(),
                           static_cast<int64_t>(parts.size()), &out));
}

// All that a model keeps for one attention layer. Several threads may call at once.
class Layer {
 public:
  explicit Layer(const sparge_layer_desc& desc = LayerDesc()) {
    sparge_layer* layer = nullptr;
    Check(sparge_layer_create(&desc, &layer));
    layer_.reset(layer);
  }
  // `desc` says what is asked, not how exactly. Without a workspace in `args` the context lends one.
  void Run(const Context& context, const sparge_plan_desc& desc, const sparge_run_args& args, uint32_t flags = 0) {
    Check(sparge_layer_run(layer_.get(), context.get(), &desc, &args, flags));
  }
  LayerTotals Totals() const {
    LayerTotals totals;
    Check(sparge_layer_get_totals(layer_.get(), &totals));
    return totals;
  }
  // NULL if there is nothing new to say.
  const char* Notice() { return sparge_layer_notice(layer_.get()); }
  // One for each kind of call so far. They live until the layer is restored or destroyed.
  std::vector<CalibrationView> Calibrations() const {
    std::vector<CalibrationView> all;
    const int64_t count = sparge_layer_calibrations(layer_.get());
    for (int64_t i = 0; i < count; ++i) all.emplace_back(sparge_layer_calibration(layer_.get(), i));
    return all;
  }
  // What is known of the heads, one vector per calibration.
  std::vector<std::vector<HeadEstimate>> Heads() const {
    std::vector<std::vector<HeadEstimate>> all;
    for (const CalibrationView& calibration : Calibrations()) {
      std::vector<HeadEstimate>& heads = all.emplace_back();
      for (int64_t h = 0; h < calibration.heads(); ++h) heads.push_back(calibration.Head(h));
    }
    return all;
  }
  std::vector<std::byte> Save() const {
    return detail::SavedBytes([&](void* to, size_t* size) { return sparge_layer_save(layer_.get(), to, size); });
  }
  // What a layer of the same descriptor learned; what this one knew is forgotten.
  void Restore(std::span<const std::byte> saved) {
    Check(sparge_layer_restore(layer_.get(), saved.data(), saved.size()));
  }
  sparge_layer* get() const { return layer_.get(); }

 private:
  struct Destroy {
    void operator()(sparge_layer* layer) const { sparge_layer_destroy(layer); }
  };
  std::unique_ptr<sparge_layer, Destroy> layer_;
};

struct TunerDesc : sparge_tuner_desc {
  TunerDesc() { sparge_tuner_desc_init(this); }
};
struct TunerInfo : sparge_tuner_info {
  TunerInfo() { sparge_tuner_info_init(this); }
};
struct TunedHead : sparge_tuned_head {
  TunedHead() { sparge_tuned_head_init(this); }
};

// Recorded calls of one layer, for Tuner: their descriptors at hand, their tensors on demand. What these functions
// throw passes through Tuner::Run; Close must not throw.
class TuneSamples {
 public:
  virtual ~TuneSamples() = default;
  virtual std::vector<const sparge_plan_desc*> Descriptors() const = 0;
  virtual const sparge_run_args& Open(int64_t index) = 0;
  virtual void Close(int64_t index) noexcept = 0;
  // True stops the run.
  virtual bool Stops(int64_t /*steps_done*/, int64_t /*steps*/) { return false; }
};

// Parameters for the heads of a layer, found on recorded calls. Context and samples outlive it.
class Tuner {
 public:
  // Of `desc` all but the samples and functions, which are set here.
  Tuner(const Context& context, sparge_tuner_desc desc, TuneSamples& samples) : host_(new Host{&samples, nullptr}) {
    const std::vector<const sparge_plan_desc*> descriptors = samples.Descriptors();
    desc.sample_count = static_cast<int64_t>(descriptors.size());
    desc.samples = descriptors.data();
    desc.self = host_.get();
    desc.open = Open;
    desc.close = [](void* self, int64_t index) { static_cast<Host*>(self)->samples->Close(index); };
    desc.progress = Progress;
    sparge_tuner* tuner = nullptr;
    Check(sparge_tuner_create(context.get(), &desc, &tuner));
    tuner_.reset(tuner);
  }
  // False if it was stopped.
  bool Run() {
    host_->thrown = nullptr;
    const sparge_status status = sparge_tuner_run(tuner_.get());
    if (host_->thrown) std::rethrow_exception(host_->thrown);
    if (status == SPARGE_STOPPED) return false;
    Check(status);
    return true;
  }
  TunerInfo Info() const {
    TunerInfo info;
    Check(sparge_tuner_get_info(tuner_.get(), &info));
    return info;
  }
  bool TunedOn(int64_t sample) const { return Serves(sample, SPARGE_SAMPLE_TUNED); }
  bool VerifiedOn(int64_t sample) const { return Serves(sample, SPARGE_SAMPLE_VERIFIED); }
  TunedHead Head(int64_t head) const {
    TunedHead found;
    Check(sparge_tuner_head(tuner_.get(), head, &found));
    return found;
  }
  // Points into this object.
  LayerPreset Preset() const {
    LayerPreset preset;
    Check(sparge_tuner_preset(tuner_.get(), &preset));
    return preset;
  }
  sparge_tuner* get() const { return tuner_.get(); }

 private:
  struct Host {
    TuneSamples* samples;
    std::exception_ptr thrown;
  };
  struct Destroy {
    void operator()(sparge_tuner* tuner) const { sparge_tuner_destroy(tuner); }
  };
  static sparge_status Open(void* self, int64_t index, const sparge_run_args** args) {
    auto* host = static_cast<Host*>(self);
    try {
      *args = &host->samples->Open(index);
      return SPARGE_OK;
    } catch (...) {
      host->thrown = std::current_exception();
      return SPARGE_STOPPED;
    }
  }
  static int32_t Progress(void* self, int64_t steps_done, int64_t steps) {
    auto* host = static_cast<Host*>(self);
    try {
      return host->samples->Stops(steps_done, steps) ? 1 : 0;
    } catch (...) {
      host->thrown = std::current_exception();
      return 1;
    }
  }
  bool Serves(int64_t sample, uint32_t role) const { return (sparge_tuner_sample(tuner_.get(), sample) & role) != 0; }

  std::unique_ptr<Host> host_;
  std::unique_ptr<sparge_tuner, Destroy> tuner_;
};

}  // namespace SPARGE_HPP_NAMESPACE
}  // namespace sparge
#endif  // SPARGE_SPARGE_HPP_

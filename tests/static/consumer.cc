// Uses every class and function of sparge.hpp, linked with the static library: there, names of the library that the
// header has, too, would take the place of the header's inline functions, or the other way round. Results are checked,
// because a function of the wrong class may well return.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kTokens = 700;
constexpr int64_t kDim = 32;

void Require(bool condition, const char* text, int line) {
  if (condition) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, text, sparge_last_error());
  std::exit(1);
}
#define REQUIRE(condition) Require((condition), #condition, __LINE__)

// Neighbouring tokens are alike and see each other best, so that there is something to skip.
struct Data {
  std::vector<float> q, k, v;

  Data() : q(kHeads * kTokens * kDim), k(q.size()), v(q.size()) {
    for (int64_t i = 0; i < kHeads * kTokens * kDim; ++i) {
      const auto token = static_cast<float>(i / kDim % kTokens + i / kDim / kTokens * 5000);  // heads differ
      const auto dim = static_cast<float>(i % kDim);
      k[i] = std::cos(0.004f * (dim + 1.0f) * token + dim);
      q[i] = 8.0f * k[i];
      v[i] = std::sin(0.01f * token + dim);
    }
  }
};

using View = sparge_tensor (*)(const void*, sparge_dtype, int64_t, int64_t, int64_t);
sparge::RunArgs ArgsFor(const Data& data, std::vector<float>& o, View view) {
  sparge::RunArgs args;
  const auto of = [&](const std::vector<float>& x) { return view(x.data(), SPARGE_F32, kHeads, kTokens, kDim); };
  args.q = of(data.q);
  args.k = of(data.k);
  args.v = of(data.v);
  o.assign(data.q.size(), -7.0f);
  args.o = of(o);
  return args;
}

sparge::PlanDesc Desc() {
  sparge::PlanDesc desc;
  desc.batch = 1;
  desc.q_heads = desc.kv_heads = kHeads;
  desc.q_tokens = desc.kv_tokens = kTokens;
  desc.qk_dim = desc.v_dim = kDim;
  return desc;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::fabs(a[i] - b[i]);
    size += std::fabs(b[i]);
  }
  return difference / size;
}

void InTurn(void* self, int32_t workers, sparge_task task, void* arg) {
  ++*static_cast<int*>(self);
  for (int32_t w = 0; w < workers; ++w) task(arg, w);
}

void Errors(const sparge::Context& context) {
  sparge::PlanDesc desc = Desc();
  desc.qk_dim = 0;
  bool caught = false;
  try {
    sparge::Plan plan(context, desc);
  } catch (const sparge::Error& error) {
    caught = error.status() == SPARGE_INVALID_ARGUMENT && std::string(error.what()).find("qk_dim=0") == 0;
  }
  REQUIRE(caught);
  sparge::Check(SPARGE_OK);
}

void Orders() {
  REQUIRE((sparge::TokenOrder(SPARGE_ORDER_HILBERT, {1, 2, 2}) == std::vector<int64_t>{0, 2, 3, 1}));
  std::vector<int64_t> order = sparge::TokenOrder(SPARGE_ORDER_RANDOM, {2, 3, 4}, 5);
  std::sort(order.begin(), order.end());
  REQUIRE(order.size() == 24 && order.front() == 0 && order.back() == 23);
}

// By thresholds, on threads of the library and of the caller.
void Plans(const sparge::Context& context, const Data& data) {
  REQUIRE(context.threads() == 2 && *context.isa() != '\0');
  sparge::Plan plan(context, Desc());
  REQUIRE(plan.get() != nullptr && plan.cache_size() == 0 && plan.workspace_size() > 0);
  REQUIRE(plan.map_shape() == std::make_pair(int64_t{6}, int64_t{11}));
  std::vector<float> o, expected, in_turn;
  sparge::Stats stats;
  sparge::RunArgs args = ArgsFor(data, o, sparge::ViewHeads);
  args.stats = &stats;
  plan.Predict(args);
  const int64_t foreseen = stats.total.qk_computed;
  REQUIRE(foreseen > 0 && o[0] == -7.0f);
  plan.Run(args);
  REQUIRE(stats.total.qk_computed == foreseen && std::string(stats.isa) == context.isa());
  const double computed = static_cast<double>(foreseen) / static_cast<double>(stats.total.qk_eligible);
  REQUIRE(stats.sparsity() == 1.0 - computed && stats.work() <= computed && stats.work() >= 0.5 * computed);
  plan.Reference(ArgsFor(data, expected, sparge::ViewHeads));
  REQUIRE(Distance(o, expected) < 0.1);

  int runs = 0;
  sparge_executor executor;
  sparge_executor_init(&executor);
  executor.self = &runs;
  executor.workers = 3;
  executor.run = InTurn;
  const sparge::Context own(executor, context.isa());
  REQUIRE(own.threads() == 3);
  sparge::Plan again(own, Desc());
  again.Run(ArgsFor(data, in_turn, sparge::ViewHeads));
  REQUIRE(runs > 0 && in_turn == o);
}

// The same tokens seen as (tokens, heads, dim) are another problem, with a result of its own.
void Views(const sparge::Context& context, const Data& data) {
  sparge::PlanDesc desc = Desc();
  desc.precision = SPARGE_PRECISION_FP32;
  desc.select = SPARGE_SELECT_ALL;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  sparge::Plan plan(context, desc);
  std::vector<float> heads, tokens, expected;
  plan.Run(ArgsFor(data, heads, sparge::ViewHeads));
  plan.Run(ArgsFor(data, tokens, sparge::ViewTokens));
  plan.Reference(ArgsFor(data, expected, sparge::ViewTokens));
  REQUIRE(Distance(tokens, expected) < 1e-5 && Distance(heads, expected) > 0.1);
}

void Calibrations(const sparge::Context& context, const Data& data) {
  sparge::CalibrationDesc bounds;
  bounds.q_heads = kHeads;
  bounds.target_l1 = bounds.pv_l1 = 0.5;
  sparge::Calibration calibration(bounds);
  REQUIRE(calibration.heads() == kHeads && calibration.Head(0).state == SPARGE_HEAD_UNKNOWN);
  sparge::PlanDesc desc = Desc();
  desc.select = SPARGE_SELECT_AUTO;
  desc.calibration = calibration.get();
  sparge::Plan plan(context, desc);
  std::vector<float> o, expected;
  const sparge::RunArgs args = ArgsFor(data, o, sparge::ViewHeads);
  for (int i = 0; i < 3; ++i) plan.Calibrate(args, 1.0);
  const sparge::HeadEstimate loose = calibration.Head(1);
  REQUIRE(loose.samples > 0 && loose.state == SPARGE_HEAD_SPARSE && o[0] == -7.0f);
  // Other bounds for one head make another choice for that head, and for no other.
  const sparge::HeadEstimate other = calibration.Head(0);
  calibration.SetBounds(1, 1e-7, 1e-7);
  const sparge::HeadEstimate tight = calibration.Head(1);
  REQUIRE(tight.samples == loose.samples);
  REQUIRE(tight.state == SPARGE_HEAD_DENSE || tight.error < loose.error);
  REQUIRE(calibration.Head(0).params.tau == other.params.tau && calibration.Head(0).state == other.state);
  bool refused = false;
  try {
    calibration.SetBounds(kHeads, 0.1, 0.1);
  } catch (const sparge::Error& error) {
    refused = std::string(error.what()).find("head=2") != std::string::npos;
  }
  REQUIRE(refused);

  const std::vector<std::byte> saved = calibration.Save();
  const sparge::Calibration loaded(saved);
  REQUIRE(loaded.Save() == saved && loaded.heads() == kHeads && loaded.Head(1).error == tight.error);
  const sparge::CalibrationView view = loaded.view();
  REQUIRE(view.get() == loaded.get() && view.heads() == kHeads && view.Head(0).error == other.error &&
          view.Save() == saved);
  plan.Run(args);
  plan.Reference(ArgsFor(data, expected, sparge::ViewHeads));
  REQUIRE(Distance(o, expected) < 0.6);
}

// Three parts of the keys, joined: as the whole.
void Parts(const sparge::Context& context, const Data& data) {
  const int64_t first[] = {0, 100, 450, kTokens};
  std::vector<float> whole, o[3], lse[3];
  sparge_partial parts[3];
  sparge::PlanDesc desc = Desc();
  desc.precision = SPARGE_PRECISION_FP32;
  desc.select = SPARGE_SELECT_ALL;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  sparge::Plan(context, desc).Run(ArgsFor(data, whole, sparge::ViewHeads));
  for (int i = 0; i < 3; ++i) {
    sparge::RunArgs args = ArgsFor(data, o[i], sparge::ViewHeads);
    args.k.data = static_cast<float*>(args.k.data) + first[i] * kDim;
    args.v.data = static_cast<float*>(args.v.data) + first[i] * kDim;
    lse[i].resize(kHeads * kTokens);
    args.lse = {lse[i].data(), kHeads * kTokens, kTokens};
    desc.kv_tokens = first[i + 1] - first[i];
    sparge::Plan(context, desc).Run(args);
    parts[i] = {args.o, args.lse};
  }
  REQUIRE(Distance(o[0], whole) > 0.1);
  sparge::MergeParts(context, {1, kHeads, kTokens, kDim}, parts, parts[0]);
  REQUIRE(Distance(o[0], whole) < 1e-5);
}

// What a model keeps: learns, tells, is saved, and goes on elsewhere.
void Layers(const sparge::Context& context, const Data& data) {
  sparge::LayerDesc bounds;
  bounds.target_l1 = 0.5;
  bounds.min_keys = 0;
  sparge::Layer layer(bounds);
  REQUIRE(layer.get() != nullptr && layer.Totals().calls == 0 && layer.Notice() == nullptr);
  std::vector<float> o, exact, expected;
  sparge::Stats stats;
  sparge::RunArgs args = ArgsFor(data, o, sparge::ViewHeads);
  args.stats = &stats;
  for (int i = 0; i < 20 && stats.sparsity() == 0; ++i) layer.Run(context, Desc(), args);
  REQUIRE(stats.sparsity() > 0);
  sparge::Plan(context, Desc()).Reference(ArgsFor(data, expected, sparge::ViewHeads));
  REQUIRE(Distance(o, expected) < 0.6);
  layer.Run(context, Desc(), ArgsFor(data, exact, sparge::ViewHeads), SPARGE_LAYER_DENSE);
  REQUIRE(Distance(exact, expected) < 0.03);
  const sparge::LayerTotals totals = layer.Totals();
  REQUIRE(totals.calls > 1 && totals.dense_calls == 1 && totals.tiles.qk_computed < totals.tiles.qk_eligible);
  const std::vector<sparge::CalibrationView> calibrations = layer.Calibrations();
  REQUIRE(calibrations.size() == 1 && calibrations[0].heads() == kHeads && calibrations[0].Head(1).samples > 0);
  REQUIRE(layer.Heads().size() == 1 && layer.Heads()[0].size() == kHeads);
  REQUIRE(layer.Heads()[0][1].error == calibrations[0].Head(1).error);

  const std::vector<std::byte> saved = layer.Save();
  sparge::Layer other(bounds);
  REQUIRE(other.Calibrations().empty() && other.Save() != saved);
  other.Restore(saved);
  REQUIRE(other.Save() == saved && other.Heads()[0][1].error == calibrations[0].Head(1).error);
}

// Three recorded calls, of the same tensors.
class Recorded : public sparge::TuneSamples {
 public:
  explicit Recorded(const Data& data) : desc_(Desc()), args_(ArgsFor(data, unused_, sparge::ViewHeads)) {
    args_.o = {};
  }
  std::vector<const sparge_plan_desc*> Descriptors() const override { return {&desc_, &desc_, &desc_}; }
  const sparge_run_args& Open(int64_t index) override {
    REQUIRE(index >= 0 && index < 3 && open_++ == 0);
    return args_;
  }
  void Close(int64_t /*index*/) noexcept override { REQUIRE(--open_ == 0); }
  bool Stops(int64_t /*steps_done*/, int64_t /*steps*/) override { return stops; }

  bool stops = false;

 private:
  std::vector<float> unused_;
  sparge::PlanDesc desc_;
  sparge::RunArgs args_;
  int open_ = 0;
};

void Tuners(const sparge::Context& context, const Data& data) {
  Recorded samples(data);
  sparge::TunerDesc bounds;
  bounds.target_l1 = 0.3;
  sparge::Tuner tuner(context, bounds, samples);
  REQUIRE(tuner.get() != nullptr && tuner.Info().steps > 0 && tuner.Info().ms == 0);
  int tuned = 0, verified = 0;
  for (int i = 0; i < 3; ++i) {
    tuned += tuner.TunedOn(i) ? 1 : 0;
    verified += tuner.VerifiedOn(i) ? 1 : 0;
  }
  REQUIRE(tuned > 0 && verified > 0 && !tuner.TunedOn(3));
  samples.stops = true;
  REQUIRE(!tuner.Run());
  samples.stops = false;
  REQUIRE(tuner.Run() && tuner.Info().ms > 0);
  const sparge::TunedHead head = tuner.Head(1);
  REQUIRE(head.verified_on == verified && head.work > 0 && head.work <= 1 && head.pv_error <= 1);

  // What was found, as the preset of a layer.
  sparge::LayerPreset preset;
  static_cast<sparge_layer_preset&>(preset) = tuner.Preset();
  REQUIRE(preset.q_heads == kHeads && preset.heads[1].tau == head.params.tau);
  sparge::LayerDesc desc;
  desc.preset = &preset;
  desc.min_keys = 0;
  sparge::Layer layer(desc);
  std::vector<float> o, expected;
  layer.Run(context, Desc(), ArgsFor(data, o, sparge::ViewHeads));
  sparge::Plan(context, Desc()).Reference(ArgsFor(data, expected, sparge::ViewHeads));
  REQUIRE(Distance(o, expected) < 0.5);
}

}  // namespace

int main() {
  const sparge::Context context(2);
  const Data data;
  Errors(context);
  Orders();
  Plans(context, data);
  Views(context, data);
  Calibrations(context, data);
  Parts(context, data);
  Layers(context, data);
  Tuners(context, data);
  std::puts("every class of sparge.hpp works with the static library");
  return 0;
}

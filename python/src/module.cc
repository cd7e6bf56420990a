// The extension module sparge._core: what the Python files of the package are made of. Not for direct use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "io/tensor.h"
#include "python/src/arrays.h"
#include "python/src/bounds.h"
#include "python/src/call.h"
#include "python/src/engine.h"
#include "python/src/gpu.h"
#include "python/src/layer.h"
#include "python/src/options.h"
#include "python/src/tune.h"

namespace sparge::python {
namespace {

enum class Verb { kRun, kPredict, kReference, kCalibrate };

struct DestroyPlan {
  void operator()(sparge_plan* plan) const { sparge_plan_destroy(plan); }
};
using PlanPtr = std::unique_ptr<sparge_plan, DestroyPlan>;

// Costs a microsecond; with a grid, a dozen nanoseconds per token for the curve, beside as many microseconds of work.
PlanPtr MakePlan(const Context& context, const sparge_plan_desc& desc) {
  sparge_plan* plan = nullptr;
  Check(sparge_plan_create(context.get(), &desc, &plan));
  return PlanPtr(plan);
}

// `predict` writes a map; its caller made the array from the shapes, which are not all there is to it.
void CheckMap(const Array& map, const sparge_plan* plan, const PlanDesc& desc) {
  int64_t q_blocks = 0;
  int64_t k_blocks = 0;
  sparge_plan_map_shape(plan, &q_blocks, &k_blocks);
  int64_t entries = 1;
  for (const int64_t side : map.shape) entries *= side;
  if (entries != desc.batch * desc.q_heads * q_blocks * k_blocks) {
    throw std::length_error("the map has " + std::to_string(entries) + " entries");
  }
}

// Lets go of the GIL for the work.
void Do(Verb verb, Call& call, double effort = 0) {
  const Described& described = call.described();
  RunArgs& args = call.args();
  nb::gil_scoped_release release;
  Engine& engine = Engine::Get();
  const auto context = engine.ContextFor(call.threads());
  const PlanPtr plan = MakePlan(*context, described.desc);
  if (call.outputs().map) CheckMap(*call.outputs().map, plan.get(), described.desc);
  call.outputs().part.Check(plan.get(), described.desc);
  if (verb == Verb::kReference) return Check(sparge_reference(plan.get(), &args));
  Workspace workspace = engine.TakeWorkspace(sparge_plan_workspace_size(plan.get()));
  args.workspace = workspace.bytes.get();
  args.workspace_size = workspace.size;
  sparge_status status = SPARGE_OK;
  if (verb == Verb::kRun) status = sparge_run(plan.get(), &args);
  if (verb == Verb::kPredict) status = sparge_predict(plan.get(), &args);
  if (verb == Verb::kCalibrate) status = sparge_calibrate(plan.get(), &args, effort);
  engine.ReturnWorkspace(std::move(workspace));
  Check(status);
}

std::shared_ptr<CallStats> Attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                                     bool with_stats, nb::dict options) {
  auto stats = with_stats ? std::make_shared<CallStats>() : nullptr;
  Call call(q, k, v, out, options, Asker::kCaller, {OptionalOutput("lse", lse), {}, stats});
  Do(Verb::kRun, call);
  return stats;
}

// `map` is uint8 (batch, heads, q_blocks, k_blocks), made by the caller.
std::shared_ptr<CallStats> Predict(nb::handle q, nb::handle k, nb::handle map, nb::dict options) {
  auto stats = std::make_shared<CallStats>();
  Call call(q, k, nb::none(), nb::none(), options, Asker::kCaller, {{}, ImportOutput("map", map), stats});
  Do(Verb::kPredict, call);
  return stats;
}

void Reference(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::dict options) {
  Call call(q, k, v, out, options, Asker::kCaller, {OptionalOutput("lse", lse), {}, nullptr});
  Do(Verb::kReference, call);
}

void Calibrate(nb::handle q, nb::handle k, nb::handle v, double effort, nb::dict options) {
  Call call(q, k, v, nb::none(), options, Asker::kCaller, {});
  Do(Verb::kCalibrate, call, effort);
}

// A part of a larger call, with what parts leave for each other: `run` also the map, if that is an array.
std::shared_ptr<CallStats> RunPart(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                                   nb::handle map, nb::dict options, nb::dict arrays) {
  auto stats = std::make_shared<CallStats>();
  Outputs outputs{OptionalOutput("lse", lse), {}, stats, {}};
  if (!map.is_none()) outputs.map = ImportOutput("map", map);
  outputs.part.Read(arrays);
  Call call(q, k, v, out, options, Asker::kCaller, std::move(outputs));
  Do(Verb::kRun, call);
  return stats;
}

// Stage 1 of a part; `q` gives no more than its shape if pools are among the arrays.
void PredictPart(nb::handle q, nb::handle k, nb::handle v, nb::dict options, nb::dict arrays) {
  Outputs outputs;
  outputs.part.Read(arrays);
  Call call(q, k, v, nb::none(), options, Asker::kCaller, std::move(outputs));
  Do(Verb::kPredict, call);
}

// Entries per sequence and query head of pool_lse, for so many queries.
int64_t CountPools(int64_t queries) {
  PlanDesc desc;
  desc.batch = desc.q_heads = desc.kv_heads = desc.qk_dim = desc.v_dim = 1;
  desc.q_tokens = desc.kv_tokens = queries;
  desc.select = SPARGE_SELECT_FLOOR;
  return sparge_plan_pools(MakePlan(*Engine::Get().ContextFor(1), desc).get());
}

void TokenOrder(const std::string& order, const std::vector<int64_t>& grid, uint64_t seed,
                nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  static constexpr const char* kOrders[] = {"hilbert", "row-major", "time-major", "random"};
  for (int i = 0; i < 4; ++i) {
    if (order != kOrders[i]) continue;
    if (grid.size() != 3) RaiseValue("grid has " + std::to_string(grid.size()) + " sides, not 3");
    return Check(sparge_token_order(static_cast<sparge_order>(i), grid.data(), seed, out.data()));
  }
  RaiseValue("order='" + order + "' is none of hilbert, row-major, time-major, random");
}

// A part of `merge` as the caller has it.
struct Part {
  std::string name, lse_name;
  Input out, lse;
};

// `out`, `lse` and `parts`, a list of pairs of the same, as (batch, heads, tokens, dim) and (batch, heads, tokens).
void Merge(nb::list pairs, nb::handle out_object, nb::handle lse_object, int64_t threads) {
  const Array out_array = ImportOutput("out", out_object);
  const Array lse_array = ImportOutput("lse", lse_object);
  const TensorView out_view = ViewOutput(out_array, Layout::kHeadsFirst);
  const std::array<int64_t, 4> shape = out_view.shape;
  std::vector<Part> parts(pairs.size());  // never moved: arrays point to the names
  std::vector<sparge_partial> partials;
  for (size_t i = 0; i < parts.size(); ++i) {
    Part& part = parts[i];
    const nb::tuple pair = nb::cast<nb::tuple>(pairs[i]);
    part.name = "parts[" + std::to_string(i) + "]";
    part.lse_name = part.name + " lse";
    part.out = Input(part.name.c_str(), pair[0]);
    part.lse = Input(part.lse_name.c_str(), pair[1]);
    const TensorView view = View(part.out.array(), Layout::kHeadsFirst);
    CheckShape(part.name.c_str(), view, shape);
    partials.push_back({view.tensor, ViewLse(part.lse.array(), view)});
  }
  const sparge_partial out{out_view.tensor, ViewLse(lse_array, out_view)};
  const int32_t wanted = CheckedThreads(threads);
  double work = static_cast<double>(parts.size());
  for (const int64_t side : shape) work *= static_cast<double>(side);
  nb::gil_scoped_release release;
  const auto context = Engine::Get().ContextFor(ThreadsFor(work, wanted));
  Check(sparge_merge_parts(context->get(), shape[0], shape[1], shape[2], shape[3], partials.data(),
                           static_cast<int64_t>(partials.size()), &out));
}

nb::list Isas() {
  nb::list list;
  for (int32_t i = 0; i < sparge_isa_count(); ++i) {
    sparge_isa isa;
    sparge_isa_init(&isa);
    Check(sparge_isa_at(i, &isa));
    nb::dict entry;
    entry["name"] = isa.name;
    entry["runnable"] = isa.runnable != 0;
    entry["group_rows"] = isa.group_rows;
    entry["int8_qk"] = isa.int8_qk;
    list.append(entry);
  }
  return list;
}

void InitCalibration(Calibration* self, int64_t heads, std::optional<double> target_l1, std::optional<double> pv_l1,
                     std::optional<double> target_l2, std::optional<double> pv_l2, std::optional<double> round_l1,
                     uint64_t seed) {
  CalibrationDesc desc;
  desc.q_heads = heads;
  SetBounds({target_l1, pv_l1, target_l2, pv_l2, round_l1}, desc);
  desc.seed = seed;
  new (self) Calibration(desc);
}

void InitFromBytes(Calibration* self, nb::bytes data) {
  const auto* begin = reinterpret_cast<const std::byte*>(data.c_str());
  new (self) Calibration(std::vector<std::byte>(begin, begin + data.size()));
}

nb::bytes SaveCalibration(const Calibration& calibration) {
  const std::vector<std::byte> bytes = calibration.Save();
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

nb::dict StatsFields(const CallStats& s) {
  const auto tiles = [](int64_t eligible, int64_t computed) {
    nb::dict d;
    d["eligible"] = eligible;
    d["computed"] = computed;
    return d;
  };
  nb::dict stages;
  stages["pack"] = s.stats.pack_ms;
  stages["calibrate"] = s.stats.calibrate_ms;
  stages["predict"] = s.stats.predict_ms;
  stages["schedule"] = s.stats.schedule_ms;
  stages["kernel"] = s.stats.kernel_ms;
  nb::list heads;
  for (const sparge_head_stats& h : s.heads) {
    heads.append(nb::make_tuple(h.qk_eligible, h.qk_computed, h.pv_eligible, h.pv_computed));
  }
  nb::dict d;
  d["time_ms"] = s.stats.total_ms;
  d["stages_ms"] = stages;
  d["isa"] = s.stats.isa == nullptr ? "" : s.stats.isa;
  d["threads"] = s.stats.threads;
  d["group_rows"] = s.stats.group_rows;
  d["qk_tiles"] = tiles(s.stats.total.qk_eligible, s.stats.total.qk_computed);
  d["pv_tiles"] = tiles(s.stats.total.pv_eligible, s.stats.total.pv_computed);
  d["sparsity"] = s.stats.sparsity();
  d["work"] = s.stats.work();
  d["heads"] = heads;
  return d;
}

// The library's numbers, so that Python has none of its own.
void ExportDefaults(nb::module_& m) {
  const CalibrationDesc bounds;
  m.attr("TARGET_L2") = bounds.target_l2;
  m.attr("PV_ROOM") = SPARGE_PV_ROOM;
  m.attr("ROUND_L1") = bounds.round_l1;
  m.attr("BLOCK_Q") = SPARGE_BLOCK_Q;
  m.attr("BLOCK_K") = SPARGE_BLOCK_K;
  m.attr("MAX_HEAD_DIM") = SPARGE_MAX_HEAD_DIM;
  m.attr("EFFORT_OF_RUN") = SPARGE_EFFORT_OF_RUN;
  m.attr("FEW_QUERIES") = SPARGE_FEW_QUERIES;
  const LayerDesc layer;
  m.attr("MIN_KEYS") = layer.min_keys;
  m.attr("DENSE_TAIL") = layer.dense_tail;
}

// A failed call of the library, or a file that cannot be read, as the Python exception that fits.
void Translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.status() == SPARGE_INVALID_ARGUMENT) type = PyExc_ValueError;
    if (error.status() == SPARGE_OUT_OF_MEMORY) type = PyExc_MemoryError;
    PyErr_SetString(type, error.what());
  } catch (const io::Error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // an interpreter that goes down with models alive is no defect of ours
  nb::register_exception_translator(Translate);
  ExportDefaults(m);

  nb::class_<CallStats>(m, "CallStats").def("fields", &StatsFields);
  nb::class_<Calibration>(m, "Calibration")
      .def("__init__", &InitCalibration, nb::arg("heads"), nb::kw_only(), nb::arg("target_l1").none(),
           nb::arg("pv_l1").none(), nb::arg("target_l2").none(), nb::arg("pv_l2").none(), nb::arg("round_l1").none(),
           nb::arg("seed"))
      .def("__init__", &InitFromBytes, nb::arg("data"))
      .def_prop_ro("heads", [](const Calibration& self) { return sparge_calibration_heads(self.get()); })
      .def("save", &SaveCalibration)
      .def(
          "head", [](const Calibration& self, int64_t head) { return DescribeHead(self.Head(head)); }, nb::arg("head"))
      .def("set_bounds", &Calibration::SetBounds, nb::arg("head"), nb::arg("target"), nb::arg("pv"));

  BindGpu(m);
  BindLayer(m);
  BindTune(m);
  m.def("attention", &Attention, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("with_stats"), nb::arg("options"));
  m.def("predict", &Predict, nb::arg("q"), nb::arg("k"), nb::arg("map"), nb::arg("options"));
  m.def("reference", &Reference, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("options"));
  m.def("calibrate", &Calibrate, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("effort"), nb::arg("options"));
  m.def("run_part", &RunPart, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse"),
        nb::arg("map").none(), nb::arg("options"), nb::arg("arrays"));
  m.def("predict_part", &PredictPart, nb::arg("q"), nb::arg("k"), nb::arg("v").none(), nb::arg("options"),
        nb::arg("arrays"));
  m.def("count_pools", &CountPools, nb::arg("queries"));
  m.def("token_order", &TokenOrder, nb::arg("order"), nb::arg("grid"), nb::arg("seed"), nb::arg("out"));
  m.def("merge", &Merge, nb::arg("parts"), nb::arg("out"), nb::arg("lse"), nb::arg("threads"));
  m.def("isas", &Isas);
  m.def("version", &sparge_version);
  m.def(
      "set_num_threads", [](int64_t threads) { Engine::Get().SetThreads(threads); }, nb::arg("threads"));
  m.def("get_num_threads", [] { return Engine::Get().threads(); });
  m.def("forget_threads", [] {
    Engine::Get().ForgetThreads();
    GpuPlans::Get().Forget();
  });
}

}  // namespace sparge::python

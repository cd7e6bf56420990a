// The extension module sparge._core: what the Python files of the package are made of. Not for direct use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "python/src/arrays.h"
#include "python/src/engine.h"
#include "python/src/options.h"

namespace sparge::python {
namespace {

// Beneath this many multiply-adds waking other threads takes longer than they save (results do not depend on threads).
constexpr double kAlone = 1.5e6;

enum class Verb { kRun, kPredict, kReference, kCalibrate };

struct CallStats {
  Stats stats;
  std::vector<sparge_head_stats> heads;  // batch x q_heads
  int64_t batch = 0;
  int64_t q_heads = 0;
};

// What a call may write besides the result.
struct Outputs {
  std::optional<Array> lse, map;
  std::shared_ptr<CallStats> stats;
};

int32_t ThreadsFor(const Problem& problem) {
  const PlanDesc& d = problem.desc;
  const double work = static_cast<double>(d.batch) * static_cast<double>(d.q_heads) * static_cast<double>(d.q_tokens) *
                      static_cast<double>(d.kv_tokens) * static_cast<double>(d.qk_dim + d.v_dim);
  return work <= kAlone ? 1 : problem.threads;
}

void CheckShape(const char* name, const TensorView& view, const std::array<int64_t, 4>& wanted) {
  if (view.shape != wanted) {
    RaiseValue(std::string(name) + ": as (batch, heads, tokens, dim) it is " + ShapeText(view.shape.data(), 4) +
               ", not " + ShapeText(wanted.data(), 4));
  }
}

sparge_lse ViewLse(const Array& array, const TensorView& q) {
  const size_t dims = array.dims();
  const std::array<int64_t, 3> wanted{q.shape[0], q.shape[1], q.shape[2]};
  bool fits = array.dtype == nb::dtype<float>() && dims >= 1 && dims <= 3;
  std::array<int64_t, 3> strides{};
  for (size_t i = 0; fits && i < 3; ++i) {
    const bool there = i + dims >= 3;
    const int64_t side = there ? array.shape[i + dims - 3] : 1;
    fits = side == wanted[i];
    strides[i] = side > 1 && !Empty(array) ? array.strides[i + dims - 3] : 0;
  }
  if (!fits || strides[2] > 1) {
    RaiseValue(std::string(array.name) + ": is no float32 array " + ShapeText(wanted.data(), 3) +
               " with a contiguous last dimension");
  }
  return {static_cast<float*>(array.data), strides[0], strides[1]};
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

void CallLibrary(Verb verb, Engine& engine, const Problem& problem, RunArgs& args, const Outputs& outputs,
                 double effort) {
  const auto context = engine.ContextFor(ThreadsFor(problem));
  const PlanPtr plan = engine.PlanFor(context, problem.desc, problem.calibration, !problem.own_calibration);
  if (outputs.map) CheckMap(*outputs.map, plan.get(), problem.desc);
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

// Every verb: reads the arguments, then lets go of the GIL for the work.
void Call(Verb verb, nb::handle q_object, nb::handle k_object, nb::handle v_object, nb::handle out_object,
          nb::dict options, Outputs outputs, double effort = 0) {
  Problem problem;
  problem.layout = ReadLayout(options);
  const Input q("q", q_object);
  const Input k("k", k_object);
  const TensorView q_view = View(q.array(), problem.layout);
  const TensorView k_view = View(k.array(), problem.layout);
  Input v;
  TensorView v_view;
  if (!v_object.is_none()) {
    v = Input("v", v_object);
    v_view = View(v.array(), problem.layout);
  }
  ReadProblem(q_view, k_view, v_object.is_none() ? nullptr : &v_view, options, problem);

  RunArgs args;
  args.q = q_view.tensor;
  args.k = k_view.tensor;
  args.v = v_view.tensor;
  args.mask = problem.mask_view;
  Array out;
  if (!out_object.is_none()) {
    out = ImportOutput("out", out_object);
    const TensorView view = ViewOutput(out, problem.layout);
    CheckShape("out", view, {q_view.shape[0], q_view.shape[1], q_view.shape[2], v_view.shape[3]});
    args.o = view.tensor;
  }
  if (problem.map) {
    args.map = static_cast<const uint8_t*>(problem.map->array().data);
    args.map_batch_stride = problem.map_batch_stride;
    args.map_head_stride = problem.map_head_stride;
  }
  if (outputs.lse) args.lse = ViewLse(*outputs.lse, q_view);
  if (outputs.map) args.map_out = static_cast<uint8_t*>(outputs.map->data);
  if (outputs.stats) {
    outputs.stats->batch = problem.desc.batch;
    outputs.stats->q_heads = problem.desc.q_heads;
    outputs.stats->heads.resize(static_cast<size_t>(problem.desc.batch * problem.desc.q_heads));
    args.stats = &outputs.stats->stats;
    args.head_stats = outputs.stats->heads.data();
  }
  nb::gil_scoped_release release;
  CallLibrary(verb, Engine::Get(), problem, args, outputs, effort);
}

std::optional<Array> OptionalOutput(const char* name, nb::handle object) {
  if (object.is_none()) return std::nullopt;
  return ImportOutput(name, object);
}

std::shared_ptr<CallStats> Attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                                     bool with_stats, nb::dict options) {
  auto stats = with_stats ? std::make_shared<CallStats>() : nullptr;
  Call(Verb::kRun, q, k, v, out, options, {OptionalOutput("lse", lse), {}, stats});
  return stats;
}

// `map` is uint8 (batch, heads, q_blocks, k_blocks), made by the caller.
std::shared_ptr<CallStats> Predict(nb::handle q, nb::handle k, nb::handle map, nb::dict options) {
  auto stats = std::make_shared<CallStats>();
  Call(Verb::kPredict, q, k, nb::none(), nb::none(), options, {{}, ImportOutput("map", map), stats});
  return stats;
}

void Reference(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::dict options) {
  Call(Verb::kReference, q, k, v, out, options, {OptionalOutput("lse", lse), {}, nullptr});
}

void Calibrate(nb::handle q, nb::handle k, nb::handle v, double effort, nb::dict options) {
  Call(Verb::kCalibrate, q, k, v, nb::none(), options, {}, effort);
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
  const auto context = Engine::Get().ContextFor(work <= kAlone ? 1 : wanted);
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

void InitCalibration(Calibration* self, int64_t heads, double target_l1, double pv_l1, double round_l1, uint64_t seed) {
  CalibrationDesc desc;
  desc.q_heads = heads;
  desc.target_l1 = target_l1;
  desc.pv_l1 = pv_l1;
  desc.round_l1 = round_l1;
  desc.seed = seed;
  new (self) Calibration(desc);
}

void InitFromBytes(Calibration* self, nb::bytes data) {
  const auto* begin = reinterpret_cast<const std::byte*>(data.c_str());
  new (self) Calibration(std::vector<std::byte>(begin, begin + data.size()));
}

nb::dict DescribeHead(const Calibration& calibration, int64_t head) {
  static constexpr const char* kStates[] = {"unknown", "sparse", "dense"};
  static constexpr const char* kPrecisions[] = {"fp32", "int16", "int8"};
  const HeadEstimate e = calibration.Head(head);
  nb::dict d;
  d["state"] = kStates[e.state];
  d["precision"] = kPrecisions[e.precision];
  d["theta"] = e.params.theta;
  d["tau"] = e.params.tau;
  d["pv_skip"] = e.params.pv_skip;
  d["samples"] = e.samples;
  d["l1"] = e.l1;
  d["l1_error"] = e.l1_error;
  d["pv_l1"] = e.pv_l1;
  d["pv_l1_error"] = e.pv_l1_error;
  d["round_l1"] = e.round_l1;
  d["round_l1_error"] = e.round_l1_error;
  d["sparsity"] = e.sparsity;
  d["work"] = e.work;
  return d;
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

// What a layer adds up, call by call.
nb::tuple StatsTotals(const CallStats& s) {
  const sparge_head_stats& t = s.stats.total;
  return nb::make_tuple(s.stats.total_ms, t.qk_eligible, t.qk_computed, t.pv_eligible, t.pv_computed);
}

// The library's numbers, so that Python has none of its own.
void ExportDefaults(nb::module_& m) {
  const CalibrationDesc bounds;
  m.attr("TARGET_L1") = bounds.target_l1;
  m.attr("PV_ROOM") = SPARGE_PV_ROOM;
  m.attr("ROUND_L1") = bounds.round_l1;
  m.attr("BLOCK_Q") = SPARGE_BLOCK_Q;
  m.attr("BLOCK_K") = SPARGE_BLOCK_K;
  m.attr("MAX_HEAD_DIM") = SPARGE_MAX_HEAD_DIM;
  m.attr("FEW_QUERIES") = SPARGE_FEW_QUERIES;
}

// A failed call of the library as the Python exception that fits.
void Translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.status() == SPARGE_INVALID_ARGUMENT) type = PyExc_ValueError;
    if (error.status() == SPARGE_OUT_OF_MEMORY) type = PyExc_MemoryError;
    PyErr_SetString(type, error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // an interpreter that goes down with models alive is no defect of ours
  nb::register_exception_translator(Translate);
  ExportDefaults(m);

  nb::class_<CallStats>(m, "CallStats").def("fields", &StatsFields).def("totals", &StatsTotals);
  nb::class_<Calibration>(m, "Calibration")
      .def("__init__", &InitCalibration, nb::arg("heads"), nb::arg("target_l1"), nb::arg("pv_l1"), nb::arg("round_l1"),
           nb::arg("seed"))
      .def("__init__", &InitFromBytes, nb::arg("data"))
      .def_prop_ro("heads", [](const Calibration& self) { return sparge_calibration_heads(self.get()); })
      .def("save", &SaveCalibration)
      .def("head", &DescribeHead, nb::arg("head"))
      .def("set_bounds", &Calibration::SetBounds, nb::arg("head"), nb::arg("target_l1"), nb::arg("pv_l1"));

  m.def("attention", &Attention, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("with_stats"), nb::arg("options"));
  m.def("predict", &Predict, nb::arg("q"), nb::arg("k"), nb::arg("map"), nb::arg("options"));
  m.def("reference", &Reference, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("options"));
  m.def("calibrate", &Calibrate, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("effort"), nb::arg("options"));
  m.def("token_order", &TokenOrder, nb::arg("order"), nb::arg("grid"), nb::arg("seed"), nb::arg("out"));
  m.def("merge", &Merge, nb::arg("parts"), nb::arg("out"), nb::arg("lse"), nb::arg("threads"));
  m.def("isas", &Isas);
  m.def("version", &sparge_version);
  m.def(
      "set_num_threads", [](int64_t threads) { Engine::Get().SetThreads(threads); }, nb::arg("threads"));
  m.def("get_num_threads", [] { return Engine::Get().threads(); });
  m.def("grids_laid", [] { return Engine::Get().grids_laid(); });
  m.def("forget_threads", [] { Engine::Get().ForgetThreads(); });
}

}  // namespace sparge::python

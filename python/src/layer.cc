#include "python/src/layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/layer_preset.h"
#include "io/preset.h"
#include "io/tensor.h"
#include "python/src/bounds.h"
#include "python/src/call.h"
#include "python/src/engine.h"
#include "python/src/options.h"

namespace sparge::python {
namespace {

// ------------------------------------------------------------------ presets

struct PresetFile {
  std::string name;  // what messages call it
  io::Preset preset;
};

void InitPreset(PresetFile* self, nb::bytes text, const std::string& name) {
  io::Preset preset = io::ParsePreset({text.c_str(), text.size()}, name);
  if (preset.partial) throw io::Error(name, "is not finished; run `sparge tune` again");
  new (self) PresetFile{name, std::move(preset)};
}

nb::list NamesOfLayers(const PresetFile& file) {
  nb::list names;
  for (const auto& [name, layer] : file.preset.layers) names.append(name);
  return names;
}

nb::dict DescribeLayer(const PresetFile& file, const std::string& name) {
  const io::PresetLayer& layer = io::FindLayer(file.preset, name, file.name);
  nb::list heads;
  for (const io::PresetHead& head : layer.heads) {
    nb::dict h;
    h["precision"] = NameOf(head.precision);
    h["select"] = NameOf(head.select);
    h["theta"] = head.params.theta;
    h["tau"] = head.params.tau;
    h["pv_skip"] = head.params.pv_skip;
    heads.append(h);
  }
  nb::dict d;
  d["q_heads"] = layer.q_heads;
  d["kv_heads"] = layer.kv_heads;
  d["qk_dim"] = layer.qk_dim;
  d["v_dim"] = layer.v_dim;
  d["causal"] = layer.causal;
  d["heads"] = nb::tuple(heads);
  return d;
}

// As the file has them.
nb::dict DescribeBounds(const PresetFile& file) {
  const io::PresetBounds& bounds = file.preset.bounds;
  nb::dict d;
  if (bounds.of_loss()) {
    d["loss"] = bounds.loss;
    d["measured_loss"] = bounds.measured_loss;
    return d;
  }
  d[io::TargetName(bounds.measure).c_str()] = bounds.target;
  d[io::PvName(bounds.measure).c_str()] = bounds.pv;
  d["round_l1"] = bounds.round_l1;
  return d;
}

// ------------------------------------------------------------------ layers

void InitLayer(Layer* self, std::optional<double> target_l1, std::optional<double> pv_l1,
               std::optional<double> target_l2, std::optional<double> pv_l2, std::optional<double> round_l1,
               uint64_t seed, nb::object precision, nb::object preset, const std::string& name, bool remembers,
               bool keep_keys, int64_t min_keys, int64_t dense_tail) {
  LayerDesc desc;
  SetBounds({target_l1, pv_l1, target_l2, pv_l2, round_l1}, desc);
  desc.seed = seed;
  desc.precision = ReadPrecision(precision);
  desc.remembers = remembers ? 1 : 0;
  desc.keep_keys = keep_keys ? 1 : 0;
  desc.min_keys = min_keys;
  desc.dense_tail = dense_tail;
  std::optional<io::LayerPreset> tuned;
  if (!preset.is_none()) {
    const auto& file = nb::cast<const PresetFile&>(preset);
    tuned.emplace(file.preset, io::FindLayer(file.preset, name, file.name));
    desc.preset = tuned->get();
  }
  new (self) Layer(desc);
}

// Says what it did if `with_stats`.
std::shared_ptr<CallStats> RunLayer(Layer& layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                                    nb::handle lse, bool with_stats, bool dense, nb::dict options) {
  auto stats = with_stats ? std::make_shared<CallStats>() : nullptr;
  Call call(q, k, v, out, options, Asker::kLayer, {OptionalOutput("lse", lse), {}, stats});
  nb::gil_scoped_release release;
  const auto context = Engine::Get().ContextFor(call.threads());
  layer.Run(*context, call.described().desc, call.args(), dense ? SPARGE_LAYER_DENSE : 0);
  return stats;
}

nb::dict DescribeTotals(const Layer& layer) {
  const LayerTotals t = layer.Totals();
  nb::dict d;
  d["calls"] = t.calls;
  d["dense_calls"] = t.dense_calls;
  d["time_ms"] = t.total_ms;
  d["predict_ms"] = t.predict_ms;
  d["kernel_ms"] = t.kernel_ms;
  d["decode_ms"] = t.decode_ms;
  d["calibrate_ms"] = t.calibrate_ms;
  d["key_blocks"] = t.key_blocks;
  d["key_blocks_reused"] = t.key_blocks_reused;
  d["qk_eligible"] = t.tiles.qk_eligible;
  d["qk_computed"] = t.tiles.qk_computed;
  d["pv_eligible"] = t.tiles.pv_eligible;
  d["pv_computed"] = t.tiles.pv_computed;
  return d;
}

nb::bytes BytesOf(const std::vector<std::byte>& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Each as sparge_calibration_save writes it: copies, because calls may be changing the calibrations meanwhile.
nb::list SavedCalibrations(const Layer& layer) {
  nb::list all;
  for (int64_t i = 0; i < sparge_layer_calibrations(layer.get()); ++i) {
    const sparge_calibration* calibration = sparge_layer_calibration(layer.get(), i);
    size_t size = 0;
    Check(sparge_calibration_save(calibration, nullptr, &size));
    std::vector<std::byte> bytes(size);
    Check(sparge_calibration_save(calibration, bytes.data(), &size));
    all.append(BytesOf(bytes));
  }
  return all;
}

void RestoreLayer(Layer& layer, nb::bytes data) {
  const auto* begin = reinterpret_cast<const std::byte*>(data.c_str());
  layer.Restore(std::vector<std::byte>(begin, begin + data.size()));
}

}  // namespace

nb::dict DescribeHead(const HeadEstimate& e) {
  static constexpr const char* kStates[] = {"unknown", "sparse", "dense"};
  nb::dict d;
  d["state"] = kStates[e.state];
  d["precision"] = NameOf(e.precision);
  d["theta"] = e.params.theta;
  d["tau"] = e.params.tau;
  d["pv_skip"] = e.params.pv_skip;
  d["samples"] = e.samples;
  d["measure"] = sparge_measure_name(e.measure);
  d["error"] = e.error;
  d["error_se"] = e.error_se;
  d["pv_error"] = e.pv_error;
  d["pv_error_se"] = e.pv_error_se;
  d["known"] = e.known != 0;
  d["limit"] = e.limit;
  d["round_l1"] = e.round_l1;
  d["round_l1_se"] = e.round_l1_error;
  d["sparsity"] = e.sparsity;
  d["work"] = e.work;
  return d;
}

void BindLayer(nb::module_& m) {
  nb::class_<PresetFile>(m, "Preset")
      .def("__init__", &InitPreset, nb::arg("text"), nb::arg("name"))
      .def("names", &NamesOfLayers)
      .def("layer", &DescribeLayer, nb::arg("name"))
      .def("bounds", &DescribeBounds)
      .def(
          "write", [](const PresetFile& self, const std::string& path) { io::WritePreset(path, self.preset); },
          nb::arg("path"));
  nb::class_<Layer>(m, "Layer")
      .def("__init__", &InitLayer, nb::kw_only(), nb::arg("target_l1").none(), nb::arg("pv_l1").none(),
           nb::arg("target_l2").none(), nb::arg("pv_l2").none(), nb::arg("round_l1").none(), nb::arg("seed"),
           nb::arg("precision").none(), nb::arg("preset").none(), nb::arg("name"), nb::arg("remembers"),
           nb::arg("keep_keys"), nb::arg("min_keys"), nb::arg("dense_tail"))
      .def("run", &RunLayer, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
           nb::arg("with_stats"), nb::arg("dense"), nb::arg("options"))
      .def("notice", &Layer::Notice)
      .def("totals", &DescribeTotals)
      .def("calibrations", &SavedCalibrations)
      .def("save", [](const Layer& self) { return BytesOf(self.Save()); })
      .def("restore", &RestoreLayer, nb::arg("data"));
}

}  // namespace sparge::python

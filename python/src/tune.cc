#include "python/src/tune.h"

#include <io/call.h>
#include <io/captures.h>
#include <io/tuned.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "python/src/arrays.h"
#include "python/src/bounds.h"
#include "python/src/engine.h"

namespace sparge::python {
namespace {

// A copy: the model goes on with its own tensors.
io::Tensor CopyTensor(const char* name, nb::handle object) {
  const Input input(name, object);
  const TensorView view = View(input.array(), Layout::kHeadsFirst);
  const io::DType dtype = view.tensor.dtype == SPARGE_F32   ? io::DType::F32
                          : view.tensor.dtype == SPARGE_F16 ? io::DType::F16
                                                            : io::DType::BF16;
  io::Tensor copy = io::MakeTensor(dtype, input.array().shape);
  const auto element = static_cast<int64_t>(io::ElementSize(dtype));
  const auto row = static_cast<size_t>(view.shape[3] * element);
  const auto* from = static_cast<const std::byte*>(view.tensor.data);
  std::byte* to = copy.data.data();
  for (int64_t b = 0; b < view.shape[0]; ++b) {
    for (int64_t h = 0; h < view.shape[1]; ++h) {
      for (int64_t t = 0; t < view.shape[2]; ++t, to += row) {
        const int64_t at = b * view.tensor.batch_stride + h * view.tensor.head_stride + t * view.tensor.token_stride;
        std::memcpy(to, from + at * element, row);
      }
    }
  }
  return copy;
}

// What sparge.capture would write into files.
struct Recording {
  io::Captures captures;

  // What was recorded into files.
  static Recording Read(const std::string& folder) { return {io::FindCaptures(folder)}; }

  // What was made of a folder that is none of layers; "" if it is one, or no folder.
  std::string assumed() const { return captures.assumed; }

  // Returns the bytes it takes.
  int64_t Add(const std::string& layer, const std::string& name, nb::handle q, nb::handle k, nb::handle v,
              io::Metadata metadata) {
    io::RecordedCall call = io::MakeCall(CopyTensor("q", q), CopyTensor("k", k), CopyTensor("v", v),
                                         std::move(metadata), layer + "/" + name);
    const size_t bytes = call.q.data.size() + call.k.data.size() + call.v.data.size();
    io::AddCapture(layer, name, std::move(call), captures);
    return static_cast<int64_t>(bytes);
  }
};

// Lets go of the GIL for the work. `progress(steps_done, steps)` is called between calls of the library; what it
// raises, and Ctrl-C, ends the work, of which finished layers are on the disk. `threads` 0: the default.
void TuneRecording(Recording& recording, std::string out, std::optional<double> target_l1, std::optional<double> pv_l1,
                   std::optional<double> target_l2, std::optional<double> pv_l2, std::optional<double> round_l1,
                   uint64_t seed, bool restart, int64_t threads, const nb::callable& progress) {
  const int32_t checked_threads = CheckedThreads(threads);
  io::TuneTask task;
  SetBounds({target_l1, pv_l1, target_l2, pv_l2, round_l1}, task.bounds);
  nb::gil_scoped_release release;
  task.out = std::move(out);
  task.bounds.seed = seed;
  task.restart = restart;
  task.how_restart = "give restart=True";
  const std::string digest = io::CheckCaptures(recording.captures);
  const auto context = Engine::Get().ContextFor(checked_threads);
  io::PresetTuner tuner(*context, recording.captures, digest, std::move(task));
  tuner.Run([&](int64_t steps_done) {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    progress(steps_done, tuner.steps());
    return false;
  });
}

}  // namespace

void BindTune(nb::module_& m) {
  const TunerDesc defaults;
  m.attr("TUNE_TARGET_L2") = defaults.target_l2;
  m.attr("TUNE_ROUND_L1") = defaults.round_l1;
  m.attr("TUNE_LEAST") = SPARGE_TUNE_LEAST;
  m.attr("TUNE_PV_ROOM") = SPARGE_TUNE_PV_ROOM;
  nb::class_<Recording>(m, "Recording")
      .def(nb::init<>())
      .def_static("read", &Recording::Read, nb::arg("folder"))
      .def_prop_ro("assumed", &Recording::assumed)
      .def("add", &Recording::Add, nb::arg("layer"), nb::arg("name"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("metadata"));
  m.def("tune", &TuneRecording, nb::arg("recording"), nb::arg("out"), nb::arg("target_l1").none(),
        nb::arg("pv_l1").none(), nb::arg("target_l2").none(), nb::arg("pv_l2").none(), nb::arg("round_l1").none(),
        nb::arg("seed"), nb::arg("restart"), nb::arg("threads"), nb::arg("progress"));
}

}  // namespace sparge::python

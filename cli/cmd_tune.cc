// cmd_tune.cc - `sparge tune`: from captures and error bounds to a preset; can be stopped at any time and continued.
#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/tune_report.h"
#include "io/captures.h"
#include "io/preset.h"
#include "io/tuned.h"

namespace sparge::cli {
namespace {

struct TuneOptions {
  std::string captures, out;
  std::optional<double> target_l1, pv_l1, round_l1;
  TunerDesc bounds;
  int32_t threads = 0;
  bool restart = false, json = false;

  std::string partial() const { return out + ".partial"; }
};

// ------------------------------------------------------------------ stopping

volatile std::sig_atomic_t stop_signal = 0;

void NoteSignal(int signal) { stop_signal = signal; }

// A second signal ends the program at once; what is finished is on the disk already.
void CatchSignals() {
  struct sigaction action = {};
  action.sa_handler = NoteSignal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

// ------------------------------------------------------------------ before the work

void FillBounds(TuneOptions& o) {
  if (o.target_l1) o.bounds.target_l1 = *o.target_l1;
  o.bounds.pv_l1 = o.pv_l1.value_or(SPARGE_TUNE_PV_ROOM * o.bounds.target_l1);
  if (o.round_l1) o.bounds.round_l1 = *o.round_l1;
  if (o.bounds.pv_l1 < o.bounds.target_l1) {
    throw UsageError(Format("--pv-l1 %g is smaller than --target-l1 %g: PV skip adds to the error of the selection",
                            o.bounds.pv_l1, o.bounds.target_l1));
  }
}

void CheckOutputs(const TuneOptions& o, const io::Captures& captures) {
  if (!o.out.ends_with(".json")) throw UsageError("--out " + o.out + ": must end in .json");
  std::vector<NamedFile> inputs;
  for (const io::LayerCaptures& layer : captures.layers) {
    for (const io::Capture& capture : layer.captures) inputs.push_back({"", capture.path});
  }
  CheckPlaces({{"--out", o.out}, {"--out", o.partial()}}, inputs);
}

// Everything that the parameters depend on, but for the captures.
std::string OptionsText(const TunerDesc& b, const Context& context) {
  return "target_l1 " + Json(b.target_l1).dump() + ", pv_l1 " + Json(b.pv_l1).dump() + ", round_l1 " +
         Json(b.round_l1).dump() + ", seed " + std::to_string(b.seed) + ", isa " + context.isa() + ", sparge " +
         sparge_version();
}

// What an earlier run finished, or an empty preset. Refuses to mix what does not belong together.
io::Preset StartOrResume(const TuneOptions& o, const Context& context, const std::string& digest) {
  io::Preset fresh;
  fresh.made_by = std::string("sparge ") + sparge_version();
  fresh.target_l1 = o.bounds.target_l1;
  fresh.pv_l1 = o.bounds.pv_l1;
  fresh.round_l1 = o.bounds.round_l1;
  fresh.predictor = SPARGE_PREDICT_KEYS;  // the one that tuning takes
  fresh.seed = o.bounds.seed;
  fresh.partial = {OptionsText(o.bounds, context), digest};
  std::error_code error;
  if (o.restart || !std::filesystem::exists(o.partial(), error)) return fresh;
  const std::string ways = "; delete it or give --restart to begin anew";
  io::Preset found;
  try {
    found = io::ReadPreset(o.partial());
  } catch (const io::Error& failure) {
    throw UsageError(failure.what() + ways);
  }
  if (!found.partial) throw UsageError(o.partial() + ": is not an unfinished preset" + ways);
  if (found.partial->options != fresh.partial->options) {
    throw UsageError(o.partial() + ": was begun with other options: " + found.partial->options + ways);
  }
  if (found.partial->captures != digest) throw UsageError(o.partial() + ": was begun with other captures" + ways);
  return found;
}

// ------------------------------------------------------------------ the work

// A layer at work: its captures, opened as the tuner asks for them; the bar; and Ctrl-C.
class LayerAtWork : public io::CaptureSamples {
 public:
  LayerAtWork(const Context& context, const io::LayerCaptures& layer, TunerDesc bounds)
      : io::CaptureSamples(layer), name_(layer.name), tuner_(context, Named(bounds), *this) {}

  const std::string& name() const { return name_; }
  int64_t steps() const { return tuner_.Info().steps; }
  // False if a signal came.
  bool Tune(Progress& progress) {
    progress_ = &progress;
    return tuner_.Run();
  }
  // After that.
  io::PresetLayer Found() const { return io::TunedLayer(tuner_, Names()); }
  TuneTime time() const { return {tuner_.Info().ms, tuner_.Info().dense_ms}; }

  bool Stops(int64_t steps_done, int64_t /*steps*/) override {
    progress_->Step(steps_done - steps_done_);
    steps_done_ = steps_done;
    return stop_signal != 0;
  }

 private:
  TunerDesc Named(TunerDesc bounds) const {
    bounds.name = name_.c_str();
    return bounds;
  }

  std::string name_;
  Tuner tuner_;
  Progress* progress_ = nullptr;
  int64_t steps_done_ = 0;
};

// False if a signal came: then the layers that are finished are in the report, and on the disk.
bool TuneLayers(const TuneOptions& o, const Context& context, const io::Captures& captures, TuneReport& report) {
  std::vector<std::unique_ptr<LayerAtWork>> layers;
  int64_t steps = 0;
  for (const io::LayerCaptures& layer : captures.layers) {
    if (report.preset.layers.contains(layer.name)) continue;
    layers.push_back(std::make_unique<LayerAtWork>(context, layer, o.bounds));
    steps += layers.back()->steps();
  }
  Progress progress("tuning", steps);
  for (const std::unique_ptr<LayerAtWork>& layer : layers) {
    if (!layer->Tune(progress)) return false;
    report.preset.layers[layer->name()] = layer->Found();
    report.times[layer->name()] = layer->time();
    io::WritePreset(o.partial(), report.preset);
  }
  return true;
}

int Tune(TuneOptions o) {
  if (o.captures.empty()) throw UsageError("no captures: give a folder with LAYER/SAMPLE.safetensors");
  if (o.out.empty()) throw UsageError("--out is missing: -o preset.json");
  FillBounds(o);
  const auto start = std::chrono::steady_clock::now();
  io::Captures captures = io::FindCaptures(o.captures);
  CheckOutputs(o, captures);
  const Context context(o.threads);
  const std::string digest = io::CheckCaptures(captures);
  TuneReport report{o.out, context.isa(), context.threads(), 0, StartOrResume(o, context, digest), {}};
  if (!captures.assumed.empty()) std::fprintf(stderr, "%s\n", captures.assumed.c_str());
  if (!report.preset.layers.empty()) {
    std::fprintf(stderr, "%s: %zu of %zu layers were finished by an earlier run\n", o.partial().c_str(),
                 report.preset.layers.size(), captures.layers.size());
  }
  CatchSignals();
  if (!TuneLayers(o, context, captures, report)) {
    std::fprintf(stderr, "sparge tune: stopped after %zu of %zu layers; the same command continues from there\n",
                 report.preset.layers.size(), captures.layers.size());
    return 128 + stop_signal;  // as shells report it
  }
  report.preset.partial.reset();
  io::WritePreset(o.out, report.preset);
  std::error_code ignored;
  std::filesystem::remove(o.partial(), ignored);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  report.wall_ms = time.count();
  PrintOut(o.json ? Dump(TuneJson(report)) : TuneText(report));
  return 0;
}

void RegisterBound(CLI::App& app, const std::string& flag, const std::string& help, std::optional<double>& target) {
  AddText(app, flag, "X", help, "Bounds",
          [flag, &target](const std::string& text) { target = ParseNumber(flag, text, SPARGE_TUNE_LEAST_L1, 1); });
}

}  // namespace

Command AddTune(CLI::App& program) {
  CLI::App* app = program.add_subcommand("tune", "find parameters per layer and head for error bounds");
  const auto o = std::make_shared<TuneOptions>();
  app->add_option("captures", o->captures, "folder with LAYER/SAMPLE.safetensors")->type_name("PATH");
  app->add_option("-o,--out", o->out, "required: the preset, .json")->type_name("FILE");
  const TunerDesc& usual = o->bounds;
  RegisterBound(*app, "--target-l1",
                Format("relative L1 of sparse against dense, per head; default %g", usual.target_l1), o->target_l1);
  RegisterBound(*app, "--pv-l1", Format("the same with PV skip; default %g times --target-l1", SPARGE_TUNE_PV_ROOM),
                o->pv_l1);
  RegisterBound(*app, "--round-l1", Format("relative L1 of the precision itself; default %g", usual.round_l1),
                o->round_l1);
  AddText(*app, "--seed", "N", "of sampled rows and held-out samples; default 0", "Run", [o](const std::string& text) {
    o->bounds.seed = static_cast<uint64_t>(ParseInteger("--seed", text, 0, std::numeric_limits<int64_t>::max()));
  });
  app->add_flag("--restart", o->restart, "do not continue what an earlier run began")->group("Run");
  RegisterThreads(*app, o->threads);
  RegisterJson(*app, o->json);
  return {app, [o] { return Tune(*o); }};
}

}  // namespace sparge::cli

// cmd_tune.cc - `sparge tune`: from captures and error bounds to a preset; can be stopped at any time and continued.
#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include "cli/captures.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/tune_layer.h"
#include "cli/tune_report.h"
#include "io/preset.h"

namespace sparge::cli {
namespace {

struct TuneOptions {
  std::string captures, out;
  std::optional<double> l1, l2, round_l1;
  TuneBounds bounds;
  int32_t threads = 0;
  bool restart = false, json = false;

  std::string partial() const { return out + ".partial"; }
};

// ------------------------------------------------------------------ stopping

volatile std::sig_atomic_t stop_signal = 0;

void NoteSignal(int signal) { stop_signal = signal; }

struct Stopped {
  int signal;
};

void ThrowIfStopped() {
  if (stop_signal != 0) throw Stopped{stop_signal};
}

// A second signal ends the program at once; what is finished is on the disk already.
void CatchSignals() {
  struct sigaction action = {};
  action.sa_handler = NoteSignal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

// ------------------------------------------------------------------ before the work

void FillBounds(TuneOptions& o) {
  if (o.l1) o.bounds.l1 = *o.l1;
  constexpr double kRoomForSkip = 1.2;  // the ratio of the default bounds
  o.bounds.l2 = o.l2.value_or(kRoomForSkip * o.bounds.l1);
  if (o.round_l1) o.bounds.round_l1 = *o.round_l1;
  if (o.bounds.l2 < o.bounds.l1) {
    throw UsageError(Format("--l2 %g is smaller than --l1 %g: PV skip adds to the error of the selection", o.bounds.l2,
                            o.bounds.l1));
  }
}

void CheckPlaces(const TuneOptions& o, const Captures& captures) {
  if (!o.out.ends_with(".json")) throw UsageError("--out " + o.out + ": must end in .json");
  for (const std::string& path : {o.out, o.partial()}) {
    try {
      io::CheckWritable(path);
    } catch (const io::Error& error) {
      throw UsageError(std::string("--out ") + error.what());
    }
  }
  for (const LayerCaptures& layer : captures.layers) {
    for (const Sample& sample : layer.samples) {
      for (const std::string& path : {o.out, o.partial()}) {
        if (SameFile(path, sample.path))
          throw UsageError("--out " + path + ": would overwrite the input " + sample.path);
      }
    }
  }
}

// Everything that the parameters depend on, but for the captures.
std::string OptionsText(const TuneBounds& b, const Context& context) {
  return "l1 " + Json(b.l1).dump() + ", l2 " + Json(b.l2).dump() + ", round_l1 " + Json(b.round_l1).dump() +
         ", predictor " + io::PredictorName(b.predictor) + ", seed " + std::to_string(b.seed) + ", isa " +
         context.isa() + ", sparge " + sparge_version();
}

// What an earlier run finished, or an empty preset. Refuses to mix what does not belong together.
io::Preset StartOrResume(const TuneOptions& o, const Context& context, const std::string& digest) {
  io::Preset fresh;
  fresh.made_by = std::string("sparge ") + sparge_version();
  fresh.l1 = o.bounds.l1;
  fresh.l2 = o.bounds.l2;
  fresh.round_l1 = o.bounds.round_l1;
  fresh.predictor = o.bounds.predictor;
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

int64_t StepsLeft(const Captures& captures, const io::Preset& preset) {
  int64_t steps = 0;
  for (const LayerCaptures& layer : captures.layers) {
    if (!preset.layers.contains(layer.name)) steps += TuneSteps(layer, preset.seed);
  }
  return steps;
}

void TuneLayers(const TuneOptions& o, const Context& context, const Captures& captures, TuneReport& report) {
  Progress progress("tuning", StepsLeft(captures, report.preset));
  for (const LayerCaptures& layer : captures.layers) {
    if (report.preset.layers.contains(layer.name)) continue;
    LayerTuner tuner(context, layer, o.bounds, progress, ThrowIfStopped);
    report.preset.layers[layer.name] = tuner.Tune();
    report.times[layer.name] = tuner.time();
    io::WritePreset(o.partial(), report.preset);
  }
}

int Tune(TuneOptions o) {
  if (o.captures.empty()) throw UsageError("no captures: give a folder with LAYER/SAMPLE.safetensors");
  if (o.out.empty()) throw UsageError("--out is missing: -o preset.json");
  FillBounds(o);
  const auto start = std::chrono::steady_clock::now();
  Captures captures = FindCaptures(o.captures);
  CheckPlaces(o, captures);
  const Context context(o.threads);
  const std::string digest = CheckCaptures(captures);
  TuneReport report{o.out, context.isa(), context.threads(), 0, StartOrResume(o, context, digest), {}};
  if (!captures.assumed.empty()) std::fprintf(stderr, "%s\n", captures.assumed.c_str());
  if (!report.preset.layers.empty()) {
    std::fprintf(stderr, "%s: %zu of %zu layers were finished by an earlier run\n", o.partial().c_str(),
                 report.preset.layers.size(), captures.layers.size());
  }
  CatchSignals();
  try {
    TuneLayers(o, context, captures, report);
  } catch (const Stopped& stopped) {
    std::fprintf(stderr, "sparge tune: stopped after %zu of %zu layers; the same command continues from there\n",
                 report.preset.layers.size(), captures.layers.size());
    return 128 + stopped.signal;  // as shells report it
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
  constexpr double kSmallest = 1e-6;  // below the error of fp32 itself
  AddText(app, flag, "X", help, "Bounds",
          [flag, &target](const std::string& text) { target = ParseNumber(flag, text, kSmallest, 1); });
}

}  // namespace

Command AddTune(CLI::App& program) {
  CLI::App* app = program.add_subcommand("tune", "find parameters per layer and head for error bounds");
  const auto o = std::make_shared<TuneOptions>();
  app->add_option("captures", o->captures, "folder with LAYER/SAMPLE.safetensors")->type_name("PATH");
  app->add_option("-o,--out", o->out, "required: the preset, .json")->type_name("FILE");
  RegisterBound(*app, "--l1", "relative L1 of sparse against dense, per head; default 0.05", o->l1);
  RegisterBound(*app, "--l2", "the same with PV skip; default 1.2 times --l1", o->l2);
  RegisterBound(*app, "--round-l1", "relative L1 of the precision itself; default 0.05", o->round_l1);
  AddText(*app, "--seed", "N", "of sampled rows and held-out samples; default 0", "Run", [o](const std::string& text) {
    o->bounds.seed = static_cast<uint64_t>(ParseInteger("--seed", text, 0, std::numeric_limits<int64_t>::max()));
  });
  app->add_flag("--restart", o->restart, "do not continue what an earlier run began")->group("Run");
  RegisterThreads(*app, o->threads);
  RegisterJson(*app, o->json);
  return {app, [o] { return Tune(*o); }};
}

}  // namespace sparge::cli

// cmd_tune.cc - `sparge tune`: from captures and error bounds to a preset; can be stopped at any time and continued.
#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/tune_report.h"
#include "io/captures.h"
#include "io/tuned.h"

namespace sparge::cli {
namespace {

struct TuneOptions {
  std::string captures, out;
  GivenBounds given;
  std::optional<double> round_l1;
  TunerDesc bounds;
  int32_t threads = 0;
  bool sample = false, restart = false, json = false;
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
  GivenBounds usual = o.given;
  if (!usual.target_l1 && !usual.target_l2) usual.target_l2 = o.bounds.target_l2;
  CheckBounds(usual);
  if (o.given.target_l1) o.bounds.target_l1 = *o.given.target_l1;
  if (o.given.pv_l1) o.bounds.pv_l1 = *o.given.pv_l1;
  if (o.given.target_l2) o.bounds.target_l2 = *o.given.target_l2;
  if (o.given.pv_l2) o.bounds.pv_l2 = *o.given.pv_l2;
  if (o.round_l1) o.bounds.round_l1 = *o.round_l1;
}

void CheckOutputs(const TuneOptions& o, const io::Captures& captures) {
  if (!o.out.ends_with(".json")) throw UsageError("--out " + o.out + ": must end in .json");
  std::vector<NamedFile> inputs;
  for (const io::LayerCaptures& layer : captures.layers) {
    for (const io::Capture& capture : layer.captures) inputs.push_back({"", capture.path});
  }
  CheckPlaces({{"--out", o.out}, {"--out", io::PartialOf(o.out)}}, inputs);
}

// ------------------------------------------------------------------ the work

// False if a signal came.
bool RunWithBar(io::PresetTuner& tuner) {
  Progress progress("tuning", tuner.steps());
  int64_t shown = 0;
  return tuner.Run([&](int64_t steps_done) {
    progress.Step(steps_done - std::exchange(shown, steps_done));
    return stop_signal != 0;
  });
}

int Tune(TuneOptions o) {
  if (o.sample && !o.captures.empty()) throw UsageError("--sample " + o.captures + ": one of the two");
  if (o.sample) o.captures = (std::filesystem::path(SampleFolder()) / kSampleCall).string();
  if (o.captures.empty()) throw UsageError("no captures: give a folder with LAYER/SAMPLE.safetensors, or --sample");
  if (o.out.empty()) throw UsageError("--out is missing: -o preset.json");
  FillBounds(o);
  const auto start = std::chrono::steady_clock::now();
  io::Captures captures = io::FindCaptures(o.captures);
  CheckOutputs(o, captures);
  const Context context(o.threads);
  const std::string digest = io::CheckCaptures(captures);
  io::PresetTuner tuner(context, captures, digest, {o.out, o.bounds, o.restart, "give --restart"});
  if (!captures.assumed.empty()) std::fprintf(stderr, "%s\n", captures.assumed.c_str());
  if (tuner.resumed() > 0) {
    std::fprintf(stderr, "%s: %zu of %zu layers were finished by an earlier run\n", io::PartialOf(o.out).c_str(),
                 tuner.resumed(), captures.layers.size());
  }
  CatchSignals();
  if (!RunWithBar(tuner)) {
    std::fprintf(stderr, "sparge tune: stopped after %zu of %zu layers; the same command continues from there\n",
                 tuner.preset().layers.size(), captures.layers.size());
    return 128 + stop_signal;  // as shells report it
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  const TuneReport report{o.out, context.isa(), context.threads(), time.count(), tuner.preset(), tuner.times()};
  PrintOut(o.json ? Dump(TuneJson(report)) : TuneText(report));
  return 0;
}

constexpr char kFooter[] =
    "sparge tune --sample -o preset.json                    tries it on recorded heads\n"
    "sparge tune --target-l2 0.1 captures/ -o preset.json   captures: sparge.capture in Python "
    "(docs/python-tuning.md)\n"
    "sparge check --preset preset.json other-captures/      does it hold elsewhere?";

void RegisterBound(CLI::App& app, const std::string& flag, const std::string& help, std::optional<double>& target) {
  AddText(app, flag, "X", help, "Bounds",
          [flag, &target](const std::string& text) { target = ParseNumber(flag, text, SPARGE_TUNE_LEAST, 1); });
}

}  // namespace

Command AddTune(CLI::App& program) {
  CLI::App* app = AddVerb(program, "tune", "find parameters per layer and head for error bounds", kFooter);
  const auto o = std::make_shared<TuneOptions>();
  app->add_option("captures", o->captures, "folder with LAYER/SAMPLE.safetensors")->type_name("PATH");
  app->add_flag("--sample", o->sample, "instead: two recorded heads that come with this program, to try it");
  app->add_option("-o,--out", o->out, "required: the preset, .json")->type_name("FILE");
  const TunerDesc& usual = o->bounds;
  RegisterBound(*app, "--target-l2",
                Format("relative L2 of sparse against dense, per head; default %g", usual.target_l2),
                o->given.target_l2);
  RegisterBound(*app, "--pv-l2", Format("the same with PV skip; default %g times --target-l2", SPARGE_TUNE_PV_ROOM),
                o->given.pv_l2);
  RegisterBound(*app, "--target-l1", "a bound of the relative L1 instead", o->given.target_l1);
  RegisterBound(*app, "--pv-l1", "likewise, with --target-l1", o->given.pv_l1);
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

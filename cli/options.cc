// options.cc - registers and checks the options of run, map, check and report; every refusal names the flag and its
// value.
#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>
#include <sparge/sparge.hpp>
#include <utility>

#include "cli/text.h"
#include "io/preset.h"
#include "io/tensor.h"

namespace sparge::cli {
namespace {

using io::Quoted;

void AddNumber(CLI::App& app, const std::string& flag, const std::string& help, const std::string& group,
               std::optional<double>& target, double low, double high) {
  AddText(app, flag, "X", help, group,
          [flag, low, high, &target](const std::string& text) { target = ParseNumber(flag, text, low, high); });
}

void AddInteger(CLI::App& app, const std::string& flag, const std::string& help, std::optional<int64_t>& target,
                int64_t low, int64_t high) {
  AddText(app, flag, "N", help, "Attention",
          [flag, low, high, &target](const std::string& text) { target = ParseInteger(flag, text, low, high); });
}

void AddFile(CLI::App& app, const std::string& flag, const std::string& help, const std::string& group,
             std::string& target) {
  app.add_option_function<std::string>(
         flag,
         [flag, &target](const std::string& text) {
           if (text.empty()) throw UsageError(flag + ": the file name is empty");
           target = text;
         },
         help)
      ->type_name("FILE")
      ->group(group);
}

void AddChoice(CLI::App& app, const std::string& flag, const std::string& help, const std::vector<std::string>& choices,
               std::function<void(const std::string&)> take) {
  AddText(app, flag, JoinChoices(choices), help, "Sparsity",
          [=, take = std::move(take)](const std::string& text) { take(ParseChoice(flag, text, choices)); });
}

void RegisterInputs(CLI::App& app, Verb verb, Options& options) {
  const std::string group = "Inputs";
  AddFile(app, "--q", "queries, .npy: (N,D), (H,N,D) or (B,H,N,D), float32 or float16", group, options.q);
  AddFile(app, "--k", "keys, .npy", group, options.k);
  AddFile(app, "--v", verb == Verb::kMap ? "values, .npy; for --select auto, which measures results" : "values, .npy",
          group, options.v);
  AddFile(app, "--tensors", "instead of --q --k --v: a .safetensors file with tensors q, k, v (bfloat16 too)", group,
          options.tensors);
  if (TakesPaths(verb)) {
    app.add_option("paths", options.paths, "instead: .safetensors files, or folders that are searched for them")
        ->type_name("PATH")
        ->group(group);
  }
  AddFile(app, "--mask", "(Nq,Nk), (H,Nq,Nk) or (B,H,Nq,Nk), .npy: float is added, bool or uint8 = may attend", group,
          options.mask);
  AddFile(app, "--map", "block map, .npy: uint8 or bool (H,Tq,Tk) or (B,H,Tq,Tk); keeps exactly these tiles", group,
          options.map);
}

void RegisterOutputs(CLI::App& app, Verb verb, Options& options) {
  const std::string group = "Outputs";
  if (verb == Verb::kRun) {
    AddFile(app, "--out", "required: result with q's type, .npy or .safetensors", group, options.out);
    AddFile(app, "--lse", "log-sum-exp, float32 .npy", group, options.lse);
  }
  if (!TakesPaths(verb)) {
    AddFile(app, "--map-out",
            verb == Verb::kMap ? "required: tiles to compute, uint8 .npy" : "computed tiles, uint8 .npy", group,
            options.map_out);
  }
}

void RegisterAttention(CLI::App& app, Options& options) {
  constexpr int64_t kFar = int64_t{1} << 31;
  app.add_flag("--causal", options.causal, "query i sees keys j <= i + offset")->group("Attention");
  AddInteger(app, "--query-offset", "the offset of causal and window; default Nk - Nq", options.query_offset, -kFar,
             kFar);
  AddInteger(app, "--window", "query i sees keys j > i + offset - N", options.window, 1, kFar);
  AddText(app, "--scale", "X", "factor of the scores; default D^-1/2", "Attention",
          [&options](const std::string& text) {
            options.scale = ParseNumber("--scale", text);
            if (*options.scale == 0) throw UsageError("--scale: " + Quoted(text) + " would make all scores equal");
          });
  RegisterGrid(app, options.grid);
}

void RegisterSparsity(CLI::App& app, Verb verb, Options& options) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kLargest = std::numeric_limits<double>::max();
  const std::string group = "Sparsity";
  const PlanDesc defaults;
  AddChoice(app, "--precision", Format("arithmetic, at least; default %s", io::PrecisionName(defaults.precision)),
            {"fp32", "int16", "int8"}, [&options](const std::string& text) { options.precision = text; });
  AddChoice(
      app, "--select",
      "which tiles to compute; default auto, or what a parameter says: cdf for --tau and --theta, topk for --topk, "
      "map for --map",
      {"auto", "all", "cdf", "topk", "floor", "map"}, [&options](const std::string& text) { options.select = text; });
  AddNumber(
      app, "--tau",
      Format("cdf: predicted mass to keep; floor: see docs/studies/predictor.md; default %g", defaults.params.tau),
      group, options.tau, 0, 1);
  AddNumber(app, "--topk", Format("topk: fraction of visible tiles to keep; default %g", defaults.params.topk), group,
            options.topk, 0, 1);
  AddNumber(
      app, "--theta",
      Format("blocks less self-similar than this are kept whole; default %g, below 0 = off", defaults.params.theta),
      group, options.theta, -kLargest, kLargest);
  if (verb != Verb::kMap) {
    AddText(app, "--pv-skip", "X|off",
            Format("skip row groups that lie this far (natural log) below the maximum; default %g",
                   defaults.params.pv_skip),
            group, [&options](const std::string& text) {
              options.pv_skip = text == "off" ? kInfinity : ParseNumber("--pv-skip", text);
              if (*options.pv_skip < 0) throw UsageError("--pv-skip: " + Quoted(text) + " is negative");
            });
  }
  AddChoice(app, "--predictor", "how the mass of a tile is guessed; default keys for floor, else paper",
            {"keys", "paper"}, [&options](const std::string& text) { options.predictor = text; });
  CLI::Option* sink = app.add_flag_function(
      "--sink", [&options](int64_t) { options.sink = true; }, "always keep the first key block; default when causal");
  app.add_flag_function(
         "--no-sink", [&options](int64_t) { options.sink = false; }, "do not")
      ->excludes(sink)
      ->group(group);
  sink->group(group);
}

// Error bounds instead of parameters, and parameters that were found before.
void RegisterTuned(CLI::App& app, Verb verb, Options& options) {
  const std::string group = "Sparsity";
  const CalibrationDesc defaults;
  AddNumber(app, "--target-l2",
            Format("auto: relative L2 that a head's selection may cost; default %g", defaults.target_l2), group,
            options.target_l2, 0, 1);
  AddNumber(app, "--target-l1", "auto: a bound of the relative L1 instead", group, options.target_l1, 0, 1);
  if (verb != Verb::kMap) {
    AddNumber(app, "--pv-l2", Format("auto: the same with PV skip; default %g times --target-l2", SPARGE_PV_ROOM),
              group, options.pv_l2, 0, 1);
    AddNumber(app, "--pv-l1", "auto: likewise, with --target-l1", group, options.pv_l1, 0, 1);
  }
  AddNumber(app, "--round-l1", Format("auto: relative L1 of the precision itself; default %g", defaults.round_l1),
            group, options.round_l1, 0, 1);
  AddText(app, "--seed", "N", "auto: which query rows are measured; default 0", group,
          [&options](const std::string& text) {
            options.seed = ParseInteger("--seed", text, 0, std::numeric_limits<int64_t>::max());
          });
  AddText(app, "--warm", "N",
          "auto: calls before the one that counts, for the layer to learn from; default: until each head has a choice",
          group, [&options](const std::string& text) { options.warm = ParseInteger("--warm", text, 0, 1000); });
  AddFile(app, "--preset", "parameters per head, as `sparge tune` writes them", group, options.preset);
  AddText(app, "--layer", "NAME", "layer of --preset; for PATH the default is the folder of each file", group,
          [&options](const std::string& text) {
            if (text.empty()) throw UsageError("--layer: the name is empty");
            options.layer = text;
          });
}

using GivenFlags = std::initializer_list<std::pair<const char*, bool>>;

// Throws for the first flag that is given.
void RefuseGiven(const GivenFlags& flags, const std::string& why) {
  for (const auto& [flag, given] : flags) {
    if (given) throw UsageError(flag + why);
  }
}

void CheckPreset(const Options& o) {
  if (o.preset.empty()) {
    if (!o.layer.empty()) throw UsageError("--layer " + o.layer + " has no meaning without --preset");
    return;
  }
  RefuseGiven({{"--select", o.select.has_value()},
               {"--map", !o.map.empty()},
               {"--tau", o.tau.has_value()},
               {"--topk", o.topk.has_value()},
               {"--theta", o.theta.has_value()},
               {"--pv-skip", o.pv_skip.has_value()},
               {"--precision", o.precision.has_value()},
               {"--predictor", o.predictor.has_value()},
               {o.sink.value_or(true) ? "--sink" : "--no-sink", o.sink.has_value()},
               {"--target-l2", o.target_l2.has_value()},
               {"--pv-l2", o.pv_l2.has_value()},
               {"--target-l1", o.target_l1.has_value()},
               {"--pv-l1", o.pv_l1.has_value()},
               {"--round-l1", o.round_l1.has_value()},
               {"--seed", o.seed.has_value()},
               {"--warm", o.warm.has_value()}},
              " has no meaning with --preset " + o.preset + ", which decides it");
  if (o.layer.empty() && o.paths.empty()) {
    throw UsageError("--layer is missing: which layer of --preset " + o.preset + "?");
  }
}

void CheckAuto(const Options& o) {
  if (o.pv_skip) {
    throw UsageError("--pv-skip has no meaning with " + SelectionOf(o).flag +
                     " which chooses it; give --pv-l2 for its error, or --tau X for a selection of your own");
  }
  CheckBounds({o.target_l1, o.pv_l1, o.target_l2, o.pv_l2});
  if (o.round_l1 && o.precision && *o.precision != "int8") {
    throw UsageError("--round-l1 has no meaning with --precision " + *o.precision +
                     ": it says when int8 is not enough");
  }
}

// Each flag belongs to some selections.
void CheckSelection(const Options& o) {
  const auto [select, flag] = SelectionOf(o);
  const std::string with = " has no meaning with " + flag;
  const bool tau = select == "cdf" || select == "floor";
  const bool predicted = tau || select == "topk";
  if (o.map.empty() && select == "map") throw UsageError("--select map needs --map");
  RefuseGiven({{"--map", !o.map.empty() && select != "map"},
               {"--tau", o.tau && !tau},
               {"--topk", o.topk && select != "topk"},
               {"--theta", o.theta && !predicted},
               {"--predictor", o.predictor && !predicted},
               {o.sink.value_or(true) ? "--sink" : "--no-sink", o.sink && !predicted && select != "auto"}},
              with);
  if (select == "auto") return CheckAuto(o);
  RefuseGiven({{"--target-l2", o.target_l2.has_value()},
               {"--pv-l2", o.pv_l2.has_value()},
               {"--target-l1", o.target_l1.has_value()},
               {"--pv-l1", o.pv_l1.has_value()},
               {"--round-l1", o.round_l1.has_value()},
               {"--seed", o.seed.has_value()},
               {"--warm", o.warm.has_value()}},
              with + ": it belongs to --select auto");
}

void CheckInputs(Verb verb, const Options& o) {
  const bool npy = !o.q.empty() || !o.k.empty() || !o.v.empty();
  const std::string alternatives = TakesPaths(verb) ? "--q --k --v, --tensors or PATH" : "--q --k --v or --tensors";
  if (npy + !o.tensors.empty() + !o.paths.empty() > 1) throw UsageError("give only one of " + alternatives);
  if (npy + !o.tensors.empty() + !o.paths.empty() == 0) throw UsageError("no inputs: give " + alternatives);
  if (!npy) return;
  if (o.q.empty()) throw UsageError("--q is missing");
  if (o.k.empty()) throw UsageError("--k is missing");
  if (o.v.empty() && verb != Verb::kMap) throw UsageError("--v is missing");
}

}  // namespace

void CheckBounds(const GivenBounds& given) {
  if (given.target_l1 && given.target_l2) throw UsageError("--target-l1 and --target-l2 are two bounds: give one");
  if (given.pv_l1 && !given.target_l1) throw UsageError("--pv-l1 has no meaning without --target-l1");
  if (given.pv_l2 && given.target_l1) throw UsageError("--pv-l2 has no meaning with --target-l1");
  const auto check = [](const char* measure, const std::optional<double>& target, const std::optional<double>& pv) {
    if (!target || !pv || *pv >= *target) return;
    throw UsageError(Format("--pv-%s %g is smaller than --target-%s %g: PV skip adds to the error of the selection",
                            measure, *pv, measure, *target));
  };
  check("l1", given.target_l1, given.pv_l1);
  check("l2", given.target_l2, given.pv_l2);
}

void RegisterThreads(CLI::App& app, int32_t& threads) {
  AddText(app, "--threads", "N", "threads; default all", "Run", [&threads](const std::string& text) {
    threads = static_cast<int32_t>(ParseInteger("--threads", text, 1, 1024));
  });
}

void RegisterJson(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "print one JSON object on stdout")->group("Run");
}

void RegisterOptions(CLI::App& app, Verb verb, Options& options) {
  RegisterInputs(app, verb, options);
  RegisterOutputs(app, verb, options);
  RegisterAttention(app, options);
  RegisterSparsity(app, verb, options);
  RegisterTuned(app, verb, options);
  RegisterThreads(app, options.threads);
  RegisterJson(app, options.json);
  if (verb == Verb::kCheck) {
    AddNumber(app, "--max-l1", "exit with 1 if the total relative L1 is larger", "Run", options.max_l1, 0,
              std::numeric_limits<double>::infinity());
  }
}

void CheckOptions(Verb verb, const Options& o) {
  // Not left to CLI11, which would name a missing flag rather than a mistyped one.
  if (verb == Verb::kRun && o.out.empty()) throw UsageError("--out is missing");
  if (verb == Verb::kMap && o.map_out.empty()) throw UsageError("--map-out is missing");
  CheckInputs(verb, o);
  CheckPreset(o);
  if (o.preset.empty()) CheckSelection(o);
}

Selection SelectionOf(const Options& o) {
  if (o.select) return {*o.select, "--select " + *o.select};
  if (!o.map.empty()) return {"map", "--map"};
  if (o.topk) return {"topk", "--topk"};
  if (o.tau) return {"cdf", "--tau"};
  if (o.theta) return {"cdf", "--theta"};
  return {"auto", "--select auto, the default,"};
}

}  // namespace sparge::cli

// cmd_run.cc - `sparge run`: attention of tensors in files, result to a file.
#include <cstdio>
#include <memory>

#include "cli/choice.h"
#include "cli/commands.h"
#include "cli/loaded_call.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/report.h"
#include "cli/runner.h"

namespace sparge::cli {
namespace {

using io::DType;
using io::MakeTensor;
using io::Tensor;

// Space for what the run writes; tensors that are not wanted stay empty.
struct Results {
  Tensor o, lse, map;
};

Results MakeResults(const Options& options, const LoadedCall& call, RunArgs& args) {
  const PlanDesc& desc = call.desc;
  Results results;
  std::vector<int64_t> shape = call.q.shape;
  shape.back() = desc.v_dim;
  results.o = MakeTensor(call.q.dtype, shape);
  args.o = OutputView(results.o, desc);
  if (!options.lse.empty()) {
    shape.pop_back();
    results.lse = MakeTensor(DType::F32, shape);
    args.lse = {reinterpret_cast<float*>(results.lse.data.data()), desc.q_heads * desc.q_tokens, desc.q_tokens};
  }
  if (!options.map_out.empty()) {
    results.map = MakeTensor(DType::U8, MapShape(call));
    args.map_out = reinterpret_cast<uint8_t*>(results.map.data.data());
  }
  return results;
}

void PrintSummary(const Options& options, const LoadedCall& call, const Stats& stats) {
  std::fprintf(stderr,
               "%s: %.2f ms, %s, %d thread%s; %lld of %lld tiles computed, sparsity %.1f %%, work %.1f %% (%s)\n",
               options.out.c_str(), stats.total_ms, stats.isa, stats.threads, stats.threads == 1 ? "" : "s",
               static_cast<long long>(stats.total.qk_computed), static_cast<long long>(stats.total.qk_eligible),
               100 * Sparsity(stats.total), 100 * Work(stats.total), ParameterText(call).c_str());
}

int Run(const Options& options) {
  CheckOptions(Verb::kRun, options);
  const HeadChooser chooser(options);
  LoadedCall call = LoadCall(Verb::kRun, options, options.tensors);
  CheckOutputs(options, call.q.dtype);
  const Context context(options.threads);
  chooser.TakePreset(options.tensors, call);
  RunArgs args = call.args;
  const Results results = MakeResults(options, call, args);
  Stats stats;
  args.stats = &stats;
  RunProblem(context, call, args);
  std::fputs((NotesText(call, options.tensors) + ChoiceText(call)).c_str(), stderr);

  Outputs outputs;
  outputs.Add("--out", options.out, "o", results.o);
  if (!options.lse.empty()) outputs.Add("--lse", options.lse, "lse", results.lse);
  if (!options.map_out.empty()) outputs.Add("--map-out", options.map_out, "map", results.map);
  outputs.Commit([&] {
    if (options.json) {
      PrintOut(Dump(RunReport(call, stats)));
    } else {
      PrintSummary(options, call, stats);
    }
  });
  return 0;
}

}  // namespace

Command AddRun(CLI::App& program) {
  CLI::App* app = AddVerb(program, "run", "compute attention of tensors in files");
  const auto options = std::make_shared<Options>();
  RegisterOptions(*app, Verb::kRun, *options);
  return {app, [options] { return Run(*options); }};
}

}  // namespace sparge::cli

// cmd_map.cc - `sparge map`: stage 1 alone; writes which tiles would be computed and prints how many that are.
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

struct HeadFigures {
  int64_t batch, head;
  sparge_head_stats stats;
};

Json MapReport(const LoadedCall& call, const Stats& stats, const std::vector<HeadFigures>& heads) {
  Json json = RunReport(call, stats);
  // The map says nothing about PV, and no kernel ran.
  for (const char* name : {"pv_tiles", "work", "pv_skip"}) json.erase(name);
  json["stages_ms"].erase("kernel");
  json["heads"] = Json::array();
  for (const HeadFigures& figures : heads) {
    json["heads"].push_back({{"batch", figures.batch},
                             {"head", figures.head},
                             {"eligible", figures.stats.qk_eligible},
                             {"computed", figures.stats.qk_computed},
                             {"sparsity", Sparsity(figures.stats)}});
  }
  return json;
}

void PrintFigures(const Options& options, const Stats& stats, const std::vector<HeadFigures>& heads) {
  std::fprintf(stderr, "batch  head    eligible        kept  sparsity\n");
  const auto line = [](const std::string& name, const sparge_head_stats& figures) {
    std::fprintf(stderr, "%s  %10lld  %10lld  %6.1f %%\n", name.c_str(), static_cast<long long>(figures.qk_eligible),
                 static_cast<long long>(figures.qk_computed), 100 * Sparsity(figures));
  };
  for (const HeadFigures& figures : heads) {
    line(Format("%5lld %5lld", static_cast<long long>(figures.batch), static_cast<long long>(figures.head)),
         figures.stats);
  }
  line("      total", stats.total);
  std::fprintf(stderr, "%s: tiles of %d queries x %d keys, %.2f ms\n", options.map_out.c_str(), SPARGE_BLOCK_Q,
               SPARGE_BLOCK_K, stats.total_ms);
}

int Map(const Options& options) {
  CheckOptions(Verb::kMap, options);
  const HeadChooser chooser(options);
  LoadedCall call = LoadCall(Verb::kMap, options, options.tensors);
  CheckOutputs(options, call.q.dtype);
  const Context context(options.threads);
  chooser.TakePreset(options.tensors, call);
  RunArgs args = call.args;
  io::Tensor map = io::MakeTensor(io::DType::U8, MapShape(call));
  std::vector<sparge_head_stats> head_stats(static_cast<size_t>(call.desc.batch * call.desc.q_heads));
  Stats stats;
  args.map_out = reinterpret_cast<uint8_t*>(map.data.data());
  args.stats = &stats;
  args.head_stats = head_stats.data();
  std::vector<float> o;
  if (call.automatic) {
    args.o = OutputView(o, call.desc);  // what a layer skips is known when it has run
    RunProblem(context, call, args);
  } else {
    Plan(context, call.desc).Predict(args);
  }
  std::fputs((NotesText(call, options.tensors) + ChoiceText(call)).c_str(), stderr);

  std::vector<HeadFigures> heads;
  for (size_t i = 0; i < head_stats.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    heads.push_back({index / call.desc.q_heads, index % call.desc.q_heads, head_stats[i]});
  }
  Outputs outputs;
  outputs.Add("--map-out", options.map_out, "map", map);
  outputs.Commit([&] {
    if (options.json) {
      PrintOut(Dump(MapReport(call, stats, heads)));
    } else {
      PrintFigures(options, stats, heads);
    }
  });
  return 0;
}

}  // namespace

Command AddMap(CLI::App& program) {
  CLI::App* app = AddVerb(program, "map", "predict the block map, without computing attention");
  const auto options = std::make_shared<Options>();
  RegisterOptions(*app, Verb::kMap, *options);
  return {app, [options] { return Map(*options); }};
}

}  // namespace sparge::cli

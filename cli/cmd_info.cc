// cmd_info.cc - `sparge info`: version, block sizes, defaults, instruction sets, threads and GPUs of this machine.
#include <memory>
#include <vector>

#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/report.h"
#include "io/preset.h"

namespace sparge::cli {
namespace {

struct InfoOptions {
  int32_t threads = 0;
  bool json = false;
};

struct Info {
  std::string cpu;
  std::string isa_in_use;
  int32_t threads = 0;
  std::vector<sparge_isa> isas;
  std::vector<std::string> gpus;  // what each is, by number
  std::string no_further_gpu;     // why the next one cannot be taken
};

// The GPUs that a context can be made on.
void CollectGpus(Info& info) {
  for (;;) {
    const std::string device = "cuda:" + std::to_string(info.gpus.size());
    ContextDesc desc;
    desc.device = device.c_str();
    try {
      info.gpus.emplace_back(Context(desc).isa());
    } catch (const Error& error) {
      info.no_further_gpu = error.what();
      return;
    }
  }
}

Info Collect(int32_t threads) {
  const Context context(threads);
  Info info{CpuName(), context.isa(), context.threads(), {}, {}, {}};
  CollectGpus(info);
  for (int32_t i = 0; i < sparge_isa_count(); ++i) {
    sparge_isa isa;
    sparge_isa_init(&isa);
    Check(sparge_isa_at(i, &isa));
    info.isas.push_back(isa);
  }
  return info;
}

// What holds where nothing is said: the library's own, and those of `tune`.
Json Defaults() {
  const LayerDesc layer;
  const PlanDesc plan;
  const TunerDesc tuner;
  const Bounds bounds = BoundsOf(layer);
  const Bounds tune = BoundsOf(tuner);
  return {{"select", SelectionOf(Options()).name},
          {io::TargetName(bounds.measure), bounds.target},
          {io::PvName(bounds.measure), bounds.pv},
          {"round_l1", layer.round_l1},
          {"pv_room", SPARGE_PV_ROOM},
          {"few_queries", SPARGE_FEW_QUERIES},
          {"min_keys", layer.min_keys},
          {"dense_tail", layer.dense_tail},
          {"precision", io::PrecisionName(plan.precision)},
          {"tau", plan.params.tau},
          {"topk", plan.params.topk},
          {"theta", plan.params.theta},
          {"pv_skip", plan.params.pv_skip},
          {"tune",
           {{io::TargetName(tune.measure), tune.target},
            {io::PvName(tune.measure), tune.pv},
            {"round_l1", tuner.round_l1}}}};
}

std::string JsonText(const Info& info) {
  Json json = {{"version", sparge_version()},
               {"block_q", SPARGE_BLOCK_Q},
               {"block_k", SPARGE_BLOCK_K},
               {"max_head_dim", SPARGE_MAX_HEAD_DIM},
               {"cpu", info.cpu},
               {"threads", info.threads},
               {"isa", info.isa_in_use},
               {"gpus", info.gpus}};
  if (info.gpus.empty()) json["no_gpu"] = info.no_further_gpu;
  json["defaults"] = Defaults();
  json["isas"] = Json::array();
  for (const sparge_isa& isa : info.isas) {
    json["isas"].push_back({{"name", isa.name},
                            {"runnable", isa.runnable != 0},
                            {"in_use", info.isa_in_use == isa.name},
                            {"group_rows", isa.group_rows},
                            {"int8_qk", isa.int8_qk}});
  }
  return Dump(json);
}

std::string Text(const Info& info) {
  std::string text = Format("sparge %s\n", sparge_version());
  text += Format("block map   tiles of %d queries x %d keys\n", SPARGE_BLOCK_Q, SPARGE_BLOCK_K);
  text += Format("head size   1 to %d\n", SPARGE_MAX_HEAD_DIM);
  text += "cpu         " + info.cpu + "\n";
  text += Format("threads     %d\n", info.threads);
  for (size_t i = 0; i < info.gpus.size(); ++i) text += "cuda:" + std::to_string(i) + "      " + info.gpus[i] + "\n";
  if (info.gpus.empty()) text += "gpu         none: " + info.no_further_gpu + "\n";
  const Bounds bounds = BoundsOf(LayerDesc());
  text += Format("error       default per head: relative %s %g, %g with skipped products; rounding (l1) %g\n\n",
                 sparge_measure_name(bounds.measure), bounds.target, bounds.pv, LayerDesc().round_l1);
  text += "instruction set  runs here  rows per skip  int8 arithmetic\n";
  for (const sparge_isa& isa : info.isas) {
    const bool in_use = info.isa_in_use == isa.name;
    text += Format("%-15s  %-9s  %13d  %s\n", isa.name,
                   in_use              ? "in use"
                   : isa.runnable != 0 ? "yes"
                                       : "no",
                   isa.group_rows, isa.int8_qk);
  }
  return text + "\nSPARGE_ISA=NAME in the environment forces an instruction set.\n";
}

}  // namespace

Command AddInfo(CLI::App& program) {
  CLI::App* app = AddVerb(program, "info", "what this build has and what this machine can run");
  const auto options = std::make_shared<InfoOptions>();
  RegisterThreads(*app, options->threads);
  RegisterJson(*app, options->json);
  return {app, [options] {
            const Info info = Collect(options->threads);
            PrintOut(options->json ? JsonText(info) : Text(info));
            return 0;
          }};
}

}  // namespace sparge::cli

// cmd_demo.cc - `sparge demo`: dense fp32, dense int8 and sparse int8 on captured attention heads, in one table.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/loaded_call.h"
#include "cli/machine.h"
#include "cli/metrics.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/runner.h"

#ifndef SPARGE_DATA_DIR
#define SPARGE_DATA_DIR ""
#endif

namespace sparge::cli {
namespace {

constexpr int kRounds = 3;
constexpr int64_t kLearned = 20;  // calls, after which a layer measures little more

struct DemoOptions {
  std::string data;
  int32_t threads = 0;
  bool json = false;
};

struct Row {
  std::string title;
  int64_t head = 0, tokens = 0;
  double fp32_ms = 0, int8_ms = 0, sparse_ms = 0;
  sparge_head_stats stats = {};
  ErrorTotals errors;  // sparse int8 against dense fp32

  void Add(const Row& other) {
    tokens += other.tokens;
    fp32_ms += other.fp32_ms;
    int8_ms += other.int8_ms;
    sparse_ms += other.sparse_ms;
    stats.qk_eligible += other.stats.qk_eligible;
    stats.qk_computed += other.stats.qk_computed;
    stats.pv_eligible += other.stats.pv_eligible;
    stats.pv_computed += other.stats.pv_computed;
    errors.Add(other.errors);
  }
};

PlanDesc Dense(PlanDesc desc, sparge_precision precision) {
  desc.precision = precision;
  desc.select = SPARGE_SELECT_ALL;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  return desc;
}

Row MeasureHead(const Context& context, const LoadedCall& call, int64_t index) {
  const HeadCall head = SliceHead(call, index / call.desc.q_heads, index % call.desc.q_heads);
  TimedCall fp32(context, Dense(head.asked, SPARGE_PRECISION_FP32), std::nullopt, head.args);
  TimedCall int8(context, Dense(head.asked, SPARGE_PRECISION_INT8), std::nullopt, head.args);
  TimedCall sparse(context, head.asked, call.automatic, head.args);
  // In turns, so that a busy moment of the machine does not hit one of them only.
  for (int round = 0; round < kRounds; ++round) {
    fp32.Run();
    int8.Run();
    sparse.Run();
  }
  Row row;
  row.tokens = head.asked.q_tokens;
  row.fp32_ms = fp32.best_ms();
  row.int8_ms = int8.best_ms();
  row.sparse_ms = sparse.best_ms();
  row.stats = sparse.stats().total;
  row.errors.Add(sparse.o(), fp32.o());
  return row;
}

std::string TitleOf(const LoadedCall& call, const std::string& file) {
  for (const char* key : {"title", "kind"}) {
    const auto found = call.metadata.find(key);
    if (found != call.metadata.end() && !found->second.empty()) return found->second;
  }
  return std::filesystem::path(file).stem().string();
}

std::vector<Row> Measure(const Context& context, const std::vector<std::string>& files) {
  std::vector<LoadedCall> calls;
  int64_t heads = 0;
  Options options;          // that is, what every client of the library does
  options.warm = kLearned;  // in a model that has seen some prompts
  for (const std::string& file : files) {
    calls.push_back(LoadCall(Verb::kCheck, options, file));
    heads += calls.back().desc.batch * calls.back().desc.q_heads;
  }
  Progress progress("measuring heads", heads);
  std::vector<Row> rows;
  for (size_t i = 0; i < files.size(); ++i) {
    const PlanDesc& desc = calls[i].desc;
    for (int64_t head = 0; head < desc.batch * desc.q_heads; ++head) {
      rows.push_back(MeasureHead(context, calls[i], head));
      rows.back().title = TitleOf(calls[i], files[i]);
      rows.back().head = head;
      progress.Step();
    }
  }
  return rows;
}

constexpr size_t kTitleRoom = 44;

std::string TableLine(const Row& row, const std::string& head) {
  std::string title = row.title;
  if (title.size() > kTitleRoom) title = title.substr(0, kTitleRoom - 3) + "...";
  return Format("%-44s %2s %6lld %6.1f %6.1f %4.1fx %6.1f %4.1fx %4.0f%% %6.4f\n", title.c_str(), head.c_str(),
                static_cast<long long>(row.tokens), row.fp32_ms, row.int8_ms, row.fp32_ms / row.int8_ms, row.sparse_ms,
                row.fp32_ms / row.sparse_ms, 100 * Sparsity(row.stats), row.errors.RelativeL1());
}

std::string Text(const Context& context, const std::vector<Row>& rows, const Row& total, const std::string& file) {
  std::string text =
      "Attention compares every token with every other one, and most of these comparisons hardly matter.\n"
      "SpargeAttention predicts block by block which do, skips the rest, and works in 8-bit integers.\n"
      "How much it may skip is measured on sampled rows beforehand: ";
  const Bounds bounds = BoundsOf(LayerDesc());
  text += Format("a relative error (%s) of %g per\n", sparge_measure_name(bounds.measure), bounds.target);
  text += Format("head for skipped blocks, %g with skipped products; rounding to 8 bits comes on top.\n", bounds.pv);
  text += Format("Each line is one attention head: milliseconds (best of %d) and speed against ordinary dense fp32,\n",
                 kRounds);
  text += "the share of blocks skipped, and the relative error (l1) of the result (0.02 = 2 %).\n\n";
  text += Format("%-44s %2s %6s %6s %12s %12s %5s %6s\n", "", "", "", "dense", "dense", "sparse", "", "");
  text += Format("%-44s %2s %6s %6s %6s %5s %6s %5s %5s %6s\n", "head from", "no", "tokens", "fp32", "int8", "speed",
                 "int8", "speed", "skip", "error");
  text += std::string(100, '-') + "\n";
  for (const Row& row : rows) text += TableLine(row, std::to_string(row.head));
  text += std::string(100, '-') + "\n" + TableLine(total, "");
  text += Format("\n%s, %d thread%s. What to try next:\n", context.isa(), context.threads(),
                 context.threads() == 1 ? "" : "s");
  text +=
      "  sparge check " + file + "\n      where the error comes from: selection, quantisation or skipped products\n";
  text += "  sparge run --tensors " + file +
          " --out o.npy --target-l2 0.1\n      fewer blocks, more error: name the error you accept\n";
  text += "  sparge map --tensors " + file + " --map-out m.npy\n      which blocks are computed\n";
  text += "  sparge info\n      what this machine runs\n";
  return text;
}

Json RowJson(const Row& row) {
  Json json = {{"tokens", row.tokens},
               {"dense_fp32_ms", row.fp32_ms},
               {"dense_int8_ms", row.int8_ms},
               {"sparse_int8_ms", row.sparse_ms},
               {"dense_int8_speedup", Number(row.fp32_ms / row.int8_ms)},
               {"sparse_int8_speedup", Number(row.fp32_ms / row.sparse_ms)},
               {"relative_l1", Number(row.errors.RelativeL1())}};
  AddTiles(json, row.stats);
  return json;
}

Json DemoReport(const Context& context, const std::vector<Row>& rows, const Row& total) {
  Json json = {{"isa", context.isa()}, {"threads", context.threads()}, {"heads", Json::array()}};
  for (const Row& row : rows) {
    Json head = {{"title", row.title}, {"head", row.head}};
    head.update(RowJson(row));
    json["heads"].push_back(std::move(head));
  }
  json["total"] = RowJson(total);
  return json;
}

int Demo(const DemoOptions& options) {
  const std::string folder = options.data.empty() ? SampleFolder() : options.data;
  const std::vector<std::string> files = FindTensorFiles({folder});
  const Context context(options.threads);
  const std::vector<Row> rows = Measure(context, files);
  Row total;
  total.title = "all heads";
  for (const Row& row : rows) total.Add(row);
  PrintOut(options.json ? Dump(DemoReport(context, rows, total)) : Text(context, rows, total, files.front()));
  return 0;
}

}  // namespace

Command AddDemo(CLI::App& program) {
  CLI::App* app = program.add_subcommand("demo", "speed and error on captured attention heads");
  const auto options = std::make_shared<DemoOptions>();
  app->add_option("--data", options->data, "folder with .safetensors captures; default data")->type_name("DIR");
  RegisterThreads(*app, options->threads);
  RegisterJson(*app, options->json);
  return {app, [options] { return Demo(*options); }};
}

}  // namespace sparge::cli

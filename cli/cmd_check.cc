// cmd_check.cc - `sparge check`: error of the shipped path against a double-precision reference, and where it comes
// from.
#include <cstdio>
#include <memory>

#include "cli/check_bounds.h"
#include "cli/checker.h"
#include "cli/choice.h"
#include "cli/commands.h"
#include "cli/inputs.h"
#include "cli/loaded_call.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/report.h"

namespace sparge::cli {
namespace {

struct FileResult {
  std::string file;
  int64_t heads_per_batch = 1;
  std::vector<StageErrors> heads;  // batch by batch
  Json parameters;
  std::vector<HeadEstimate> estimates;  // what the layer that ran says of its heads; empty if it had nothing to choose
};

// The error that bounds are given for: in which measure a table shows it.
sparge_measure MeasureOf(const Options& options, const HeadChooser& chooser) {
  if (chooser.preset()) return chooser.preset()->bounds.measure;
  return options.target_l1 ? SPARGE_MEASURE_L1 : SPARGE_MEASURE_L2;
}

FileResult CheckFile(const Context& context, LoadedCall& call, const std::string& file, Progress& progress) {
  const Checker checker(context, call);
  FileResult result{file, call.desc.q_heads, {}, Json::object(), {}};
  AddParameters(result.parameters, call);
  if (call.per_head) result.estimates = call.per_head->estimates;
  for (int64_t head = 0; head < checker.heads(); ++head) {
    HeadTruth truth;
    result.heads.push_back(checker.Compare(head, truth));
    progress.Step();
  }
  return result;
}

Json CheckReport(const Context& context, const std::vector<FileResult>& files, const StageErrors& total) {
  Json json = {{"isa", context.isa()}, {"threads", context.threads()}, {"files", Json::array()}};
  for (const FileResult& result : files) {
    Json file = {{"file", result.file}};
    file.update(result.parameters);
    file["heads"] = Json::array();
    for (size_t i = 0; i < result.heads.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      Json head = {{"batch", index / result.heads_per_batch}, {"head", index % result.heads_per_batch}};
      head.update(ErrorsJson(result.heads[i]));
      file["heads"].push_back(std::move(head));
    }
    json["files"].push_back(std::move(file));
  }
  json["total"] = ErrorsJson(total);
  return json;
}

std::string TableLine(const std::string& name, const StageErrors& errors, sparge_measure measure,
                      const std::string& estimate) {
  return Format("%-31s %8.2e %8.2e %8.6f %7.1f%% %9.2e %8.2e %8.2e %8.2e %8.2e %9s %8.2e\n", name.c_str(),
                errors.total.RelativeL1(), errors.total.Rmse(), errors.total.Cosine(), 100 * Sparsity(errors.stats),
                errors.Selection(), errors.Quantisation(), errors.PvSkip(), errors.skipped.Relative(measure),
                errors.pv_skipped.Relative(measure), estimate.c_str(), errors.rounding.RelativeL1());
}

// What the layer says of a head that it lets skip; "-" if it says nothing.
std::string EstimateText(const FileResult& result, size_t index) {
  if (result.estimates.empty()) return "-";
  const HeadEstimate& estimate = result.estimates[index % static_cast<size_t>(result.heads_per_batch)];
  return estimate.state == SPARGE_HEAD_SPARSE ? ErrorText(estimate) : "-";
}

std::string LineName(const FileResult& result, size_t index) {
  const auto i = static_cast<int64_t>(index);
  std::string head = std::to_string(i % result.heads_per_batch);
  if (static_cast<int64_t>(result.heads.size()) > result.heads_per_batch) {
    head = std::to_string(i / result.heads_per_batch) + "/" + head;
  }
  constexpr size_t kRoom = 27;  // the end of a path tells more than its beginning
  const std::string& file = result.file;
  return (file.size() <= kRoom ? file : "..." + file.substr(file.size() - kRoom + 3)) + " " + head;
}

std::string CheckTable(const std::vector<FileResult>& files, const StageErrors& total, sparge_measure measure) {
  const std::string name = sparge_measure_name(measure);
  std::string text =
      Format("%-31s %8s %8s %8s %8s %27s %36s\n", "", "", "", "", "", "error of", "against dense: sparse, estimated,");
  text += Format("%-31s %8s %8s %8s %8s %9s %8s %8s %8s %8s %9s %8s\n", "file and head", "rel. L1", "RMSE", "cosine",
                 "sparsity", "selection", "quantis.", "PV skip", name.c_str(), ("pv_" + name).c_str(), "estimate",
                 "round_l1");
  for (const FileResult& result : files) {
    for (size_t i = 0; i < result.heads.size(); ++i) {
      text += TableLine(LineName(result, i), result.heads[i], measure, EstimateText(result, i));
    }
  }
  text += TableLine("total", total, measure, "-");
  return text + Format("largest source of error: %s\n", total.Largest());
}

// Against the bounds of the preset, if there is one.
std::optional<BoundsJudge> Judge(const HeadChooser& chooser, const std::vector<FileResult>& files) {
  if (!chooser.preset()) return std::nullopt;
  BoundsJudge judge(*chooser.preset());
  for (const FileResult& result : files) {
    for (size_t i = 0; i < result.heads.size(); ++i) judge.Add(LineName(result, i), result.heads[i]);
  }
  return judge;
}

int Check(const Options& options) {
  CheckOptions(Verb::kCheck, options);
  const HeadChooser chooser(options);
  Inputs inputs(Verb::kCheck, options, chooser);
  inputs.LookAtAll();
  const Context context(options.threads);
  std::vector<FileResult> files;
  StageErrors total;
  inputs.ForEach("checking heads", [&](LoadedCall& call, const std::string& file, Progress& progress) {
    files.push_back(CheckFile(context, call, file, progress));
    for (const StageErrors& errors : files.back().heads) total.Add(errors);
  });
  const std::optional<BoundsJudge> judge = Judge(chooser, files);
  const bool close = !options.max_l1 || total.total.RelativeL1() <= *options.max_l1;  // NaN fails
  const bool passed = close && (!judge || judge->passed());
  if (options.json) {
    Json json = CheckReport(context, files, total);
    if (judge) json["bounds"] = judge->Report();
    json["max_l1"] = options.max_l1 ? Json(*options.max_l1) : Json(nullptr);
    json["passed"] = passed;
    PrintOut(Dump(json));
  } else {
    PrintOut(CheckTable(files, total, MeasureOf(options, chooser)) + (judge ? judge->Text() : ""));
  }
  if (!close) {
    std::fprintf(stderr, "sparge check: relative L1 %g is larger than --max-l1 %g\n", total.total.RelativeL1(),
                 *options.max_l1);
  }
  return passed ? 0 : 1;
}

}  // namespace

Command AddCheck(CLI::App& program) {
  CLI::App* app = AddVerb(program, "check", "compare with a double-precision reference; is slow");
  const auto options = std::make_shared<Options>();
  RegisterOptions(*app, Verb::kCheck, *options);
  return {app, [options] { return Check(*options); }};
}

}  // namespace sparge::cli

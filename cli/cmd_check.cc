// cmd_check.cc - `sparge check`: error of the shipped path against a double-precision reference, and where it comes
// from.
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/metrics.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/problem.h"
#include "cli/progress.h"
#include "cli/report.h"

namespace sparge::cli {
namespace {

// Four results, each one step from the one before, so that the differences are the error of one stage each:
// dense reference -> reference over the predicted tiles -> run over those tiles, no PV skip -> shipped run.
struct Errors {
  sparge_head_stats stats = {};
  ErrorSums total;  // shipped run against the dense reference
  ErrorSums selection, quantisation, pv_skip;

  void Add(const Errors& other) {
    stats.qk_eligible += other.stats.qk_eligible;
    stats.qk_computed += other.stats.qk_computed;
    stats.pv_eligible += other.stats.pv_eligible;
    stats.pv_computed += other.stats.pv_computed;
    total.Add(other.total);
    selection.Add(other.selection);
    quantisation.Add(other.quantisation);
    pv_skip.Add(other.pv_skip);
  }
  double Selection() const { return selection.RelativeL1(total); }
  double Quantisation() const { return quantisation.RelativeL1(total); }
  double PvSkip() const { return pv_skip.RelativeL1(total); }
  const char* Largest() const {
    if (Selection() == 0 && Quantisation() == 0 && PvSkip() == 0) return "none";
    if (Selection() >= Quantisation() && Selection() >= PvSkip()) return "selection";
    return Quantisation() >= PvSkip() ? "quantisation" : "pv_skip";
  }
};

struct FileResult {
  std::string file;
  int64_t heads_per_batch = 1;
  std::vector<Errors> heads;  // batch by batch
  Json parameters;
};

class Checker {
 public:
  Checker(const Context& context, const Problem& problem) : context_(context), problem_(problem) {
    const PlanDesc& desc = problem.desc;
    map_.resize(static_cast<size_t>(desc.batch * desc.q_heads * TilesPerHead()) + 1);
    head_stats_.resize(static_cast<size_t>(desc.batch * desc.q_heads));
  }

  FileResult Check(const std::string& file, Progress& progress) {
    RunShipped();
    RunWithoutSkip();
    const PlanDesc& desc = problem_.desc;
    FileResult result{file, desc.q_heads, std::vector<Errors>(head_stats_.size()), Json::object()};
    AddParameters(result.parameters, problem_);
    for (size_t i = 0; i < result.heads.size(); ++i) {
      result.heads[i] = CompareHead(static_cast<int64_t>(i));
      progress.Step();
    }
    return result;
  }

 private:
  int64_t TilesPerHead() const { return problem_.q_blocks() * problem_.k_blocks(); }

  void RunShipped() {
    RunArgs args = problem_.args;
    args.o = OutputView(shipped_, problem_.desc);
    args.map_out = map_.data();
    args.head_stats = head_stats_.data();
    Plan(context_, problem_.desc).Run(args);
  }

  void RunWithoutSkip() {
    PlanDesc desc = problem_.desc;
    desc.select = SPARGE_SELECT_MAP;
    desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    RunArgs args = problem_.args;
    args.o = OutputView(without_skip_, desc);
    args.map = map_.data();
    args.map_head_stride = TilesPerHead();
    args.map_batch_stride = desc.q_heads * TilesPerHead();
    Plan(context_, desc).Run(args);
  }

  // The oracle for one head, dense or over the tiles of `map`.
  std::vector<float> Reference(HeadProblem slice, const uint8_t* map) const {
    slice.desc.select = map == nullptr ? SPARGE_SELECT_ALL : SPARGE_SELECT_MAP;
    slice.args.map = map;
    slice.args.map_batch_stride = slice.args.map_head_stride = 0;
    std::vector<float> o;
    slice.args.o = OutputView(o, slice.desc);
    Plan(context_, slice.desc).Reference(slice.args);
    return o;
  }

  Errors CompareHead(int64_t index) const {
    const PlanDesc& desc = problem_.desc;
    const HeadProblem slice = SliceHead(problem_, index / desc.q_heads, index % desc.q_heads);
    const std::vector<float> dense = Reference(slice, nullptr);
    const std::vector<float> masked = Reference(slice, map_.data() + index * TilesPerHead());
    const auto size = static_cast<size_t>(desc.q_tokens * desc.v_dim);
    const auto at = static_cast<size_t>(index) * size;
    const std::span<const float> want = std::span(dense).first(size);
    const std::span<const float> chosen = std::span(masked).first(size);
    const std::span<const float> quantised = std::span(without_skip_).subspan(at, size);
    const std::span<const float> shipped = std::span(shipped_).subspan(at, size);
    Errors errors;
    errors.stats = head_stats_[static_cast<size_t>(index)];
    errors.total.Add(shipped, want);
    errors.selection.Add(chosen, want);
    errors.quantisation.Add(quantised, chosen);
    errors.pv_skip.Add(shipped, quantised);
    return errors;
  }

  const Context& context_;
  const Problem& problem_;
  std::vector<uint8_t> map_;
  std::vector<sparge_head_stats> head_stats_;
  std::vector<float> shipped_, without_skip_;
};

Json ErrorsJson(const Errors& errors) {
  Json json = {{"relative_l1", Number(errors.total.RelativeL1())},
               {"cosine", Number(errors.total.Cosine())},
               {"max_error", Number(errors.total.MaxError())},
               {"rmse", Number(errors.total.Rmse())},
               {"stages_l1",
                {{"selection", Number(errors.Selection())},
                 {"quantisation", Number(errors.Quantisation())},
                 {"pv_skip", Number(errors.PvSkip())}}},
               {"largest_source", errors.Largest()}};
  AddTiles(json, errors.stats);
  return json;
}

Json CheckReport(const Context& context, const std::vector<FileResult>& files, const Errors& total) {
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

std::string TableLine(const std::string& name, const Errors& errors) {
  return Format("%-31s %9.2e %9.6f %9.2e %7.1f%% %9.2e %9.2e %9.2e\n", name.c_str(), errors.total.RelativeL1(),
                errors.total.Cosine(), errors.total.MaxError(), 100 * Sparsity(errors.stats), errors.Selection(),
                errors.Quantisation(), errors.PvSkip());
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

std::string CheckTable(const std::vector<FileResult>& files, const Errors& total) {
  std::string text =
      Format("%-31s %9s %9s %9s %8s %9s %9s %9s\n", "", "", "", "", "", "error of", "error of", "error of");
  text += Format("%-31s %9s %9s %9s %8s %9s %9s %9s\n", "file and head", "rel. L1", "cosine", "max error", "sparsity",
                 "selection", "quantis.", "PV skip");
  for (const FileResult& result : files) {
    for (size_t i = 0; i < result.heads.size(); ++i) text += TableLine(LineName(result, i), result.heads[i]);
  }
  text += TableLine("total", total);
  return text + Format("largest source of error: %s\n", total.Largest());
}

// What to check: "" stands for the .npy files of the options.
std::vector<std::string> Sources(const Options& options) {
  if (!options.paths.empty()) return FindTensorFiles(options.paths);
  return {options.tensors};
}

int Check(const Options& options) {
  CheckOptions(Verb::kCheck, options);
  const std::vector<std::string> sources = Sources(options);
  const Context context(options.threads);
  int64_t heads = 0;
  std::string notes;
  // All inputs are read once before the slow part, so that a bad one is refused at once.
  for (const std::string& source : sources) {
    const Problem problem = LoadProblem(Verb::kCheck, options, source);
    heads += problem.desc.batch * problem.desc.q_heads;
    notes += NotesText(problem, source);
  }
  std::fputs(notes.c_str(), stderr);
  std::vector<FileResult> files;
  Errors total;
  {
    Progress progress("checking heads", heads);
    for (const std::string& source : sources) {
      const Problem problem = LoadProblem(Verb::kCheck, options, source);
      files.push_back(Checker(context, problem).Check(source.empty() ? options.q : source, progress));
      for (const Errors& errors : files.back().heads) total.Add(errors);
    }
  }
  const bool passed = !options.max_l1 || total.total.RelativeL1() <= *options.max_l1;  // NaN fails
  if (options.json) {
    Json json = CheckReport(context, files, total);
    json["max_l1"] = options.max_l1 ? Json(*options.max_l1) : Json(nullptr);
    json["passed"] = passed;
    PrintOut(Dump(json));
  } else {
    PrintOut(CheckTable(files, total));
  }
  if (!passed) {
    std::fprintf(stderr, "sparge check: relative L1 %g is larger than --max-l1 %g\n", total.total.RelativeL1(),
                 *options.max_l1);
  }
  return passed ? 0 : 1;
}

}  // namespace

Command AddCheck(CLI::App& program) {
  CLI::App* app = program.add_subcommand("check", "compare with a double-precision reference; is slow");
  const auto options = std::make_shared<Options>();
  RegisterOptions(*app, Verb::kCheck, *options);
  return {app, [options] { return Check(*options); }};
}

}  // namespace sparge::cli

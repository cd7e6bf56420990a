// cmd_report.cc - `sparge report`: attention maps, tiles, errors and their trade for sparsity as one HTML page.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>

#include "cli/choice.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/problem.h"
#include "cli/progress.h"
#include "cli/report_page.h"
#include "io/atomic_file.h"

namespace sparge::cli {
namespace {

namespace fs = std::filesystem;

struct ReportOptions {
  Options common;
  std::string page, png;
};

void CheckPlace(const std::string& flag, const std::string& path) {
  try {
    io::CheckWritable(path);
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

// Before the work, which is long.
void CheckPlaces(const ReportOptions& options, const std::vector<std::string>& sources) {
  if (options.page.empty()) throw UsageError("-o is missing");
  if (!options.page.ends_with(".html")) throw UsageError("-o " + options.page + ": must end in .html");
  CheckPlace("-o", options.page);
  for (const std::string& source : sources) {
    std::error_code error;
    if (fs::equivalent(source, options.page, error))
      throw UsageError("-o " + options.page + ": would overwrite an input");
  }
  if (options.png.empty()) return;
  std::error_code error;
  const bool there = fs::exists(options.png, error);
  if (there && !fs::is_directory(options.png, error)) throw UsageError("--png " + options.png + ": is not a folder");
  CheckPlace("--png", there ? (fs::path(options.png) / "map.png").string() : options.png);
}

// captures/LAYER/SAMPLE.safetensors, unless the file itself names its layer.
std::string LayerName(const Problem& problem, const std::string& path, const std::vector<std::string>& given) {
  const auto found = problem.metadata.find("layer");
  if (found != problem.metadata.end()) return found->second;
  for (const std::string& folder : given) {
    std::error_code error;
    const fs::path inside = fs::relative(path, folder, error);
    if (error || inside.empty() || *inside.begin() == ".." || !inside.has_parent_path()) continue;
    return inside.parent_path().string();
  }
  return "";
}

FileReport ReportFile(const Context& context, const Options& options, const HeadChooser& chooser,
                      const std::string& path, Progress& progress) {
  Problem problem = LoadProblem(Verb::kReport, options, path);
  chooser.Choose(context, path, problem);
  FileReport report;
  report.path = path.empty() ? options.q : path;
  report.sample = fs::path(report.path).stem().string();
  report.layer = LayerName(problem, report.path, options.paths);
  const auto title = problem.metadata.find("title");
  if (title != problem.metadata.end()) report.title = title->second;
  report.queries = problem.desc.q_tokens;
  report.keys = problem.desc.kv_tokens;
  AddParameters(report.parameters, problem);
  report.swept = SweptParameter(problem.desc.select);
  const FileReporter reporter(context, problem);
  for (int64_t head = 0; head < reporter.heads(); ++head) {
    report.heads.push_back(reporter.Measure(head));
    progress.Step();
  }
  report.order = CompareOrders(context, problem);
  return report;
}

// "LAYER-SAMPLE-HEAD.png", without anything that means something in a path.
std::string PngName(const FileReport& file, const HeadReport& head) {
  std::string name = file.layer.empty() ? file.sample : file.layer + "-" + file.sample;
  if (head.batch > 0) name += Format("-batch%lld", static_cast<long long>(head.batch));
  name += Format("-head%lld.png", static_cast<long long>(head.head));
  for (char& c : name) {
    if (c == '/' || static_cast<unsigned char>(c) < 0x20) c = '_';
  }
  return name;
}

// The panels of a head side by side, large enough to look at: a tile is twice as many queries as keys.
Image HeadImage(const HeadReport& head) {
  constexpr int64_t kSide = 384;
  constexpr int64_t kGap = 12;
  std::vector<Image> large;
  for (const Panel& panel : head.panels) {
    const int64_t factor = std::max<int64_t>(1, kSide / panel.image.width);
    large.push_back(Enlarge(panel.image, factor, factor * SPARGE_BLOCK_Q / SPARGE_BLOCK_K));
  }
  return Beside(large, kGap);
}

using Files = std::vector<std::unique_ptr<io::AtomicFile>>;

void WriteFile(const std::string& flag, const std::string& path, std::span<const std::byte> bytes, Files& files) {
  try {
    files.push_back(std::make_unique<io::AtomicFile>(path));
    files.back()->Write(bytes);
    files.back()->Close();
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

void WritePictures(const std::string& folder, const std::vector<FileReport>& reports, Files& files) {
  std::error_code error;
  fs::create_directory(folder, error);
  if (error) throw UsageError("--png " + folder + ": cannot be made: " + error.message());
  for (const FileReport& report : reports) {
    for (const HeadReport& head : report.heads) {
      if (head.panels.empty()) continue;
      WriteFile("--png", (fs::path(folder) / PngName(report, head)).string(), EncodePng(HeadImage(head)), files);
    }
  }
}

std::string Summary(const ReportOptions& options, const Json& data) {
  const Json& total = data["total"];
  return Format("%s: %zu heads, %d with pictures; sparsity %.1f %%, relative L1 %s\n", options.page.c_str(),
                data["heads"].size(), data["pictured"].get<int>(), 100 * total["sparsity"].get<double>(),
                total["relative_l1"].is_number() ? Format("%.4f", total["relative_l1"].get<double>()).c_str()
                                                 : total["relative_l1"].get<std::string>().c_str());
}

int Report(const ReportOptions& options) {
  const Options& common = options.common;
  CheckOptions(Verb::kReport, common);
  const std::vector<std::string> sources = InputFiles(common);
  CheckPlaces(options, sources);
  const HeadChooser chooser(common);
  const Context context(common.threads);
  int64_t heads = 0;
  std::string notes;
  // All inputs are read once before the slow part, so that a bad one is refused at once.
  for (const std::string& source : sources) {
    Problem problem = LoadProblem(Verb::kReport, common, source);
    chooser.TakePreset(source, problem);
    heads += problem.desc.batch * problem.desc.q_heads;
    notes += NotesText(problem, source);
  }
  std::fputs(notes.c_str(), stderr);
  std::vector<FileReport> reports;
  {
    Progress progress("measuring heads", heads);
    for (const std::string& source : sources) reports.push_back(ReportFile(context, common, chooser, source, progress));
  }
  const Json data = ReportJson(context, reports, true);
  Files files;
  const std::string page = ReportPage(data);
  WriteFile("-o", options.page, std::as_bytes(std::span(page)), files);
  if (!options.png.empty()) WritePictures(options.png, reports, files);
  for (const auto& file : files) file->Commit();
  if (common.json) {
    PrintOut(Dump(ReportJson(context, reports, false)));
  } else {
    std::fputs(Summary(options, data).c_str(), stderr);
  }
  return 0;
}

}  // namespace

Command AddReport(CLI::App& program) {
  CLI::App* app = AddVerb(program, "report", "attention maps, tiles and errors as one HTML page; is slow");
  const auto options = std::make_shared<ReportOptions>();
  RegisterOptions(*app, Verb::kReport, options->common);
  const auto add_output = [app](const std::string& flag, const char* kind, const char* help, std::string& target) {
    AddText(*app, flag, kind, help, "Outputs", [flag, &target](const std::string& text) {
      if (text.empty()) throw UsageError(flag + ": the name is empty");
      target = text;
    });
  };
  add_output("-o,--out", "FILE", "required: the page, .html", options->page);
  add_output("--png", "FOLDER", "the maps of every head as PNG files, too; made if missing", options->png);
  return {app, [options] { return Report(*options); }};
}

}  // namespace sparge::cli

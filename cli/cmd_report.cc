// cmd_report.cc - `sparge report`: attention maps, tiles, errors and their trade for sparsity as one HTML page.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <span>

#include "cli/choice.h"
#include "cli/commands.h"
#include "cli/inputs.h"
#include "cli/loaded_call.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/report_page.h"

namespace sparge::cli {
namespace {

namespace fs = std::filesystem;

struct ReportOptions {
  Options common;
  std::string page, png;
};

// captures/LAYER/SAMPLE.safetensors, unless the file itself names its layer.
std::string LayerName(const LoadedCall& call, const std::string& path, const std::vector<std::string>& given) {
  const auto found = call.metadata.find("layer");
  if (found != call.metadata.end()) return found->second;
  for (const std::string& folder : given) {
    std::error_code error;
    const fs::path inside = fs::relative(path, folder, error);
    if (error || inside.empty() || *inside.begin() == ".." || !inside.has_parent_path()) continue;
    return inside.parent_path().string();
  }
  return "";
}

// What a report calls a file, and the names of its pictures; known before any is measured.
struct NamedReport {
  std::string layer, sample;
  std::vector<std::string> pictures;  // of each head; none without tiles
};

// "LAYER-SAMPLE", without anything that means something in a path, and with room for what follows in a file's name.
std::string PictureStem(const NamedReport& report) {
  constexpr size_t kRoom = 200;  // of 255 that file systems allow
  std::string stem = report.layer.empty() ? report.sample : report.layer + "-" + report.sample;
  for (char& c : stem) {
    if (c == '/' || static_cast<unsigned char>(c) < 0x20) c = '_';
  }
  return stem.substr(0, kRoom);
}

std::string LowerCase(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// "STEM-headN.png"; "STEM-2-headN.png" where an earlier file has such names already, in whatever case.
std::vector<std::string> PictureNames(const std::string& stem, const LoadedCall& call, std::set<std::string>& taken) {
  const int64_t heads = call.q_blocks() * call.k_blocks() == 0 ? 0 : call.desc.batch * call.desc.q_heads;
  for (int64_t copy = 1;; ++copy) {
    std::vector<std::string> names, folded;
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t batch = i / call.desc.q_heads, head = i % call.desc.q_heads;
      std::string name = stem;
      if (copy > 1) name.append("-").append(std::to_string(copy));
      if (batch > 0) name.append("-batch").append(std::to_string(batch));
      names.push_back(name + "-head" + std::to_string(head) + ".png");
      folded.push_back(LowerCase(names.back()));
    }
    if (std::any_of(folded.begin(), folded.end(), [&](const auto& name) { return taken.contains(name); })) continue;
    taken.insert(folded.begin(), folded.end());
    return names;
  }
}

FileReport ReportFile(const Context& context, LoadedCall& call, const std::string& path, const NamedReport& named,
                      Progress& progress) {
  FileReport report;
  report.path = path;
  report.layer = named.layer;
  report.sample = named.sample;
  const auto title = call.metadata.find("title");
  if (title != call.metadata.end()) report.title = title->second;
  report.queries = call.desc.q_tokens;
  report.keys = call.desc.kv_tokens;
  const FileReporter reporter(context, call);
  AddParameters(report.parameters, call);
  report.swept = SweptParameter(call);
  for (int64_t head = 0; head < reporter.heads(); ++head) {
    report.heads.push_back(reporter.Measure(head));
    progress.Step();
  }
  report.order = CompareOrders(context, call);
  return report;
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

// Before the work, which is long.
void CheckOutputs(const ReportOptions& options, const Inputs& inputs, const std::vector<NamedReport>& reports) {
  std::vector<NamedFile> outputs = {{"-o", options.page}};
  std::error_code error;
  if (!options.png.empty() && !fs::exists(options.png, error)) outputs.push_back({"--png", options.png});
  if (!options.png.empty() && fs::exists(options.png, error)) {
    if (!fs::is_directory(options.png, error)) throw UsageError("--png " + options.png + ": is not a folder");
    for (const NamedReport& report : reports) {
      for (const std::string& name : report.pictures) {
        outputs.push_back({"--png", (fs::path(options.png) / name).string()});
      }
    }
  }
  std::vector<NamedFile> read = NamedInputs(options.common);
  for (const std::string& source : inputs.sources()) {
    if (!source.empty() && source != options.common.tensors) read.push_back({"", source});
  }
  CheckPlaces(outputs, read);
}

void AddPictures(const std::string& folder, const std::vector<FileReport>& reports,
                 const std::vector<NamedReport>& named, Outputs& outputs) {
  outputs.MakeFolder("--png", folder);
  for (size_t file = 0; file < reports.size(); ++file) {
    for (size_t i = 0; i < named[file].pictures.size(); ++i) {
      outputs.Add("--png", (fs::path(folder) / named[file].pictures[i]).string(),
                  EncodePng(HeadImage(reports[file].heads[i])));
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
  if (options.page.empty()) throw UsageError("-o is missing");
  if (!options.page.ends_with(".html")) throw UsageError("-o " + options.page + ": must end in .html");
  const HeadChooser chooser(common);
  Inputs inputs(Verb::kReport, common, chooser);
  std::vector<NamedReport> named;
  std::set<std::string> taken;
  inputs.LookAtAll([&](const LoadedCall& call, const std::string& file) {
    named.push_back({LayerName(call, file, common.paths), fs::path(file).stem().string(), {}});
    named.back().pictures = PictureNames(PictureStem(named.back()), call, taken);
  });
  CheckOutputs(options, inputs, named);
  const Context context(common.threads);
  std::vector<FileReport> reports;
  inputs.ForEach("measuring heads", [&](LoadedCall& call, const std::string& file, Progress& progress) {
    reports.push_back(ReportFile(context, call, file, named[reports.size()], progress));
  });
  const Json data = ReportJson(context, reports, true);
  const std::string page = ReportPage(data);
  Outputs outputs;
  outputs.Add("-o", options.page, std::as_bytes(std::span(page)));
  if (!options.png.empty()) AddPictures(options.png, reports, named, outputs);
  outputs.Commit([&] {
    if (common.json) {
      PrintOut(Dump(ReportJson(context, reports, false)));
    } else {
      std::fputs(Summary(options, data).c_str(), stderr);
    }
  });
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

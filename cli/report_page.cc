// report_page.cc - puts the figures of a report in JSON, and the JSON in the page.
#include "cli/report_page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "cli/machine.h"
#include "report_template.h"

namespace sparge::cli {
namespace {

Json PointJson(const FrontierPoint& point) {
  return {{"value", point.value}, {"sparsity", point.sparsity}, {"relative_l1", Number(point.relative_l1)}};
}

Json FrontierJson(const std::vector<FrontierPoint>& points) {
  Json json = Json::array();
  for (const FrontierPoint& point : points) json.push_back(PointJson(point));
  return json;
}

// Of the first file that has something to vary; a call through a layer may be too short for that.
std::string Swept(const std::vector<FileReport>& files) {
  for (const FileReport& file : files) {
    if (!file.swept.empty()) return file.swept;
  }
  return "";
}

// Value by value, the mean over heads that have a frontier; these have the same values, for all files have the same
// flags.
std::vector<FrontierPoint> MeanFrontier(const std::vector<FileReport>& files) {
  std::vector<FrontierPoint> mean;
  double heads = 0;
  for (const FileReport& file : files) {
    for (const HeadReport& head : file.heads) {
      if (head.frontier.empty()) continue;
      mean.resize(head.frontier.size());
      for (size_t i = 0; i < mean.size(); ++i) {
        mean[i].value = head.frontier[i].value;
        mean[i].sparsity += head.frontier[i].sparsity;
        mean[i].relative_l1 += head.frontier[i].relative_l1;
      }
      ++heads;
    }
  }
  for (FrontierPoint& point : mean) {
    point.sparsity /= heads;
    point.relative_l1 /= heads;
  }
  return mean;
}

// Spreads: by how much the worst time is above the best, as a share of it.
Json TimesJson(const HeadTimes& times) {
  return {{"dense_fp32_ms", times.dense_ms},
          {"dense_fp32_spread", Number(times.dense_worst_ms / times.dense_ms - 1)},
          {"sparse_ms", times.sparse_ms},
          {"sparse_spread", Number(times.sparse_worst_ms / times.sparse_ms - 1)},
          {"speedup", Number(times.dense_ms / times.sparse_ms)}};
}

Json HeadJson(size_t file, const FileReport& in, const HeadReport& head, bool with_pictures) {
  Json json = {{"file", file},      {"layer", in.layer},    {"sample", in.sample}, {"batch", head.batch},
               {"head", head.head}, {"tokens", in.queries}, {"keys", in.keys}};
  json.update(ErrorsJson(head.errors));
  json.update(TimesJson(head.times));
  json["frontier"] = FrontierJson(head.frontier);
  if (!with_pictures) return json;
  json["pictures"] = Json::object();
  for (const Panel& panel : head.panels) json["pictures"][panel.name] = DataUri(panel.image);
  return json;
}

Json OrderedJson(const OrderedHead& head, bool with_pictures) {
  Json json = {{"sparsity", head.sparsity}, {"relative_l1", Number(head.relative_l1)}};
  if (with_pictures) json["map"] = DataUri(head.map);
  return json;
}

Json OrderJson(size_t file, const OrderReport& order, bool with_pictures) {
  Json json = {{"file", file},
               {"grid", order.sides},
               {"in_force", order.hilbert_in_force ? "hilbert" : "raster"},
               {"raster", OrderedJson(order.raster, with_pictures)},
               {"hilbert", OrderedJson(order.hilbert, with_pictures)}};
  if (with_pictures) json["frame"] = {{"width", order.width}, {"height", order.height}, {"rank", order.rank}};
  return json;
}

Json ColorsJson() {
  Json scale = Json::array();
  for (const Color& color : MassScale()) scale.push_back(HexColor(color));
  Json tiles = Json::object();
  const char* const names[] = {"hidden", "dropped", "missed", "kept", "partly", "skipped"};
  for (size_t i = 0; i < kTileColors.size(); ++i) tiles[names[i]] = HexColor(kTileColors[i]);
  return {{"scale", scale}, {"least_mass", kLeastMass}, {"tiles", tiles}, {"missed_mass", kMissedMass}};
}

Json TotalJson(const std::vector<FileReport>& files) {
  StageErrors total;
  HeadTimes times;
  for (const FileReport& file : files) {
    for (const HeadReport& head : file.heads) {
      total.Add(head.errors);
      times.dense_ms += head.times.dense_ms;
      times.dense_worst_ms += head.times.dense_worst_ms;
      times.sparse_ms += head.times.sparse_ms;
      times.sparse_worst_ms += head.times.sparse_worst_ms;
    }
  }
  Json json = ErrorsJson(total);
  json.update(TimesJson(times));
  return json;
}

}  // namespace

std::vector<bool> ChoosePictured(const std::vector<double>& errors) {
  std::vector<bool> chosen(errors.size(), errors.size() <= kMostPictured);
  if (errors.size() <= kMostPictured) return chosen;
  std::vector<size_t> order(errors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto badness = [&](size_t i) {
    return std::isnan(errors[i]) ? std::numeric_limits<double>::infinity() : errors[i];
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return badness(a) > badness(b); });
  for (size_t i = 0; i < kWorstPictured; ++i) chosen[order[i]] = true;
  std::vector<size_t> rest;
  for (size_t i = 0; i < errors.size(); ++i) {
    if (!chosen[i]) rest.push_back(i);
  }
  constexpr size_t kSpread = kMostPictured - kWorstPictured;
  for (size_t i = 0; i < kSpread; ++i) chosen[rest[i * rest.size() / kSpread]] = true;
  return chosen;
}

Json ReportJson(const Context& context, const std::vector<FileReport>& files, bool with_pictures) {
  std::vector<double> errors;
  for (const FileReport& file : files) {
    for (const HeadReport& head : file.heads) errors.push_back(head.errors.total.RelativeL1());
  }
  const std::vector<bool> pictured = ChoosePictured(errors);
  Json json = {
      {"version", sparge_version()},  {"cpu", CpuName()},          {"isa", context.isa()},
      {"threads", context.threads()}, {"block_q", SPARGE_BLOCK_Q}, {"block_k", SPARGE_BLOCK_K},
      {"swept", Swept(files)},        {"total", TotalJson(files)}, {"frontier", FrontierJson(MeanFrontier(files))},
      {"files", Json::array()},       {"heads", Json::array()},    {"orders", Json::array()}};
  if (with_pictures) {
    json["colors"] = ColorsJson();
    json["pictured"] = std::count(pictured.begin(), pictured.end(), true);
    json["worst_pictured"] = kWorstPictured;
  }
  size_t index = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    Json file = {{"file", files[f].path}, {"title", files[f].title}};
    file.update(files[f].parameters);
    json["files"].push_back(std::move(file));
    if (files[f].order) json["orders"].push_back(OrderJson(f, *files[f].order, with_pictures));
    for (const HeadReport& head : files[f].heads) {
      json["heads"].push_back(HeadJson(f, files[f], head, with_pictures && pictured[index]));
      ++index;
    }
  }
  return json;
}

std::string ReportPage(const Json& data) {
  // File names need not be UTF-8; JSON must be.
  std::string text = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  // A title may hold "</script>", which would end the element that the data stand in.
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) text.replace(at, 1, "\\u003c");
  std::string page = kReportTemplate;
  constexpr std::string_view kPlace = "{{data}}";
  return page.replace(page.find(kPlace), kPlace.size(), text);
}

}  // namespace sparge::cli

// report_head.cc - measures one head for a report, and draws its tiles.
#include "cli/report_head.h"

#include <algorithm>
#include <string_view>

#include "cli/runner.h"

namespace sparge::cli {
namespace {

constexpr int kRounds = 3;  // best of so many times
constexpr double kTaus[] = {0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999};
constexpr double kTopks[] = {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9};

constexpr double kFloorTaus[] = {0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.997, 0.999};
constexpr double kTargets[] = {0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2};

std::span<const double> SweptValues(const LoadedCall& call) {
  const std::string_view swept = SweptParameter(call);
  if (swept == "target_l1" || swept == "target_l2") return kTargets;
  if (swept == "topk") return kTopks;
  if (swept != "tau") return {};
  if (call.desc.select == SPARGE_SELECT_FLOOR) return kFloorTaus;
  return kTaus;
}

std::span<const uint8_t> Part(const std::vector<uint8_t>& tiles, int64_t head, size_t size) {
  return std::span(tiles).subspan(static_cast<size_t>(head) * size, size);
}

}  // namespace

const char* SweptParameter(const LoadedCall& call) {
  if (call.automatic) {
    if (!call.per_head || call.per_head->estimates.empty()) return "";
    return BoundsOf(call.automatic->layer).measure == SPARGE_MEASURE_L2 ? "target_l2" : "target_l1";
  }
  const sparge_select select = call.desc.select;
  return select == SPARGE_SELECT_CDF || select == SPARGE_SELECT_FLOOR ? "tau"
         : select == SPARGE_SELECT_TOPK                               ? "topk"
                                                                      : "";
}

FileReporter::FileReporter(const Context& context, LoadedCall& call)
    : context_(context), call_(call), checker_(context, call) {
  Predict();
}

// Which tiles are visible at all, and what stage 1 thinks of them.
void FileReporter::Predict() {
  const auto tiles = static_cast<size_t>(heads() * Grid().rows * Grid().columns);
  Stats stats;
  RunArgs args = call_.args;
  const PlanDesc desc = call_.InForce();
  PlanDesc all = desc;
  all.select = SPARGE_SELECT_ALL;
  visible_.resize(tiles + 1);
  args.map = nullptr;
  args.map_out = visible_.data();
  args.stats = &stats;
  Plan(context_, all).Predict(args);
  group_rows_ = stats.group_rows;
  if (desc.select == SPARGE_SELECT_ALL || desc.select == SPARGE_SELECT_MAP) return;
  predicted_.resize(tiles + 1);
  args = call_.args;
  args.mass_out = predicted_.data();
  Plan(context_, desc).Predict(args);
}

HeadTimes FileReporter::TimeHead(const HeadCall& slice) const {
  PlanDesc fp32 = slice.desc;
  fp32.precision = SPARGE_PRECISION_FP32;
  fp32.select = SPARGE_SELECT_ALL;
  fp32.params.pv_skip = SPARGE_PV_SKIP_OFF;
  fp32.heads = nullptr;
  fp32.head_precision = nullptr;
  RunArgs fp32_args = slice.args;
  fp32_args.map = nullptr;
  TimedCall dense(context_, fp32, std::nullopt, fp32_args);
  TimedCall sparse(context_, slice.asked, call_.automatic, slice.args);
  // In turns, so that a busy moment of the machine does not hit one of them only.
  for (int round = 0; round < kRounds; ++round) {
    dense.Run();
    sparse.Run();
  }
  return {dense.best_ms(), dense.worst_ms(), sparse.best_ms(), sparse.worst_ms()};
}

std::vector<FrontierPoint> FileReporter::Frontier(const HeadCall& slice, const std::vector<float>& dense) const {
  std::vector<FrontierPoint> points;
  PlanDesc desc = slice.asked;
  std::optional<Automatic> automatic = call_.automatic;
  if (desc.heads != nullptr) desc.params = desc.heads[0];
  desc.heads = nullptr;
  for (const double value : SweptValues(call_)) {
    if (automatic) {
      SetTarget(value, automatic->layer);
    } else {
      (desc.select == SPARGE_SELECT_TOPK ? desc.params.topk : desc.params.tau) = value;
    }
    const TimedCall run(context_, desc, automatic, slice.args);
    ErrorTotals errors;
    errors.Add(run.o(), dense);
    points.push_back({value, Sparsity(run.stats().total), errors.RelativeL1()});
  }
  return points;
}

std::vector<Panel> FileReporter::Draw(int64_t head, const std::vector<float>& mass) const {
  const TileGrid grid = Grid();
  const auto tiles = static_cast<size_t>(grid.rows * grid.columns);
  if (tiles == 0) return {};
  const std::span<const uint8_t> visible = Part(visible_, head, tiles);
  const std::span<const uint8_t> kept = checker_.Kept(head), groups = checker_.PvGroups(head);
  std::vector<Tile> chosen(tiles), products(tiles);
  for (size_t t = 0; t < tiles; ++t) {
    const int64_t first = static_cast<int64_t>(t) / grid.columns * SPARGE_BLOCK_Q;
    const int64_t rows = std::min<int64_t>(SPARGE_BLOCK_Q, call_.desc.q_tokens - first);
    const int64_t all_groups = (rows + group_rows_ - 1) / group_rows_;
    const Tile left_out = visible[t] == 0 ? Tile::kHidden : Tile::kDropped;
    chosen[t] = kept[t] != 0 ? Tile::kKept : mass[t] >= kMissedMass ? Tile::kMissed : left_out;
    products[t] = kept[t] == 0             ? left_out
                  : groups[t] == 0         ? Tile::kSkipped
                  : groups[t] < all_groups ? Tile::kPartlySkipped
                                           : Tile::kKept;
  }
  std::vector<Panel> panels = {{"true", DrawMasses(grid, mass, visible)}};
  if (!predicted_.empty()) {
    const auto guess = std::span(predicted_).subspan(static_cast<size_t>(head) * tiles, tiles);
    panels.push_back({"predicted", DrawMasses(grid, guess, visible)});
  }
  panels.push_back({"kept", DrawTiles(grid, chosen)});
  panels.push_back({"pv", DrawTiles(grid, products)});
  return panels;
}

HeadReport FileReporter::Measure(int64_t head) const {
  const PlanDesc& desc = call_.desc;
  HeadReport report;
  report.batch = head / desc.q_heads;
  report.head = head % desc.q_heads;
  HeadTruth truth;
  report.errors = checker_.Compare(head, truth);
  const HeadCall slice = SliceHead(call_, report.batch, report.head);
  report.times = TimeHead(slice);
  report.frontier = Frontier(slice, truth.o);
  report.panels = Draw(head, truth.mass);
  return report;
}

}  // namespace sparge::cli

// report_order.cc - runs a head in both orders of its tokens, and walks the curve over a frame.
#include "cli/report_order.h"

#include <algorithm>

#include "cli/metrics.h"
#include "cli/report.h"
#include "cli/runner.h"

namespace sparge::cli {
namespace {

constexpr int64_t kMostCells = 48;  // per side of the drawn corner: more would be too fine to follow

bool CanReorder(const Problem& problem) {
  const PlanDesc& desc = problem.desc;
  if (!problem.grid || desc.causal != 0 || desc.window != 0 || desc.mask != SPARGE_MASK_NONE) return false;
  if (desc.select == SPARGE_SELECT_MAP) return false;  // a map belongs to one order
  const io::GridSides& sides = problem.grid->sides;
  const int64_t tokens = sides[0] * sides[1] * sides[2] + problem.grid->text.count;
  return tokens == desc.q_tokens && tokens == desc.kv_tokens;
}

OrderedHead RunInOrder(const Context& context, const Problem& problem, bool hilbert) {
  HeadProblem slice = SliceHead(problem, 0, 0);
  PlanDesc& desc = slice.asked;
  const TokenGrid& grid = *problem.grid;
  for (size_t i = 0; i < 3; ++i) desc.grid[i] = hilbert ? grid.sides[i] : 0;
  desc.text_tokens = hilbert ? grid.text.count : 0;
  desc.text_after = hilbert && grid.text.after ? 1 : 0;
  const TileGrid tiles{problem.q_blocks(), problem.k_blocks()};
  const auto count = static_cast<size_t>(tiles.rows * tiles.columns);
  std::vector<float> dense, sparse, mass(count);
  Stats stats;
  RunArgs args = slice.args;
  args.o = OutputView(dense, desc);
  args.mass_out = mass.data();
  Plan(context, desc).Reference(args);
  args.o = OutputView(sparse, desc);
  args.mass_out = nullptr;
  args.stats = &stats;
  Runner runner(context, desc, problem.automatic);
  runner.RunSettled(args);
  ErrorTotals errors;
  errors.Add(sparse, dense);
  const std::vector<uint8_t> visible(count, 1);
  return {stats.sparsity(), errors.RelativeL1(), DrawMasses(tiles, mass, visible)};
}

}  // namespace

std::optional<OrderReport> CompareOrders(const Context& context, const Problem& problem) {
  if (!CanReorder(problem) || problem.q_blocks() * problem.k_blocks() == 0) return std::nullopt;
  OrderReport report;
  report.sides = problem.grid->sides;
  report.hilbert_in_force = problem.grid->hilbert;
  report.height = std::min(report.sides[1], kMostCells);
  report.width = std::min(report.sides[2], kMostCells);
  report.rank.resize(static_cast<size_t>(report.width * report.height));
  const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, report.sides);
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t y = order[i] / report.sides[2], x = order[i] % report.sides[2];  // y beyond H: a later frame
    if (y >= report.height || x >= report.width) continue;
    report.rank[static_cast<size_t>(y * report.width + x)] = static_cast<int64_t>(i);
  }
  report.raster = RunInOrder(context, problem, false);
  report.hilbert = RunInOrder(context, problem, true);
  return report;
}

}  // namespace sparge::cli

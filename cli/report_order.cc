// report_order.cc - runs a head in both orders of its tokens, and walks the curve over a frame.
#include "cli/report_order.h"

#include <algorithm>

#include "cli/metrics.h"
#include "cli/report.h"
#include "cli/runner.h"

namespace sparge::cli {
namespace {

constexpr int64_t kMostCells = 48;  // per side of the drawn corner: more would be too fine to follow

bool CanReorder(const LoadedCall& call) {
  const PlanDesc& desc = call.desc;
  if (!call.grid || desc.causal != 0 || desc.window != 0 || desc.mask != SPARGE_MASK_NONE) return false;
  if (desc.select == SPARGE_SELECT_MAP) return false;  // a map belongs to one order
  const io::GridSides& sides = call.grid->sides;
  const int64_t tokens = sides[0] * sides[1] * sides[2] + call.grid->text.count;
  return tokens == desc.q_tokens && tokens == desc.kv_tokens;
}

OrderedHead RunInOrder(const Context& context, const LoadedCall& call, bool hilbert) {
  HeadCall slice = SliceHead(call, 0, 0);
  PlanDesc& desc = slice.asked;
  const TokenGrid& grid = *call.grid;
  for (size_t i = 0; i < 3; ++i) desc.grid[i] = hilbert ? grid.sides[i] : 0;
  desc.text_tokens = hilbert ? grid.text.count : 0;
  desc.text_after = hilbert && grid.text.after ? 1 : 0;
  const TileGrid tiles{call.q_blocks(), call.k_blocks()};
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
  Runner runner(context, desc, call.automatic);
  runner.RunSettled(args);
  ErrorTotals errors;
  errors.Add(sparse, dense);
  const std::vector<uint8_t> visible(count, 1);
  return {stats.sparsity(), errors.RelativeL1(), DrawMasses(tiles, mass, visible)};
}

}  // namespace

std::optional<OrderReport> CompareOrders(const Context& context, const LoadedCall& call) {
  if (!CanReorder(call) || call.q_blocks() * call.k_blocks() == 0) return std::nullopt;
  OrderReport report;
  report.sides = call.grid->sides;
  report.hilbert_in_force = call.grid->hilbert;
  report.height = std::min(report.sides[1], kMostCells);
  report.width = std::min(report.sides[2], kMostCells);
  report.rank.resize(static_cast<size_t>(report.width * report.height));
  const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, report.sides);
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t y = order[i] / report.sides[2], x = order[i] % report.sides[2];  // y beyond H: a later frame
    if (y >= report.height || x >= report.width) continue;
    report.rank[static_cast<size_t>(y * report.width + x)] = static_cast<int64_t>(i);
  }
  report.raster = RunInOrder(context, call, false);
  report.hilbert = RunInOrder(context, call, true);
  return report;
}

}  // namespace sparge::cli

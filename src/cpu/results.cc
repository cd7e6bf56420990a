// Counts tiles and row groups, and writes what the caller asked for.
#include "src/cpu/results.h"

#include <algorithm>
#include <limits>

#include "src/base/sized.h"
#include "src/cpu/parts.h"

namespace sparge::impl {
namespace {

// Row groups of a query block.
int64_t GroupsOf(const Plan& plan, const BlockId& id) {
  return CeilDiv(plan.sequences[id.sequence].QueriesIn(id.block), plan.kernel().group_rows);
}

void CountWork(const Plan& plan, const sparge_run_args& args, const Workspace& w, sparge_stats& stats) {
  const auto count = [&](const BlockId& id, const sparge_head_stats& part) {
    AddStats(part, stats.total);
    if (args.head_stats != nullptr) AddStats(part, args.head_stats[plan.HeadPlace(id.sequence, id.head)]);
  };
  for (int64_t row = 0; row < plan.q_heads * plan.all_q_blocks; ++row) {
    const BlockId id = FindQueryBlock(plan, row);
    const int64_t groups = GroupsOf(plan, id);
    const int64_t eligible = w.map.eligible[row];
    const int64_t computed = w.map.computed[row];
    count(id, {eligible, computed, eligible * groups, computed * groups});
  }
  for (int64_t i = 0; i < w.schedule.item_count; ++i) {
    const WorkItem& item = w.schedule.items[i];
    count(FindQueryBlock(plan, item.row), {0, 0, 0, -item.skipped});
  }
}

}  // namespace

void CountPass(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w,
               sparge_stats& stats) {
  if (args.map_out != nullptr) WriteMap(plan, heads, w.map, args.map_out);
  if (args.stats != nullptr || args.head_stats != nullptr) CountWork(plan, args, w, stats);
}

void ClearResults(const Plan& plan, const sparge_run_args& args) {
  if (args.map_out != nullptr) std::fill_n(args.map_out, plan.AllTiles(), uint8_t{0});
  if (args.pv_out != nullptr) std::fill_n(args.pv_out, plan.AllTiles(), uint8_t{0});
  if (args.mass_out != nullptr) std::fill_n(args.mass_out, plan.AllTiles(), 0.0f);
  if (args.head_stats != nullptr) std::fill_n(args.head_stats, plan.batch * plan.q_heads, sparge_head_stats{});
  if (args.key_survey_out != nullptr) {
    std::fill_n(args.key_survey_out, plan.batch * plan.kv_heads * KeySurveySize(plan), 0.0);
  }
  // Of blocks without keys, and beyond the queries of a sequence.
  if (args.pool_counts_out != nullptr) {
    std::fill_n(args.pool_counts_out, plan.batch * plan.q_heads * plan.q_blocks, int32_t{0});
  }
  // Pools that see none of these keys.
  if (args.pool_lse_out != nullptr) {
    std::fill_n(args.pool_lse_out, plan.batch * plan.q_heads * plan.pools(), -std::numeric_limits<double>::infinity());
  }
}

void WriteStats(const Plan& plan, const sparge_run_args& args, sparge_stats& stats) {
  if (args.stats == nullptr) return;
  stats.group_rows = plan.kernel().group_rows;
  stats.threads = plan.machine.executor.workers;
  stats.isa = plan.machine.isa;
  stats.total_ms = stats.pack_ms + stats.calibrate_ms + stats.predict_ms + stats.schedule_ms + stats.kernel_ms;
  StoreSized(stats, args.stats);
}

}  // namespace sparge::impl

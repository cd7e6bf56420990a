// Splits rows where they are few, and sorts the work by cost.
#include "src/cpu/schedule.h"

#include <algorithm>

namespace sparge::impl {

namespace {

// Rows of the whole, of which these may be a part: a row must be split in a part as it is in the whole.
int64_t AllRows(const Plan& plan) {
  const bool whole = plan.place.all_queries == plan.q_tokens;
  return plan.q_heads * (whole ? plan.all_q_blocks : plan.sequence_count() * CeilDiv(plan.place.all_queries, kBlockQ));
}

// The largest number of parts of any row that is split.
int64_t MostParts(const Plan& plan) {
  const int64_t rows = std::max<int64_t>(AllRows(plan), 1);
  const int64_t enough = rows >= kManyRows ? kTailParts : CeilDiv(2 * kManyRows, rows);
  return std::clamp<int64_t>(plan.k_blocks / kTilesPerPart, 1, enough);
}

}  // namespace

int64_t MaxPartsOf(const Plan& plan, int64_t row) {
  if (AllRows(plan) < kManyRows) return MostParts(plan);
  const bool in_tail = row < plan.all_q_blocks && row + plan.place.first_query / kBlockQ < kTailRows;
  return in_tail ? MostParts(plan) : 1;
}

int64_t MaxParts(const Plan& plan) {
  const int64_t rows = plan.q_heads * plan.all_q_blocks;
  const int64_t split = AllRows(plan) >= kManyRows ? std::min(rows, kTailRows) : rows;
  const int64_t parts = MostParts(plan);
  return parts == 1 ? 0 : parts * split;
}

Schedule LaySchedule(const Plan& plan, Arena& arena) {
  const int64_t rows = plan.q_heads * plan.all_q_blocks;
  Schedule schedule{};
  schedule.items = arena.Take<WorkItem>(rows + MaxParts(plan));
  schedule.split_rows = arena.Take<SplitRow>(MaxParts(plan) > 0 ? rows : 0);
  return schedule;
}

void MakeSchedule(const Plan& plan, const HeadChoice& heads, const BlockMap& map, Schedule& schedule) {
  const int64_t rows = plan.q_heads * plan.all_q_blocks;
  int64_t next_part = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (!heads.active[row / plan.all_q_blocks]) continue;
    const int64_t tiles = map.computed[row];
    const int64_t parts = std::clamp<int64_t>(tiles / kTilesPerPart, 1, MaxPartsOf(plan, row));
    if (parts > 1) schedule.split_rows[schedule.split_count++] = {row, next_part, parts};
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t slot = parts > 1 ? next_part++ : -1;
      schedule.items[schedule.item_count++] = {row, tiles * p / parts, tiles * (p + 1) / parts, slot, 0};
    }
  }
  // Cost is kept tiles. Largest first, handed out one by one: the last threads to finish have small pieces left.
  std::sort(schedule.items, schedule.items + schedule.item_count, [](const WorkItem& a, const WorkItem& b) {
    const int64_t cost_a = a.end - a.begin;
    const int64_t cost_b = b.end - b.begin;
    return cost_a != cost_b ? cost_a > cost_b : a.row != b.row ? a.row < b.row : a.begin < b.begin;
  });
}

}  // namespace sparge::impl

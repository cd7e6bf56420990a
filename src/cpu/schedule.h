// From the block map to work items, largest first. Pure functions of the plan and the map: the same items whatever the
// number of threads, which is what makes results independent of it.
#ifndef SPARGE_SRC_CPU_SCHEDULE_H_
#define SPARGE_SRC_CPU_SCHEDULE_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/cpu/plan.h"
#include "src/select/block_map.h"

namespace sparge::impl {

// A run of kept tiles of one row (query block of one head): the begin'th to the end'th of them.
struct WorkItem {
  int64_t row;         // Problem::QueryBlock
  int64_t begin, end;  // of the row's kept tiles
  int64_t part;        // slot of the partial result, or -1: the item is the whole row
  int64_t skipped;     // result: row groups whose PV was skipped
};

// A row that was split: its partial results lie in slots [first_part, first_part + parts).
struct SplitRow {
  int64_t row, first_part, parts;
};

struct Schedule {
  WorkItem* items;
  SplitRow* split_rows;
  int64_t item_count, split_count;
};

// With fewer rows than this the threads might starve, and long rows are split along the keys.
inline constexpr int64_t kManyRows = 16;
// A part has at least this many tiles, so that merging its 128 partial rows costs little beside them.
inline constexpr int64_t kTilesPerPart = 16;

// With more, so many of them are split all the same: small pieces at the end let the threads finish together.
inline constexpr int64_t kTailRows = 4;
inline constexpr int64_t kTailParts = 4;

// The largest number of parts of a row, and of all rows together.
int64_t MaxPartsOf(const Plan& plan, int64_t row);
int64_t MaxParts(const Plan& plan);

Schedule LaySchedule(const Plan& plan, Arena& arena);
// Of the active heads.
void MakeSchedule(const Plan& plan, const HeadChoice& heads, const BlockMap& map, Schedule& schedule);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_SCHEDULE_H_

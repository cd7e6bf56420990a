// Packs pooled queries and runs the kernel's sums over every key.
#include "src/cpu/masses.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/parts.h"

namespace sparge::impl {
namespace {

int64_t RowsPerWorker(const Plan& plan) { return int64_t{plan.kernel().pass_rows} + UnlikeRows::kMostUnlike; }

// The arrays of one worker, from its `first` row on.
PoolMemory OfWorker(const Plan& plan, const PoolMemory& all, int32_t worker, int64_t first = 0) {
  const int64_t at = worker * RowsPerWorker(plan) + first;
  return {all.rows + at * plan.row_lanes() * kLaneBytes,
          all.factor + at,
          all.shift + at,
          all.row_top + at,
          all.mass + at * all.stride,
          all.top + at * all.stride,
          all.stride};
}

int64_t PoolsIn(const Plan& plan, const Sequence& s, int64_t block) {
  return CeilDiv(s.QueriesIn(block), plan.predictor->pool_rows());
}

// What happens to the scores of a pool. It stands where its last query is, and its window is as much longer: it sees
// what any of its queries sees.
ScoreRule PoolRule(const Plan& plan, const BlockId& block) {
  ScoreRule rule = RuleOf(plan, block.sequence, block.head);
  if (rule.visible.window > 0) rule.visible.window += plan.predictor->pool_rows() - 1;
  return rule;
}

// Place of a pool in an array (batch, q_heads, pools) of the interface.
int64_t PoolPlace(const Plan& plan, const BlockId& block, int64_t pool) {
  return plan.HeadPlace(block.sequence, block.head) * plan.pools() + block.block * plan.block_pools() + pool;
}

// Row r of the masses in `rows` is that of a query, or of a pool that stands for one: where it stands, its place among
// the pools of its block, and what it sees.
struct MassRow {
  const PoolMemory& rows;
  int64_t r;
  int64_t query, pool;
  const Visible& visible;

  const float* mass() const { return rows.mass + r * rows.stride; }
};

// By how much the masses of a row are to be divided; 0 if it sees nothing.
double SumOf(const Plan& plan, const sparge_run_args& args, const BlockId& block, const MassRow& row,
             const bool* visible) {
  const Sequence& s = plan.sequences[block.sequence];
  double sum = 0;
  for (int64_t j = 0; j < s.k_blocks; ++j) sum += visible[j] ? static_cast<double>(row.mass()[j]) : 0.0;
  if (!IsAbsolute(args)) return sum;
  // What the masses are relative to, log2 units, as the scores are without centred keys.
  const double top = static_cast<double>(row.rows.row_top[row.r]) +
                     LeftOut(plan, row.visible, block.head, row.query, row.rows.shift[row.r]);
  const int64_t place = PoolPlace(plan, block, row.pool);
  if (args.pool_lse_out != nullptr) {
    args.pool_lse_out[place] = sum > 0 ? (top + std::log2(sum)) / kLog2e : -std::numeric_limits<double>::infinity();
  }
  // The sum over all keys, relative to this part's maximum.
  return args.pool_lse != nullptr ? std::exp2(args.pool_lse[place] * kLog2e - top) : sum;
}

// The masses of the queries of a block that are pools of their own, as the first query of the block sees the keys: what
// the others see beside is on the diagonal.
void OwnMasses(const Plan& plan, const Packed& packed, const BlockId& block, const UnlikeRows& unlike,
               const PoolMemory& mine) {
  const Sequence& s = plan.sequences[block.sequence];
  const int64_t first = plan.QueryBlock(block.head, s, block.block) * kBlockQ;
  for (int64_t r = 0; r < unlike.count; ++r) {
    CopyQuery(plan, packed, first + unlike.rows[r], r, {mine.rows, mine.factor, mine.shift});
    std::fill_n(mine.mass + r * mine.stride, s.k_blocks, 0.0f);
  }
  KernelArgs k{};
  k.query = {mine.rows, plan.row_lanes(), mine.factor, mine.shift, block.block * kBlockQ, unlike.count, /*step=*/0};
  k.blocks = PackedBlocks(plan, packed, plan.KeyBlock(block.head / plan.heads_per_kv, s, 0));
  k.rule = RuleOf(plan, block.sequence, block.head);
  const Range keys = k.rule.visible.KeysOf(k.query.first);
  plan.kernel().masses[plan.precision](k, {BlocksOf(keys, kBlockK), mine.mass, mine.top, mine.row_top, mine.stride});
}

// What they add to the masses of the block's tiles.
void AddOwn(const Plan& plan, const sparge_run_args& args, const Packed& packed, const PoolMemory& memory,
            const BlockId& block, int32_t worker, const bool* visible, double* mass) {
  const Sequence& s = plan.sequences[block.sequence];
  const UnlikeRows& unlike = packed.unlike[plan.QueryBlock(block.head, s, block.block)];
  if (unlike.count == 0 || unlike.TooMany()) return;
  const PoolMemory mine = OfWorker(plan, memory, worker, plan.kernel().pass_rows);
  OwnMasses(plan, packed, block, unlike, mine);
  for (int64_t r = 0; r < unlike.count; ++r) {
    const MassRow own{mine, r, block.block * kBlockQ, plan.predictor->pools + r, s.visible};
    const double sum = SumOf(plan, args, block, own, visible);
    for (int64_t j = 0; j < s.k_blocks; ++j) {
      const double share = visible[j] && sum > 0 ? static_cast<double>(own.mass()[j]) / sum : 0.0;
      if (share >= kOwnShare) mass[j] = 1;  // above every floor
    }
  }
}

}  // namespace

PoolMemory LayPoolMemory(const Plan& plan, Arena& arena) {
  if (!plan.predicts() || plan.predictor->scores_are_logs) return {};
  const int64_t rows = plan.machine.executor.workers * RowsPerWorker(plan);
  PoolMemory memory{};
  memory.stride = RoundUp(plan.k_blocks, kChannelAlign);
  memory.rows = arena.Take<std::byte>(rows * plan.row_lanes() * kLaneBytes);
  memory.factor = arena.Take<float>(rows);
  memory.shift = arena.Take<float>(rows);
  memory.row_top = arena.Take<float>(rows);
  memory.mass = arena.Take<float>(rows * memory.stride);
  memory.top = arena.Take<float>(rows * memory.stride);
  return memory;
}

int64_t PooledBlocks(const Plan& plan) { return plan.kernel().pass_rows / plan.predictor->pools; }

void PoolMasses(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& first,
                int64_t blocks, int32_t worker, const PoolMemory& memory) {
  const PoolMemory mine = OfWorker(plan, memory, worker);
  const Sequence& s = plan.sequences[first.sequence];
  const int64_t count = (blocks - 1) * plan.predictor->pools + PoolsIn(plan, s, first.block + blocks - 1);
  const QueryRows rows{mine.rows, mine.factor, mine.shift};
  if (args.pool_codes != nullptr) {
    TakeCodedPools(plan, args, first, count, rows);
  } else {
    PackPools(plan, packed, first, count, IsAbsolute(args), worker, rows);
  }

  KernelArgs k{};
  const int64_t step = plan.predictor->pool_rows();
  k.query = {mine.rows,
             plan.row_lanes(),
             mine.factor,
             mine.shift,
             first.block * kBlockQ + step - 1,
             static_cast<int>(count),
             step,
             step};
  const int64_t kv_head = first.head / plan.heads_per_kv;
  k.blocks = PackedBlocks(plan, packed, plan.KeyBlock(kv_head, s, 0));
  k.rule = PoolRule(plan, first);
  const Range keys = k.rule.visible.KeysOfAny(k.query.Position(0), k.query.Position(count - 1));
  const MassArgs to{BlocksOf(keys, kBlockK), mine.mass, mine.top, mine.row_top, mine.stride};
  plan.kernel().masses[plan.precision](k, to);
}

void RowMasses(const Plan& plan, const sparge_run_args& args, const Packed& packed, const PoolMemory& memory,
               const BlockId& block, int64_t i, int32_t worker, const bool* visible, double* mass) {
  const PoolMemory mine = OfWorker(plan, memory, worker);
  const Sequence& s = plan.sequences[block.sequence];
  const int64_t pools = PoolsIn(plan, s, block.block);
  const int64_t step = plan.predictor->pool_rows();
  const ScoreRule rule = PoolRule(plan, block);
  std::fill_n(mass, s.k_blocks, 0.0);
  int64_t counted = 0;
  for (int64_t p = 0; p < pools; ++p) {
    const int64_t middle = QueryBlock::Middle(block.block * kBlockQ + (p + 1) * step - 1, step);
    const MassRow pool{mine, i * plan.predictor->pools + p, middle, p, rule.visible};
    const double sum = SumOf(plan, args, block, pool, visible);
    if (!(sum > 0)) continue;
    ++counted;
    for (int64_t j = 0; j < s.k_blocks; ++j) mass[j] += visible[j] ? static_cast<double>(pool.mass()[j]) / sum : 0.0;
  }
  // A pool that sees none of a part's keys counts there, too.
  const int64_t of = args.pool_lse != nullptr ? pools : counted;
  for (int64_t j = 0; of > 1 && j < s.k_blocks; ++j) mass[j] /= static_cast<double>(of);
  if (packed.unlike != nullptr) AddOwn(plan, args, packed, memory, block, worker, visible, mass);
}

}  // namespace sparge::impl

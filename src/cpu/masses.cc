// Packs pooled queries and runs the kernel's sums over every key.
#include "src/cpu/masses.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparge::impl {
namespace {

// The arrays of one worker.
PoolMemory OfWorker(const Plan& plan, const PoolMemory& all, int32_t worker) {
  const int64_t at = worker * int64_t{plan.kernel().pass_rows};
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

// Sums that leave or come are those of the keys as they are, not of the centred ones.
bool IsAbsolute(const sparge_run_args& args) { return args.pool_lse != nullptr || args.pool_lse_out != nullptr; }

// What happens to the scores of a pool. It stands where its last query is, and its window is as much longer: it sees
// what any of its queries sees.
ScoreRule PoolRule(const Plan& plan, const BlockId& block) {
  ScoreRule rule = RuleOf(plan, block.sequence, block.head);
  if (rule.visible.window > 0) rule.visible.window += plan.predictor->pool_rows() - 1;
  return rule;
}

// Place of a pool in an array (batch, q_heads, pools) of the interface.
int64_t PoolPlace(const Plan& plan, const BlockId& block, int64_t pool) {
  return plan.HeadPlace(block.sequence, block.head) * plan.pools() + block.block * plan.predictor->pools + pool;
}

}  // namespace

PoolMemory LayPoolMemory(const Plan& plan, Arena& arena) {
  if (!plan.predicts() || plan.predictor->scores_are_logs) return {};
  const int64_t rows = plan.machine.executor.workers * int64_t{plan.kernel().pass_rows};
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
  PackPools(plan, packed, first, count, IsAbsolute(args), worker, {mine.rows, mine.factor, mine.shift});

  KernelArgs k{};
  const int64_t step = plan.predictor->pool_rows();
  k.query = {
      mine.rows, plan.row_lanes(), mine.factor, mine.shift, first.block * kBlockQ + step - 1, static_cast<int>(count),
      step};
  const int64_t kv_head = first.head / plan.heads_per_kv;
  k.blocks = PackedBlocks(plan, packed, plan.KeyBlock(kv_head, s, 0));
  k.rule = PoolRule(plan, first);
  const Range keys = k.rule.visible.KeysOfAny(k.query.Position(0), k.query.Position(count - 1));
  const MassArgs to{BlocksOf(keys, kBlockK), mine.mass, mine.top, mine.row_top, mine.stride};
  plan.kernel().masses[plan.precision](k, to);
}

void RowMasses(const Plan& plan, const sparge_run_args& args, const PoolMemory& memory, const BlockId& block, int64_t i,
               int32_t worker, const bool* visible, double* mass) {
  const PoolMemory mine = OfWorker(plan, memory, worker);
  const Sequence& s = plan.sequences[block.sequence];
  const int64_t pools = PoolsIn(plan, s, block.block);
  std::fill_n(mass, s.k_blocks, 0.0);
  int64_t counted = 0;
  for (int64_t p = 0; p < pools; ++p) {
    const int64_t pool = i * plan.predictor->pools + p;
    const float* of_pool = mine.mass + pool * mine.stride;
    double sum = 0;
    for (int64_t j = 0; j < s.k_blocks; ++j) sum += visible[j] ? static_cast<double>(of_pool[j]) : 0.0;
    if (IsAbsolute(args)) {
      const int64_t step = plan.predictor->pool_rows();
      const int64_t last = block.block * kBlockQ + (p + 1) * step - 1;
      const double top =
          static_cast<double>(mine.row_top[pool]) +
          LeftOut(plan, PoolRule(plan, block).visible, block.head, QueryBlock::Middle(last, step), mine.shift[pool]);
      const int64_t place = PoolPlace(plan, block, p);
      if (args.pool_lse_out != nullptr) {
        args.pool_lse_out[place] = sum > 0 ? (top + std::log2(sum)) / kLog2e : -std::numeric_limits<double>::infinity();
      }
      // The sum over all keys, relative to this part's maximum.
      if (args.pool_lse != nullptr) sum = std::exp2(args.pool_lse[place] * kLog2e - top);
    }
    if (!(sum > 0)) continue;
    ++counted;
    for (int64_t j = 0; j < s.k_blocks; ++j) mass[j] += visible[j] ? static_cast<double>(of_pool[j]) / sum : 0.0;
  }
  // A pool that sees none of a part's keys counts there, too.
  const int64_t of = args.pool_lse != nullptr ? pools : counted;
  for (int64_t j = 0; of > 1 && j < s.k_blocks; ++j) mass[j] /= static_cast<double>(of);
}

}  // namespace sparge::impl

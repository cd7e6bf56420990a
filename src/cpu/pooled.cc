// Packs pooled queries and runs the kernel's sums over every key.
#include "src/cpu/pooled.h"

#include <algorithm>

namespace sparge::impl {
namespace {

// The arrays of one worker.
Pooled OfWorker(const Plan& plan, const Pooled& all, int32_t worker) {
  const int64_t rows = plan.runtime.kernels->pass_rows;
  const int64_t at = worker * rows;
  return {all.rows + at * plan.row_lanes() * kLaneBytes,
          all.factor + at,
          all.shift + at,
          all.mass + at * all.stride,
          all.top + at * all.stride,
          all.stride};
}

int64_t PoolsIn(const Plan& plan, const Sequence& s, int64_t block) {
  return CeilDiv(s.QueriesIn(block), plan.pool_rows());
}

}  // namespace

Pooled LayPooled(const Plan& plan, Arena& arena) {
  if (!plan.predicts() || plan.predictor != SPARGE_PREDICT_KEYS) return {};
  const int64_t rows = plan.runtime.executor.workers * plan.runtime.kernels->pass_rows;
  Pooled pooled{};
  pooled.stride = RoundUp(plan.k_blocks, kChannelAlign);
  pooled.rows = arena.Take<std::byte>(rows * plan.row_lanes() * kLaneBytes);
  pooled.factor = arena.Take<float>(rows);
  pooled.shift = arena.Take<float>(rows);
  pooled.mass = arena.Take<float>(rows * pooled.stride);
  pooled.top = arena.Take<float>(rows * pooled.stride);
  return pooled;
}

int64_t PooledBlocks(const Plan& plan) { return plan.runtime.kernels->pass_rows / plan.pools(); }

void MeasurePools(const Plan& plan, const Packed& packed, const BlockId& first, int64_t blocks, int32_t worker,
                  const Pooled& pooled) {
  const Pooled mine = OfWorker(plan, pooled, worker);
  const Sequence& s = plan.sequences[first.sequence];
  const int64_t count = (blocks - 1) * plan.pools() + PoolsIn(plan, s, first.block + blocks - 1);
  PackPools(plan, packed, first, count, worker, {mine.rows, mine.factor, mine.shift});

  KernelArgs args{};
  const int64_t step = plan.pool_rows();
  // A pool stands where its last query is, and its window is as much longer: it sees what any of its queries sees.
  args.query = {
      mine.rows, plan.row_lanes(), mine.factor, mine.shift, first.block * kBlockQ + step - 1, static_cast<int>(count),
      step};
  const int64_t kv_head = first.head / plan.heads_per_kv;
  args.blocks = PackedBlocks(plan, packed, plan.KeyBlock(kv_head, s, 0));
  args.rule = RuleOf(plan, first.sequence, first.head);
  if (s.visible.window > 0) args.rule.visible.window += step - 1;
  const Range keys = args.rule.visible.KeysOfAny(args.query.Position(0), args.query.Position(count - 1));
  const MassArgs to{BlocksOf(keys, kBlockK), mine.mass, mine.top, mine.stride};
  plan.runtime.kernels->masses[plan.precision](args, to);
}

void PooledRow(const Plan& plan, const Pooled& pooled, const BlockId& block, int64_t i, int32_t worker,
               const bool* visible, double* mass) {
  const Pooled mine = OfWorker(plan, pooled, worker);
  const Sequence& s = plan.sequences[block.sequence];
  std::fill_n(mass, s.k_blocks, 0.0);
  int64_t counted = 0;
  for (int64_t p = 0; p < PoolsIn(plan, s, block.block); ++p) {
    const float* of_pool = mine.mass + (i * plan.pools() + p) * mine.stride;
    double sum = 0;
    for (int64_t j = 0; j < s.k_blocks; ++j) sum += visible[j] ? static_cast<double>(of_pool[j]) : 0.0;
    if (!(sum > 0)) continue;
    ++counted;
    for (int64_t j = 0; j < s.k_blocks; ++j) mass[j] += visible[j] ? static_cast<double>(of_pool[j]) / sum : 0.0;
  }
  for (int64_t j = 0; counted > 1 && j < s.k_blocks; ++j) mass[j] /= static_cast<double>(counted);
}

}  // namespace sparge::impl

// What the CPU adds to a problem: threads, the instruction set, and what follows from it for lanes and padding.
#ifndef SPARGE_SRC_CPU_PLAN_H_
#define SPARGE_SRC_CPU_PLAN_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <utility>

#include "src/cpu/instruction_sets.h"
#include "src/cpu/pack_ops.h"
#include "src/problem/problem.h"
#include "src/select/predictors.h"

namespace sparge::impl {

// What all plans of a context share; the functions are fetched once.
struct Machine {
  sparge_executor executor;
  const char* isa;
  CpuOps ops;
};

struct Plan : Problem {
  Machine machine;
  const Predictor* predictor;

  Plan(Problem problem, const Machine& on)
      : Problem(std::move(problem)), machine(on), predictor(&PredictorFor(select, Problem::predictor)) {}

  // Pooled queries of a block, and of a sequence and head; places for those that a block lacks included.
  int64_t block_pools() const { return predictor->pools + (judges_rows() ? UnlikeRows::kMostUnlike : 0); }
  // Queries that are unlike their pool are judged by themselves. Where tiles compete for a share or a number, they
  // would take the place of what all others need.
  bool judges_rows() const {
    return predicts() && predictor->own_rows && (calibrates() || select == SPARGE_SELECT_FLOOR);
  }
  int64_t pools() const { return q_blocks * block_pools(); }
  const KernelOps& kernel() const { return *machine.ops.kernel; }
  const QuantGrid& grid() const { return kernel().grid[precision]; }
  // Lanes of one packed query or key row; dims and channels padded to whole vectors.
  int64_t row_lanes() const { return CeilDiv(qk_dim, PerLane(precision)); }
  int64_t dim_pad() const { return RoundUp(qk_dim, kChannelAlign); }
  int64_t channels() const { return RoundUp(v_dim, kChannelAlign); }
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PLAN_H_

// Stage 2 over the work items of a schedule: the kernel, parts joined, output written.
#ifndef SPARGE_SRC_CPU_ATTEND_ROWS_H_
#define SPARGE_SRC_CPU_ATTEND_ROWS_H_

#include "src/cpu/plan.h"
#include "src/cpu/workspace.h"

namespace sparge::impl {

// Rows of one head whose sums are complete: queries [first, first + count) of a sequence.
struct CompleteRows {
  int64_t sequence, head, first, count;
  const float* shift;  // per row, as QueryBlock::shift
};
// Their output: sink, log-sum-exp, o / l.
void FinishRows(const Plan& plan, const sparge_run_args& args, const Packed& packed, const CompleteRows& rows,
                const RowState& state);

void AttendRows(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_ATTEND_ROWS_H_

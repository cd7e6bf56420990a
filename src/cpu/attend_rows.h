// Stage 2 over the work items of a schedule: the kernel, parts joined, output written.
#ifndef SPARGE_SRC_CPU_ATTEND_ROWS_H_
#define SPARGE_SRC_CPU_ATTEND_ROWS_H_

#include "src/cpu/plan.h"
#include "src/cpu/workspace.h"

namespace sparge::impl {

void AttendRows(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_ATTEND_ROWS_H_

// Attention as a whole: the stages one after the other over a workspace, for each plan of a call (plan.h, MakePlans).
#ifndef SPARGE_SRC_CPU_ATTEND_H_
#define SPARGE_SRC_CPU_ATTEND_H_

#include <cstddef>
#include <vector>

#include "src/problem/problem.h"

namespace sparge::impl {

size_t WorkspaceSize(const std::vector<Plan>& plans);
size_t CacheSize(const std::vector<Plan>& plans);

// Both stages. Arguments have been checked.
void Attend(const std::vector<Plan>& plans, const sparge_run_args& args);

// Stage 1 only.
void Predict(const std::vector<Plan>& plans, const sparge_run_args& args);

// Measures for the plans' calibration only; `effort` is the share of a dense call to spend.
void Calibrate(const std::vector<Plan>& plans, const sparge_run_args& args, double effort);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_ATTEND_H_

// Attention as a whole on the CPU: the stages one after the other, for each plan of a call (problem.h, MakeProblems).
#ifndef SPARGE_SRC_CPU_ATTEND_H_
#define SPARGE_SRC_CPU_ATTEND_H_

#include <vector>

#include "src/cpu/plan.h"

namespace sparge::impl {

// Both stages. Arguments have been checked.
void Attend(const std::vector<Plan>& plans, const sparge_run_args& args);

// Stage 1 only.
void Predict(const std::vector<Plan>& plans, const sparge_run_args& args);

// Samples for the plans' calibration only; `effort` is the share of a dense call to spend.
void Calibrate(const std::vector<Plan>& plans, const sparge_run_args& args, double effort);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_ATTEND_H_

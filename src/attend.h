// Attention as a whole: the stages one after the other over a workspace.
#ifndef SPARGE_SRC_ATTEND_H_
#define SPARGE_SRC_ATTEND_H_

#include <cstddef>

#include "src/plan.h"

namespace sparge {

size_t WorkspaceSize(const Plan& plan);

// Both stages. Arguments have been checked.
void Attend(const Plan& plan, const sparge_run_args& args);

// Stage 1 only.
void Predict(const Plan& plan, const sparge_run_args& args);

}  // namespace sparge
#endif  // SPARGE_SRC_ATTEND_H_

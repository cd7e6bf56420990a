// Parts of a larger call (sparge_run_args): what they leave for each other, and which tensors a call reads beside that.
#ifndef SPARGE_SRC_PROBLEM_PARTS_H_
#define SPARGE_SRC_PROBLEM_PARTS_H_

#include <sparge/sparge.h>

#include "src/problem/problem.h"

namespace sparge::impl {

// The tensors of the caller that a call reads.
struct Reads {
  bool q, k, v;
};
Reads ReadsOf(const Problem& problem, const sparge_run_args& args, Call call);

// `pools`: the call has pools.
void CheckParts(const Problem& problem, const sparge_run_args& args, Call call, bool pools);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_PROBLEM_PARTS_H_

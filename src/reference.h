// The oracle: attention in double, plain loops, no blocks but those of a given map. Slow and frozen; the shipped path
// never calls it.
#ifndef SPARGE_SRC_REFERENCE_H_
#define SPARGE_SRC_REFERENCE_H_

#include "src/problem/problem.h"

namespace sparge::impl {

// Arguments have been checked. args.map, if given, limits the tiles, whatever the plan selects.
void Reference(const Problem& problem, const sparge_executor& executor, const sparge_run_args& args);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_REFERENCE_H_

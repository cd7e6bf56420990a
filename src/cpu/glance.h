// Whether keys in the caller's tensors are still those that were packed, without reading much of them.
#ifndef SPARGE_SRC_CPU_GLANCE_H_
#define SPARGE_SRC_CPU_GLANCE_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/cpu/plan.h"

namespace sparge::impl {

// What tells whether a block of keys is still the same, without reading much of it; never 0.
uint64_t GlanceAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);
// The same of a few tokens, first and last among them: tells whether a run of neighbours is still the same.
uint64_t SampleAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);
// Asks for what SampleAt reads.
void ForeseeSample(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_GLANCE_H_

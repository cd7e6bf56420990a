// Whether keys and values in the caller's tensors are still those that were packed, without reading much of them.
#ifndef SPARGE_SRC_CPU_GLANCE_H_
#define SPARGE_SRC_CPU_GLANCE_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/cpu/plan.h"

namespace sparge::impl {

// What tells whether a block is still the same, without reading much of it; never 0. The first 64 bytes of each key in
// the first kv head, and of each value in the last one.
uint64_t GlanceAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);
// Of all key blocks, those of a sequence plan.cache_blocks after those of the one before.
void GlanceAtAll(const Plan& plan, const sparge_run_args& args, uint64_t* glances);
// Of the keys of a few tokens, first and last among them: tells whether a run of neighbours is still the same.
uint64_t SampleAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);
// Asks for what SampleAt reads.
void ForeseeSample(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_GLANCE_H_

// The vector functions of measuring, one set per instruction set: sums of tiles' outputs and distances between results.
#ifndef SPARGE_SRC_CPU_PROBE_OPS_H_
#define SPARGE_SRC_CPU_PROBE_OPS_H_

#include <cstdint>

namespace sparge::impl {

// Rows of `channels` floats, a multiple of kChannelAlign, aligned.
struct ProbeOps {
  // rows[r] *= by[r]
  void (*scale)(float* rows, const float* by, int64_t count, int64_t channels);
  // sum += sign * rows
  void (*add)(float* sum, const float* rows, float sign, int64_t count, int64_t channels);
  // The sum over all numbers of |rows[r] * by[r] - want|.
  double (*distance)(const float* rows, const float* by, const float* want, int64_t count, int64_t channels);
};

// Of one of Highway's targets; NULL if that was not compiled in.
const ProbeOps* ProbeOpsOf(int64_t target);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_OPS_H_

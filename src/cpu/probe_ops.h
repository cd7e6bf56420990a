// The vector functions of measuring, one set per instruction set: sums of tiles' outputs and distances between results.
#ifndef SPARGE_SRC_CPU_PROBE_OPS_H_
#define SPARGE_SRC_CPU_PROBE_OPS_H_

#include <cstdint>

namespace sparge::impl {

// A row's results against each tile by itself, in an order: the i-th is tile order[i], which has the sum `o` at
// [tile * stride], `channels` floats (a multiple of kChannelAlign, aligned), and counts weight[tile * weight_stride].
struct TileResults {
  const float* o;
  int64_t stride;
  int64_t channels;
  const float* weight;
  int64_t weight_stride;
  const int32_t* order;
};

// Results of more and more tiles: step s has the first ends[s] of them, and its sum counts by[s].
struct ProbeSteps {
  static constexpr int64_t kMost = 64;
  int64_t count = 0;
  int64_t ends[kMost];
  float by[kMost];
};

struct ProbeOps {
  // weight[i] = 2^(m[i] - top[i]), 0 where m is -inf; `count` is a multiple of kChannelAlign, arrays are aligned
  void (*weights)(const float* m, const float* top, int64_t count, float* weight);
  // out = by * the sum of the first `tiles`
  void (*sum)(const TileResults& row, int64_t tiles, float by, float* out);
  // out[s] = the sum over all channels of |step s - want|, or of its square: by sparge_measure
  using Distances = void (*)(const TileResults& row, const ProbeSteps& steps, const float* want, float* out);
  Distances distances[2];
  // The sum over all channels of |row * by - want * want_by|.
  double (*distance)(const float* row, float by, const float* want, float want_by, int64_t channels);
};

// Of one of Highway's targets; NULL if that was not compiled in.
const ProbeOps* ProbeOpsOf(int64_t target);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_OPS_H_

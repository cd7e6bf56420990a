// The vector functions of measuring, one set per instruction set: sums of tiles' outputs and distances between results.
#ifndef SPARGE_SRC_CPU_PROBE_OPS_H_
#define SPARGE_SRC_CPU_PROBE_OPS_H_

#include <cstdint>

namespace sparge::impl {

// A row's results against each tile by itself: tile t has the sum `o` at [t * stride] of `channels` floats, a multiple
// of kChannelAlign, aligned.
struct TileResults {
  const float* o;
  int64_t stride;
  int64_t tiles;
  int64_t channels;
};

struct ProbeOps {
  // weight[i] = 2^(m[i] - top[i]), 0 where m is -inf; `count` is a multiple of kChannelAlign, arrays are aligned
  void (*weights)(const float* m, const float* top, int64_t count, float* weight);
  // sums[bucket[t]] += weight[t] * o of tile t, but for tiles of bucket kNowhere
  static constexpr uint8_t kNowhere = 255;
  void (*collect)(const TileResults& row, const float* weight, const uint8_t* bucket, float* sums);
  // to += from
  void (*add)(float* to, const float* from, int64_t channels);
  // The sum over all channels of |row * by - want * want_by|, or of its square: by sparge_measure.
  using Distance = double (*)(const float* row, float by, const float* want, float want_by, int64_t channels);
  Distance distance[2];
};

// Of one of Highway's targets; NULL if that was not compiled in.
const ProbeOps* ProbeOpsOf(int64_t target);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_OPS_H_

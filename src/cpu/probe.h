// Measuring for a calibration: a few rows of a query block, densely, tile by tile, and from that their result under
// every tau and lambda of the grid.
#ifndef SPARGE_SRC_CPU_PROBE_H_
#define SPARGE_SRC_CPU_PROBE_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/calibrate/calibration.h"
#include "src/cpu/pack.h"
#include "src/cpu/predict.h"
#include "src/problem/problem.h"

namespace sparge::impl {

// A sample costs about so many times what its rows cost in a dense call: tile by tile with sums, masses and distances.
inline constexpr double kSampleCost = 2.0;
// Shares of a dense call that runs spend: until a head's first choice, until it is settled, and after.
inline constexpr double kCalibrationEffort = 0.045;
inline constexpr double kRefineEffort = 0.03;
inline constexpr double kWatchEffort = 0.004;
// At most so much for a head's first choice, if that is enough for it: a long prompt may be the only call there is.
inline constexpr double kFirstEffort = 0.07;
// Measured at a time; bounds the memory for results.
inline constexpr int64_t kSamplesAtOnce = 128;

// A tile of some rows: its part of a row group's result, and how far its scores lie below the best so far.
struct Drop {
  float depth;  // natural-log units; the group skips the tile iff lambda <= depth
  int32_t tile, group;
};

// Working memory; all but samples and results per worker. A tile's results come in the order of rank.
struct Measuring {
  float* o;        // per tile: the sample's rows of `channels`
  float* m;        // per tile and row
  float* l;        // per tile and row
  float* sum;      // the sample's rows of `channels`: a result at work
  float* dense;    // the same: the dense result
  float* queries;  // the sample's rows of dim_pad
  int32_t* kept;   // tile indices
  Drop* drops;
  Sample* samples;
  SampleResult* results;
};
Measuring LayMeasuring(const Plan& plan, Arena& arena);

// The samples of one call, in an order of their own: `next` walks through heads and strata. Samples depend on the seed,
// the call and the settings only.
struct Sampling {
  uint64_t call;
  double effort;  // of a dense call; negative: one of those above, as each head needs
  int64_t head = 0;
  int64_t samples = 0, taken = 0;  // of this head
};
// Fills up to kSamplesAtOnce samples of active heads; returns their number, 0 at the end.
int64_t NextSamples(const Plan& plan, const HeadChoice& heads, Sampling& sampling, Sample* out);

// Measures `count` samples on all threads, then tells the calibration, in order.
void MeasureSamples(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockMap& map,
                    const Measuring& memory, int64_t count);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_H_

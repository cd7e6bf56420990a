// Probes for a calibration: a few rows of a query block, densely, tile by tile, and from that their result under
// every tau and lambda of the grid.
#ifndef SPARGE_SRC_CPU_PROBE_H_
#define SPARGE_SRC_CPU_PROBE_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/calibrate/calibration.h"
#include "src/calibrate/sampling.h"
#include "src/cpu/pack.h"
#include "src/cpu/plan.h"
#include "src/cpu/predict.h"

namespace sparge::impl {

// Queries of a sample: fewer would be dearer by the row, and more say less by the row, for neighbours are alike.
int64_t SampleRows(const Plan& plan);

// A tile of some rows: its part of a row group's result, and how far its scores lie below the best so far.
struct Drop {
  float depth;  // natural-log units; the group skips the tile iff lambda <= depth
  int32_t tile, group;
};

// Working memory; all but samples and results per worker. A tile's results come in the order of rank.
struct ProbeMemory {
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
ProbeMemory LayProbeMemory(const Plan& plan, Arena& arena);

// Measures `count` of memory.samples on all threads, then tells the calibration, in order. Their masses are in the
// store.
void ProbeSamples(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& stage1,
                  const BlockMap& map, const ProbeMemory& memory, int64_t count);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_H_

// Probes for a calibration: a few rows of a head, densely, tile by tile, and from that their result under every tau and
// lambda of the grid.
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

// Queries of a sample: a row group, for fewer would be dearer by the row.
int64_t SampleRows(const Plan& plan);

// Working memory; all but samples and results per worker. What is per tile has the tiles that any row sees, ascending.
struct ProbeMemory {
  // The rows, gathered.
  std::byte* rows;
  float* queries;  // fp32, dim_pad floats each
  // Their results against each tile.
  int32_t* tiles;    // key block
  uint64_t* masked;  // bits by key block
  float* o;          // rows of `channels`, relative to m
  float* m;     // per row, padded to kChannelAlign; so are the next three. The best score of this tile and those before
  float* l;     // relative to m
  float* best;  // the best score of this tile
  float* weight;
  // One row at work.
  uint8_t* bucket;  // per tile
  int32_t* order;   // tiles by bucket, the last one first
  float* dense;     // `channels`
  float* exact;     // rows of `channels`: the same in fp32
  Sample* samples;
  RowResult* results;
};
ProbeMemory LayProbeMemory(const Plan& plan, Arena& arena);

// Measures `count` of memory.samples on all threads, then tells the calibration, in order. Their masses are in the
// store.
void ProbeSamples(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& stage1,
                  const BlockMap& map, const ProbeMemory& memory, int64_t count);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PROBE_H_

// All memory of one call, laid out in the caller's workspace and cache.
#ifndef SPARGE_SRC_CPU_WORKSPACE_H_
#define SPARGE_SRC_CPU_WORKSPACE_H_

#include <cstdint>
#include <vector>

#include "src/base/arena.h"
#include "src/cpu/decode.h"
#include "src/cpu/pack.h"
#include "src/cpu/plan.h"
#include "src/cpu/predict.h"
#include "src/cpu/probe.h"
#include "src/cpu/schedule.h"
#include "src/select/block_map.h"

namespace sparge::impl {

// What a calibrated plan decides per call, per query head. In the same place for every plan of a call.
struct Decisions {
  sparge_head_params* params;
  uint8_t* active;   // in the plan at hand
  uint8_t* done;     // computed by this or an earlier plan
  uint8_t* sampled;  // likewise, samples taken
  uint8_t* fresh;    // active and scored, and no samples taken yet
};

struct Workspace {
  Decisions decisions;  // plans whose calibration decides
  Packed packed;
  DecodeMemory decode;  // plans that decode: these have no more than this
  BlockMap map;
  Stage1 stage1;
  Schedule schedule;
  ProbeMemory probes;  // calibrated plans only
  int32_t* kept;       // per worker: indices of a row's kept tiles
  float* states;       // per worker, then per part: one query block's (m, l, o)

  RowState WorkerState(const Plan& plan, int32_t worker) const { return StateAt(plan, worker); }
  RowState PartState(const Plan& plan, int64_t part) const {
    return StateAt(plan, plan.machine.executor.workers + part);
  }
  static int64_t StateFloats(const Plan& plan) { return kBlockQ * (2 + plan.channels()); }

 private:
  RowState StateAt(const Plan& plan, int64_t index) const {
    float* base = states + index * StateFloats(plan);
    return {base + int64_t{2} * kBlockQ, base, base + kBlockQ};
  }
};

// `cache`: the caller's, for plans that have one.
Workspace LayWorkspace(const Plan& plan, Arena& arena, Arena& cache);
// From the first aligned byte of the caller's memory on.
Arena ArenaOf(void* memory);

// Behind the cache's mark, which says what it is laid for, the plans have their parts one after the other.
struct Cache {
  Arena arena;
  bool fits;  // what is in it is of use
};
Cache OpenCache(const std::vector<Plan>& plans, const sparge_run_args& args);

Needs SizesOf(const std::vector<Plan>& plans);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_WORKSPACE_H_

// Stage 1 on the CPU: which tiles to compute. Works from what packing left, the caller's mask or map, and positions;
// never from q or k.
//
//   visible   a tile is eligible iff some query of it sees some key of it (causal, window, length, mask)
//   score     how much of the row's attention a tile holds. Predictor `keys`: masses.h. Predictor `paper`: mean of the
//             query block . mean of the key block, as attention would score it
//   select    src/select/select.h
//
// A calibrated plan chooses between scoring and selecting: its masses are kept in between, of as many heads as fit.
#ifndef SPARGE_SRC_CPU_PREDICT_H_
#define SPARGE_SRC_CPU_PREDICT_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/cpu/masses.h"
#include "src/cpu/pack.h"
#include "src/cpu/plan.h"
#include "src/select/block_map.h"
#include "src/select/select.h"

namespace sparge::impl {

struct HeadRange {
  int64_t begin, end;
};

// The masses of the tiles of some heads: those of Problem::QueryBlock `row` are at Row(row).
struct MassStore {
  float* mass;     // kHidden marks tiles that are not visible
  int64_t stride;  // floats per row
  int64_t heads;   // that fit
  int64_t rows_per_head;
  int64_t first_head = 0;
  uint8_t* scored;  // per query head: its masses are here

  static constexpr float kHidden = -1.0f;
  float* Row(int64_t row) const { return mass + (row - first_head * rows_per_head) * stride; }
};

// Memory of stage 1, per worker, beside the map.
struct Stage1 {
  PoolMemory pools;
  MassStore store;  // calibrated plans
  std::byte* scratch;
};
Stage1 LayStage1(const Plan& plan, Arena& arena);

// Scores and selects: fills the map for the active heads; rows of others have no eligible tile.
void PredictAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                const Stage1& memory, const BlockMap& map);

// The same in two steps, for a calibrated plan and `range.end - range.begin` <= store.heads of its heads. First the
// masses of the heads with store.scored, then what follows from them and from heads.params.
void ScoreHeads(const Plan& plan, HeadRange range, const sparge_run_args& args, const Packed& packed,
                const Stage1& memory, const BlockMap& map);
void SelectHeads(const Plan& plan, const HeadChoice& heads, HeadRange range, const sparge_run_args& args,
                 const Packed& packed, const Stage1& memory, const BlockMap& map);

// Writes the map of the active heads as bytes into a (batch, q_heads, q_blocks, k_blocks) array of zeros.
void WriteMap(const Plan& plan, const HeadChoice& heads, const BlockMap& map, uint8_t* out);

// The part of a block's rule that says which tiles are kept whatever their mass is.
RowRule ForcedRule(const Plan& plan, const BlockId& id);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PREDICT_H_

// The contract of the attention kernels: stage 2, for one query block against the key blocks that stage 1 kept.
//
// A kernel computes, for every row r of the query block, over the visible keys j of the kept blocks,
//
//   s(r,j) = rule(sum_d q(r,d) k(j,d))          in log2 units
//   m(r)   = max_j s(r,j),  l(r) = sum_j 2^(s(r,j) - m(r)),  o(r,c) = sum_j 2^(s(r,j) - m(r)) v(j,c)
//
// with the flash-attention recurrence, tile by tile in ascending order, and leaves (o, m, l) to the caller. A row group
// skips exponentials and PV of a tile iff no row of the group has a tile maximum > (its running maximum - skip).
//
// Kernels are leaves: they know packed blocks and nothing of plans, threads or allocation.
#ifndef SPARGE_SRC_CPU_KERNEL_KERNEL_H_
#define SPARGE_SRC_CPU_KERNEL_KERNEL_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>

#include "src/base/tokens.h"
#include "src/base/units.h"
#include "src/base/visible.h"
#include "src/problem/score_rule.h"

namespace sparge::impl {

// Packed operands are made of 32-bit lanes: one float, a pair of int16 or a quad of int8 along the summed dimension
// (head dimension for QK, keys for PV). A key block holds, for each step of PerLane dims, one lane per key; a value
// block, for each step of PerLane keys, one lane per channel. Lanes are grouped in panels (KernelOps::panel_lanes): all
// steps of the first panel, then all of the second, and so on. docs/layout.md has a worked example.
inline constexpr int kLaneBytes = 4;
inline constexpr int kChannelAlign = 16;  // channels are padded to the widest vector of lanes
inline constexpr int PerLane(sparge_precision precision) {
  return precision == SPARGE_PRECISION_FP32 ? 1 : precision == SPARGE_PRECISION_INT16 ? 2 : 4;
}
// The integers that a kernel can multiply without overflow. Packing obeys; docs/numerics.md has the bounds.
//
// A bound on L2 norms is one on sums of products, too (Cauchy-Schwarz), and lets narrow accumulators wrap on the way.
// It holds for what one accumulator sums: all numbers of a row; or, where `sum_lanes` is not 0, the first halves of so
// many neighbouring lanes, and likewise their second halves. In PV: the keys of a block, or every key that falls into
// the first half of a lane, and likewise the second.
struct QuantGrid {
  int q_max;           // |q| <= q_max, stored as q + q_offset
  int q_offset = 0;    // makes q unsigned where the instruction wants that
  int k_max;           // |k| <= k_max
  int p_max;           // probabilities 0..p_max, p_max standing for the tile's row maximum
  int v_max;           // |v| <= v_max
  int fine_max;        // the second half of a value's bits: |.| <= fine_max, in steps of 1 / (2 fine_max)
  int q_norm_max = 0;  // bounds on L2 norms of integers; 0 = not needed
  int k_norm_max = 0;
  int p_norm_max = 0;
  int v_norm_max = 0;
  int sum_lanes = 0;    // lanes of a row that one narrow accumulator sums; 0 = all
  bool rotate = false;  // rows are rotated before rounding, see rotate-inl.h

  // Accumulations per row of so many lanes.
  constexpr int64_t Sums(int64_t row_lanes) const {
    return sum_lanes == 0 ? 1 : (row_lanes + sum_lanes - 1) / sum_lanes;
  }
};

// One query block, packed: `count` rows of `row_lanes` lanes.
struct QueryBlock {
  const std::byte* rows;
  int64_t row_lanes;
  const float* factor;  // per row: score in log2 units = integer dot * key scale * factor (fp32: already in q)
  const float* shift;   // per row: what centring the keys took from the score, log2 units; NaN = the row is not finite
  int64_t first;        // index of row 0 in its sequence
  int count;            // 1..kBlockQ
  int64_t step = 1;     // from row to row
  int64_t pooled = 1;   // queries that a row stands for, at the position of their last one

  int64_t Position(int64_t row) const { return first + row * step; }
  // What a row stands for by distance, if it stands for `pooled` queries up to `last`.
  static int64_t Middle(int64_t last, int64_t pooled) { return last - (pooled - 1) / 2; }
};

// When the second half of a value block's bits is worth its product. One token much smaller than the others of its
// block (the first token of a text is often such a sink) drowns in their step; it hurts where that token has most
// weight.
enum class FineValues : uint8_t { kNever, kForPeaks, kAlways };

// All key and value blocks of one sequence and kv head, packed.
struct KeyValueBlocks {
  const std::byte* keys;   // per block: row_lanes x kBlockK lanes, in panels
  const float* key_scale;  // per key (integers only)
  // Where the accumulation starts, per block, accumulation and key: -q_offset * sum of the key's integers (int8 only).
  // Narrow accumulators: a pair of int16 for the two halves of the lanes.
  const int32_t* key_start;
  const uint64_t* poison;    // per block: bit j = key or value j is not finite; stored as zeros
  const std::byte* values;   // per block: (kBlockK / PerLane) x channels lanes, in panels
  const float* value_scale;  // per block and channel (integers only)
  // Integers only: what rounding left of the values, in the same layout, in steps of value_scale / (2 fine_max); and
  // when it is needed.
  const std::byte* fine_values;
  const FineValues* fine;
  int64_t channels;  // v_dim rounded up to kChannelAlign
};

// Instead of packed blocks: all tokens of one sequence and kv head as they are, for the direct kernel. They have no
// order.
struct DirectTokens {
  TokenRows keys, values;
};
// Scores of the direct kernel are bounded by this, log2 units, so that their differences are finite.
inline constexpr float kDirectScoreLimit = 1e30f;

// The online-softmax state of the rows. Empty: m = -inf, l = 0, o = 0.
struct RowState {
  float* o;  // count x channels
  float* m;
  float* l;  // NaN = the row saw a key that is not finite
};

struct KernelArgs {
  QueryBlock query;
  KeyValueBlocks blocks;
  DirectTokens direct;
  ScoreRule rule;
  const int32_t* kept;           // ascending key block indices
  const uint64_t* masked_tiles;  // bit per key block: the mask changes this tile; NULL = no mask
  int64_t kept_count;
  float skip;  // lambda in log2 units; infinity = never skip
  // Per row: a score that it has in another part, log2 units, so that a tile can be skipped beside it; NULL = none.
  const float* known;
  // Per row: the sum of 2^(s - known) over that other part, for whoever goes on from there: what rounding may lose is
  // judged beside it, and state.l includes it; NULL = 0.
  const float* known_sum;
  // Per row: PV of a tile is left out as well if the sum of 2^(s - known) over its keys is below this for every row of
  // a group; NULL = none.
  const float* least;
  // So few rows that a tile is read from memory for them: the next one is asked for in time, values if all are needed.
  bool foresee, foresee_values;
  RowState state;
  float* best;         // result, per row: the best score of the kept tiles, -inf = sees none; NULL = not wanted
  uint8_t* pv_groups;  // result, per key block: row groups whose PV was computed, of kept ones only; NULL = not wanted
};

// Where Masses puts its results, per row of the query block: for each key block b of `blocks`
//   mass(r,b) = sum over the visible keys j of b of 2^(s(r,j) - max over all j of s(r,j))
struct MassArgs {
  Range blocks;
  float* mass;     // row r, block b: [r * stride + b]
  float* top;      // the same; scratch
  float* row_top;  // row r: the maximum over all j
  int64_t stride;  // at least blocks.end
};

// Writes `count` finished rows: o / l, in the output's type.
struct FinishArgs {
  RowState state;
  int64_t channels;
  int64_t count, v_dim;
  float value_unit;  // values were divided by this power of two
  std::byte* out;
  sparge_dtype dtype;
  int64_t token_stride;            // elements
  const int32_t* order = nullptr;  // row r goes to place order[r]; NULL: to place r
};

// The kernels of one instruction set.
struct KernelOps {
  const char* int8_text;  // the int8 arithmetic in words
  int group_rows;         // rows that the PV skip decides for together
  int pass_rows;          // rows that meet a tile together, whole groups; the most that `masses` takes
  int panel_lanes;        // lanes of packed keys and values that lie together
  QuantGrid grid[3];      // by sparge_precision
  // Returns how many row groups were PV-skipped. One function per precision.
  int64_t (*attend[3])(const KernelArgs&);
  // The same in fp32 straight from the tensors; of `blocks` it reads `channels` only.
  int64_t (*attend_direct)(const KernelArgs&);
  // Of `args`: query, blocks (keys only) and rule, without mask. One function per precision.
  void (*masses[3])(const KernelArgs& args, const MassArgs& to);
  void (*finish)(const FinishArgs&);
};
// Of one of Highway's targets; NULL if that was not compiled in.
const KernelOps* KernelOpsOf(int64_t target);
// The same kernels with the dot products that some processors have beyond a target: of AVX2, and of NEON. Where that
// target is compiled in.
const KernelOps* AvxVnniOps();
const KernelOps* NeonDotprodOps();
const KernelOps* NeonI8mmOps();

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_KERNEL_KERNEL_H_

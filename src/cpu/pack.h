// Packing: reads q, k and v once, writes the kernel's blocks, and as a by-product the summaries that stage 1 works
// from.
#ifndef SPARGE_SRC_CPU_PACK_H_
#define SPARGE_SRC_CPU_PACK_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/base/arena.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/plan.h"

namespace sparge::impl {

// The similarity of a block whose mean does not speak for it at any theta.
inline constexpr float kNotAlike = -std::numeric_limits<float>::infinity();

// What stage 1 knows of the blocks of q or k: the mean of their tokens and how alike the tokens are.
struct BlockSummaries {
  float* mean;        // per block (q: per pool): dim_pad floats; k: centred, in units of KeyUnits::k_unit
  float* similarity;  // per block: squared norm of the mean unit vector, 0..1; or kNotAlike
};

// Per sequence and kv head. Keys and values are divided by a power of two close to their largest magnitude, so that no
// later product or sum can overflow, whatever finite numbers come in; docs/numerics.md.
struct KeyUnits {
  double k_unit;  // stored key = (key - mean) / k_unit, |stored| <= 4
  double v_unit;  // stored value = value / v_unit, |stored| < 2
};

// Largest power of two <= max_abs, within what float can invert: 2^-100..2^127.
double UnitFor(float max_abs);
// Keys near the largest float are not centred: the difference could overflow, and softmax is one-hot there anyway.
inline constexpr float kMostCentred = 0x1p126f;

// What the caller's cache knows of the keys and values that are packed in it; all NULL without one.
struct KeyCache {
  int64_t* centred;    // per sequence and kv head: how many keys its mean is of; 0 = nothing here is of use
  uint64_t* checksum;  // per key block: of the tokens that are packed there
  uint8_t* stale;      // per key block: to be packed in this call
  uint64_t* glance;    // per key block: GlanceAt of the tokens that are packed there
  // What the last call that decodes or glances saw. Per sequence and its key blocks: GlanceAt; SampleAt, and per
  // sequence how many keys (0 if a call has come since that does not decode), and where.
  uint64_t *seen, *sample;
  int64_t* keys_seen;
  uint64_t* place_seen;
};

// Everything packed. Blocks are indexed by Problem::QueryBlock and Problem::KeyBlock.
struct Packed {
  // Keys and values: in the workspace, or in the caller's cache.
  KeyCache cache;
  KeyUnits* units;   // per sequence and kv head
  float* key_mean;   // per sequence and kv head: dim_pad floats
  float* block_max;  // per key block: largest |k|, largest |v| (from the first pass)
  int32_t* finite;   // per key block: number of finite keys (from the first pass)
  BlockSummaries k;
  std::byte* keys;
  float* key_scale;
  int32_t* key_start;
  uint64_t* poison;
  std::byte* values;
  float* value_scale;
  std::byte* fine_values;  // integers only
  FineValues* fine;        // integers only
  // Queries: in the workspace.
  BlockSummaries q;
  UnlikeRows* unlike;  // per query block; NULL where no pool stands for its rows
  std::byte* queries;
  float* q_factor;
  float* q_shift;
  float* scratch;  // per worker: scratch_floats

  static int64_t scratch_floats(const Plan& plan);
};

// `cache`: the caller's, for plans that have one.
Packed LayPacked(const Plan& plan, Arena& arena, Arena& cache);

// What a cache was laid for: it is of no use to a call whose plans say something else.
uint64_t CacheKind(const std::vector<Plan>& plans);
// Forgets all that is in a plan's part of the cache.
void EmptyCache(const Plan& plan, const Packed& packed);
// Of what calls that decode saw: a call came by that did not look.
void ForgetSteps(const Plan& plan, const Packed& packed);

// Key blocks of the active heads, and how many of them the cache had.
struct KeyBlockCounts {
  int64_t all, reused;
};
// First pass over the keys, then all blocks of the active heads. `with_values` false: v is not read (stage 1 only).
KeyBlockCounts PackAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, bool with_values,
                       const Packed& packed);

// Sums over keys leave or come, and are those of the keys as they are, not of the centred ones.
inline bool IsAbsolute(const sparge_run_args& args) {
  return args.pool_lse != nullptr || args.pool_lse_out != nullptr || args.pool_codes_out != nullptr;
}

// Where packed queries go.
struct QueryRows {
  std::byte* rows;  // per row: row_lanes lanes
  float* factor;    // per row
  float* shift;     // per row
};
// Packs some rows of a sequence and head for the kernel, and nothing else of them. `absolute`: with what softmax does
// not see.
void PackRowsOnly(const Plan& plan, const Packed& packed, const BlockId& id, const TokenRows& tokens, bool absolute,
                  int32_t worker, const QueryRows& out);
// Row r of `to` becomes the packed query at `place`: Problem::QueryBlock * kBlockQ and the row within the block.
void CopyQuery(const Plan& plan, const Packed& packed, int64_t place, int64_t r, const QueryRows& to);
// Pooled queries of one head, from the block's first pool on, as the kernel takes them. `absolute`: the shift is
// wanted.
void PackPools(const Plan& plan, const Packed& packed, const BlockId& block, int64_t count, bool absolute,
               int32_t worker, const QueryRows& out);

// Queries that a plan that decodes takes together: of one head, or one query of several heads.
struct QueryRun {
  int64_t sequence, head, query;  // of the first row
  int64_t count;
  bool over_heads;

  TokenRows Tokens(const Plan& plan, const sparge_run_args& args) const;
};
// As the kernel takes them, with their shift.
void PackQueryRun(const Plan& plan, const sparge_run_args& args, const Packed& packed, const QueryRun& run,
                  int32_t worker, const QueryRows& out);
// As the direct kernel takes them.
void PackDirectRun(const Plan& plan, const sparge_run_args& args, const QueryRun& run, const QueryRows& out);

// Packs one more key block beside those in the cache. False: it does not fit their units.
bool PackAnother(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                 int32_t worker, int64_t task);

// All packed blocks of a sequence and kv head, whose first one is Problem::KeyBlock `first`.
KeyValueBlocks PackedBlocks(const Plan& plan, const Packed& packed, int64_t first);

// The kernel's arguments for one packed query block, all but kept tiles, masked tiles, skip and state.
KernelArgs BlockArgs(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id);
// All tokens of the block's sequence and kv head as they lie.
DirectTokens TokensOf(const Plan& plan, const sparge_run_args& args, const BlockId& id);

// For Plan::direct: the queries only, as floats.
Packed LayDirect(const Plan& plan, Arena& arena);
void PackDirect(const Plan& plan, const sparge_run_args& args, const Packed& packed);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PACK_H_

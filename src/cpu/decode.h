// Few queries against keys and values that earlier calls left packed in the cache: what a language model does for every
// token that it writes. Time goes into reading, so keys are read once for all query heads that share them, and the
// tensors themselves are only glanced at.
#ifndef SPARGE_SRC_CPU_DECODE_H_
#define SPARGE_SRC_CPU_DECODE_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/cpu/pack.h"
#include "src/cpu/plan.h"

namespace sparge::impl {

// What came of a part of the keys of one kv head.
struct PartCounts {
  int64_t tiles;    // visible
  int64_t skipped;  // row groups whose PV was skipped
};

struct DecodeMemory {
  QueryRows packed, direct;  // every query of every head, as the two kinds of kernel take them
  uint64_t* glance;          // per sequence and key block: what it looks like now
  float *o, *m, *l;          // per part and row
  float* least;              // per row: what a tile must hold, in units of 2^m of part 0
  PartCounts* counts;        // per part, sequence and kv head
  float* direct_o;           // per worker: rows of what is read from the tensors
  float *direct_m, *direct_l;
  int32_t* kept;     // per worker: the blocks of a part
  uint64_t* masked;  // per worker: bit per key block
};
DecodeMemory LayDecode(const Plan& plan, Arena& arena);

// Brings the cache up to date: what much has changed in is packed anew, a block that stays as it is, too; others wait.
KeyBlockCounts RefreshCache(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args,
                            const Packed& packed, const DecodeMemory& memory);
// The output of the active heads.
void DecodeHeads(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                 const DecodeMemory& memory, sparge_stats& stats);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_DECODE_H_

// The predictor `keys`: how much attention the tiles of a query block hold, judged by a few pooled queries (means of
// neighbouring ones) against every key. A mean of keys hides a single strong one; a look at each costs p / 128 of QK.
//
//   mass(pool, tile) = sum over the keys j of the tile that the pool sees of exp(score(pool, j))
//   share(pool, tile) = mass(pool, tile) / sum over visible tiles of mass(pool, .)
//   mass(tile)        = mean over the block's pools of share(pool, tile)
//
// A query that is unlike its pool (UnlikeRows) is a pool of its own beside: a tile of which its share is large has the
// mass 1, for it may be the only one that looks there.
//
// The sum of a pool can leave as a logarithm (pool_lse_out), and come from outside (pool_lse) where the keys are a
// part.
#ifndef SPARGE_SRC_CPU_MASSES_H_
#define SPARGE_SRC_CPU_MASSES_H_

#include <cstdint>

#include "src/base/arena.h"
#include "src/cpu/pack.h"
#include "src/cpu/plan.h"

namespace sparge::impl {

// Working memory, per worker.
struct PoolMemory {
  std::byte* rows;  // packed pools, then the queries of a block that are pools of their own
  float* factor;
  float* shift;
  float* row_top;  // per pool: what its masses are relative to, log2 units
  float* mass;     // per pool: `stride` floats, one per key block
  float* top;
  int64_t stride;
};

PoolMemory LayPoolMemory(const Plan& plan, Arena& arena);

// How many query blocks are judged together: as many as fill the rows of one pass of the kernel.
int64_t PooledBlocks(const Plan& plan);

// The masses of the pools of `blocks` query blocks from `first` on, all of one head and sequence, for RowMasses.
void PoolMasses(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& first,
                int64_t blocks, int32_t worker, const PoolMemory& memory);

// mass[j] of the tiles of the i'th of these query blocks. But for what queries of their own add, they sum to 1 over the
// visible ones, or are all 0; over the visible ones of all parts, if the sums come from outside.
void RowMasses(const Plan& plan, const sparge_run_args& args, const Packed& packed, const PoolMemory& memory,
               const BlockId& block, int64_t i, int32_t worker, const bool* visible, double* mass);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_MASSES_H_

// The vector functions of packing, one set per instruction set; pack.cc calls them block by block.
#ifndef SPARGE_SRC_CPU_PACK_OPS_H_
#define SPARGE_SRC_CPU_PACK_OPS_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>

#include "src/base/packing.h"
#include "src/base/tokens.h"
#include "src/cpu/kernel/kernel.h"
#include "src/select/unlike.h"

namespace sparge::impl {

// Largest magnitude over the finite tokens, their mean (if `mean` is not NULL) and their number.
struct Survey {
  float max_abs;
  int32_t finite;
};

// Packs the rows of one query or key block:
//   keys: x = (token - centre) * inverse_unit,  queries: x = token
//   stored = round(x / scale) + offset, as lanes of `precision`
// where scale makes the integers keep |.| <= max and |.|_2 <= norm_max. fp32 stores keys as x, queries as x * factor.
struct PackRowsArgs {
  TokenRows tokens;
  int64_t dim_pad;
  sparge_precision precision;
  const float* centre;  // dim_pad floats: mean of the keys
  float inverse_unit;
  int max, norm_max, offset;
  int sum_lanes;  // as QuantGrid::sum_lanes
  bool rotate;
  bool is_query;
  // Queries: score = dot * factor, factor = (scale of the row) * score_factor, bounded by limit / max (integers) or
  // limit / max|row| (fp32), so that scores stay finite.
  double score_factor, limit;
  // Results. Queries: row_lanes lanes per row. Keys: a block in panels, see kernel.h.
  int32_t* out;
  int64_t row_lanes;
  float* scale;         // per row: keys: the scale; queries: the score factor. NULL for fp32 keys
  int32_t* start;       // per accumulation (kBlockK apart) and row, as KeyValueBlocks::key_start; NULL = not needed
  int start_offset;     // offset_of_q
  float* mean;          // per run of pool_rows rows: dim_pad floats: mean of x; NULL = no summary
  int64_t pool_rows;    // a multiple of 16, the most rows that are packed at once
  float* similarity;    // one float
  double shift_factor;  // 0: the shift is not needed
  float* shift;         // queries: per row, shift_factor * (token . centre); NaN marks a row that is not finite
  float* scratch;       // RowScratchFloats(dim_pad)
};

struct PackValuesArgs {
  TokenRows tokens;
  int64_t channels;
  sparge_precision precision;
  float inverse_unit;
  int max, norm_max, fine_max;  // as QuantGrid
  int32_t* out;                 // kBlockK / PerLane rows of `channels` lanes
  float* scale;                 // per channel; NULL for fp32
  int32_t* fine_out;            // the second half of bits, laid out as `out`; NULL for fp32
  FineValues* fine;             // when it is needed; NULL for fp32
  float* scratch;               // ValueScratchFloats(channels)
};

// The widest vectors have 16 lanes: so many rows and one of sums; a block of values and one row of scales.
inline constexpr int64_t RowScratchFloats(int64_t dim_pad) { return (16 + 1) * dim_pad; }
inline constexpr int64_t ValueScratchFloats(int64_t channels) { return (kBlockK + 1) * channels; }

// The queries of one block for the direct kernel: floats, brought to at most 2^-12, and the factor from dot to score.
struct DirectRowsArgs {
  TokenRows tokens;
  int64_t dim_pad;
  double score_factor;
  float* out;     // per row: dim_pad floats
  float* factor;  // per row
  float* shift;   // per row: 0; NaN marks a row that is not finite
};

struct UnlikeArgs {
  TokenRows tokens;
  int64_t dim_pad;
  const float* mean;  // as PackRowsArgs
  int64_t pool_rows;
  float* scratch;  // 2 dim_pad floats
};

// What a checksum comes to with one more number.
inline uint64_t Mix(uint64_t sum, uint64_t number) {
  const uint64_t product = (sum ^ number) * 0xff51afd7ed558ccdu;
  return product ^ product >> 32;
}

struct PackOps {
  Survey (*survey)(const TokenRows& tokens, int64_t dim_pad, float* mean, float* scratch);
  uint64_t (*rows)(const PackRowsArgs& args);      // bit t = token t is not finite (keys)
  uint64_t (*values)(const PackValuesArgs& args);  // likewise
  void (*direct_rows)(const DirectRowsArgs& args);
  void (*unlike)(const UnlikeArgs& args, UnlikeRows& out);
  // 64 bits of the tokens as they lie, for telling whether they are still the same.
  uint64_t (*checksum)(const TokenRows& tokens);
  // Likewise, quick where tokens are short and far apart.
  uint64_t (*glimpse)(const TokenRows& tokens);
};

// Of one of Highway's targets; NULL if that was not compiled in.
const PackOps* PackOpsOf(int64_t target);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PACK_OPS_H_

// What the host tells the kernels: plain structs, alike for both compilers, and the layout of packed operands.
#ifndef SPARGE_SRC_CUDA_KERNEL_PARAMS_H_
#define SPARGE_SRC_CUDA_KERNEL_PARAMS_H_

#include <cstdint>

namespace sparge::cuda {

#ifdef __CUDACC__
#define SPARGE_BOTH __host__ __device__
#else
#define SPARGE_BOTH
#endif

inline constexpr int kTileQ = 128;       // SPARGE_BLOCK_Q
inline constexpr int kTileK = 64;        // SPARGE_BLOCK_K
inline constexpr int kLargestDim = 256;  // that there are kernels for
inline constexpr int kThreads = 128;
inline constexpr int kWarpRows = 32;  // query rows of a warp: the PV skip decides for them together
inline constexpr int kPools = 2;      // pooled queries of a block (select/predictors.h)
inline constexpr int kPoolRows = kTileQ / kPools;
inline constexpr int kOwnRows = 6;  // queries of a block that are judged by themselves (kMostUnlike of the CPU)
inline constexpr int kScoredRows = kPools + kOwnRows;

// Packing has a thread per channel.
SPARGE_BOTH constexpr int PackThreads(int dim) { return dim < 128 ? 128 : dim; }
// Shared memory that a launch of the packing of queries asks for: the rows of a pool, and little beside.
SPARGE_BOTH constexpr int LaunchedPackBytes(int dim) { return dim <= 128 ? 0 : (kPoolRows + kPools + 8) * dim * 4; }

// Keys of one step of the attention kernel: what two stages of shared memory and the registers have room for.
SPARGE_BOTH constexpr int StepKeys(int dim) { return dim == 64 ? 64 : 32; }
// Channels of the output that a block of the attention kernel has registers for, and how many blocks share the others:
// each of them computes the scores anew.
SPARGE_BOTH constexpr int ChannelsAtOnce(int dim) { return dim < 128 ? dim : 128; }
SPARGE_BOTH constexpr int ChannelParts(int dim) { return dim / ChannelsAtOnce(dim); }

// One step of packed keys and values as it lies in shared memory: keys (a row of `dim` bytes per key), values of a part
// of the channels (f16: a row of 2 bytes per channel for each key; e4m3: a row of StepKeys bytes per channel), then one
// float per key, its scale. A step has such an image for every part. Rows are made of chunks of 16 bytes, which
// SwizzledChunk moves so that 8 rows at the same chunk touch every bank once.
SPARGE_BOTH constexpr int KeyBytes(int dim) { return StepKeys(dim) * dim; }
SPARGE_BOTH constexpr int ValueBytes(int dim, bool fp8) { return StepKeys(dim) * ChannelsAtOnce(dim) * (fp8 ? 1 : 2); }
SPARGE_BOTH constexpr int StepBytes(int dim, bool fp8) {
  return KeyBytes(dim) + ValueBytes(dim, fp8) + StepKeys(dim) * 4;
}
// Bytes from one block of keys to the next.
SPARGE_BOTH constexpr int64_t BlockStepBytes(int dim, bool fp8) {
  return int64_t{kTileK / StepKeys(dim)} * ChannelParts(dim) * StepBytes(dim, fp8);
}
// A block of queries: a row of `dim` bytes per query, then the factor of each.
SPARGE_BOTH constexpr int QueryBytes(int dim) { return kTileQ * dim + kTileQ * 4; }

// Shared memory that a launch of the attention kernel asks for: the queries and two steps.
SPARGE_BOTH constexpr int LaunchedAttendBytes(int dim, bool fp8) { return QueryBytes(dim) + 2 * StepBytes(dim, fp8); }

// Place of a chunk in a row of kRowBytes.
template <int kRowBytes>
SPARGE_BOTH constexpr int SwizzledChunk(int row, int chunk) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0);
  if (kRowBytes == 32) return chunk ^ ((row >> 2) & 1);
  if (kRowBytes == 64) return chunk ^ ((row >> 1) & 3);
  return chunk ^ (row & 7);
}
// Where the byte of (row, byte of the row) lies.
template <int kRowBytes>
SPARGE_BOTH constexpr int SwizzledByte(int row, int byte) {
  return row * kRowBytes + SwizzledChunk<kRowBytes>(row, byte / 16) * 16 + byte % 16;
}

// e4m3: where a token of 16 stands, so that the scores of a lane are the bytes of its operand.
SPARGE_BOTH constexpr int E4m3Place(int token) { return token % 8 / 2 * 4 + (token & 1) + token / 8 * 2; }
// Probabilities are scaled by 2^8 for e4m3, whose largest number is 448.
inline constexpr float kE4m3Shift = 8;

struct SequenceInfo {
  int64_t index;  // in the batch
  int64_t q_begin, k_begin;
  int64_t offset, window;  // Visible
  int32_t q_count, q_blocks, q_block_begin;
  int32_t k_count, k_blocks, k_block_begin;
  int32_t causal;
  int32_t tail_begin;  // from this query on blocks keep all tiles (dense_tail)
};

// What all kernels know of the problem. Blocks are numbered through all sequences of a head (problem.h).
struct Shape {
  const SequenceInfo* sequences;
  const int32_t* sequence_of_q_block;
  const int32_t* sequence_of_k_block;
  int32_t sequence_count;
  int32_t q_heads, kv_heads, heads_per_kv;
  int32_t all_q_blocks, all_k_blocks;
  int32_t q_blocks, k_blocks;  // of the longest sequence: the shape of maps
  int32_t qk_dim, v_dim;
  int32_t packed;  // no batch dimension
  int32_t kept_words;
};

// A strided tensor of the caller (sparge_tensor).
struct Tensor {
  void* data;
  int64_t batch_stride, head_stride, token_stride;
  int32_t dtype;
  int32_t unused;
};

// One entry per query head.
struct HeadParams {
  double theta, tau, topk;
  float skip;  // log2 units; infinity = never
  float sink;  // log2 units; -infinity = none
};

// Per sequence and kv head (Problem::KvUnit).
struct KeyUnit {
  double score_factor;  // from dot to score, log2 units, but for the scales of the rows
  float inverse_unit;   // of keys: a power of two
  int32_t unused;
};

// As sparge_head_stats.
struct HeadStats {
  unsigned long long qk_eligible, qk_computed, pv_eligible, pv_computed;
};

// First pass over the keys and values. Blocks of keys are numbered through all kv heads (Problem::KeyBlock), the place
// of a channel among `dim` ones.
struct SurveyParams {
  Shape shape;
  Tensor k, v;           // v.data NULL: stage 1 alone
  double scale;          // of scores, log2 units, by the rotation
  float* block_mean;     // per block and channel, of finite keys
  float* block_max;      // per block: largest |k|
  int32_t* finite;       // per block: finite keys
  float* value_max;      // per block and channel: largest |v| of finite values
  float* key_mean;       // per KvUnit and channel
  KeyUnit* units;        // per KvUnit
  float* value_inverse;  // per KvUnit and channel: a power of two that brings values below 2
  float* value_step;     // per KvUnit and channel: what these are multiplied by before rounding
  float* value_unit;     // per KvUnit and channel: back to values
};

// Keys and values.
struct PackKeysParams {
  Shape shape;
  Tensor k, v;
  const float* key_mean;
  const KeyUnit* units;
  const float* value_inverse;
  const float* value_step;
  int32_t rotation;    // block size
  int32_t summarises;  // block_mean and similarity are wanted
  uint8_t* steps;      // BlockStepBytes per block
  float* key_scale;    // per key, finite ones and others alike
  float* block_mean;   // per block and channel: of the centred keys, in units
  float* similarity;   // per block
};

// Rows that stage 1 scores against every key, kScoredRows per query block: pools, then queries by themselves.
struct ScoredRows {
  uint8_t* rows;  // dim bytes each
  float* factor;
  float* shift;
  int32_t* own;  // per query block: queries by themselves
};

struct PackQueriesParams {
  Shape shape;
  Tensor q;
  const float* key_mean;
  const KeyUnit* units;
  int32_t rotation;
  int32_t pools;       // per block that means are wanted of; 0: none
  int32_t judges;      // queries that are unlike their pool are judged by themselves
  int32_t scores_all;  // pools are scored against every key: `scored` is wanted
  double shift_factor;
  double factor_limit;
  uint8_t* queries;   // QueryBytes per block
  float* q_shift;     // per query: what centring took from its scores, log2 units
  float* mean;        // per pool and channel
  float* similarity;  // per block
  ScoredRows scored;
};

// Stage 1 works on rows of the map, those of query blocks [first_row, first_row + row_count) of all heads.
struct StageParams {
  Shape shape;
  const HeadParams* heads;
  int32_t first_row, row_count;
  int32_t mode;  // StageMode
  int32_t logs;  // scores are logarithms (the paper's predictor)
  int32_t keep_sink;
  int32_t near_keys;   // kept before each causal query
  int32_t own_rows;    // queries by themselves are scored
  float softcap;       // log2 units
  double mean_factor;  // from means to scores, log2 units, but for the unit of keys
  ScoredRows scored;
  const uint8_t* steps;
  int32_t step_bytes;
  int32_t pool_window;  // by how much the window of a pool is longer
  const float* key_scale;
  const float* q_mean;
  const float* q_similarity;
  const float* k_mean;
  const float* k_similarity;
  const float* key_mean;
  const KeyUnit* units;
  float* scores;  // per row of the map: score_rows rows of k_blocks
  int32_t score_rows;
  int32_t unused;
  const uint8_t* map;  // SELECT_MAP
  int64_t map_batch_stride, map_head_stride;
  uint32_t* kept;
  uint8_t* map_out;  // (batch, q_heads, q_blocks, k_blocks); NULL = not wanted
  float* mass_out;   // likewise
  HeadStats* stats;
};
enum StageMode : int32_t { kAllTiles, kMapTiles, kByMass, kByCount, kByFloor };

// Zeros and log-sum-exp -inf for queries of a sequence without keys.
struct EmptyRows {
  int64_t index, q_begin, q_count;
};
struct EmptyParams {
  Shape shape;
  const EmptyRows* rows;
  Tensor o;
  float* lse;
  int64_t lse_batch_stride, lse_head_stride;
};

// The kept bits: kept_words 32-bit words per query block of all heads.
struct AttendParams {
  Shape shape;
  const HeadParams* heads;
  const uint8_t* queries;   // QueryBytes per query block
  const float* q_shift;     // per query: what centring took from its scores, log2 units
  const uint8_t* steps;     // BlockStepBytes per block of keys
  const float* value_unit;  // per KvUnit and channel
  const uint32_t* kept;
  float softcap;  // log2 units; 0 = off
  int32_t unused;
  Tensor o;
  float* lse;  // NULL = not wanted
  int64_t lse_batch_stride, lse_head_stride;
  HeadStats* stats;  // (batch, q_heads); NULL = not wanted
};

// Partial results over different keys, joined (sparge_merge_parts). A launch takes what a kernel has room for.
inline constexpr int kMostParts = 32;
struct Part {
  Tensor o;
  float* lse;
  int64_t lse_batch_stride, lse_head_stride;
};
struct MergeParams {
  Part parts[kMostParts];
  Part out;  // may be one of them
  int64_t tokens;
  int32_t count, dim;
};

}  // namespace sparge::cuda
#endif  // SPARGE_SRC_CUDA_KERNEL_PARAMS_H_

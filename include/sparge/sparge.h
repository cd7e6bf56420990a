/* sparge.h - the C ABI of sparge: block-sparse, quantised attention on CPUs, and on NVIDIA GPUs (docs/cuda.md).
 *
 * Use: make a context (threads, instruction set), make a plan from shapes and parameters, ask how much workspace it
 * needs, run it as often as you like, destroy both. `run` allocates nothing, prints nothing and never exits.
 *
 * Structs that may grow begin with their size: call the `_init` function, then set what you need. It is inline, so that
 * the size is that of the header you compile with: a newer library never writes past it, and takes its own defaults for
 * what your header lacks. From another language call `_init_sized` with the size of your own struct. Structs without a
 * size are final. So a program that was compiled with this header, or with that of 0.3, goes on working with every
 * later library of the same major version. Every function that can fail returns a status; `sparge_last_error` has the
 * detail, per thread.
 *
 * This header compiles as C11 and as C++. `sparge.hpp` is the C++20 comfort over it.
 */
#ifndef SPARGE_SPARGE_H_
#define SPARGE_SPARGE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(SPARGE_BUILD) && defined(__GNUC__)
#define SPARGE_API __attribute__((visibility("default")))
#else
#define SPARGE_API
#endif
#if defined(__GNUC__)
#define SPARGE_OLD_NAME(now) __attribute__((deprecated("it is " now " since 0.4")))
#else
#define SPARGE_OLD_NAME(now)
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPARGE_VERSION_MAJOR 0
#define SPARGE_VERSION_MINOR 4
#define SPARGE_VERSION_PATCH 0

/* Block maps that cross this interface are made of tiles of this size. */
#define SPARGE_BLOCK_Q 128
#define SPARGE_BLOCK_K 64
#define SPARGE_MAX_HEAD_DIM 576

/* ------------------------------------------------------------------ status */

typedef enum sparge_status {
  SPARGE_OK = 0,
  SPARGE_INVALID_ARGUMENT = 1,     /* an argument is wrong: the detail names it and its value */
  SPARGE_UNSUPPORTED_HARDWARE = 2, /* an instruction set, a GPU or a driver was asked for that this machine lacks */
  SPARGE_OUT_OF_MEMORY = 3,
  SPARGE_INTERNAL_ERROR = 4, /* a defect of this library */
  SPARGE_STOPPED = 5,        /* a function of the caller asked for it */
  SPARGE_DEVICE_ERROR = 6,   /* a GPU failed, or its driver refused what was asked */
  SPARGE_RANK_LOST = 7       /* another process does not do its part (sparge_mpi.h) */
} sparge_status;

/* One short text per status; never NULL. */
SPARGE_API const char* sparge_status_text(sparge_status status);
/* Detail of this thread's last failed call: one line, naming the argument and the value. Empty if none failed. */
SPARGE_API const char* sparge_last_error(void);
SPARGE_API const char* sparge_version(void);

/* ------------------------------------------------------------------ context: threads and instruction set */

/* Threads of the caller's own. `run` calls task(arg, w) once for every w in [0, workers), at the same time or one
 * after the other, and returns when all have returned. Results do not depend on how many really run at once. */
typedef void (*sparge_task)(void* arg, int32_t worker);
typedef struct sparge_executor {
  size_t struct_size;
  void* self;
  int32_t workers; /* 1 or more */
  void (*run)(void* self, int32_t workers, sparge_task task, void* arg);
} sparge_executor;
SPARGE_API void sparge_executor_init_sized(sparge_executor* executor, size_t size);
static inline void sparge_executor_init(sparge_executor* executor) {
  sparge_executor_init_sized(executor, sizeof(*executor));
}

typedef struct sparge_context sparge_context;

typedef struct sparge_context_desc {
  size_t struct_size;
  int32_t threads;                 /* built-in pool: number of threads, 0 = all cores */
  const sparge_executor* executor; /* NULL = built-in pool; copied */
  const char* isa;                 /* name from sparge_isa_at; NULL = environment SPARGE_ISA, else the best one */
  /* Where plans of this context run: "cpu", or "cuda:N" for the N-th NVIDIA GPU, which has neither threads, executor
   * nor isa; NULL = "cpu". All pointers of a run on a GPU, but for the structs that hold them, are memory of that GPU:
   * tensors, workspace, lse, map, map_out, head_stats, mass_out. docs/cuda.md says what a GPU refuses. */
  const char* device;
} sparge_context_desc;

SPARGE_API void sparge_context_desc_init_sized(sparge_context_desc* desc, size_t size);
static inline void sparge_context_desc_init(sparge_context_desc* desc) {
  sparge_context_desc_init_sized(desc, sizeof(*desc));
}
/* `desc` may be NULL: all defaults. A context may be used by several threads at once. */
SPARGE_API sparge_status sparge_context_create(const sparge_context_desc* desc, sparge_context** out);
SPARGE_API void sparge_context_destroy(sparge_context* context); /* NULL is allowed */
SPARGE_API const char* sparge_context_isa(const sparge_context* context);
SPARGE_API int32_t sparge_context_threads(const sparge_context* context);

typedef struct sparge_isa {
  size_t struct_size;
  const char* name;    /* "baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neon_dotprod", "neon_i8mm" */
  int32_t runnable;    /* 1 if this machine has it */
  int32_t group_rows;  /* query rows that the PV skip decides for together */
  const char* int8_qk; /* the int8 arithmetic in words */
} sparge_isa;
/* Instruction sets compiled into this library, best first; index < count. */
SPARGE_API int32_t sparge_isa_count(void);
SPARGE_API void sparge_isa_init_sized(sparge_isa* isa, size_t size);
static inline void sparge_isa_init(sparge_isa* isa) { sparge_isa_init_sized(isa, sizeof(*isa)); }
SPARGE_API sparge_status sparge_isa_at(int32_t index, sparge_isa* out);

/* ------------------------------------------------------------------ orders of image and video tokens */

typedef enum sparge_order {
  SPARGE_ORDER_HILBERT = 0,    /* neighbours on a generalised Hilbert curve are neighbours in the grid, for any sides */
  SPARGE_ORDER_ROW_MAJOR = 1,  /* raster: x fastest, t slowest */
  SPARGE_ORDER_TIME_MAJOR = 2, /* t fastest, then x, then y */
  SPARGE_ORDER_RANDOM = 3      /* the same on every machine for the same seed */
} sparge_order;

/* out[i] = raster index (t * H * W + y * W + x) of the i-th token of a grid T, H, W in that order; T * H * W entries,
 * at most 2^31-1. `seed` is for SPARGE_ORDER_RANDOM, and 0 else. A plan with a grid does this by itself. */
SPARGE_API sparge_status sparge_token_order(sparge_order order, const int64_t grid[3], uint64_t seed, int64_t* out);

/* ------------------------------------------------------------------ plan: shapes and parameters */

typedef struct sparge_calibration sparge_calibration; /* see below: error bounds instead of parameters */

typedef enum sparge_dtype { SPARGE_F32 = 0, SPARGE_F16 = 1, SPARGE_BF16 = 2 } sparge_dtype;
typedef enum sparge_precision {
  SPARGE_PRECISION_FP32 = 0,
  SPARGE_PRECISION_INT16 = 1,
  SPARGE_PRECISION_INT8 = 2,
  /* One letter from SPARGE_F32, which is a type: in C the two went in each other's place without a word. */
  SPARGE_FP32 SPARGE_OLD_NAME("SPARGE_PRECISION_FP32") = 0,
  SPARGE_INT16 SPARGE_OLD_NAME("SPARGE_PRECISION_INT16") = 1,
  SPARGE_INT8 SPARGE_OLD_NAME("SPARGE_PRECISION_INT8") = 2
} sparge_precision;
typedef enum sparge_select {
  SPARGE_SELECT_ALL = 0,  /* dense: every visible tile */
  SPARGE_SELECT_CDF = 1,  /* the smallest set of tiles with predicted mass >= tau */
  SPARGE_SELECT_TOPK = 2, /* the ceil(topk * visible) tiles with the largest predicted mass */
  SPARGE_SELECT_MAP = 3,  /* exactly the tiles of the caller's map */
  SPARGE_SELECT_AUTO = 4, /* per head, what is fastest within the error bounds of `calibration` */
  SPARGE_SELECT_FLOOR = 5 /* every tile with a predicted mass of at least (1 - tau) / sqrt(visible tiles of its row) */
} sparge_select;
/* How the mass of a tile is guessed (docs/studies/predictor.md). */
typedef enum sparge_predictor {
  SPARGE_PREDICT_DEFAULT = 0, /* KEYS for SELECT_FLOOR and SELECT_AUTO, PAPER for SELECT_CDF and SELECT_TOPK */
  SPARGE_PREDICT_KEYS = 1,    /* means of neighbouring queries against every key */
  SPARGE_PREDICT_PAPER = 2    /* the paper's rule: mean of the query block against mean of the key block */
} sparge_predictor;
typedef enum sparge_mask_type {
  SPARGE_MASK_NONE = 0,
  SPARGE_MASK_BOOL = 1,    /* uint8: non-zero may attend */
  SPARGE_MASK_ADD_F32 = 2, /* added to the scaled score; -inf hides */
  SPARGE_MASK_ADD_F16 = 3
} sparge_mask_type;

/* Thresholds of one query head (docs/algorithm.md). */
typedef struct sparge_head_params {
  double theta;   /* a block is self-similar iff its similarity > theta; < 0 switches the fallback off */
  double tau;     /* SELECT_CDF: mass to keep; SELECT_FLOOR: see there; 0..1 */
  double topk;    /* SELECT_TOPK: fraction to keep, 0..1 */
  double pv_skip; /* lambda, >= 0, natural-log units; SPARGE_PV_SKIP_OFF (infinity) = never skip */
} sparge_head_params;
#define SPARGE_PV_SKIP_OFF (1.0 / 0.0)

/* query_offset: bottom-right aligned, that is (keys - queries) of each sequence. */
#define SPARGE_OFFSET_BOTTOM_RIGHT INT64_MIN

typedef struct sparge_plan_desc {
  size_t struct_size;

  /* Shapes. q (batch, q_heads, q_tokens, qk_dim), k (batch, kv_heads, kv_tokens, qk_dim), v (.., kv_tokens, v_dim),
   * o (batch, q_heads, q_tokens, v_dim). q_heads is a multiple of kv_heads. Head sizes 1..576, tokens 0..2^31-1. */
  int64_t batch;
  int64_t q_heads, kv_heads;
  int64_t q_tokens, kv_tokens;
  int64_t qk_dim, v_dim;
  /* Packed variable-length batch: batch + 1 ascending offsets each, first 0, last q_tokens / kv_tokens. Tensors then
   * have no batch stride: sequence b holds tokens [offsets[b], offsets[b+1]). Both or neither; copied. */
  const int64_t* q_offsets;
  const int64_t* kv_offsets;

  /* Scores. */
  double scale;   /* 0 = 1 / sqrt(qk_dim) */
  double softcap; /* 0 = off; else (1.18e-38..1e9) score = softcap * tanh(score / softcap), before masks and slopes */
  int32_t causal; /* query i sees keys j <= i + query_offset */
  int64_t query_offset;
  int64_t window; /* 0 = off; else also j > i + query_offset - window */
  sparge_mask_type mask;
  const float* alibi_slopes; /* q_heads values <= 1e9: score -= slope * |i + query_offset - j|; NULL = none; copied */
  const float* sink_logits;  /* q_heads values: exp(logit) joins the denominator; NULL = none; copied */

  /* Sparsity. */
  sparge_precision precision; /* at least: up to 16 queries per kv head and tiles that need no prediction take fp32 */
  sparge_select select;
  int32_t keep_sink;               /* first key block always kept: 1 yes, 0 no, -1 = yes when causal */
  sparge_head_params params;       /* for all heads */
  const sparge_head_params* heads; /* q_heads entries instead of `params`; NULL = none; copied */
  sparge_predictor predictor;
  const sparge_precision* head_precision; /* q_heads entries instead of `precision`; NULL = none; copied */
  sparge_calibration* calibration;        /* iff SELECT_AUTO; must outlive the plan, and may serve several plans */

  /* Tokens of images and videos: grid T, H, W, in raster order (t * H * W + y * W + x), with text_tokens tokens before
   * it or, if text_after is 1, after it. Blocks are then made of tokens that follow one another on a Hilbert curve
   * through the grid (sparge_token_order); the text tokens stay where they are. Inputs and outputs keep the caller's
   * order, and the result is that of the raster order up to rounding and selection; block maps, given or returned, are
   * in the order of the curve. All 0 = off. Needs q_tokens = kv_tokens = text_tokens + T * H * W, and neither causal,
   * window, mask, alibi_slopes nor offsets. */
  int64_t grid[3];
  int64_t text_tokens;
  int32_t text_after;

  /* Query blocks with any of the last so many queries of their sequence have all visible tiles, whatever is selected
   * for the others. What a language model says next comes from these queries: a tile that none but them needs would
   * hardly show in the error of a head. Not with a map or a grid. */
  int64_t dense_tail;

  /* A prompt that comes in batches, against ever more keys: the caller's cache (sparge_run_args) keeps the keys and
   * values of earlier calls as they were packed, and has room for this many per sequence: 0 = no cache, else at least
   * kv_tokens. Neither with offsets nor with a grid. */
  int64_t cache_tokens;
  /* SELECT_AUTO: share of a dense call, 0..1, that runs spend on samples at least, whatever the calibration knows
   * already. For small calls whose input changes from one to the next. */
  double least_effort;

  /* A part of a larger call (context parallelism, split keys): where its queries and keys stand among all. Positions
   * (query_offset, window, alibi_slopes) then count from the first key of the whole, the sink is kept by who has it,
   * rows are split along the keys as in the whole, and tiles are judged by their share of the whole: predict leaves the
   * sums of a part (pool_lse_out), the caller joins them over the parts, and run takes them (pool_lse). Then the map is
   * that of the whole, and sparge_merge_parts joins the results. all_queries and all_keys 0 = q_tokens and kv_tokens;
   * first_query is a multiple of 128, first_key of 64. A part of the keys is selected by ALL, MAP or FLOOR. */
  int64_t first_query, all_queries;
  int64_t first_key, all_keys;

  /* 1 = few queries, up to SPARGE_FEW_QUERIES, against keys and values most of which earlier calls left packed in the
   * cache: they are taken from there, and the tensors are only glanced at. The glance: the first 64 bytes of each key
   * in the first kv head and of each value in the last one; but where there are just as many new keys as queries since
   * the last such call, none moved, and no mask, of older ones every 21st key and the last of each block of 64 (not
   * with 2: another call came in between). Whoever changes what this does not show must empty the cache. What has
   * changed is read from the tensors, and packed when a second call finds it unchanged, or all if it is much. Every
   * visible tile has its QK; values of a tile are left out by the PV skip, and where FLOOR or AUTO selects also if its
   * share of the attention, known here, is below the floor. Needs cache_tokens; neither for a map nor for a part of a
   * larger call, and run does not fill map_out and pv_out. */
  int32_t decode;
  /* 1 = packed keys of earlier calls are known again by a glance at the first 64 bytes of each key in the first kv
   * head and of each value in the last one, instead of by a checksum of everything, which takes longer than all else
   * that is done with old keys. Whoever changes keys or values that this does not show must empty the cache. Needs
   * cache_tokens. */
  int32_t glance;
} sparge_plan_desc;

typedef struct sparge_plan sparge_plan;

/* Defaults: int8, cdf, tau 0.98, theta 0.3, pv_skip 10, not causal, scale 1/sqrt(D), bottom-right offset. */
SPARGE_API void sparge_plan_desc_init_sized(sparge_plan_desc* desc, size_t size);
static inline void sparge_plan_desc_init(sparge_plan_desc* desc) { sparge_plan_desc_init_sized(desc, sizeof(*desc)); }
/* The context must outlive the plan. A plan may be run by several threads at once, each with its own workspace and
 * cache. */
SPARGE_API sparge_status sparge_plan_create(sparge_context* context, const sparge_plan_desc* desc, sparge_plan** out);
SPARGE_API void sparge_plan_destroy(sparge_plan* plan); /* NULL is allowed; waits for a GPU that is at work on it */
/* Bytes of workspace that a run needs: linear in tokens, plus one or two bits per tile. 0 without queries or keys. */
SPARGE_API size_t sparge_plan_workspace_size(const sparge_plan* plan);
/* Bytes of the cache; q_tokens and kv_tokens do not matter. 0 without one, and for so few queries that nothing is
 * packed. */
SPARGE_API size_t sparge_plan_cache_size(const sparge_plan* plan);
/* Tiles per head of the block map: ceil(q_tokens / 128), ceil(kv_tokens / 64), of the longest sequence if packed. */
SPARGE_API void sparge_plan_map_shape(const sparge_plan* plan, int64_t* q_blocks, int64_t* k_blocks);
/* Pools of queries per sequence and head, for pool_lse. */
SPARGE_API int64_t sparge_plan_pools(const sparge_plan* plan);

/* ------------------------------------------------------------------ run */

/* A strided view (batch, heads, tokens, dim) with innermost stride 1; other strides in elements, 0 or more. Outputs
 * must not overlap themselves. Inputs are never written. */
typedef struct sparge_tensor {
  void* data;
  sparge_dtype dtype;
  int64_t batch_stride, head_stride, token_stride;
} sparge_tensor;

/* (batch, heads, q_tokens, kv_tokens) with innermost stride 1; a stride of 0 broadcasts. Packed batches: indices are
 * local to the sequence. */
typedef struct sparge_mask {
  const void* data;
  int64_t batch_stride, head_stride, query_stride;
} sparge_mask;

/* float (batch, q_heads, q_tokens) with innermost stride 1. */
typedef struct sparge_lse {
  float* data;
  int64_t batch_stride, head_stride;
} sparge_lse;

typedef struct sparge_head_stats {
  int64_t qk_eligible, qk_computed; /* tiles: visible under masks and causality; computed */
  int64_t pv_eligible, pv_computed; /* row groups: all of eligible tiles; of computed tiles less those PV-skipped */
} sparge_head_stats;

typedef struct sparge_stats {
  size_t struct_size;
  sparge_head_stats total;
  int32_t group_rows; /* query rows per row group */
  int32_t threads;
  const char* isa;
  double total_ms, pack_ms, predict_ms, schedule_ms, kernel_ms;
  union {
    double calibrate_ms; /* samples for the calibration of SELECT_AUTO */
    double measure_ms SPARGE_OLD_NAME("calibrate_ms");
  };
  int64_t key_blocks, key_blocks_reused; /* of all kv heads, once per precision: those needed; found in the cache */
} sparge_stats;

/* Keys and values of a part as int8 heads pack them, for sending: half of what fp16 takes, and whoever gets them
 * computes with the very numbers of whoever left them, if both have the same instruction set. Arrays are contiguous;
 * k_blocks = ceil(kv_tokens / 64), and D = qk_dim rounded up to a multiple of 4, for rotation fills what is behind.
 * Where it was needed (numerics.md) a block of values has a second half of bits. */
typedef struct sparge_key_codes {
  int8_t* keys;         /* (batch, kv_heads, kv_tokens, D): centred, rotated and rounded */
  float* key_scales;    /* (batch, kv_heads, kv_tokens) */
  int8_t* values;       /* (batch, kv_heads, kv_tokens, v_dim) */
  float* value_scales;  /* (batch, kv_heads, k_blocks, v_dim), in a power of two that key_survey tells */
  int8_t* fine_values;  /* as values; tokens of blocks that do not need it are left as they are, and not read */
  uint8_t* fine;        /* (batch, kv_heads, k_blocks): 0 = not needed, 1 = at peaks, 2 = always */
  uint64_t* not_finite; /* (batch, kv_heads, k_blocks): bit j = key or value j is not */
} sparge_key_codes;

/* The pools of queries likewise; arrays (batch, q_heads, sparge_plan_pools, ...) as sparge_run_args.pool_rows. */
typedef struct sparge_pool_codes {
  int8_t* rows; /* (..., D) */
  float* factors;
  float* shifts;
} sparge_pool_codes;

typedef struct sparge_run_args {
  size_t struct_size;
  sparge_tensor q, k, v, o;
  sparge_mask mask;   /* iff the plan has a mask */
  const uint8_t* map; /* iff SELECT_MAP: rows of k_blocks bytes, q_blocks rows per head; non-zero = compute the tile */
  int64_t map_batch_stride, map_head_stride; /* bytes, 0 broadcasts */
  sparge_lse lse;                            /* data NULL = not wanted */
  uint8_t* map_out;              /* (batch, q_heads, q_blocks, k_blocks) contiguous 0/1: computed tiles; NULL = no */
  sparge_stats* stats;           /* NULL = not wanted */
  sparge_head_stats* head_stats; /* batch * q_heads entries, NULL = not wanted */
  void* workspace;
  size_t workspace_size;
  /* Pictures of what happened, (batch, q_heads, q_blocks, k_blocks) contiguous; NULL = not wanted.
   * mass_out: share of a row's attention that a tile holds. predict: as predicted, over visible tiles (a plan that
   * predicts), to which a query that is unlike its neighbours may add; reference: the true one, mean over the
   * queries of the block. Refused by run.
   * pv_out: row groups of the tile whose PV was computed. run only. */
  float* mass_out;
  uint8_t* pv_out;
  /* iff the plan has cache_tokens: memory of sparge_plan_cache_size bytes that the caller keeps from call to call, one
   * per layer, and never shares between calls that run at once. Zeros are an empty cache; what another kind of plan
   * left there is emptied. Packed blocks of 64 keys are known again by a checksum (64 bits) of their keys and values,
   * so nothing has to be told when some of them change (but see sparge_plan_desc.glance). Keys are centred on a mean
   * that is kept until their number has doubled or most of them are others; so results depend on earlier calls, by
   * rounding, and where tiles are selected by what that makes of their masses. predict empties the cache of a plan that
   * predicts. */
  void* cache;
  size_t cache_size;
  /* Stage 1 of a call that is a part (sparge_plan_desc.all_keys): per pool of 64 neighbouring queries the natural
   * logarithm of the sum of exp(score) over the keys it sees, -inf if none; (batch, q_heads, sparge_plan_pools)
   * contiguous. pool_lse_out: of the keys of this call. pool_lse: of all keys, log-add-exp over the parts; decides
   * instead. NULL = no. */
  double* pool_lse_out;
  const double* pool_lse;
  /* The keys and values of a call that is a part, (batch, kv_heads, qk_dim + 3) contiguous: sums of the keys per
   * channel, how many there are, the largest |k|, the largest |v|; of finite ones. key_survey_out: of this call;
   * predict then reads k and v, fills this and nothing else: other outputs are refused. key_survey: of all keys, that
   * is sums and maxima over the parts; decides instead, so that a part is rounded as in the whole. So few queries that
   * nothing is packed: zeros, and of no effect. NULL = no. Not with a cache; `_out` not of keys without any query. */
  double* key_survey_out;
  const double* key_survey;
  /* What stage 1 takes of the queries, so that they need not travel to where keys are: pool_rows (batch, q_heads,
   * sparge_plan_pools, qk_dim) contiguous, and per query block in pool_counts (batch, q_heads, q_blocks) how many of
   * its rows are pools of their own, after those of all. Beyond these pool_rows_out is left as it is. `_out`: of the
   * queries of this call. Without: predict takes them instead of q, whose data may be NULL; for pool_lse_out only, so
   * not with map_out, mass_out, stats and head_stats. NULL = no. */
  float* pool_rows_out;
  int32_t* pool_counts_out;
  const float* pool_rows;
  const int32_t* pool_counts;
  /* A GPU's queue (CUstream, cudaStream_t) that the kernels of the call are put into; NULL = the default one. Nothing
   * is allocated or waited for, so that a call can be captured in a CUDA graph. Refused on a CPU. */
  void* stream;
  /* What parts send each other as 8-bit integers; NULL = no. All need key_survey, and more than the few queries for
   * which nothing is packed; not with a grid, offsets or SELECT_AUTO.
   * key_codes_out: predict then reads k and v, fills this and does nothing else; all heads are int8.
   * key_codes: int8 heads take them instead of k and v, whose data may be NULL if all heads are int8; predict reads
   * keys and key_scales only.
   * pool_codes_out, pool_codes: in place of pool_rows_out and pool_rows, beside the same pool_counts; all heads are
   * int8. */
  const sparge_key_codes* key_codes_out;
  const sparge_key_codes* key_codes;
  const sparge_pool_codes* pool_codes_out;
  const sparge_pool_codes* pool_codes;
} sparge_run_args;

SPARGE_API void sparge_run_args_init_sized(sparge_run_args* args, size_t size);
static inline void sparge_run_args_init(sparge_run_args* args) { sparge_run_args_init_sized(args, sizeof(*args)); }
SPARGE_API void sparge_stats_init_sized(sparge_stats* stats, size_t size);
static inline void sparge_stats_init(sparge_stats* stats) { sparge_stats_init_sized(stats, sizeof(*stats)); }
/* o = attention(q, k, v). A query that sees no key gives zeros and log-sum-exp -inf. */
SPARGE_API sparge_status sparge_run(const sparge_plan* plan, const sparge_run_args* args);
/* Stage 1 only: fills map_out, stats and head_stats; reads q and k (and mask, map), not v, o and lse. */
SPARGE_API sparge_status sparge_predict(const sparge_plan* plan, const sparge_run_args* args);

/* The slow oracle: the same problem in double precision, without quantisation and PV skip, over all visible tiles or,
 * if args->map is given, over the tiles of that map. Writes o and lse. Needs no workspace; allocates its own. */
SPARGE_API sparge_status sparge_reference(const sparge_plan* plan, const sparge_run_args* args);

/* ------------------------------------------------------------------ calibration: error bounds instead of parameters */

/* What an application keeps per layer, for plans with SELECT_AUTO. Runs measure some sampled query rows densely beside
 * the sparse path, choose (precision, theta, tau, lambda) per head from that, and re-check now and then; a head that
 * cannot meet the bounds is dense. docs/tuning.md tells how, and what it costs. Safe to use from several threads at
 * once; for one order of calls the choices depend on the seed and the inputs only. */
typedef struct sparge_calibration_desc {
  size_t struct_size;
  int64_t q_heads; /* of every plan that uses it */
  /* Bounds of a head's sparse result against its dense result of the same precision: target_l2 or, if that is named,
   * target_l1 instead. */
  double target_l1; /* sum |o - dense| / sum |dense| */
  double pv_l1;     /* the same once the PV skip is on: at least target_l1; negative = SPARGE_PV_ROOM * target_l1 */
  double round_l1;  /* relative L1 of the precision itself against fp32: a head beyond it gets int16 instead of int8 */
  uint64_t seed;
  double target_l2; /* the root of sum (o - dense)^2 / sum dense^2: sees single rows that are wholly wrong */
  double pv_l2;     /* as pv_l1 */
} sparge_calibration_desc;
#define SPARGE_NOT_NAMED (-1.0)
/* The error that the PV skip may add to that of the selection. */
#define SPARGE_PV_ROOM 1.25

/* What errors are measured in. */
typedef enum sparge_measure { SPARGE_MEASURE_L1 = 0, SPARGE_MEASURE_L2 = 1 } sparge_measure;
SPARGE_API const char* sparge_measure_name(sparge_measure measure); /* "l1", "l2"; else "" */

/* Bounds hold for the mean over calls. A single one may lie this far beyond: calibrations and tuning expect it of no
 * more than one call in twenty. */
#define SPARGE_SINGLE_CALL 1.2

typedef enum sparge_head_state {
  SPARGE_HEAD_UNKNOWN = 0, /* not measured yet: dense */
  SPARGE_HEAD_SPARSE = 1,
  SPARGE_HEAD_DENSE = 2 /* nothing faster met the bounds */
} sparge_head_state;

/* An error is known if samples say that the true one lies within so many times of it. */
#define SPARGE_KNOWN_WITHIN 1.3

/* What is in force for one head, and what was measured of it. Errors are estimates from samples; `_se` and `_error` are
 * their standard errors, which few rows make too small: `limit` says how large the error may be. */
typedef struct sparge_head_estimate {
  size_t struct_size;
  sparge_head_state state;
  sparge_precision precision; /* INT16 if int8 is not exact enough, else INT8; plans of more bits keep theirs */
  sparge_head_params params;
  int64_t samples; /* of query rows; 0: the figures below mean nothing */
  /* Of skipping, in `measure`: without PV skip, and with it. */
  union {
    double error;
    double l1 SPARGE_OLD_NAME("error");
  };
  union {
    double error_se;
    double l1_error SPARGE_OLD_NAME("error_se");
  };
  union {
    double pv_error;
    double pv_l1 SPARGE_OLD_NAME("pv_error");
  };
  union {
    double pv_error_se;
    double pv_l1_error SPARGE_OLD_NAME("pv_error_se");
  };
  double round_l1, round_l1_error;
  double sparsity; /* of QK tiles */
  double work;     /* (QK + PV computed) / eligible / 2 */
  sparge_measure measure;
  int32_t known; /* 1: pv_error is within SPARGE_KNOWN_WITHIN of the true one; 0: all that is known is the limit */
  double limit;  /* 19 of 20 heads are below it, PV skip included */
} sparge_head_estimate;

/* Defaults: target_l2 0.03, pv_l2 negative, round_l1 0.05, seed 0; target_l1 is not named. (Programs of 0.3, whose
 * header has no L2: target_l1 0.015, pv_l1 0.01875.) */
SPARGE_API void sparge_calibration_desc_init_sized(sparge_calibration_desc* desc, size_t size);
static inline void sparge_calibration_desc_init(sparge_calibration_desc* desc) {
  sparge_calibration_desc_init_sized(desc, sizeof(*desc));
}
/* What target_l1, pv_l1, target_l2 and pv_l2 mean together: the measure, and both bounds in it. Refuses what _create
 * would refuse of them. The same of layers and tuners is below. */
SPARGE_API sparge_status sparge_calibration_desc_bounds(const sparge_calibration_desc* desc, sparge_measure* measure,
                                                        double* target, double* pv);
SPARGE_API sparge_status sparge_calibration_create(const sparge_calibration_desc* desc, sparge_calibration** out);
SPARGE_API void sparge_calibration_destroy(sparge_calibration* calibration);        /* NULL is allowed */
SPARGE_API int64_t sparge_calibration_heads(const sparge_calibration* calibration); /* q_heads; 0 for NULL */
SPARGE_API void sparge_head_estimate_init_sized(sparge_head_estimate* estimate, size_t size);
static inline void sparge_head_estimate_init(sparge_head_estimate* estimate) {
  sparge_head_estimate_init_sized(estimate, sizeof(*estimate));
}
SPARGE_API sparge_status sparge_calibration_head(const sparge_calibration* calibration, int64_t head,
                                                 sparge_head_estimate* out);
/* Other bounds for one head from now on, in the measure of the calibration; what was measured stays. */
SPARGE_API sparge_status sparge_calibration_set_bounds(sparge_calibration* calibration, int64_t head, double target,
                                                       double pv);
/* All that it knows, as bytes that any machine can load. *size: in, room at `buffer`; out, bytes needed. With NULL as
 * buffer only the size is told; too little room is an error. */
SPARGE_API sparge_status sparge_calibration_save(const sparge_calibration* calibration, void* buffer, size_t* size);
SPARGE_API sparge_status sparge_calibration_load(const void* data, size_t size, sparge_calibration** out);

/* Measures without computing the result: reads q, k, v (o may be empty), spends about `effort` (0..1) of the time of a
 * dense call, and leaves the choice in the calibration of the plan. What `sparge tune` is made of. The first call
 * finds theta and tau, later ones lambda as well. */
/* Or, with this as effort: spends what a run would, and chooses as it does. */
#define SPARGE_EFFORT_OF_RUN (-1.0)
SPARGE_API sparge_status sparge_calibrate(const sparge_plan* plan, const sparge_run_args* args, double effort);

/* ------------------------------------------------------------------ merge */

/* A partial result: attention over a part of the keys, with its log-sum-exp. */
typedef struct sparge_partial {
  sparge_tensor o;
  sparge_lse lse;
} sparge_partial;

/* out = the result over the keys of all parts together; exact, and empty parts (lse -inf) are neutral. o is (batch,
 * heads, tokens, dim); lse is a natural logarithm. out may be one of the parts. Runs on the context's threads; the
 * order of the parts changes results by rounding only, the number of threads not at all. */
SPARGE_API sparge_status sparge_merge_parts(sparge_context* context, int64_t batch, int64_t heads, int64_t tokens,
                                            int64_t dim, const sparge_partial* parts, int64_t count,
                                            const sparge_partial* out);
/* The same for two parts, on the calling thread. */
SPARGE_API sparge_status sparge_merge(int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                                      const sparge_partial* a, const sparge_partial* b, const sparge_partial* out);

/* ------------------------------------------------------------------ layer: what a model keeps per attention layer */

/* Policy in one place: how exact, which tiles, when nothing is skipped, which keys stay packed. A client makes one
 * layer per attention layer of a model, tells each call what is asked (shapes, scores, tensors), and shows what the
 * layer says.
 *
 * What a layer decides, per call (of a packed batch, the longest sequence counts, and one that goes on or ends):
 *   few queries   up to SPARGE_FEW_QUERIES (decoding), or fewer keys than min_keys: every tile. From SPARGE_DECODE_KEYS
 *                 keys on, few queries of one sequence take the keys that a prompt, or the step before, left packed
 *                 (sparge_plan_desc.decode), with what the calibration or preset of the prompt says of each head
 *   tiles         auto, by a calibration of its own for each kind of call (heads, head sizes, causal or not); or by its
 *                 preset; or every tile (a target of 0)
 *   last queries  of a prompt keep every tile (dense_tail): a causal call of all its keys at once, or one of fewer
 *                 queries than an earlier one of its kind, which is how a prompt in batches ends
 *   samples       a causal call that goes on with a prompt, against more keys than queries, is small and unlike the
 *                 last one: it is sampled anew
 *   keys          that such a call meets, of more than few queries, are kept packed for the next one (keep_keys),
 *                 unless it has offsets or a mask. Where there is no memory for that, the call does without
 * Where every tile is computed from the tensors there is no PV skip either. */
typedef struct sparge_layer sparge_layer;

#define SPARGE_FEW_QUERIES 64
/* From so many keys on, few queries take those that earlier calls packed. */
#define SPARGE_DECODE_KEYS 512

/* One layer of a preset; see `sparge tune`. */
typedef struct sparge_layer_preset {
  size_t struct_size;
  int64_t q_heads, kv_heads, qk_dim, v_dim; /* a call of other shapes is refused */
  int32_t causal;       /* a call that differs, and has no mask, has these precisions and every tile */
  sparge_select select; /* ALL, CDF or FLOOR */
  sparge_predictor predictor;
  const sparge_head_params* heads;        /* q_heads entries */
  const sparge_precision* head_precision; /* q_heads entries */
} sparge_layer_preset;
SPARGE_API void sparge_layer_preset_init_sized(sparge_layer_preset* preset, size_t size);
static inline void sparge_layer_preset_init(sparge_layer_preset* preset) {
  sparge_layer_preset_init_sized(preset, sizeof(*preset));
}

typedef struct sparge_layer_desc {
  size_t struct_size;
  /* As sparge_calibration_desc; a target of 0 = exact: every tile. */
  double target_l1, pv_l1, target_l2, pv_l2;
  double round_l1;
  uint64_t seed;
  /* A sparge_precision: at least this. SPARGE_PRECISION_AUTO = int8, and fp32 if the target is 0. */
  int32_t precision;
  const sparge_layer_preset* preset; /* instead of calibrations, with the bounds as they were; NULL = none; copied */
  int32_t remembers;                 /* 1; 0 = nothing is kept from call to call: each one calibrates for itself */
  int32_t keep_keys;                 /* 1; 0 = keys are packed anew in every call */
  int64_t min_keys;                  /* 1024 */
  int64_t dense_tail;                /* 128 */
} sparge_layer_desc;
#define SPARGE_PRECISION_AUTO (-1)

/* Sums over the calls of a layer. */
typedef struct sparge_layer_totals {
  size_t struct_size;
  int64_t calls;
  int64_t dense_calls; /* of these, those that could skip nothing: by a rule above, or because they were told so */
  double total_ms, pack_ms, predict_ms, schedule_ms, kernel_ms, calibrate_ms;
  int64_t key_blocks, key_blocks_reused;
  sparge_head_stats tiles; /* but for those of few queries that take packed keys: they are smaller */
  double decode_ms;        /* of kernel_ms: those few queries */
} sparge_layer_totals;
SPARGE_API void sparge_layer_totals_init_sized(sparge_layer_totals* totals, size_t size);
static inline void sparge_layer_totals_init(sparge_layer_totals* totals) {
  sparge_layer_totals_init_sized(totals, sizeof(*totals));
}

/* Defaults: bounds as sparge_calibration_desc, the rest as said above. */
SPARGE_API void sparge_layer_desc_init_sized(sparge_layer_desc* desc, size_t size);
static inline void sparge_layer_desc_init(sparge_layer_desc* desc) {
  sparge_layer_desc_init_sized(desc, sizeof(*desc));
}
SPARGE_API sparge_status sparge_layer_desc_bounds(const sparge_layer_desc* desc, sparge_measure* measure,
                                                  double* target, double* pv);
SPARGE_API sparge_status sparge_layer_create(const sparge_layer_desc* desc, sparge_layer** out);
SPARGE_API void sparge_layer_destroy(sparge_layer* layer); /* NULL is allowed */

/* As sparge_run. `desc` says what is asked; what says how exactly (precision, select, params, heads, predictor,
 * head_precision, calibration, dense_tail, cache_tokens, least_effort) is the layer's to choose, and refused if it is
 * not as sparge_plan_desc_init left it. args->workspace may be NULL: then the context lends one. args->cache must be
 * NULL. Whole calls only, no parts. Calls of several threads at once are allowed; those that keep keys wait for one
 * another. */
/* Flag: every tile in this call (the first steps of a denoiser), from the tensors. Keys that earlier calls packed are
 * forgotten, or known again by all of their bytes. */
#define SPARGE_LAYER_DENSE 1u
SPARGE_API sparge_status sparge_layer_run(sparge_layer* layer, sparge_context* context, const sparge_plan_desc* desc,
                                          const sparge_run_args* args, uint32_t flags);
SPARGE_API sparge_status sparge_layer_get_totals(const sparge_layer* layer, sparge_layer_totals* out);
/* What a user should know and has not been told yet, one line, or NULL; once each. The text is never freed. */
SPARGE_API const char* sparge_layer_notice(sparge_layer* layer);
/* The calibrations made so far, one per kind of call; NULL beyond them. They live until the layer is restored or
 * destroyed. */
SPARGE_API int64_t sparge_layer_calibrations(const sparge_layer* layer);
SPARGE_API const sparge_calibration* sparge_layer_calibration(const sparge_layer* layer, int64_t index);
/* What it learned (not keys and totals) as bytes, as sparge_calibration_save; and back into a layer made with the same
 * descriptor, which forgets what it knew. Other bounds or another seed are refused. */
SPARGE_API sparge_status sparge_layer_save(const sparge_layer* layer, void* buffer, size_t* size);
SPARGE_API sparge_status sparge_layer_restore(sparge_layer* layer, const void* data, size_t size);

/* ------------------------------------------------------------------ tune: a preset for a layer, from recorded calls */

/* What calibrations do while a model runs, done once and thoroughly (docs/tuning.md): of the samples, which are
 * recorded calls of one layer, most are tuned on, by sampled query rows; some are held out; these and some of the
 * others are verified in full, head by head. A head that fails gets tighter bounds or becomes dense, one with much room
 * looser ones. The same samples and seed give the same preset, bit by bit, on the same instruction set, for any number
 * of threads. */
typedef struct sparge_tuner sparge_tuner;

/* As SPARGE_PV_ROOM, of bounds that are kept in full and not by estimates. */
#define SPARGE_TUNE_PV_ROOM 1.2
/* Smaller bounds are refused: they are below the error of fp32 itself. */
#define SPARGE_TUNE_LEAST 1e-6

typedef struct sparge_tuner_desc {
  size_t struct_size;
  /* As sparge_calibration_desc, but for the default and SPARGE_TUNE_PV_ROOM; all of them SPARGE_TUNE_LEAST..1. */
  double target_l1, pv_l1, target_l2, pv_l2;
  double round_l1;
  uint64_t seed;    /* of sampled rows, and of which samples are held out */
  const char* name; /* of the layer: which samples are held out depends on it, too; NULL = ""; copied */

  /* What each sample asks: shapes and scores. Heads, head sizes and causal are the same in all of them; what says how
   * exactly (as in sparge_layer_run) is refused if it is not as sparge_plan_desc_init left it. Copied, but for what
   * they point to, which must stay until the tuner is destroyed. */
  int64_t sample_count; /* 1 or more */
  const sparge_plan_desc* const* samples;
  /* Their tensors, on demand: *args are q, k, v and the mask of the plan if it has one, and nothing else is set; valid
   * until `close`. One sample is open at a time, several times in all, and a call that fails ends the run with its
   * status. Called by the thread that runs. */
  void* self;
  sparge_status (*open)(void* self, int64_t index, const sparge_run_args** args);
  void (*close)(void* self, int64_t index); /* NULL = nothing to do */
  /* Between calls of the library. Non-zero stops the run. NULL = nobody asks. */
  int32_t (*progress)(void* self, int64_t steps_done, int64_t steps);
} sparge_tuner_desc;

typedef struct sparge_tuner_info {
  size_t struct_size;
  int64_t steps;   /* of a run; they take about as long as one another */
  double ms;       /* that the run spent on attention; 0 before */
  double dense_ms; /* that one dense int8 pass over all samples and heads takes, judged by those that were run */
} sparge_tuner_info;

/* Six digits each. */
typedef struct sparge_tuned_head {
  size_t struct_size;
  sparge_precision precision;
  sparge_select select;      /* FLOOR; or ALL: dense, which has tau 1 and no PV skip */
  sparge_head_params params; /* topk has no meaning */
  /* Means over the samples that were verified, with exactly these parameters. */
  double sparsity, work;
  double error, pv_error; /* against dense of the same precision, which itself has 0: without and with PV skip */
  double round_l1;        /* of the precision, against fp32: an estimate from sampled rows */
  int64_t verified_on;    /* samples */
} sparge_tuned_head;

/* Defaults: target_l2 0.1, pv_l2 negative, round_l1 0.05, seed 0; target_l1 is not named. */
SPARGE_API void sparge_tuner_desc_init_sized(sparge_tuner_desc* desc, size_t size);
static inline void sparge_tuner_desc_init(sparge_tuner_desc* desc) {
  sparge_tuner_desc_init_sized(desc, sizeof(*desc));
}
SPARGE_API sparge_status sparge_tuner_desc_bounds(const sparge_tuner_desc* desc, sparge_measure* measure,
                                                  double* target, double* pv);
SPARGE_API void sparge_tuner_info_init_sized(sparge_tuner_info* info, size_t size);
static inline void sparge_tuner_info_init(sparge_tuner_info* info) {
  sparge_tuner_info_init_sized(info, sizeof(*info));
}
SPARGE_API void sparge_tuned_head_init_sized(sparge_tuned_head* head, size_t size);
static inline void sparge_tuned_head_init(sparge_tuned_head* head) {
  sparge_tuned_head_init_sized(head, sizeof(*head));
}

/* Checks everything but the tensors. The context must outlive the tuner. */
SPARGE_API sparge_status sparge_tuner_create(sparge_context* context, const sparge_tuner_desc* desc,
                                             sparge_tuner** out);
SPARGE_API void sparge_tuner_destroy(sparge_tuner* tuner); /* NULL is allowed */
/* SPARGE_STOPPED if `progress` said so. Another run begins anew. One thread at a time. */
SPARGE_API sparge_status sparge_tuner_run(sparge_tuner* tuner);
SPARGE_API sparge_status sparge_tuner_get_info(const sparge_tuner* tuner, sparge_tuner_info* out);
/* What a sample serves for, known from the beginning. VERIFIED without TUNED: held out. 0 if there is no such sample.
 */
#define SPARGE_SAMPLE_TUNED 1u
#define SPARGE_SAMPLE_VERIFIED 2u
SPARGE_API uint32_t sparge_tuner_sample(const sparge_tuner* tuner, int64_t index);
/* What was found; refused until a run has finished. The preset points into the tuner. */
SPARGE_API sparge_status sparge_tuner_head(const sparge_tuner* tuner, int64_t head, sparge_tuned_head* out);
SPARGE_API sparge_status sparge_tuner_preset(const sparge_tuner* tuner, sparge_layer_preset* out);

#ifdef __cplusplus
}
#endif
#endif /* SPARGE_SPARGE_H_ */

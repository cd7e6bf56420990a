// Checks descriptors and arguments once, at the door, and derives what the other rooms need.
#include "src/problem/problem.h"

#include <cinttypes>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "src/base/half.h"
#include "src/base/status.h"
#include "src/base/threads.h"
#include "src/problem/order.h"
#include "src/problem/parts.h"

namespace sparge::impl {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxPosition = int64_t{1} << 40;  // offsets and windows: far beyond any token, far from overflow
// Kernels compute c tanh(x / c) in floats: from the least normal one on, c and 1 / c are what they should be. Long
// before, all scores have become alike.
constexpr double kLeastSoftcap = std::numeric_limits<float>::min();
constexpr int64_t kMaxElements = int64_t{1} << 46;  // of one tensor: keeps every size computation inside 64 bits

void CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  SPARGE_REQUIRE(value >= low && value <= high, "%s=%" PRId64 " is outside %" PRId64 "..%" PRId64, name, value, low,
                 high);
}

void CheckShapes(const sparge_plan_desc& desc) {
  CheckRange("batch", desc.batch, 0, kMaxTokens);
  CheckRange("q_heads", desc.q_heads, 1, kMaxTokens);
  CheckRange("kv_heads", desc.kv_heads, 1, kMaxTokens);
  SPARGE_REQUIRE(desc.q_heads % desc.kv_heads == 0, "q_heads=%" PRId64 " is not a multiple of kv_heads=%" PRId64,
                 desc.q_heads, desc.kv_heads);
  CheckRange("q_tokens", desc.q_tokens, 0, kMaxTokens);
  CheckRange("kv_tokens", desc.kv_tokens, 0, kMaxTokens);
  CheckRange("qk_dim", desc.qk_dim, 1, SPARGE_MAX_HEAD_DIM);
  CheckRange("v_dim", desc.v_dim, 1, SPARGE_MAX_HEAD_DIM);
  CheckRange("cache_tokens", desc.cache_tokens, 0, kMaxTokens);
  const double tokens = static_cast<double>(std::max({desc.q_tokens, desc.kv_tokens, desc.cache_tokens}));
  const double elements = static_cast<double>(desc.batch) * static_cast<double>(desc.q_heads) * tokens *
                          static_cast<double>(std::max(desc.qk_dim, desc.v_dim));
  SPARGE_REQUIRE(elements <= static_cast<double>(kMaxElements),
                 "batch=%" PRId64 " q_heads=%" PRId64 " tokens=%.0f make a tensor of more than 2^46 elements",
                 desc.batch, desc.q_heads, tokens);
}

void CheckOffsets(const char* name, const int64_t* offsets, int64_t batch, int64_t tokens) {
  SPARGE_REQUIRE(offsets[0] == 0, "%s[0]=%" PRId64 " is not 0", name, offsets[0]);
  for (int64_t b = 0; b < batch; ++b) {
    SPARGE_REQUIRE(offsets[b] <= offsets[b + 1], "%s[%" PRId64 "]=%" PRId64 " is larger than %s[%" PRId64 "]=%" PRId64,
                   name, b, offsets[b], name, b + 1, offsets[b + 1]);
  }
  SPARGE_REQUIRE(offsets[batch] == tokens, "%s[%" PRId64 "]=%" PRId64 " is not the number of tokens %" PRId64, name,
                 batch, offsets[batch], tokens);
}

void CheckScores(const sparge_plan_desc& desc) {
  SPARGE_REQUIRE(std::isfinite(desc.scale), "scale=%g is not finite", desc.scale);
  SPARGE_REQUIRE(std::fabs(desc.scale) <= 1e9, "scale=%g is larger than 1e9", desc.scale);
  SPARGE_REQUIRE(desc.softcap == 0 || (desc.softcap >= kLeastSoftcap && desc.softcap <= 1e9),
                 "softcap=%g is neither 0 nor within %.3g..1e9", desc.softcap, kLeastSoftcap);
  SPARGE_REQUIRE(desc.causal == 0 || desc.causal == 1, "causal=%d is not 0 or 1", desc.causal);
  if (desc.query_offset != SPARGE_OFFSET_BOTTOM_RIGHT) {
    CheckRange("query_offset", desc.query_offset, -kMaxPosition, kMaxPosition);
    SPARGE_REQUIRE(desc.causal == 1 || desc.window > 0 || desc.alibi_slopes != nullptr,
                   "query_offset=%" PRId64 " has no effect without causal, window or alibi_slopes", desc.query_offset);
  }
  CheckRange("window", desc.window, 0, kMaxPosition);
  CheckRange("mask", RawEnum(desc.mask), SPARGE_MASK_NONE, SPARGE_MASK_ADD_F16);
  for (int64_t h = 0; h < desc.q_heads; ++h) {
    if (desc.alibi_slopes != nullptr) {
      SPARGE_REQUIRE(std::isfinite(desc.alibi_slopes[h]), "alibi_slopes[%" PRId64 "]=%g is not finite", h,
                     static_cast<double>(desc.alibi_slopes[h]));
      // Times any distance, that is still far from the largest float.
      SPARGE_REQUIRE(std::fabs(desc.alibi_slopes[h]) <= 1e9f, "alibi_slopes[%" PRId64 "]=%g is larger than 1e9", h,
                     static_cast<double>(desc.alibi_slopes[h]));
    }
    if (desc.sink_logits != nullptr) {
      // -inf is a sink that takes nothing.
      SPARGE_REQUIRE(desc.sink_logits[h] < std::numeric_limits<float>::infinity(),
                     "sink_logits[%" PRId64 "]=%g is not a number below infinity", h,
                     static_cast<double>(desc.sink_logits[h]));
    }
  }
}

// `index` < 0: the parameters for all heads.
void CheckParams(const sparge_plan_desc& desc, const sparge_head_params& params, int64_t index) {
  char where[40] = "";
  if (index >= 0) std::snprintf(where, sizeof(where), "heads[%" PRId64 "].", index);
  SPARGE_REQUIRE(!std::isnan(params.theta), "%stheta=nan is not a number", where);
  SPARGE_REQUIRE(params.pv_skip >= 0, "%spv_skip=%g is not 0 or more", where, params.pv_skip);
  if (desc.select == SPARGE_SELECT_CDF || desc.select == SPARGE_SELECT_FLOOR) {
    SPARGE_REQUIRE(params.tau >= 0 && params.tau <= 1, "%stau=%g is outside 0..1", where, params.tau);
  }
  if (desc.select == SPARGE_SELECT_TOPK) {
    SPARGE_REQUIRE(params.topk >= 0 && params.topk <= 1, "%stopk=%g is outside 0..1", where, params.topk);
  }
}

void CheckAutomatic(const sparge_plan_desc& desc) {
  const bool automatic = desc.select == SPARGE_SELECT_AUTO;
  SPARGE_REQUIRE(
      automatic == (desc.calibration != nullptr), "%s",
      automatic ? "calibration is NULL, but select is AUTO" : "calibration is given, but select is not AUTO");
  SPARGE_REQUIRE(desc.least_effort >= 0 && desc.least_effort <= 1, "least_effort=%g is outside 0..1",
                 desc.least_effort);
  SPARGE_REQUIRE(automatic || desc.least_effort == 0, "least_effort=%g has no effect: select is not AUTO",
                 desc.least_effort);
  SPARGE_REQUIRE(!automatic || desc.heads == nullptr, "heads are given, but select is AUTO, which chooses them");
  SPARGE_REQUIRE(!automatic || desc.head_precision == nullptr,
                 "head_precision is given, but select is AUTO, which chooses it");
  SPARGE_REQUIRE(!automatic || desc.predictor != SPARGE_PREDICT_PAPER,
                 "predictor=%d has no calibration; take %d or the default", RawEnum(desc.predictor),
                 SPARGE_PREDICT_KEYS);
  for (int64_t h = 0; desc.head_precision != nullptr && h < desc.q_heads; ++h) {
    char name[48];
    std::snprintf(name, sizeof(name), "head_precision[%" PRId64 "]", h);
    CheckRange(name, RawEnum(desc.head_precision[h]), SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT8);
  }
}

void CheckDecode(const sparge_plan_desc& desc) {
  CheckRange("decode", desc.decode, 0, 2);
  if (desc.decode == 0) return;
  SPARGE_REQUIRE(desc.cache_tokens > 0, "decode=%d takes keys from a cache, but cache_tokens=0", desc.decode);
  SPARGE_REQUIRE(desc.q_tokens <= SPARGE_FEW_QUERIES, "decode=%d is for up to %d queries, but q_tokens=%" PRId64,
                 desc.decode, SPARGE_FEW_QUERIES, desc.q_tokens);
  SPARGE_REQUIRE(desc.select != SPARGE_SELECT_MAP, "decode=%d cannot be combined with select=MAP", desc.decode);
  SPARGE_REQUIRE(desc.all_queries == 0 && desc.all_keys == 0,
                 "decode=%d cannot be combined with all_queries=%" PRId64 " and all_keys=%" PRId64, desc.decode,
                 desc.all_queries, desc.all_keys);
}

void CheckCache(const sparge_plan_desc& desc) {
  CheckDecode(desc);
  CheckRange("glance", desc.glance, 0, 1);
  SPARGE_REQUIRE(desc.glance == 0 || desc.cache_tokens > 0, "glance=1 is for keys in a cache, but cache_tokens=0");
  if (desc.cache_tokens == 0) return;
  SPARGE_REQUIRE(desc.cache_tokens >= desc.kv_tokens, "cache_tokens=%" PRId64 " is less than kv_tokens=%" PRId64,
                 desc.cache_tokens, desc.kv_tokens);
  SPARGE_REQUIRE(desc.q_offsets == nullptr, "cache_tokens=%" PRId64 " cannot be combined with q_offsets",
                 desc.cache_tokens);
}

// A part of a larger call.
void CheckPlace(const sparge_plan_desc& desc) {
  const auto check = [](const char* first_name, int64_t first, const char* all_name, int64_t all, int64_t tokens) {
    if (all == 0) {
      SPARGE_REQUIRE(first == 0, "%s=%" PRId64 " has no effect without %s", first_name, first, all_name);
      return;
    }
    CheckRange(all_name, all, tokens, kMaxPosition);
    CheckRange(first_name, first, 0, all - tokens);
  };
  check("first_query", desc.first_query, "all_queries", desc.all_queries, desc.q_tokens);
  check("first_key", desc.first_key, "all_keys", desc.all_keys, desc.kv_tokens);
  if (desc.all_queries == 0 && desc.all_keys == 0) return;
  SPARGE_REQUIRE(desc.q_offsets == nullptr,
                 "all_queries=%" PRId64 " and all_keys=%" PRId64 " cannot be combined with q_offsets", desc.all_queries,
                 desc.all_keys);
  // Blocks of the part must be blocks of the whole.
  SPARGE_REQUIRE(desc.first_query % kBlockQ == 0, "first_query=%" PRId64 " is not a multiple of %d", desc.first_query,
                 kBlockQ);
  SPARGE_REQUIRE(desc.first_key % kBlockK == 0, "first_key=%" PRId64 " is not a multiple of %d", desc.first_key,
                 kBlockK);
  if (desc.all_keys == 0 || desc.all_keys == desc.kv_tokens) return;
  const bool sums = desc.select == SPARGE_SELECT_ALL || desc.select == SPARGE_SELECT_MAP ||
                    (desc.select == SPARGE_SELECT_FLOOR && desc.predictor != SPARGE_PREDICT_PAPER);
  SPARGE_REQUIRE(sums,
                 "select=%d with predictor=%d cannot be decided from a part of the keys (all_keys=%" PRId64
                 ", kv_tokens=%" PRId64 "): take ALL, MAP or FLOOR with the predictor of its default",
                 RawEnum(desc.select), RawEnum(desc.predictor), desc.all_keys, desc.kv_tokens);
  SPARGE_REQUIRE(desc.sink_logits == nullptr,
                 "sink_logits are for the whole: give them to one part only, as all_keys=0");
}

bool HasGrid(const sparge_plan_desc& desc) { return desc.grid[0] != 0 || desc.grid[1] != 0 || desc.grid[2] != 0; }

void CheckGrid(const sparge_plan_desc& desc) {
  CheckRange("text_tokens", desc.text_tokens, 0, kMaxTokens);
  CheckRange("text_after", desc.text_after, 0, 1);
  if (!HasGrid(desc)) {
    SPARGE_REQUIRE(desc.text_tokens == 0, "text_tokens=%" PRId64 " has no effect without grid", desc.text_tokens);
    SPARGE_REQUIRE(desc.text_after == 0, "text_after=%d has no effect without grid", desc.text_after);
    return;
  }
  const int64_t tokens = desc.text_tokens + CountCells(desc.grid);
  SPARGE_REQUIRE(desc.q_tokens == tokens && desc.kv_tokens == tokens,
                 "grid=%" PRId64 ",%" PRId64 ",%" PRId64 " and text_tokens=%" PRId64 " make %" PRId64
                 " tokens, which is not both q_tokens=%" PRId64 " and kv_tokens=%" PRId64,
                 desc.grid[0], desc.grid[1], desc.grid[2], desc.text_tokens, tokens, desc.q_tokens, desc.kv_tokens);
  // All of these speak of positions in the caller's order, while blocks are made in another one.
  const char* const with = "cannot be combined with grid";
  SPARGE_REQUIRE(desc.causal == 0, "causal=%d %s", desc.causal, with);
  SPARGE_REQUIRE(desc.window == 0, "window=%" PRId64 " %s", desc.window, with);
  SPARGE_REQUIRE(desc.mask == SPARGE_MASK_NONE, "mask=%d %s", RawEnum(desc.mask), with);
  SPARGE_REQUIRE(desc.alibi_slopes == nullptr, "alibi_slopes %s", with);
  SPARGE_REQUIRE(desc.q_offsets == nullptr, "q_offsets %s", with);
  SPARGE_REQUIRE(desc.cache_tokens == 0, "cache_tokens=%" PRId64 " %s", desc.cache_tokens, with);
  SPARGE_REQUIRE(desc.all_queries == 0, "all_queries=%" PRId64 " %s", desc.all_queries, with);
  SPARGE_REQUIRE(desc.all_keys == 0, "all_keys=%" PRId64 " %s", desc.all_keys, with);
}

}  // namespace

void CheckDescriptor(const sparge_plan_desc& desc) {
  CheckShapes(desc);
  SPARGE_REQUIRE((desc.q_offsets == nullptr) == (desc.kv_offsets == nullptr), "%s is missing",
                 desc.q_offsets == nullptr ? "q_offsets" : "kv_offsets");
  if (desc.q_offsets != nullptr) {
    CheckOffsets("q_offsets", desc.q_offsets, desc.batch, desc.q_tokens);
    CheckOffsets("kv_offsets", desc.kv_offsets, desc.batch, desc.kv_tokens);
  }
  CheckScores(desc);
  CheckRange("precision", RawEnum(desc.precision), SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT8);
  CheckRange("select", RawEnum(desc.select), SPARGE_SELECT_ALL, SPARGE_SELECT_FLOOR);
  CheckRange("predictor", RawEnum(desc.predictor), SPARGE_PREDICT_DEFAULT, SPARGE_PREDICT_PAPER);
  CheckRange("keep_sink", desc.keep_sink, -1, 1);
  CheckRange("dense_tail", desc.dense_tail, 0, INT32_MAX);
  SPARGE_REQUIRE(desc.dense_tail == 0 || (desc.select != SPARGE_SELECT_MAP && !HasGrid(desc)),
                 "dense_tail=%" PRId64 " is neither for a map nor for a grid", desc.dense_tail);
  if (desc.heads == nullptr) CheckParams(desc, desc.params, -1);
  for (int64_t h = 0; desc.heads != nullptr && h < desc.q_heads; ++h) CheckParams(desc, desc.heads[h], h);
  CheckAutomatic(desc);
  CheckCache(desc);
  CheckGrid(desc);
  CheckPlace(desc);
}

namespace {

Place PlaceOf(const sparge_plan_desc& desc) {
  return {desc.first_query, desc.all_queries == 0 ? desc.q_tokens : desc.all_queries, desc.first_key,
          desc.all_keys == 0 ? desc.kv_tokens : desc.all_keys};
}

// The `index`-th sequence of the batch.
Sequence SequenceAt(const sparge_plan_desc& desc, const Problem& problem, int64_t index) {
  Sequence s{};
  s.index = index;
  s.q_count = desc.q_tokens;
  s.k_count = desc.kv_tokens;
  if (problem.packed) {
    s.q_begin = desc.q_offsets[index];
    s.q_count = desc.q_offsets[index + 1] - s.q_begin;
    s.k_begin = desc.kv_offsets[index];
    s.k_count = desc.kv_offsets[index + 1] - s.k_begin;
  }
  s.q_blocks = CeilDiv(s.q_count, kBlockQ);
  s.k_blocks = CeilDiv(s.k_count, kBlockK);
  // Positions count from the first key of the whole, the visible keys from the first one here.
  const Place& place = problem.place;
  const bool bottom_right = desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT;
  const int64_t aligned = problem.is_part() || place.all_queries != desc.q_tokens
                              ? place.all_keys - place.all_queries + place.first_query
                              : s.k_count - s.q_count;
  s.visible = {s.k_count, (bottom_right ? aligned : desc.query_offset) - place.first_key, desc.window,
               desc.causal == 1};
  return s;
}

// Those with queries and keys: the others would have units, means and packed keys that nobody reads. A cache has places
// for all, whatever a call has.
void AddSequences(const sparge_plan_desc& desc, Problem& problem) {
  problem.batch = desc.batch;
  problem.all_q_blocks = problem.all_k_blocks = problem.q_blocks = problem.k_blocks = problem.most_queries = 0;
  const bool alike = !problem.packed;
  const bool idle = desc.q_tokens == 0 || desc.kv_tokens == 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    Sequence s = SequenceAt(desc, problem, b);
    problem.q_blocks = std::max(problem.q_blocks, s.q_blocks);
    problem.most_queries = std::max(problem.most_queries, s.q_count);
    problem.k_blocks = std::max(problem.k_blocks, s.k_blocks);
    problem.has_unasked_keys = problem.has_unasked_keys || (s.q_count == 0 && s.k_count > 0);
    if (alike && idle && problem.cache_blocks == 0) return;
    if (!alike && (s.q_count == 0 || s.k_count == 0)) {
      if (s.q_count > 0) problem.keyless.push_back({b, s.q_begin, s.q_count});
      continue;
    }
    s.q_block_begin = problem.all_q_blocks;
    s.k_block_begin = problem.all_k_blocks;
    problem.all_q_blocks += s.q_blocks;
    problem.all_k_blocks += problem.cache_blocks > 0 ? problem.cache_blocks : s.k_blocks;
    problem.sequences.push_back(s);
  }
}

// A view of `heads` heads of `tokens` tokens of `dim` elements.
struct TensorShape {
  int64_t heads, tokens, dim;
};

void CheckTensor(const Problem& problem, const char* name, const sparge_tensor& tensor, TensorShape shape,
                 bool output) {
  CheckRange((std::string(name) + ".dtype").c_str(), RawEnum(tensor.dtype), SPARGE_F32, SPARGE_BF16);
  const bool empty = problem.batch == 0 || shape.tokens == 0;
  SPARGE_REQUIRE(tensor.data != nullptr || empty, "%s.data is NULL", name);
  SPARGE_REQUIRE(reinterpret_cast<uintptr_t>(tensor.data) % DtypeBytes(tensor.dtype) == 0,
                 "%s.data is not aligned to its element size", name);
  const int64_t counts[3] = {problem.packed ? 1 : problem.batch, shape.heads, shape.tokens};
  const int64_t strides[3] = {tensor.batch_stride, tensor.head_stride, tensor.token_stride};
  const char* const names[3] = {"batch_stride", "head_stride", "token_stride"};
  double reach = 0;
  for (int i = 0; i < 3; ++i) {
    SPARGE_REQUIRE(strides[i] >= 0, "%s.%s=%" PRId64 " is negative", name, names[i], strides[i]);
    // Cheap and sufficient for what people do: rows of an output may not overlap.
    SPARGE_REQUIRE(!output || empty || counts[i] <= 1 || strides[i] >= shape.dim,
                   "%s.%s=%" PRId64 " makes rows of %" PRId64 " elements overlap", name, names[i], strides[i],
                   shape.dim);
    reach += static_cast<double>(strides[i]) * static_cast<double>(std::max<int64_t>(counts[i] - 1, 0));
  }
  SPARGE_REQUIRE(reach < 0x1p60, "%s has strides that reach beyond 2^60 elements", name);
}

void CheckMaskArgs(const Problem& problem, const sparge_run_args& args) {
  const bool needed = problem.mask != SPARGE_MASK_NONE;
  SPARGE_REQUIRE(needed || args.mask.data == nullptr, "mask.data is given, but the plan has no mask");
  if (!needed) return;
  const bool empty = problem.batch == 0 || problem.q_tokens == 0 || problem.kv_tokens == 0;
  SPARGE_REQUIRE(args.mask.data != nullptr || empty, "mask.data is NULL, but the plan has a mask");
  SPARGE_REQUIRE(args.mask.batch_stride >= 0 && args.mask.head_stride >= 0 && args.mask.query_stride >= 0,
                 "mask strides %" PRId64 ", %" PRId64 ", %" PRId64 " must not be negative", args.mask.batch_stride,
                 args.mask.head_stride, args.mask.query_stride);
}

// All but what differs between the plans of one descriptor: precision and active heads.
Problem MakeBase(const sparge_plan_desc& desc, Calibration* calibration, Curves* curves) {
  Problem problem{};
  problem.packed = desc.q_offsets != nullptr;
  problem.q_heads = desc.q_heads;
  problem.kv_heads = desc.kv_heads;
  problem.heads_per_kv = desc.q_heads / desc.kv_heads;
  problem.q_tokens = desc.q_tokens;
  problem.kv_tokens = desc.kv_tokens;
  problem.qk_dim = desc.qk_dim;
  problem.v_dim = desc.v_dim;
  problem.cache_blocks = CeilDiv(desc.cache_tokens, kBlockK);
  problem.decodes = desc.decode != 0;
  problem.trusts_growth = desc.decode == 1;
  problem.glances = desc.glance == 1;
  problem.place = PlaceOf(desc);
  AddSequences(desc, problem);
  problem.scale = desc.scale != 0 ? desc.scale : 1.0 / std::sqrt(static_cast<double>(desc.qk_dim));
  problem.softcap = desc.softcap;
  problem.mask = desc.mask;
  if (desc.alibi_slopes != nullptr) problem.alibi_slopes.assign(desc.alibi_slopes, desc.alibi_slopes + desc.q_heads);
  if (desc.sink_logits != nullptr) problem.sink_logits.assign(desc.sink_logits, desc.sink_logits + desc.q_heads);
  problem.precision = desc.precision;
  problem.select = desc.select;
  problem.predictor = desc.predictor;
  problem.calibration = calibration;
  problem.least_effort = desc.least_effort;
  problem.dense_tail = desc.dense_tail;
  problem.keep_sink = desc.keep_sink == -1 ? desc.causal == 1 : desc.keep_sink == 1;
  problem.heads.assign(desc.q_heads, desc.params);
  if (desc.heads != nullptr) problem.heads.assign(desc.heads, desc.heads + desc.q_heads);
  if (desc.select == SPARGE_SELECT_AUTO) problem.heads.assign(desc.q_heads, {-1.0, 1.0, 1.0, SPARGE_PV_SKIP_OFF});
  problem.active.assign(desc.q_heads, 1);
  // Tokens that all are in one block have no other to go to; the direct kernel, for few of them, relies on that.
  if (HasGrid(desc) && problem.k_blocks > 1) {
    problem.curve = curves == nullptr ? LayCurve(desc) : curves->Get(desc);
    problem.order = *problem.curve;
  }
  return problem;
}

}  // namespace

std::vector<Problem> MakeProblems(const sparge_plan_desc& desc, Calibration* calibration, Curves* curves) {
  CheckDescriptor(desc);
  const Problem base = MakeBase(desc, calibration, curves);
  const bool chosen = base.calibrates() || (base.decodes && base.select == SPARGE_SELECT_AUTO);
  const bool mixed = desc.head_precision != nullptr || (chosen && desc.precision == SPARGE_PRECISION_INT8);
  if (base.direct() || !mixed) return {base};
  std::vector<Problem> problems;
  for (const sparge_precision precision : {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32}) {
    Problem problem = base;
    problem.precision = precision;
    if (desc.head_precision != nullptr) {
      for (int64_t h = 0; h < desc.q_heads; ++h) problem.active[h] = desc.head_precision[h] == precision;
      if (std::find(problem.active.begin(), problem.active.end(), 1) == problem.active.end()) continue;
    } else if (precision == SPARGE_PRECISION_FP32) {
      continue;  // a calibration chooses between int8 and int16
    }
    problems.push_back(std::move(problem));
  }
  return problems;
}

void WriteKeyless(const Problem& problem, const sparge_executor& executor, const sparge_run_args& args) {
  const bool all = !problem.packed && problem.kv_tokens == 0;
  const int64_t count = all ? problem.batch : static_cast<int64_t>(problem.keyless.size());
  if (problem.q_tokens == 0) return;
  ForEach(executor, count * problem.q_heads, [&](int32_t, int64_t task) {
    const int64_t i = task / problem.q_heads, head = task % problem.q_heads;
    const KeylessRows rows = all ? KeylessRows{i, 0, problem.q_tokens} : problem.keyless[i];
    for (int64_t t = rows.q_begin; t < rows.q_begin + rows.q_count; ++t) {
      std::memset(TokenData(problem, args.o, rows.index, head, t), 0,
                  static_cast<size_t>(problem.v_dim) * DtypeBytes(args.o.dtype));
    }
    float* lse = LseData(problem, args.lse, rows.index, head, rows.q_begin);
    if (lse != nullptr) std::fill_n(lse, rows.q_count, -std::numeric_limits<float>::infinity());
  });
}

void CheckArgs(const Problem& problem, const sparge_run_args& args, Call call, const Needs& needs) {
  const Reads reads = ReadsOf(problem, args, call);
  if (reads.q) CheckTensor(problem, "q", args.q, {problem.q_heads, problem.q_tokens, problem.qk_dim}, false);
  if (reads.k) CheckTensor(problem, "k", args.k, {problem.kv_heads, problem.kv_tokens, problem.qk_dim}, false);
  if (reads.v) CheckTensor(problem, "v", args.v, {problem.kv_heads, problem.kv_tokens, problem.v_dim}, false);
  if (call != Call::kPredict && call != Call::kCalibrate) {
    CheckTensor(problem, "o", args.o, {problem.q_heads, problem.q_tokens, problem.v_dim}, true);
  }
  CheckMaskArgs(problem, args);
  const bool no_tiles = problem.batch * problem.q_blocks * problem.k_blocks == 0;
  if (call != Call::kReference) {
    const bool wants_map = problem.select == SPARGE_SELECT_MAP;
    SPARGE_REQUIRE(!wants_map || args.map != nullptr || no_tiles, "map is NULL, but the plan selects by map");
    SPARGE_REQUIRE(wants_map || args.map == nullptr, "map is given, but the plan does not select by map");
    SPARGE_REQUIRE(args.workspace != nullptr || needs.workspace == 0, "workspace is NULL");
    SPARGE_REQUIRE(args.workspace_size >= needs.workspace, "workspace_size=%zu is less than the %zu needed",
                   args.workspace_size, needs.workspace);
    SPARGE_REQUIRE(args.cache != nullptr || needs.cache == 0, "cache is NULL, but the plan has one");
    SPARGE_REQUIRE(args.cache_size >= needs.cache, "cache_size=%zu is less than the %zu needed", args.cache_size,
                   needs.cache);
  }
  SPARGE_REQUIRE(args.cache == nullptr || problem.cache_blocks > 0, "cache is given, but the plan has none");
  const bool has_masses = call == Call::kReference || (call == Call::kPredict && problem.predicts());
  SPARGE_REQUIRE(args.mass_out == nullptr || has_masses, "mass_out is given, but %s has no masses",
                 call == Call::kPredict ? "a plan that does not predict" : "run");
  const bool pools = call != Call::kReference && problem.select == SPARGE_SELECT_FLOOR &&
                     problem.predictor != SPARGE_PREDICT_PAPER && !problem.few();
  SPARGE_REQUIRE((args.pool_lse == nullptr && args.pool_lse_out == nullptr) || pools,
                 "%s is given, but only run and predict with select=FLOOR and the predictor of its default have pools",
                 args.pool_lse != nullptr ? "pool_lse" : "pool_lse_out");
  CheckParts(problem, args, call, pools);
  const bool needs_sums = problem.is_part() && problem.predicts() && call == Call::kRun;
  SPARGE_REQUIRE(!needs_sums || args.pool_lse != nullptr,
                 "pool_lse is NULL, but the keys are a part: the sums over all parts (pool_lse_out of predict) decide");
  const bool decodes = problem.decodes && call != Call::kReference;
  SPARGE_REQUIRE(!decodes || call == Call::kRun, "a plan that decodes chooses no tiles: it can only be run");
  SPARGE_REQUIRE(!decodes || (args.map_out == nullptr && args.pv_out == nullptr),
                 "%s is given, but a plan that decodes has no map", args.map_out != nullptr ? "map_out" : "pv_out");
  SPARGE_REQUIRE(args.pv_out == nullptr || call == Call::kRun, "pv_out is given, but only run computes PV");
  SPARGE_REQUIRE(args.map == nullptr || (args.map_batch_stride >= 0 && args.map_head_stride >= 0),
                 "map strides %" PRId64 ", %" PRId64 " must not be negative", args.map_batch_stride,
                 args.map_head_stride);
  SPARGE_REQUIRE(args.lse.data == nullptr || (args.lse.batch_stride >= 0 && args.lse.head_stride >= 0),
                 "lse strides %" PRId64 ", %" PRId64 " must not be negative", args.lse.batch_stride,
                 args.lse.head_stride);
}

}  // namespace sparge::impl

// Checks descriptors and arguments once, at the door, and derives what the other rooms need.
#include "src/problem/problem.h"

#include <cinttypes>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "src/base/half.h"
#include "src/base/status.h"
#include "src/problem/order.h"

namespace sparge::impl {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxPosition = int64_t{1} << 40;  // offsets and windows: far beyond any token, far from overflow
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
  SPARGE_REQUIRE(desc.softcap >= 0 && desc.softcap <= 1e9, "softcap=%g is outside 0..1e9", desc.softcap);
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

void CheckCache(const sparge_plan_desc& desc) {
  if (desc.cache_tokens == 0) return;
  SPARGE_REQUIRE(desc.cache_tokens >= desc.kv_tokens, "cache_tokens=%" PRId64 " is less than kv_tokens=%" PRId64,
                 desc.cache_tokens, desc.kv_tokens);
  SPARGE_REQUIRE(desc.q_offsets == nullptr, "cache_tokens=%" PRId64 " cannot be combined with q_offsets",
                 desc.cache_tokens);
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
}

namespace {

// Text as it lies, the grid along the curve.
std::vector<int32_t> CurveOrder(const sparge_plan_desc& desc) {
  std::vector<int32_t> order(desc.q_tokens);
  std::iota(order.begin(), order.end(), 0);
  const int64_t first = desc.text_after == 1 ? 0 : desc.text_tokens;
  FillOrder(SPARGE_ORDER_HILBERT, desc.grid, 0, static_cast<int32_t>(first), order.data() + first);
  return order;
}

void AddSequences(const sparge_plan_desc& desc, Plan& plan) {
  plan.all_q_blocks = plan.all_k_blocks = plan.q_blocks = plan.k_blocks = plan.most_queries = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    Sequence s{};
    if (plan.packed) {
      s.q_begin = desc.q_offsets[b];
      s.q_count = desc.q_offsets[b + 1] - s.q_begin;
      s.k_begin = desc.kv_offsets[b];
      s.k_count = desc.kv_offsets[b + 1] - s.k_begin;
    } else {
      s.q_count = desc.q_tokens;
      s.k_count = desc.kv_tokens;
    }
    s.q_blocks = CeilDiv(s.q_count, kBlockQ);
    s.k_blocks = CeilDiv(s.k_count, kBlockK);
    s.q_block_begin = plan.all_q_blocks;
    s.k_block_begin = plan.all_k_blocks;
    const bool bottom_right = desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT;
    s.visible = {s.k_count, bottom_right ? s.k_count - s.q_count : desc.query_offset, desc.window, desc.causal == 1};
    plan.all_q_blocks += s.q_blocks;
    plan.all_k_blocks += plan.cache_blocks > 0 ? plan.cache_blocks : s.k_blocks;
    plan.q_blocks = std::max(plan.q_blocks, s.q_blocks);
    plan.most_queries = std::max(plan.most_queries, s.q_count);
    plan.k_blocks = std::max(plan.k_blocks, s.k_blocks);
    plan.sequences.push_back(s);
  }
}

// A view of `heads` heads of `tokens` tokens of `dim` elements.
struct TensorShape {
  int64_t heads, tokens, dim;
};

void CheckTensor(const Plan& plan, const char* name, const sparge_tensor& tensor, TensorShape shape, bool output) {
  CheckRange((std::string(name) + ".dtype").c_str(), RawEnum(tensor.dtype), SPARGE_F32, SPARGE_BF16);
  const bool empty = plan.batch() == 0 || shape.tokens == 0;
  SPARGE_REQUIRE(tensor.data != nullptr || empty, "%s.data is NULL", name);
  SPARGE_REQUIRE(reinterpret_cast<uintptr_t>(tensor.data) % DtypeBytes(tensor.dtype) == 0,
                 "%s.data is not aligned to its element size", name);
  const int64_t counts[3] = {plan.packed ? 1 : plan.batch(), shape.heads, shape.tokens};
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

void CheckMaskArgs(const Plan& plan, const sparge_run_args& args) {
  const bool needed = plan.mask != SPARGE_MASK_NONE;
  SPARGE_REQUIRE(needed || args.mask.data == nullptr, "mask.data is given, but the plan has no mask");
  if (!needed) return;
  const bool empty = plan.batch() == 0 || plan.q_tokens == 0 || plan.kv_tokens == 0;
  SPARGE_REQUIRE(args.mask.data != nullptr || empty, "mask.data is NULL, but the plan has a mask");
  SPARGE_REQUIRE(args.mask.batch_stride >= 0 && args.mask.head_stride >= 0 && args.mask.query_stride >= 0,
                 "mask strides %" PRId64 ", %" PRId64 ", %" PRId64 " must not be negative", args.mask.batch_stride,
                 args.mask.head_stride, args.mask.query_stride);
}

// Tau and theta that were set by hand go with the masses of the paper, for which they are known to do: pooled queries
// give a sink more than its due, and a share of that is soon reached. A floor on mass is measured, whatever the scale.
sparge_predictor PredictorFor(const sparge_plan_desc& desc) {
  if (desc.predictor != SPARGE_PREDICT_DEFAULT) return desc.predictor;
  const bool by_hand = desc.select == SPARGE_SELECT_CDF || desc.select == SPARGE_SELECT_TOPK;
  return by_hand ? SPARGE_PREDICT_PAPER : SPARGE_PREDICT_KEYS;
}

// All but what differs between the plans of one descriptor: precision and active heads.
Plan MakeBase(const Runtime& runtime, const sparge_plan_desc& desc, Calibration* calibration) {
  Plan plan{};
  plan.runtime = runtime;
  plan.packed = desc.q_offsets != nullptr;
  plan.q_heads = desc.q_heads;
  plan.kv_heads = desc.kv_heads;
  plan.heads_per_kv = desc.q_heads / desc.kv_heads;
  plan.q_tokens = desc.q_tokens;
  plan.kv_tokens = desc.kv_tokens;
  plan.qk_dim = desc.qk_dim;
  plan.v_dim = desc.v_dim;
  plan.cache_blocks = CeilDiv(desc.cache_tokens, kBlockK);
  AddSequences(desc, plan);
  plan.scale = desc.scale != 0 ? desc.scale : 1.0 / std::sqrt(static_cast<double>(desc.qk_dim));
  plan.softcap = desc.softcap;
  plan.mask = desc.mask;
  if (desc.alibi_slopes != nullptr) plan.alibi_slopes.assign(desc.alibi_slopes, desc.alibi_slopes + desc.q_heads);
  if (desc.sink_logits != nullptr) plan.sink_logits.assign(desc.sink_logits, desc.sink_logits + desc.q_heads);
  plan.precision = desc.precision;
  plan.select = desc.select;
  plan.predictor = PredictorFor(desc);
  plan.calibration = calibration;
  plan.least_effort = desc.least_effort;
  plan.dense_tail = desc.dense_tail;
  plan.keep_sink = desc.keep_sink == -1 ? desc.causal == 1 : desc.keep_sink == 1;
  plan.heads.assign(desc.q_heads, desc.params);
  if (desc.heads != nullptr) plan.heads.assign(desc.heads, desc.heads + desc.q_heads);
  if (desc.select == SPARGE_SELECT_AUTO) plan.heads.assign(desc.q_heads, {-1.0, 1.0, 1.0, SPARGE_PV_SKIP_OFF});
  plan.active.assign(desc.q_heads, 1);
  // Tokens that all are in one block have no other to go to; the direct kernel, for few of them, relies on that.
  if (HasGrid(desc) && plan.k_blocks > 1) plan.order = CurveOrder(desc);
  return plan;
}

}  // namespace

std::vector<Plan> MakePlans(const Runtime& runtime, const sparge_plan_desc& desc, Calibration* calibration) {
  CheckDescriptor(desc);
  const Plan base = MakeBase(runtime, desc, calibration);
  const bool mixed = desc.head_precision != nullptr || (base.measures() && desc.precision == SPARGE_PRECISION_INT8);
  if (base.direct() || !mixed) return {base};
  std::vector<Plan> plans;
  for (const sparge_precision precision : {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32}) {
    Plan plan = base;
    plan.precision = precision;
    if (desc.head_precision != nullptr) {
      for (int64_t h = 0; h < desc.q_heads; ++h) plan.active[h] = desc.head_precision[h] == precision;
      if (std::find(plan.active.begin(), plan.active.end(), 1) == plan.active.end()) continue;
    } else if (precision == SPARGE_PRECISION_FP32) {
      continue;  // a calibration chooses between int8 and int16
    }
    plans.push_back(std::move(plan));
  }
  return plans;
}

void CheckArgs(const Plan& plan, const sparge_run_args& args, Call call, const Needs& needs) {
  CheckTensor(plan, "q", args.q, {plan.q_heads, plan.q_tokens, plan.qk_dim}, false);
  CheckTensor(plan, "k", args.k, {plan.kv_heads, plan.kv_tokens, plan.qk_dim}, false);
  if (call != Call::kPredict) {
    CheckTensor(plan, "v", args.v, {plan.kv_heads, plan.kv_tokens, plan.v_dim}, false);
    if (call != Call::kCalibrate) CheckTensor(plan, "o", args.o, {plan.q_heads, plan.q_tokens, plan.v_dim}, true);
  }
  CheckMaskArgs(plan, args);
  const bool no_tiles = plan.batch() * plan.q_blocks * plan.k_blocks == 0;
  if (call != Call::kReference) {
    const bool wants_map = plan.select == SPARGE_SELECT_MAP;
    SPARGE_REQUIRE(!wants_map || args.map != nullptr || no_tiles, "map is NULL, but the plan selects by map");
    SPARGE_REQUIRE(wants_map || args.map == nullptr, "map is given, but the plan does not select by map");
    SPARGE_REQUIRE(args.workspace != nullptr || needs.workspace == 0, "workspace is NULL");
    SPARGE_REQUIRE(args.workspace_size >= needs.workspace, "workspace_size=%zu is less than the %zu needed",
                   args.workspace_size, needs.workspace);
    SPARGE_REQUIRE(args.cache != nullptr || needs.cache == 0, "cache is NULL, but the plan has one");
    SPARGE_REQUIRE(args.cache_size >= needs.cache, "cache_size=%zu is less than the %zu needed", args.cache_size,
                   needs.cache);
  }
  SPARGE_REQUIRE(args.cache == nullptr || plan.cache_blocks > 0, "cache is given, but the plan has none");
  const bool has_masses = call == Call::kReference || (call == Call::kPredict && plan.predicts());
  SPARGE_REQUIRE(args.mass_out == nullptr || has_masses, "mass_out is given, but %s has no masses",
                 call == Call::kPredict ? "a plan that does not predict" : "run");
  SPARGE_REQUIRE(args.pv_out == nullptr || call == Call::kRun, "pv_out is given, but only run computes PV");
  SPARGE_REQUIRE(args.map == nullptr || (args.map_batch_stride >= 0 && args.map_head_stride >= 0),
                 "map strides %" PRId64 ", %" PRId64 " must not be negative", args.map_batch_stride,
                 args.map_head_stride);
  SPARGE_REQUIRE(args.lse.data == nullptr || (args.lse.batch_stride >= 0 && args.lse.head_stride >= 0),
                 "lse strides %" PRId64 ", %" PRId64 " must not be negative", args.lse.batch_stride,
                 args.lse.head_stride);
}

}  // namespace sparge::impl

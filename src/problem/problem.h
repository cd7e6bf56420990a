// What is asked: a checked, plain description of one attention problem. Everything that can be refused is refused here.
#ifndef SPARGE_SRC_PROBLEM_PROBLEM_H_
#define SPARGE_SRC_PROBLEM_PROBLEM_H_

#include <sparge/sparge.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "src/base/half.h"
#include "src/base/tokens.h"
#include "src/base/units.h"
#include "src/base/visible.h"
#include "src/problem/order.h"
#include "src/problem/score_rule.h"

namespace sparge::impl {

// One sequence of the batch that has queries and keys. Token indices count from `q_begin` / `k_begin` in its tensor
// row; blocks are numbered through all sequences of a head, so that one index finds a block's data.
struct Sequence {
  int64_t index;  // in the batch: of its part of tensors, masks, maps and figures
  int64_t q_begin, q_count, q_blocks, q_block_begin;
  int64_t k_begin, k_count, k_blocks, k_block_begin;
  Visible visible;

  int64_t QueriesIn(int64_t q_block) const { return std::min<int64_t>(kBlockQ, q_count - q_block * kBlockQ); }
  int64_t KeysIn(int64_t k_block) const { return std::min<int64_t>(kBlockK, k_count - k_block * kBlockK); }
};

// Queries of a sequence that has no keys: their result is empty.
struct KeylessRows {
  int64_t index, q_begin, q_count;
};

// Packing a key costs about as much as this many queries take to use it unpacked.
inline constexpr int64_t kDirectQueries = 16;

// Where the queries and keys of a call stand among all, if it is a part of a larger one.
struct Place {
  int64_t first_query, all_queries;
  int64_t first_key, all_keys;
};

struct Calibration;

struct Problem {
  int64_t batch;                     // as in the descriptor
  std::vector<Sequence> sequences;   // those with something to compute: others cost no memory
  std::vector<KeylessRows> keyless;  // of a packed batch; of another one that has no keys, all rows are
  bool has_unasked_keys;             // a sequence has keys, and no queries
  bool packed;  // sequences lie behind one another in one tensor row, instead of in a batch dimension
  int64_t q_heads, kv_heads, heads_per_kv;
  int64_t q_tokens, kv_tokens;  // as in the descriptor
  int64_t qk_dim, v_dim;
  int64_t most_queries;                // of a sequence
  int64_t q_blocks, k_blocks;          // of the longest sequence: the shape of the map
  int64_t all_q_blocks, all_k_blocks;  // of all sequences of one head; places for blocks, if there is a cache
  int64_t cache_blocks;                // places for key blocks of one sequence in the caller's cache; 0 = no cache
  bool decodes;                        // few queries, against what earlier calls left in the cache
  bool trusts_growth;                  // and no other call came before them
  bool glances;                        // what is in the cache is known again by a glance, not by checksums
  Place place;

  double scale;
  double softcap;
  sparge_mask_type mask;
  std::vector<float> alibi_slopes;  // empty = none
  std::vector<float> sink_logits;   // empty = none

  sparge_precision precision;  // of all heads that this plan computes
  sparge_select select;
  sparge_predictor predictor;  // as asked for: select/predictors.h has the default
  bool keep_sink;
  int64_t dense_tail;                     // last queries of a sequence whose blocks keep all visible tiles
  std::vector<sparge_head_params> heads;  // one per query head
  std::vector<uint8_t> active;            // one per query head: computed by this plan
  Calibration* calibration;               // iff select is AUTO
  double least_effort;                    // samples: share of a dense call
  TokenOrder curve;                       // NULL = none
  std::span<const int32_t> order;         // blocks take the tokens of a sequence in this order; empty = as they lie

  // So few queries that they take keys and values straight from the tensors, in fp32, whatever the precision asked for.
  // Stage 1 needs summaries, for which all keys have to be read anyway.
  bool direct() const { return !decodes && !predicts() && few(); }
  // A part is computed as the whole is.
  bool few() const {
    const int64_t queries = place.all_queries == q_tokens ? most_queries : place.all_queries;
    return q_blocks <= 1 && queries * heads_per_kv <= kDirectQueries;
  }
  bool predicts() const {
    return select == SPARGE_SELECT_CDF || select == SPARGE_SELECT_TOPK || select == SPARGE_SELECT_FLOOR || calibrates();
  }
  // Few queries are not worth a prediction, and there is nothing to calibrate.
  bool calibrates() const { return select == SPARGE_SELECT_AUTO && !decodes && !few(); }
  // Whether these are not all keys that the queries see.
  bool is_part() const { return place.all_keys != kv_tokens; }
  int64_t sequence_count() const { return static_cast<int64_t>(sequences.size()); }
  // Whether there is nothing to compute. Sequences of a plan with a cache have their places there nevertheless.
  bool idle() const { return sequences.empty() || q_tokens == 0 || kv_tokens == 0; }
  // Index of a query block among all of all heads, or of a key block among all of all kv heads.
  int64_t QueryBlock(int64_t head, const Sequence& s, int64_t block) const {
    return head * all_q_blocks + s.q_block_begin + block;
  }
  int64_t KeyBlock(int64_t kv_head, const Sequence& s, int64_t block) const {
    return kv_head * all_k_blocks + s.k_block_begin + block;
  }
  // Index of what is kept per sequence and kv head: mean and units of the keys.
  int64_t KvUnit(int64_t sequence, int64_t kv_head) const { return sequence * kv_heads + kv_head; }
  // Place of a sequence and head in an array (batch, q_heads) that crosses the interface.
  int64_t HeadPlace(int64_t sequence, int64_t head) const { return sequences[sequence].index * q_heads + head; }
  // Tiles of an array (batch, q_heads, q_blocks, k_blocks) that crosses the interface.
  int64_t AllTiles() const { return batch * q_heads * q_blocks * k_blocks; }
};

// The heads of one call: what is in force for each, and which of them this pass computes.
struct HeadChoice {
  const sparge_head_params* params;  // per query head
  const uint8_t* active;             // per query head

  bool KvActive(const Problem& problem, int64_t kv_head) const {
    const uint8_t* first = active + kv_head * problem.heads_per_kv;
    return std::any_of(first, first + problem.heads_per_kv, [](uint8_t a) { return a != 0; });
  }
};

// Throws Failure if something in it cannot be.
void CheckDescriptor(const sparge_plan_desc& desc);

// One problem per precision that its heads may need, fewer bits first: a call computes the heads of each in turn.
// `curves`: those of the context, if there is one. Throws Failure.
std::vector<Problem> MakeProblems(const sparge_plan_desc& desc, Calibration* calibration, Curves* curves = nullptr);

// What a call is going to do, which decides what its arguments must hold.
enum class Call { kRun, kPredict, kCalibrate, kReference };
// Bytes of the caller's memory that a call needs.
struct Needs {
  size_t workspace, cache;
};
// Zeros and log-sum-exp -inf for queries of sequences without keys.
void WriteKeyless(const Problem& problem, const sparge_executor& executor, const sparge_run_args& args);

// Throws Failure if `args` do not fit the problem.
void CheckArgs(const Problem& problem, const sparge_run_args& args, Call call, const Needs& needs);

// Where a block stands: the inverse of Problem::QueryBlock and Problem::KeyBlock.
struct BlockId {
  int64_t head, sequence, block;
};
template <int64_t Sequence::*kBegin>
BlockId FindBlock(const Problem& problem, int64_t index, int64_t blocks_per_head) {
  const int64_t within = index % blocks_per_head;
  // The last sequence that begins at or before `within`: empty ones share their beginning with the next.
  const auto after = std::upper_bound(problem.sequences.begin(), problem.sequences.end(), within,
                                      [](int64_t block, const Sequence& s) { return block < s.*kBegin; });
  const int64_t sequence = after - problem.sequences.begin() - 1;
  return {index / blocks_per_head, sequence, within - problem.sequences[sequence].*kBegin};
}
inline BlockId FindQueryBlock(const Problem& problem, int64_t index) {
  return FindBlock<&Sequence::q_block_begin>(problem, index, problem.all_q_blocks);
}
inline BlockId FindKeyBlock(const Problem& problem, int64_t index) {
  return FindBlock<&Sequence::k_block_begin>(problem, index, problem.all_k_blocks);
}

// Where the tiles of a query block begin in an array (batch, q_heads, q_blocks, k_blocks).
inline int64_t TileRow(const Problem& problem, const BlockId& id) {
  return (problem.HeadPlace(id.sequence, id.head) * problem.q_blocks + id.block) * problem.k_blocks;
}

// Address of a token of the tensor row that holds the `index`-th sequence of the batch.
inline std::byte* TokenData(const Problem& problem, const sparge_tensor& tensor, int64_t index, int64_t head,
                            int64_t token) {
  const int64_t batch = problem.packed ? 0 : index;
  const int64_t at = batch * tensor.batch_stride + head * tensor.head_stride + token * tensor.token_stride;
  return static_cast<std::byte*>(tensor.data) + at * static_cast<int64_t>(DtypeBytes(tensor.dtype));
}
inline std::byte* SequenceData(const Problem& problem, const sparge_tensor& tensor, int64_t sequence, int64_t head,
                               int64_t first_token) {
  return TokenData(problem, tensor, problem.sequences[sequence].index, head, first_token);
}

// Rows that follow one another in the plan's order from the `first`-th on: the address that their places count from,
// and these places, NULL = 0, 1, 2 and so on. Packed sequences have no order, so that `first` then is a token.
struct RowPlaces {
  std::byte* data;
  const int32_t* order;
};
inline RowPlaces PlacesOf(const Problem& problem, const sparge_tensor& tensor, int64_t sequence, int64_t head,
                          int64_t first) {
  const bool as_they_lie = problem.order.empty();
  return {SequenceData(problem, tensor, sequence, head, as_they_lie ? first : 0),
          as_they_lie ? nullptr : problem.order.data() + first};
}

inline TokenRows RowsOf(const Problem& problem, const sparge_tensor& tensor, int64_t sequence, int64_t head,
                        int64_t first, int64_t count, int64_t dim) {
  const RowPlaces places = PlacesOf(problem, tensor, sequence, head, first);
  return {places.data, tensor.dtype, tensor.token_stride, count, dim, places.order};
}

inline int64_t MaskElementBytes(sparge_mask_type type) {
  return type == SPARGE_MASK_BOOL ? 1 : type == SPARGE_MASK_ADD_F16 ? 2 : 4;
}

// Address of the mask element (query, key 0); NULL if there is no mask.
inline const std::byte* MaskRow(const Problem& problem, const sparge_mask& mask, int64_t sequence, int64_t head,
                                int64_t query) {
  if (problem.mask == SPARGE_MASK_NONE) return nullptr;
  const int64_t at =
      problem.sequences[sequence].index * mask.batch_stride + head * mask.head_stride + query * mask.query_stride;
  return static_cast<const std::byte*>(mask.data) + at * MaskElementBytes(problem.mask);
}

// What happens to the scores of a head, but for the mask.
inline ScoreRule RuleOf(const Problem& problem, int64_t sequence, int64_t head) {
  ScoreRule rule;
  rule.visible = problem.sequences[sequence].visible;
  rule.softcap = static_cast<float>(problem.softcap * kLog2e);
  rule.slope = problem.alibi_slopes.empty() ? 0.0f : static_cast<float>(problem.alibi_slopes[head] * kLog2e);
  rule.mask_type = problem.mask;
  return rule;
}

// What a kernel left out of all scores of a query, log2 units: what centring the keys took, `shift`, which with a
// softcap is in the scores already; and the base of ALiBi.
inline double LeftOut(const Problem& problem, const Visible& visible, int64_t head, int64_t query, float shift) {
  const double slope = problem.alibi_slopes.empty() ? 0.0 : static_cast<double>(problem.alibi_slopes[head]) * kLog2e;
  return (problem.softcap > 0 ? 0.0 : static_cast<double>(shift)) + BaseBias(visible, slope, query);
}

// The sink logit of a head, log2 units; -inf without one.
inline double SinkLogit(const Problem& problem, int64_t head) {
  if (problem.sink_logits.empty()) return -std::numeric_limits<double>::infinity();
  return static_cast<double>(problem.sink_logits[head]) * kLog2e;
}

// The lse of a token of the tensor row that holds the `index`-th sequence of the batch; NULL if not wanted.
inline float* LseData(const Problem& problem, const sparge_lse& lse, int64_t index, int64_t head, int64_t token) {
  if (lse.data == nullptr) return nullptr;
  const int64_t batch = problem.packed ? 0 : index;
  return lse.data + batch * lse.batch_stride + head * lse.head_stride + token;
}
// That of a sequence's first token.
inline float* LseRow(const Problem& problem, const sparge_lse& lse, int64_t sequence, int64_t head) {
  const Sequence& s = problem.sequences[sequence];
  return LseData(problem, lse, s.index, head, s.q_begin);
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_PROBLEM_PROBLEM_H_

// Surveys and pools, out of a call and into another.
#include "src/cpu/parts.h"

#include <algorithm>
#include <cinttypes>
#include <vector>

#include "src/base/half.h"
#include "src/base/status.h"
#include "src/base/threads.h"
#include "src/cpu/codes.h"

namespace sparge::impl {
namespace {

// Place of a sequence and kv head in an array (batch, kv_heads, ...) of the interface.
int64_t SurveyPlace(const Plan& plan, int64_t index) {
  const int64_t batch = plan.sequences[index / plan.kv_heads].index;
  return (batch * plan.kv_heads + index % plan.kv_heads) * KeySurveySize(plan);
}

// Place of the first pool of a query block in an array (batch, q_heads, pools) of the interface.
int64_t FirstPool(const Plan& plan, const BlockId& id) {
  return plan.HeadPlace(id.sequence, id.head) * plan.pools() + id.block * plan.block_pools();
}

int64_t BlockPlace(const Plan& plan, const BlockId& id) {
  return plan.HeadPlace(id.sequence, id.head) * plan.q_blocks + id.block;
}

// The sums as the packing of a whole makes them: means of blocks, times their keys.
void SurveyKeys(const Plan& plan, const sparge_run_args& args, const Packed& packed, int64_t index, int32_t worker) {
  const int64_t sequence = index / plan.kv_heads, kv_head = index % plan.kv_heads;
  const Sequence& s = plan.sequences[sequence];
  const PackOps& ops = *plan.machine.ops.pack;
  float* scratch = packed.scratch + worker * Packed::scratch_floats(plan);
  double* out = args.key_survey_out + SurveyPlace(plan, index);
  std::fill_n(out, KeySurveySize(plan), 0.0);  // of another precision, whose heads share these keys: the same
  for (int64_t j = 0; j < s.k_blocks; ++j) {
    const auto rows = [&](const sparge_tensor& tensor, int64_t dim) {
      return RowsOf(plan, tensor, sequence, kv_head, s.k_begin + j * kBlockK, s.KeysIn(j), dim);
    };
    float* mean = packed.k.mean + plan.KeyBlock(kv_head, s, j) * plan.dim_pad();
    const Survey k = ops.survey(rows(args.k, plan.qk_dim), plan.dim_pad(), mean, scratch);
    const Survey v = ops.survey(rows(args.v, plan.v_dim), plan.channels(), nullptr, scratch);
    for (int64_t d = 0; d < plan.qk_dim; ++d) out[d] += static_cast<double>(mean[d]) * k.finite;
    out[plan.qk_dim] += k.finite;
    out[plan.qk_dim + 1] = std::max(out[plan.qk_dim + 1], static_cast<double>(k.max_abs));
    out[plan.qk_dim + 2] = std::max(out[plan.qk_dim + 2], static_cast<double>(v.max_abs));
  }
}

// The pools of a block, and its queries that are pools of their own.
struct PoolCount {
  int64_t pools, own;
};

// As stage 1 packs them where keys are here.
void LeaveCodedPools(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id,
                     const PoolCount& count, int32_t worker) {
  const int64_t block = plan.QueryBlock(id.head, plan.sequences[id.sequence], id.block);
  const int64_t bytes = plan.row_lanes() * kLaneBytes;
  std::byte rows[kPredictKeys.pools * RoundUp(SPARGE_MAX_HEAD_DIM, kLaneBytes)];
  float factor[kPredictKeys.pools], shift[kPredictKeys.pools];
  PackPools(plan, packed, id, count.pools, /*absolute=*/true, worker, {rows, factor, shift});
  LeavePoolCodes(plan, *args.pool_codes_out, FirstPool(plan, id), count.pools, {rows, factor, shift});
  for (int64_t r = 0; r < count.own; ++r) {
    const int64_t at = block * kBlockQ + packed.unlike[block].rows[r];
    LeavePoolCodes(plan, *args.pool_codes_out, FirstPool(plan, id) + plan.predictor->pools + r, 1,
                   {packed.queries + at * bytes, packed.q_factor + at, packed.q_shift + at});
  }
}

}  // namespace

void LeaveSurvey(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed) {
  if (plan.direct()) return;
  ForEach(plan.machine.executor, plan.sequence_count() * plan.kv_heads, [&](int32_t worker, int64_t index) {
    if (heads.KvActive(plan, index % plan.kv_heads)) SurveyKeys(plan, args, packed, index, worker);
  });
}

void TakeSurvey(const Plan& plan, const sparge_run_args& args, int64_t index, const Packed& packed) {
  const double* survey = args.key_survey + SurveyPlace(plan, index);
  const double tokens = survey[plan.qk_dim];
  const auto k_max = static_cast<float>(survey[plan.qk_dim + 1]), v_max = static_cast<float>(survey[plan.qk_dim + 2]);
  packed.units[index] = {UnitFor(k_max), UnitFor(v_max)};
  const bool centre = tokens > 0 && k_max <= kMostCentred;
  float* mean = packed.key_mean + index * plan.dim_pad();
  std::fill_n(mean, plan.dim_pad(), 0.0f);
  for (int64_t d = 0; centre && d < plan.qk_dim; ++d) mean[d] = static_cast<float>(survey[d] / tokens);
}

void LeavePools(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id,
                int32_t worker) {
  const Sequence& s = plan.sequences[id.sequence];
  const int64_t block = plan.QueryBlock(id.head, s, id.block);
  const int64_t pools = CeilDiv(s.QueriesIn(id.block), plan.predictor->pool_rows());
  const UnlikeRows& unlike = packed.unlike[block];
  args.pool_counts_out[BlockPlace(plan, id)] = unlike.count;
  const int64_t own = unlike.TooMany() ? 0 : unlike.count;
  if (args.pool_codes_out != nullptr) return LeaveCodedPools(plan, args, packed, id, {pools, own}, worker);
  float* out = args.pool_rows_out + FirstPool(plan, id) * plan.qk_dim;
  for (int64_t p = 0; p < pools; ++p) {
    const float* mean = packed.q.mean + (block * plan.predictor->pools + p) * plan.dim_pad();
    std::copy_n(mean, plan.qk_dim, out + p * plan.qk_dim);
  }
  out += plan.predictor->pools * plan.qk_dim;
  const TokenRows rows =
      RowsOf(plan, args.q, id.sequence, id.head, s.q_begin + id.block * kBlockQ, s.QueriesIn(id.block), plan.qk_dim);
  for (int64_t r = 0; r < own; ++r) {
    const std::byte* row = rows.Token(unlike.rows[r]);
    for (int64_t d = 0; d < plan.qk_dim; ++d) out[r * plan.qk_dim + d] = LoadElement(row, rows.dtype, d);
  }
}

void CheckCounts(const Plan& plan, const sparge_run_args& args) {
  for (int64_t i = 0; i < plan.batch * plan.q_heads * plan.q_blocks; ++i) {
    SPARGE_REQUIRE(args.pool_counts[i] >= 0, "pool_counts[%" PRId64 "]=%d is negative", i, args.pool_counts[i]);
  }
}

void CheckFine(const Plan& plan, const sparge_key_codes& codes) {
  for (int64_t i = 0; i < plan.batch * plan.kv_heads * plan.k_blocks; ++i) {
    SPARGE_REQUIRE(codes.fine[i] <= 2, "key_codes: fine[%" PRId64 "]=%d is above 2", i, codes.fine[i]);
  }
}

void TakeCodedPools(const Plan& plan, const sparge_run_args& args, const BlockId& first, int64_t count,
                    const QueryRows& out) {
  BlockId id = first;
  const int64_t bytes = plan.row_lanes() * kLaneBytes;
  for (int64_t done = 0; done < count; done += plan.predictor->pools, ++id.block) {
    TakePoolCodes(plan, *args.pool_codes, FirstPool(plan, id), std::min(plan.predictor->pools, count - done),
                  {out.rows + done * bytes, out.factor + done, out.shift + done});
  }
}

void TakePools(const Plan& plan, const sparge_run_args& args, const BlockId& id, int32_t worker, const Packed& packed) {
  const int64_t row = plan.QueryBlock(id.head, plan.sequences[id.sequence], id.block);
  packed.q.similarity[row] = 1;
  UnlikeRows& unlike = packed.unlike[row];
  const int32_t count = args.pool_counts[BlockPlace(plan, id)];
  unlike.count = static_cast<int16_t>(std::min(count, UnlikeRows::kMostUnlike + 1));
  const int64_t own = unlike.TooMany() ? 0 : unlike.count;
  for (int16_t r = 0; r < own; ++r) unlike.rows[r] = r;
  const int64_t first = row * kBlockQ;
  const QueryRows rows{packed.queries + first * plan.row_lanes() * kLaneBytes, packed.q_factor + first,
                       packed.q_shift + first};
  if (args.pool_codes != nullptr) {  // those of all come when they are needed
    return TakePoolCodes(plan, *args.pool_codes, FirstPool(plan, id) + plan.predictor->pools, own, rows);
  }
  const float* from = args.pool_rows + FirstPool(plan, id) * plan.qk_dim;
  for (int64_t p = 0; p < plan.predictor->pools; ++p) {
    float* mean = packed.q.mean + (row * plan.predictor->pools + p) * plan.dim_pad();
    std::fill_n(std::copy_n(from + p * plan.qk_dim, plan.qk_dim, mean), plan.dim_pad() - plan.qk_dim, 0.0f);
  }
  if (own == 0) return;
  const auto* own_rows = reinterpret_cast<const std::byte*>(from + plan.predictor->pools * plan.qk_dim);
  PackRowsOnly(plan, packed, id, {own_rows, SPARGE_F32, plan.qk_dim, own, plan.qk_dim}, /*absolute=*/true, worker,
               rows);
}

}  // namespace sparge::impl

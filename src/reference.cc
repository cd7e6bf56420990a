// The oracle, one query at a time: scores, softmax, weighted sum.
#include "src/reference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "src/base/half.h"
#include "src/base/threads.h"

namespace sparge::impl {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

double MaskBias(const Plan& plan, const std::byte* mask, int64_t key) {
  switch (plan.mask) {
    case SPARGE_MASK_BOOL:
      return static_cast<uint8_t>(mask[key]) != 0 ? 0.0 : kMinusInf;
    case SPARGE_MASK_ADD_F32:
      return LoadElement(mask, SPARGE_F32, key);
    case SPARGE_MASK_ADD_F16:
      return LoadElement(mask, SPARGE_F16, key);
    case SPARGE_MASK_NONE:
      break;
  }
  return 0.0;
}

// One head of one sequence: k and v converted once.
struct Head {
  const Plan& plan;
  const sparge_run_args& args;
  int64_t sequence, head;
  const std::vector<int64_t>& place;  // of a token in the order of the blocks; empty = where it lies
  std::vector<double> k, v;

  Head(const Plan& p, const sparge_run_args& a, int64_t seq, int64_t h, const std::vector<int64_t>& places)
      : plan(p), args(a), sequence(seq), head(h), place(places) {
    Load(args.k, plan.qk_dim, k);
    Load(args.v, plan.v_dim, v);
  }
  void Load(const sparge_tensor& tensor, int64_t dim, std::vector<double>& to) const {
    const Sequence& s = plan.sequences[sequence];
    const std::byte* data =
        SequenceData(plan, tensor, DtypeBytes(tensor.dtype), sequence, head / plan.heads_per_kv, s.k_begin);
    to.resize(static_cast<size_t>(s.k_count * dim));
    for (int64_t t = 0; t < s.k_count; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        to[t * dim + d] = LoadElement(data, tensor.dtype, t * tensor.token_stride + d);
      }
    }
  }

  // The score of one pair, -inf if hidden.
  double Score(const double* q, int64_t query, int64_t key) const {
    const Sequence& s = plan.sequences[sequence];
    double score = 0;
    for (int64_t d = 0; d < plan.qk_dim; ++d) score += q[d] * k[key * plan.qk_dim + d];
    score *= plan.scale;
    if (plan.softcap > 0) score = plan.softcap * std::tanh(score / plan.softcap);
    if (!plan.alibi_slopes.empty()) {
      score -=
          static_cast<double>(plan.alibi_slopes[head]) * std::fabs(static_cast<double>(query + s.visible.offset - key));
    }
    const std::byte* mask = MaskRow(plan, args.mask, sequence, head, query);
    return mask == nullptr ? score : score + MaskBias(plan, mask, key);
  }

  // Where a token stands in the order of the blocks.
  int64_t PlaceOf(int64_t token) const { return place.empty() ? token : place[token]; }

  // True iff the given map, if there is one, has the tile of this pair.
  bool InMap(int64_t query, int64_t key) const {
    if (args.map == nullptr) return true;
    const uint8_t* map = args.map + sequence * args.map_batch_stride + head * args.map_head_stride;
    return map[PlaceOf(query) / kBlockQ * plan.k_blocks + PlaceOf(key) / kBlockK] != 0;
  }

  // Adds the row's share of each tile to `masses`, unless NULL. False if the query sees nothing.
  bool Row(int64_t query, double* masses) const {
    const Sequence& s = plan.sequences[sequence];
    const std::byte* q_data = SequenceData(plan, args.q, DtypeBytes(args.q.dtype), sequence, head, s.q_begin + query);
    std::vector<double> q(plan.qk_dim), o(plan.v_dim), scores(s.k_count, kMinusInf);
    for (int64_t d = 0; d < plan.qk_dim; ++d) q[d] = LoadElement(q_data, args.q.dtype, d);
    double top = kMinusInf;
    const Range keys = s.visible.KeysOf(query);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      if (!InMap(query, j)) continue;
      scores[j] = Score(q.data(), query, j);
      top = std::isnan(scores[j]) ? scores[j] : std::max(top, scores[j]);
    }
    const bool empty = top == kMinusInf;
    double sum = 0;
    for (int64_t j = keys.begin; j < keys.end && !empty; ++j) {
      const double p = scores[j] = std::exp(scores[j] - top);
      if (p == 0) continue;
      sum += p;
      for (int64_t c = 0; c < plan.v_dim; ++c) o[c] += p * v[j * plan.v_dim + c];
    }
    if (!plan.sink_logits.empty() && !empty) sum += std::exp(plan.sink_logits[head] - top);
    std::byte* out = SequenceData(plan, args.o, DtypeBytes(args.o.dtype), sequence, head, s.q_begin + query);
    for (int64_t c = 0; c < plan.v_dim; ++c) {
      StoreElement(out, args.o.dtype, c, static_cast<float>(empty ? 0.0 : o[c] / sum));
    }
    float* lse = LseRow(plan, args.lse, sequence, head);
    if (lse != nullptr) lse[query] = static_cast<float>(empty ? kMinusInf : top + std::log(sum));
    for (int64_t j = keys.begin; j < keys.end && !empty && masses != nullptr; ++j) {
      masses[PlaceOf(j) / kBlockK] += scores[j] / sum;
    }
    return !empty;
  }

  // All queries of a block; the mean of their shares goes to the block's tiles of mass_out.
  void Block(int64_t block) const {
    const Sequence& s = plan.sequences[sequence];
    std::vector<double> masses(args.mass_out == nullptr ? 0 : static_cast<size_t>(s.k_blocks));
    int64_t rows = 0;
    for (int64_t i = block * kBlockQ; i < block * kBlockQ + s.QueriesIn(block); ++i) {
      rows += Row(place.empty() ? i : plan.order[i], args.mass_out == nullptr ? nullptr : masses.data());
    }
    for (size_t j = 0; j < masses.size() && rows > 0; ++j) {
      args.mass_out[TileRow(plan, {head, sequence, block}) + static_cast<int64_t>(j)] =
          static_cast<float>(masses[j] / static_cast<double>(rows));
    }
  }
};

}  // namespace

void Reference(const Plan& plan, const sparge_run_args& args) {
  std::vector<int64_t> place(plan.order.size());
  for (size_t i = 0; i < place.size(); ++i) place[plan.order[i]] = static_cast<int64_t>(i);
  if (args.mass_out != nullptr) std::fill_n(args.mass_out, plan.AllTiles(), 0.0f);
  for (int64_t b = 0; b < plan.batch(); ++b) {
    const int64_t blocks = plan.sequences[b].q_blocks;
    for (int64_t h = 0; h < plan.q_heads && blocks > 0; ++h) {
      const Head head(plan, args, b, h, place);
      ForEach(plan.runtime.executor, blocks, [&](int32_t, int64_t block) { head.Block(block); });
    }
  }
}

}  // namespace sparge::impl

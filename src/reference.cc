// The oracle, one query at a time: scores, softmax, weighted sum.
#include "src/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "src/base/half.h"
#include "src/base/threads.h"

namespace sparge::impl {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// The two inner loops. The thread sanitizer passes them over: they touch what was there before the threads began and
// what is a row's own, and would be most of the time of the tests that it runs.
__attribute__((no_sanitize("thread"))) double Dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}
__attribute__((no_sanitize("thread"))) void AddTimes(double factor, const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

double MaskBias(const Problem& problem, const std::byte* mask, int64_t key) {
  switch (problem.mask) {
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
  const Problem& problem;
  const sparge_run_args& args;
  int64_t sequence, head;
  const std::vector<int64_t>& place;  // of a token in the order of the blocks; empty = where it lies
  std::vector<double> k, v;

  Head(const Problem& p, const sparge_run_args& a, int64_t seq, int64_t h, const std::vector<int64_t>& places)
      : problem(p), args(a), sequence(seq), head(h), place(places) {
    Load(args.k, problem.qk_dim, k);
    Load(args.v, problem.v_dim, v);
  }
  void Load(const sparge_tensor& tensor, int64_t dim, std::vector<double>& to) const {
    const Sequence& s = problem.sequences[sequence];
    const std::byte* data = SequenceData(problem, tensor, sequence, head / problem.heads_per_kv, s.k_begin);
    to.resize(static_cast<size_t>(s.k_count * dim));
    for (int64_t t = 0; t < s.k_count; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        to[t * dim + d] = LoadElement(data, tensor.dtype, t * tensor.token_stride + d);
      }
    }
  }

  // ALiBi of the key that is nearest to a query: taken from all scores of its row, which may not be told apart beside
  // it even in double precision.
  struct Base {
    int64_t distance;
    double bias;
  };
  Base BaseOf(int64_t query) const {
    if (problem.alibi_slopes.empty()) return {0, 0.0};
    const Sequence& s = problem.sequences[sequence];
    const int64_t position = query + s.visible.offset;
    const int64_t distance = std::max<int64_t>({-position, position - (s.k_count - 1), 0});
    return {distance, -static_cast<double>(problem.alibi_slopes[head]) * static_cast<double>(distance)};
  }

  // The score of one pair less the row's base; -inf if hidden.
  double Score(const double* q, int64_t query, int64_t key, const Base& base) const {
    const Sequence& s = problem.sequences[sequence];
    double score = problem.scale * Dot(q, k.data() + key * problem.qk_dim, problem.qk_dim);
    if (problem.softcap > 0) score = problem.softcap * std::tanh(score / problem.softcap);
    if (!problem.alibi_slopes.empty()) {
      const int64_t distance = std::abs(query + s.visible.offset - key) - base.distance;
      score -= static_cast<double>(problem.alibi_slopes[head]) * static_cast<double>(distance);
    }
    const std::byte* mask = MaskRow(problem, args.mask, sequence, head, query);
    return mask == nullptr ? score : score + MaskBias(problem, mask, key);
  }

  // Where a token stands in the order of the blocks.
  int64_t PlaceOf(int64_t token) const { return place.empty() ? token : place[token]; }

  // True iff the given map, if there is one, has the tile of this pair.
  bool InMap(int64_t query, int64_t key) const {
    if (args.map == nullptr) return true;
    const uint8_t* map =
        args.map + problem.sequences[sequence].index * args.map_batch_stride + head * args.map_head_stride;
    return map[PlaceOf(query) / kBlockQ * problem.k_blocks + PlaceOf(key) / kBlockK] != 0;
  }

  // Adds the row's share of each tile to `masses`, unless NULL. False if the query sees nothing.
  bool Row(int64_t query, double* masses) const {
    const Sequence& s = problem.sequences[sequence];
    const std::byte* q_data = SequenceData(problem, args.q, sequence, head, s.q_begin + query);
    std::vector<double> q(problem.qk_dim), o(problem.v_dim), scores(s.k_count, kMinusInf);
    for (int64_t d = 0; d < problem.qk_dim; ++d) q[d] = LoadElement(q_data, args.q.dtype, d);
    double top = kMinusInf;
    const Base base = BaseOf(query);
    const Range keys = s.visible.KeysOf(query);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      if (!InMap(query, j)) continue;
      scores[j] = Score(q.data(), query, j, base);
      top = std::isnan(scores[j]) ? scores[j] : std::max(top, scores[j]);
    }
    const bool empty = top == kMinusInf;
    double sum = 0;
    for (int64_t j = keys.begin; j < keys.end && !empty; ++j) {
      const double p = scores[j] = std::exp(scores[j] - top);
      if (p == 0) continue;
      sum += p;
      AddTimes(p, v.data() + j * problem.v_dim, problem.v_dim, o.data());
    }
    double log_sum = top + std::log(sum) + base.bias;
    if (!problem.sink_logits.empty() && !empty) {
      // The sink joins the denominator, in units of whichever of the two is larger.
      const double sink = problem.sink_logits[head], larger = std::max(log_sum, sink);
      const double joined = larger + std::log(std::exp(log_sum - larger) + std::exp(sink - larger));
      sum *= std::exp(joined - log_sum);
      log_sum = joined;
    }
    std::byte* out = SequenceData(problem, args.o, sequence, head, s.q_begin + query);
    for (int64_t c = 0; c < problem.v_dim; ++c) {
      StoreElement(out, args.o.dtype, c, static_cast<float>(empty ? 0.0 : o[c] / sum));
    }
    float* lse = LseRow(problem, args.lse, sequence, head);
    if (lse != nullptr) lse[query] = static_cast<float>(empty ? kMinusInf : log_sum);
    for (int64_t j = keys.begin; j < keys.end && !empty && masses != nullptr; ++j) {
      masses[PlaceOf(j) / kBlockK] += scores[j] / sum;
    }
    return !empty;
  }

  // All queries of a block; the mean of their shares goes to the block's tiles of mass_out.
  void Block(int64_t block) const {
    const Sequence& s = problem.sequences[sequence];
    std::vector<double> masses(args.mass_out == nullptr ? 0 : static_cast<size_t>(s.k_blocks));
    int64_t rows = 0;
    for (int64_t i = block * kBlockQ; i < block * kBlockQ + s.QueriesIn(block); ++i) {
      rows += Row(place.empty() ? i : problem.order[i], args.mass_out == nullptr ? nullptr : masses.data());
    }
    for (size_t j = 0; j < masses.size() && rows > 0; ++j) {
      args.mass_out[TileRow(problem, {head, sequence, block}) + static_cast<int64_t>(j)] =
          static_cast<float>(masses[j] / static_cast<double>(rows));
    }
  }
};

}  // namespace

void Reference(const Problem& problem, const sparge_executor& executor, const sparge_run_args& args) {
  std::vector<int64_t> place(problem.order.size());
  for (size_t i = 0; i < place.size(); ++i) place[problem.order[i]] = static_cast<int64_t>(i);
  if (args.mass_out != nullptr) std::fill_n(args.mass_out, problem.AllTiles(), 0.0f);
  WriteKeyless(problem, executor, args);
  if (problem.idle()) return;
  for (int64_t b = 0; b < problem.sequence_count(); ++b) {
    const int64_t blocks = problem.sequences[b].q_blocks;
    for (int64_t h = 0; h < problem.q_heads; ++h) {
      const Head head(problem, args, b, h, place);
      ForEach(executor, blocks, [&](int32_t, int64_t block) { head.Block(block); });
    }
  }
}

}  // namespace sparge::impl

// Step 2 of 3: the block map equals the rule, written here a second time by brute force from the tokens.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

using Vector = std::vector<double>;

// The tokens of one head as doubles.
std::vector<Vector> Tokens(const TestTensor& tensor, int64_t b, int64_t h) {
  std::vector<Vector> tokens(static_cast<size_t>(tensor.tokens), Vector(static_cast<size_t>(tensor.dim)));
  for (int64_t t = 0; t < tensor.tokens; ++t) {
    for (int64_t d = 0; d < tensor.dim; ++d) tokens[t][d] = tensor.Get(b, h, t, d);
  }
  return tokens;
}

struct Block {
  Vector mean;
  double similarity;
};

// Mean of all ordered pairs' cosines, the diagonal included; a zero token has cosine 0 with everything.
std::vector<Block> Blocks(const std::vector<Vector>& tokens, int64_t size) {
  std::vector<Block> blocks;
  for (size_t first = 0; first < tokens.size(); first += size) {
    const size_t last = std::min(tokens.size(), first + size);
    const double n = static_cast<double>(last - first);
    Block block{Vector(tokens[0].size(), 0.0), 0.0};
    std::vector<double> norms;
    for (size_t a = first; a < last; ++a) {
      norms.push_back(std::sqrt(std::inner_product(tokens[a].begin(), tokens[a].end(), tokens[a].begin(), 0.0)));
      for (size_t d = 0; d < block.mean.size(); ++d) block.mean[d] += tokens[a][d] / n;
    }
    for (size_t a = first; a < last; ++a) {
      for (size_t b = first; b < last; ++b) {
        const double norm = norms[a - first] * norms[b - first];
        if (norm == 0) continue;
        block.similarity += std::inner_product(tokens[a].begin(), tokens[a].end(), tokens[b].begin(), 0.0) / norm;
      }
    }
    block.similarity /= n * n;
    blocks.push_back(block);
  }
  return blocks;
}

struct Ruled {
  std::vector<uint8_t> row;
  bool clear = true;  // no decision was within rounding
};

// What a test knows about pairs: who sees whom.
using Sees = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;

class Rule {
 public:
  Rule(const Problem& p, Sees sees) : p_(p), sees_(std::move(sees)) {}

  // Blocks of one head; call before Row.
  void Load(int64_t b, int64_t h) {
    b_ = b;
    h_ = h;
    std::vector<Vector> keys = Tokens(p_.k, b, h * p_.shape.kv_heads / p_.shape.q_heads);
    Vector mean(keys[0].size(), 0.0);
    for (const Vector& key : keys) {
      for (size_t d = 0; d < mean.size(); ++d) mean[d] += key[d] / static_cast<double>(keys.size());
    }
    for (Vector& key : keys) {
      for (size_t d = 0; d < mean.size(); ++d) key[d] -= mean[d];
    }
    q_ = Blocks(Tokens(p_.q, b, h), SPARGE_BLOCK_Q);
    k_ = Blocks(keys, SPARGE_BLOCK_K);
  }
  int64_t rows() const { return static_cast<int64_t>(q_.size()); }

  Ruled Row(int64_t i) const {
    const sparge_head_params params = p_.desc.heads != nullptr ? p_.desc.heads[h_] : p_.desc.params;
    const double scale = p_.desc.scale != 0 ? p_.desc.scale : 1 / std::sqrt(static_cast<double>(p_.shape.qk_dim));
    Ruled out{std::vector<uint8_t>(k_.size(), 0)};
    std::vector<std::pair<double, int>> candidates;  // (score, block)
    int64_t visible = 0;
    const bool in_tail = std::min(p_.shape.q_tokens, (i + 1) * 128) > p_.shape.q_tokens - p_.desc.dense_tail;
    const bool q_alike = !in_tail && q_[i].similarity > params.theta;
    out.clear &= std::fabs(q_[i].similarity - params.theta) > 1e-5;
    for (size_t j = 0; j < k_.size(); ++j) {
      if (!Visible(i, j)) continue;
      ++visible;
      const bool k_alike = k_[j].similarity > params.theta;
      out.clear &= std::fabs(k_[j].similarity - params.theta) > 1e-5;
      if (!q_alike || !k_alike) out.row[j] = 1;
      const double dot = std::inner_product(q_[i].mean.begin(), q_[i].mean.end(), k_[j].mean.begin(), 0.0);
      if (q_alike && k_alike) candidates.emplace_back(dot * scale, static_cast<int>(j));
      if (Diagonal(i, j) || (j == 0 && Sink())) out.row[j] = 1;
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](auto& a, auto& b) { return a.first > b.first; });
    double sum = 0;
    for (auto& [score, j] : candidates) sum += std::exp(score - candidates[0].first);
    double mass = 0;
    for (size_t c = 0; c < candidates.size(); ++c) {
      const bool last = p_.desc.select == SPARGE_SELECT_TOPK
                            ? c + 1 >= std::max(1.0, std::ceil(params.topk * static_cast<double>(visible)))
                            : false;
      out.row[candidates[c].second] = 1;
      mass += std::exp(candidates[c].first - candidates[0].first) / sum;
      if (p_.desc.select == SPARGE_SELECT_CDF && params.tau < 1) {
        out.clear &= std::fabs(mass - params.tau) > 1e-6;
        if (mass >= params.tau) return Close(out, candidates, c);
      }
      if (last) return Close(out, candidates, c);
    }
    return out;
  }

 private:
  // The choice between the last one taken and the next must not be a matter of rounding.
  static Ruled Close(Ruled out, const std::vector<std::pair<double, int>>& candidates, size_t c) {
    if (c + 1 < candidates.size()) out.clear &= candidates[c].first - candidates[c + 1].first > 1e-5;
    return out;
  }
  bool Visible(int64_t i, int64_t j) const {
    return AnyPair(i, j, [&](int64_t a, int64_t k) { return sees_(b_, h_, a, k); });
  }
  bool Diagonal(int64_t i, int64_t j) const {
    if (p_.desc.causal == 0) return false;
    const int64_t offset = p_.desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT ? p_.shape.kv_tokens - p_.shape.q_tokens
                                                                              : p_.desc.query_offset;
    return AnyPair(i, j, [&](int64_t a, int64_t k) { return k == a + offset; });
  }
  bool Sink() const { return p_.desc.keep_sink == 1 || (p_.desc.keep_sink == -1 && p_.desc.causal == 1); }
  template <class Test>
  bool AnyPair(int64_t i, int64_t j, const Test& test) const {
    for (int64_t a = i * 128; a < std::min(p_.shape.q_tokens, (i + 1) * 128); ++a) {
      for (int64_t k = j * 64; k < std::min(p_.shape.kv_tokens, (j + 1) * 64); ++k) {
        if (test(a, k)) return true;
      }
    }
    return false;
  }
  const Problem& p_;
  Sees sees_;
  int64_t b_ = 0, h_ = 0;
  std::vector<Block> q_, k_;
};

Sees ByPosition(const Problem& p) {
  const int64_t offset =
      p.desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT ? p.shape.kv_tokens - p.shape.q_tokens : p.desc.query_offset;
  const bool causal = p.desc.causal == 1;
  const int64_t window = p.desc.window;
  return [=](int64_t, int64_t, int64_t i, int64_t j) {
    return (!causal || j <= i + offset) && (window == 0 || j > i + offset - window);
  };
}

// Compares on every instruction set. Returns the sparsity.
double ExpectRule(const Problem& p, const Sees& sees) {
  double sparsity = 0;
  Rule rule(p, sees);
  for (const std::string& isa : RunnableIsas()) {
    SCOPED_TRACE(isa);
    const Context context(2, isa.c_str());
    const Result result = Predict(context, p);
    sparsity = result.stats.sparsity();
    int64_t unclear = 0, rows = 0;
    for (int64_t b = 0; b < p.shape.batch; ++b) {
      for (int64_t h = 0; h < p.shape.q_heads; ++h) {
        rule.Load(b, h);
        for (int64_t i = 0; i < rule.rows(); ++i, ++rows) {
          const Ruled expected = rule.Row(i);
          unclear += !expected.clear;
          if (!expected.clear) continue;
          const auto* row = result.map.data() + ((b * p.shape.q_heads + h) * result.q_blocks + i) * result.k_blocks;
          EXPECT_EQ(std::vector<uint8_t>(row, row + result.k_blocks), expected.row) << "head " << h << " row " << i;
        }
      }
    }
    EXPECT_LE(unclear, 1 + rows / 50) << "too many rows hang on rounding: the test says nothing";
    EXPECT_EQ(RunProblem(context, p).map, result.map) << "run and predict disagree";
  }
  return sparsity;
}

Problem Structured(int64_t queries, int64_t keys, uint32_t seed) {
  Problem p({.q_heads = 4,
             .kv_heads = 2,
             .q_tokens = queries,
             .kv_tokens = keys,
             .qk_dim = 32,
             .seed = seed,
             .correlated = true});
  // Sharper scores, so that the selection has something to drop.
  p.q.Fill([old = p.q](int64_t b, int64_t h, int64_t t, int64_t d) { return 2.5f * old.Get(b, h, t, d); });
  p.desc.select = SPARGE_SELECT_CDF;
  p.desc.params.tau = 0.9;
  p.desc.params.theta = 0.2;
  p.desc.predictor = SPARGE_PREDICT_PAPER;
  return p;
}

TEST(Predict, CdfOverThetas) {
  for (const double theta : {-1.0, 0.0, 0.2, 0.4, 1.0}) {
    Problem p = Structured(700, 900, 1);
    p.desc.params.theta = theta;
    const double sparsity = ExpectRule(p, ByPosition(p));
    if (theta < 0.3) {
      EXPECT_GT(sparsity, 0.1);
    }
    if (theta == 1.0) {
      EXPECT_EQ(sparsity, 0.0);
    }
  }
}

TEST(Predict, CdfOverTaus) {
  double last = 1.0;
  for (const double tau : {0.0, 0.3, 0.7, 0.9, 0.99, 1.0}) {
    Problem p = Structured(512, 1000, 2);
    p.desc.params.tau = tau;
    const double sparsity = ExpectRule(p, ByPosition(p));
    EXPECT_LE(sparsity, last);
    last = sparsity;
  }
  EXPECT_EQ(last, 0.0) << "tau = 1 keeps all";
}

TEST(Predict, TopK) {
  for (const double topk : {0.0, 0.1, 0.3, 0.5, 1.0}) {
    Problem p = Structured(640, 640, 3);
    p.desc.select = SPARGE_SELECT_TOPK;
    p.desc.params.topk = topk;
    ExpectRule(p, ByPosition(p));
    p.desc.causal = 1;
    ExpectRule(p, ByPosition(p));
  }
}

TEST(Predict, CausalOffsetsWindowsAndSinks) {
  for (const int32_t sink : {-1, 0, 1}) {
    for (const int64_t offset : {SPARGE_OFFSET_BOTTOM_RIGHT, int64_t{0}, int64_t{37}, int64_t{-100}}) {
      for (const int64_t window : {0, 200}) {
        Problem p = Structured(500, 777, 4);
        p.desc.causal = 1;
        p.desc.keep_sink = sink;
        p.desc.query_offset = offset;
        p.desc.window = window;
        ExpectRule(p, ByPosition(p));
      }
    }
  }
  Problem p = Structured(500, 777, 5);
  p.desc.keep_sink = 1;
  ExpectRule(p, ByPosition(p));
}

TEST(Predict, LastQueriesSeeAllTiles) {
  Problem p = Structured(700, 1000, 11);  // the last block has 60 queries
  p.desc.causal = 1;
  double before = 1;
  for (const int64_t tail : {int64_t{0}, int64_t{1}, int64_t{61}, int64_t{700}}) {
    SCOPED_TRACE(tail);
    p.desc.dense_tail = tail;
    const double sparsity = ExpectRule(p, ByPosition(p));
    EXPECT_LT(sparsity, before);  // one block more each time, then all
    before = sparsity;
  }
  EXPECT_EQ(before, 0);
}

TEST(Predict, MaskHidesTiles) {
  Problem p = Structured(400, 640, 6);
  p.desc.mask = SPARGE_MASK_BOOL;
  // Even key blocks are hidden from the first query block; key 300 is all that the second sees of its block.
  const auto open = [](int64_t i, int64_t j) { return i < 128 ? (j / 64) % 2 == 1 : (j / 64 != 4 || j == 300); };
  for (int64_t i = 0; i < 400; ++i) {
    for (int64_t j = 0; j < 640; ++j) p.mask_bytes.push_back(open(i, j) ? 1 : 0);
  }
  p.mask = {p.mask_bytes.data(), 0, 0, 640};
  EXPECT_GT(ExpectRule(p, [&](int64_t, int64_t, int64_t i, int64_t j) { return open(i, j); }), 0.05);
}

TEST(Predict, ParametersPerHead) {
  Problem p = Structured(600, 600, 7);
  const sparge_head_params heads[] = {
      {-1, 0.5, 0.5, 10}, {0.2, 0.95, 0.5, 10}, {0.9, 0.5, 0.5, 10}, {-1, 1.0, 0.5, 10}};
  p.desc.heads = heads;
  ExpectRule(p, ByPosition(p));
  const Context context(1);
  const Result result = Predict(context, p);
  EXPECT_LT(result.head_stats[0].qk_computed, result.head_stats[1].qk_computed);
  EXPECT_EQ(result.head_stats[3].qk_computed, result.head_stats[3].qk_eligible);
}

TEST(Predict, ZeroTokensAndTailsAreJudgedFairly) {
  Problem p = Structured(321, 705, 8);
  p.q.Fill([old = p.q](int64_t b, int64_t h, int64_t t, int64_t d) { return t % 50 == 3 ? 0 : old.Get(b, h, t, d); });
  const double with_zeros = ExpectRule(p, ByPosition(p));
  EXPECT_GT(with_zeros, 0.05) << "zero tokens and ragged tails must not force everything";
  p.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });
  ExpectRule(p, ByPosition(p));
}

TEST(Predict, UsesTheCallersScale) {
  Problem p = Structured(512, 1000, 9);
  p.desc.scale = 0.02;
  const double flat = ExpectRule(p, ByPosition(p));
  p.desc.scale = 0.5;
  EXPECT_GT(ExpectRule(p, ByPosition(p)), flat);
}

TEST(Predict, CommonOffsetOfTheKeysChangesNothing) {
  Problem p = Structured(512, 1000, 10);
  const Context context(1);
  const Result before = Predict(context, p);
  p.k.Fill([old = p.k](int64_t b, int64_t h, int64_t t, int64_t d) { return old.Get(b, h, t, d) + 8.0f; });
  const Result after = Predict(context, p);
  int64_t different = 0;
  for (size_t i = 0; i < before.map.size(); ++i) different += before.map[i] != after.map[i];
  EXPECT_LE(different, static_cast<int64_t>(before.map.size() / 100)) << "only rounding may differ";
}

TEST(Predict, GivenMapIsKeptExactly) {
  Problem p({.q_heads = 2, .q_tokens = 300, .kv_tokens = 300});
  RandomMap(p, 0.5, 3);
  p.desc.causal = 1;
  const Context context(1);
  const Result result = Predict(context, p);
  for (size_t i = 0; i < p.map.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / 5 % 3, tile = static_cast<int64_t>(i) % 5;
    const bool visible = tile * 64 <= std::min<int64_t>(row * 128 + 127, 299);
    EXPECT_EQ(result.map[i], visible ? p.map[i] : 0);
  }
}

}  // namespace
}  // namespace sparge::testing

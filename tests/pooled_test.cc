// Step 2 of 3 for the predictor `keys`: masses equal a brute-force sum over tokens, and the map equals the rule over
// these masses.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr int64_t kPool = 64;  // queries

struct Predicted {
  Result result;
  std::vector<float> mass;
};

Predicted PredictMasses(const Context& context, const Problem& p) {
  Predicted out{Predict(context, p), {}};
  out.mass.resize(out.result.map.size());
  Plan plan(context, p.desc);
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.mask = p.mask;
  args.mass_out = out.mass.data();
  plan.Predict(args);
  return out;
}

class Oracle {
 public:
  explicit Oracle(const Problem& p) : p_(p) {
    offset_ =
        p.desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT ? p.shape.kv_tokens - p.shape.q_tokens : p.desc.query_offset;
    scale_ = p.desc.scale != 0 ? p.desc.scale : 1 / std::sqrt(static_cast<double>(p.shape.qk_dim));
  }

  bool Sees(int64_t i, int64_t j) const {
    return (p_.desc.causal == 0 || j <= i + offset_) && (p_.desc.window == 0 || j > i + offset_ - p_.desc.window) &&
           (p_.mask_bytes.empty() || p_.mask_bytes[i * p_.shape.kv_tokens + j] != 0);
  }
  bool Visible(int64_t row, int64_t tile) const {
    for (int64_t i = row * 128; i < std::min(p_.shape.q_tokens, (row + 1) * 128); ++i) {
      for (int64_t j = tile * 64; j < std::min(p_.shape.kv_tokens, (tile + 1) * 64); ++j) {
        if (Sees(i, j)) return true;
      }
    }
    return false;
  }
  std::vector<bool> VisibleTiles(int64_t row) const {
    std::vector<bool> visible;
    for (int64_t t = 0; t * 64 < p_.shape.kv_tokens; ++t) visible.push_back(Visible(row, t));
    return visible;
  }

  // The queries of a row of tiles that speak for those unlike their pool; more than six: the row is computed in full.
  // `clear`: no decision hangs on rounding.
  std::vector<int64_t> Unlike(int64_t b, int64_t h, int64_t row, bool* clear) const {
    std::vector<int64_t> found;
    if (p_.desc.select != SPARGE_SELECT_FLOOR) return found;
    const int64_t end = std::min(p_.shape.q_tokens, (row + 1) * 128);
    for (int64_t first = row * 128; first < end; first += kPool) {
      const int64_t last = std::min(end, first + kPool);
      if (last - first < 16) continue;
      std::vector<double> distance;
      for (int64_t i = first; i < last; ++i) {
        const std::vector<double> mean = MeanQuery(b, h, first);
        double sum = 0;
        for (int64_t d = 0; d < p_.shape.qk_dim; ++d) sum += std::pow(p_.q.Get(b, h, i, d) - mean[d], 2);
        distance.push_back(sum);
      }
      std::vector<double> sorted = distance;
      std::sort(sorted.begin(), sorted.end());
      const double most = 4 * sorted[sorted.size() / 2];
      const auto over = [&](double value) {
        *clear = *clear && (value == most || std::fabs(value - most) > 1e-4 * most);
        return value > most;
      };
      for (double value : distance) over(value);
      while (true) {
        const auto far = std::max_element(distance.begin(), distance.end());
        if (!(*far > most)) break;
        const int64_t speaker = first + (far - distance.begin());
        found.push_back(speaker);
        for (int64_t i = first; i < last; ++i) {
          double sum = 0;
          for (int64_t d = 0; d < p_.shape.qk_dim; ++d) {
            sum += std::pow(p_.q.Get(b, h, i, d) - p_.q.Get(b, h, speaker, d), 2);
          }
          if (distance[i - first] > most && !over(sum)) distance[i - first] = 0;
        }
      }
    }
    return found;
  }

  // The mass of each tile of a row, by the formula of src/cpu/masses.h. `clear`: none hangs on rounding.
  std::vector<double> Masses(int64_t b, int64_t h, int64_t row, bool* clear) const {
    const std::vector<bool> visible = VisibleTiles(row);
    std::vector<double> mass(visible.size(), 0.0);
    double pools = 0;
    for (int64_t first = row * 128; first < std::min(p_.shape.q_tokens, (row + 1) * 128); first += kPool) {
      const std::vector<double> one = OfPool(b, h, first, visible);
      const double sum = std::accumulate(one.begin(), one.end(), 0.0);
      if (sum == 0) continue;
      ++pools;
      for (size_t t = 0; t < mass.size(); ++t) mass[t] += one[t] / sum;
    }
    for (double& m : mass) m /= std::max(pools, 1.0);
    const std::vector<int64_t> unlike = Unlike(b, h, row, clear);
    for (const int64_t query : unlike.size() <= 6 ? unlike : std::vector<int64_t>()) {
      const std::vector<double> own = OfQuery(b, h, query, row * 128, visible);
      const double sum = std::accumulate(own.begin(), own.end(), 0.0);
      for (size_t t = 0; t < mass.size() && sum > 0; ++t) {
        const double share = own[t] / sum;
        *clear = *clear && std::fabs(share - 0.125) > 0.02;  // int8 scores; see MassTolerance
        if (share >= 0.125) mass[t] = 1;
      }
    }
    return mass;
  }

  double Similarity(int64_t b, int64_t h, int64_t row) const {
    std::vector<double> sum(static_cast<size_t>(p_.shape.qk_dim));
    const int64_t end = std::min(p_.shape.q_tokens, (row + 1) * 128);
    for (int64_t i = row * 128; i < end; ++i) {
      double norm = 0;
      for (int64_t d = 0; d < p_.shape.qk_dim; ++d) norm += std::pow(p_.q.Get(b, h, i, d), 2);
      for (int64_t d = 0; d < p_.shape.qk_dim && norm > 0; ++d) sum[d] += p_.q.Get(b, h, i, d) / std::sqrt(norm);
    }
    return std::inner_product(sum.begin(), sum.end(), sum.begin(), 0.0) /
           std::pow(static_cast<double>(end - row * 128), 2);
  }

  bool Diagonal(int64_t row, int64_t tile) const {
    if (p_.desc.causal == 0) return false;
    const int64_t before = p_.desc.select == SPARGE_SELECT_FLOOR ? 32 : 0;  // keys right before each query
    const int64_t first = row * 128 + offset_ - before,
                  last = std::min(p_.shape.q_tokens, (row + 1) * 128) - 1 + offset_;
    return first < (tile + 1) * 64 && last >= tile * 64;
  }
  bool Sink() const { return p_.desc.keep_sink == 1 || (p_.desc.keep_sink == -1 && p_.desc.causal == 1); }

 private:
  std::vector<double> MeanQuery(int64_t b, int64_t h, int64_t first) const {
    const int64_t end = std::min(p_.shape.q_tokens, first + kPool);
    std::vector<double> query(static_cast<size_t>(p_.shape.qk_dim), 0.0);
    for (int64_t i = first; i < end; ++i) {
      for (int64_t d = 0; d < p_.shape.qk_dim; ++d) query[d] += p_.q.Get(b, h, i, d) / static_cast<double>(end - first);
    }
    return query;
  }

  // Unnormalised masses of the pool that begins at query `first`. It stands where the last of 64 queries would be.
  std::vector<double> OfPool(int64_t b, int64_t h, int64_t first, const std::vector<bool>& visible) const {
    const int64_t last = first + kPool - 1 + offset_;
    return MassesOf(h, MeanQuery(b, h, first), b, first + offset_, last, last - (kPool - 1) / 2, visible);
  }
  // Those of a query by itself, as query `first` sees the keys.
  std::vector<double> OfQuery(int64_t b, int64_t h, int64_t query, int64_t first,
                              const std::vector<bool>& visible) const {
    std::vector<double> q;
    for (int64_t d = 0; d < p_.shape.qk_dim; ++d) q.push_back(p_.q.Get(b, h, query, d));
    return MassesOf(h, q, b, first + offset_, first + offset_, first + offset_, visible);
  }

  // With keys as from position `first` with a window, to `last`, and by distance from `middle`.
  std::vector<double> MassesOf(int64_t h, const std::vector<double>& query, int64_t b, int64_t first, int64_t last,
                               int64_t middle, const std::vector<bool>& visible) const {
    std::vector<double> scores(static_cast<size_t>(p_.shape.kv_tokens), -1e300);
    for (int64_t j = 0; j < p_.shape.kv_tokens; ++j) {
      if (p_.desc.causal != 0 && j > last) continue;
      if (p_.desc.window != 0 && j <= first - p_.desc.window) continue;
      double score = 0;
      const int64_t kv = h * p_.shape.kv_heads / p_.shape.q_heads;
      for (int64_t d = 0; d < p_.shape.qk_dim; ++d) score += query[d] * p_.k.Get(b, kv, j, d);
      score *= scale_;
      if (p_.desc.softcap > 0) score = p_.desc.softcap * std::tanh(score / p_.desc.softcap);
      if (p_.desc.alibi_slopes != nullptr) {
        score -= p_.desc.alibi_slopes[h] * std::fabs(static_cast<double>(middle - j));
      }
      scores[j] = score;
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    std::vector<double> mass(visible.size(), 0.0);
    for (int64_t j = 0; j < p_.shape.kv_tokens; ++j) {
      if (visible[j / 64] && scores[j] > -1e299) mass[j / 64] += std::exp(scores[j] - top);
    }
    return mass;
  }

  const Problem& p_;
  int64_t offset_;
  double scale_;
};

// How far a mass may be off, as a share of itself plus this. fp32: the polynomial of 2^x (7.5e-5) and rounded scores of
// up to about 20 (20 * 64 * 2^-24). Integers: scores of these heads, with deviation s, are off by s times the relative
// error of a dot product, 2e-2 for 7-bit queries and 8-bit keys, 1e-4 for 16 bits; four deviations of that.
double MassTolerance(sparge_precision precision) {
  return precision == SPARGE_PRECISION_FP32 ? 3e-4 : precision == SPARGE_PRECISION_INT16 ? 4 * 5 * 1e-4 : 4 * 5 * 2e-2;
}

// Which tiles a row keeps, given its masses; `clear` = no decision hangs on rounding.
struct Ruled {
  std::vector<uint8_t> row;
  bool clear = true;
};

Ruled Rule(const Problem& p, const Oracle& oracle, int64_t b, int64_t h, int64_t row, const float* mass) {
  const sparge_head_params params = p.desc.heads != nullptr ? p.desc.heads[h] : p.desc.params;
  const std::vector<bool> visible = oracle.VisibleTiles(row);
  Ruled out{std::vector<uint8_t>(visible.size(), 0)};
  const bool in_full = oracle.Unlike(b, h, row, &out.clear).size() > 6;
  const double similarity = in_full ? -2 : oracle.Similarity(b, h, row);
  out.clear = out.clear && (in_full || std::fabs(similarity - params.theta) > 1e-5);
  std::vector<size_t> order;
  for (size_t t = 0; t < visible.size(); ++t) {
    if (visible[t]) order.push_back(t);
  }
  const auto count = static_cast<double>(order.size());
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t c) { return mass[a] > mass[c]; });
  double taken = 0;
  bool open = true;
  for (size_t i = 0; i < order.size(); ++i) {
    const double m = mass[order[i]];
    if (p.desc.select == SPARGE_SELECT_FLOOR) {
      const double floor = (1 - params.tau) / std::sqrt(count);
      out.clear &= i == 0 || std::fabs(m - floor) > 1e-6 * floor;
      open = i == 0 || params.tau >= 1 || m >= floor;
    }
    if (open || similarity <= params.theta) out.row[order[i]] = 1;
    taken += m;
    if (p.desc.select == SPARGE_SELECT_CDF && params.tau < 1 && open) {
      out.clear &= std::fabs(taken - params.tau) > 1e-5;
      open = taken < params.tau;
      out.clear &= open || i + 1 == order.size() || m - mass[order[i + 1]] > 1e-6 * m;
    }
    if (p.desc.select == SPARGE_SELECT_TOPK && open) {
      open = static_cast<double>(i) + 1 < std::ceil(params.topk * count);
      out.clear &= open || i + 1 == order.size() || m - mass[order[i + 1]] > 1e-6 * m;
    }
  }
  for (const size_t t : order) {
    if (oracle.Diagonal(row, static_cast<int64_t>(t)) || (t == 0 && oracle.Sink())) out.row[t] = 1;
  }
  return out;
}

// Masses against brute force and the map against the rule, on every instruction set. Returns the sparsity.
double ExpectRule(const Problem& p) {
  double sparsity = 0;
  const Oracle oracle(p);
  for (const std::string& isa : RunnableIsas()) {
    SCOPED_TRACE(isa + " " + Name(p.desc.precision));
    const Context context(2, isa.c_str());
    const Predicted predicted = PredictMasses(context, p);
    const Result& result = predicted.result;
    sparsity = result.stats.sparsity();
    int64_t unclear = 0, rows = 0;
    for (int64_t b = 0; b < p.shape.batch; ++b) {
      for (int64_t h = 0; h < p.shape.q_heads; ++h) {
        for (int64_t row = 0; row < result.q_blocks; ++row, ++rows) {
          const int64_t at = ((b * p.shape.q_heads + h) * result.q_blocks + row) * result.k_blocks;
          const float* mass = predicted.mass.data() + at;
          bool clear = true;
          const std::vector<double> want = oracle.Masses(b, h, row, &clear);
          for (int64_t t = 0; clear && t < result.k_blocks; ++t) {
            const double tolerance =
                MassTolerance(p.desc.precision) * (want[t] + (p.desc.precision == SPARGE_PRECISION_FP32 ? 0 : 0.02));
            EXPECT_NEAR(mass[t], want[t], tolerance + 1e-7) << "head " << h << " row " << row << " tile " << t;
          }
          Ruled ruled = Rule(p, oracle, b, h, row, mass);
          ruled.clear = ruled.clear && clear;
          unclear += !ruled.clear;
          if (!ruled.clear) continue;
          EXPECT_EQ(std::vector<uint8_t>(result.map.data() + at, result.map.data() + at + result.k_blocks), ruled.row)
              << "head " << h << " row " << row;
        }
      }
    }
    EXPECT_LE(unclear, 1 + rows / 20) << "too many rows hang on rounding: the test says nothing";
    EXPECT_EQ(RunProblem(context, p).map, result.map) << "run and predict disagree";
  }
  return sparsity;
}

Problem Structured(int64_t queries, int64_t keys, uint32_t seed, sparge_precision precision = SPARGE_PRECISION_FP32) {
  Problem p({.q_heads = 2,
             .kv_heads = 1,
             .q_tokens = queries,
             .kv_tokens = keys,
             .qk_dim = 32,
             .seed = seed,
             .correlated = true});
  p.q.Fill([old = p.q](int64_t b, int64_t h, int64_t t, int64_t d) { return 2.5f * old.Get(b, h, t, d); });
  p.desc.precision = precision;
  p.desc.select = SPARGE_SELECT_FLOOR;
  p.desc.params.tau = 0.9;
  p.desc.params.theta = -1;
  p.desc.predictor = SPARGE_PREDICT_KEYS;
  return p;
}

TEST(Pooled, RulesAndPrecisions) {
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
    for (const sparge_select select : {SPARGE_SELECT_FLOOR, SPARGE_SELECT_CDF, SPARGE_SELECT_TOPK}) {
      Problem p = Structured(1700, 900, 1, precision);  // more blocks than one pass takes
      p.desc.select = select;
      p.desc.params.topk = 0.3;
      EXPECT_GT(ExpectRule(p), 0.1) << select;
    }
  }
}

TEST(Pooled, FloorOverTaus) {
  double last = 1.0;
  for (const double tau : {0.0, 0.5, 0.9, 0.99, 1.0}) {
    Problem p = Structured(512, 1000, 2);
    p.desc.params.tau = tau;
    const double sparsity = ExpectRule(p);
    EXPECT_LE(sparsity, last);
    last = sparsity;
  }
  EXPECT_EQ(last, 0.0) << "tau = 1 keeps all";
}

TEST(Pooled, ThetaJudgesQueriesOnly) {
  double last = 1.0;
  for (const double theta : {-1.0, 0.2, 0.4, 1.0}) {
    Problem p = Structured(700, 900, 3);
    p.desc.params.theta = theta;
    const double sparsity = ExpectRule(p);
    EXPECT_LE(sparsity, last);
    last = sparsity;
  }
  EXPECT_EQ(last, 0.0);
}

TEST(Pooled, CausalOffsetsAndWindows) {
  for (const int64_t offset : {SPARGE_OFFSET_BOTTOM_RIGHT, int64_t{0}, int64_t{37}, int64_t{-100}}) {
    for (const int64_t window : {0, 200}) {
      Problem p = Structured(500, 777, 4);
      p.desc.causal = 1;
      p.desc.query_offset = offset;
      p.desc.window = window;
      ExpectRule(p);
    }
  }
}

TEST(Pooled, SoftcapSlopesAndMask) {
  const std::vector<float> slopes = {0.01f, 0.1f};
  Problem p = Structured(400, 640, 5);
  p.desc.alibi_slopes = slopes.data();
  EXPECT_GT(ExpectRule(p), 0.1);
  p = Structured(400, 640, 6);
  p.desc.softcap = 3;
  ExpectRule(p);
  p = Structured(400, 640, 7);
  p.desc.mask = SPARGE_MASK_BOOL;
  for (int64_t i = 0; i < 400; ++i) {
    for (int64_t j = 0; j < 640; ++j) p.mask_bytes.push_back((i / 128 + j / 64) % 3 != 0 ? 1 : 0);
  }
  p.mask = {p.mask_bytes.data(), 0, 0, 640};
  ExpectRule(p);
}

TEST(Pooled, ZerosAndTails) {
  Problem p = Structured(321, 705, 8);
  p.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });
  ExpectRule(p);
  for (const int64_t queries : {1, 63, 64, 65, 129}) {
    Problem tail = Structured(queries, 300, 9);
    tail.desc.params.theta = -1;
    ExpectRule(tail);
  }
}

// A block mean hides one strong key among weak ones; a look at every key does not.
TEST(Pooled, SeesASingleStrongKey) {
  Problem p = Structured(256, 1024, 10);
  p.k.Fill([old = p.k](int64_t b, int64_t h, int64_t t, int64_t d) {
    return t == 700 ? (d == 0 ? 40.0f : 0.0f) : d == 0 ? -40.0f / 63 : 0.3f * old.Get(b, h, t, d);
  });
  p.q.Fill(
      [old = p.q](int64_t b, int64_t h, int64_t t, int64_t d) { return d == 0 ? 2.0f : 0.2f * old.Get(b, h, t, d); });
  p.desc.params.topk = 0.05;
  p.desc.select = SPARGE_SELECT_TOPK;
  const Context context(1);
  EXPECT_EQ(Predict(context, p).map[700 / 64], 1);
  p.k.Set(0, 0, 701, 0, -80.0f);  // and another one as weak: now the mean of the block is like all others
  p.desc.predictor = SPARGE_PREDICT_PAPER;
  EXPECT_EQ(Predict(context, p).map[700 / 64], 0) << "if means see it too, the test says nothing";
  p.desc.predictor = SPARGE_PREDICT_KEYS;
  EXPECT_EQ(Predict(context, p).map[700 / 64], 1);
}

}  // namespace
}  // namespace sparge::testing

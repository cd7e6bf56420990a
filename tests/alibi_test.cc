// ALiBi at any distance: positions may lie far from all keys, where floats no longer tell one distance from the next.
// What is added to all scores of a query alike changes neither its result nor which tiles are chosen for it, but its
// log-sum-exp, and what a sink takes.
#include <cmath>
#include <vector>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr sparge_precision kPrecisions[] = {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};
constexpr int64_t kFar = int64_t{1} << 40;
constexpr int64_t kOffsets[] = {0, 1 << 20, (1 << 24) + 1, kFar, -70, -(1 << 20), -(1 << 24) - 1, -kFar};
// Steep, gentle, and so small that they show at a distance only: 2^40 of the last one are 1.1. Negative: far keys
// first.
constexpr float kSlopes[] = {0.5f, 0.01f, 1e-6f, 1e-12f, -0.02f, -1e-12f};
constexpr float kSinks[] = {0.5f, -1.0f, 3.0f, 2.0f, 1.0f, 4.0f};
constexpr int64_t kHeads = 6;

struct Expected {
  TestTensor o;
  std::vector<double> lse;
};

// The formula in long double, which has 64 bits: a slope times 2^40 leaves 24 of them for the rest.
Expected Formula(const Problem& p) {
  const Case& c = p.shape;
  Expected expected{TestTensor(1, c.q_heads, c.q_tokens, c.v_dim), std::vector<double>()};
  for (int64_t h = 0; h < c.q_heads; ++h) {
    for (int64_t i = 0; i < c.q_tokens; ++i) {
      std::vector<long double> scores, o(static_cast<size_t>(c.v_dim), 0.0L);
      for (int64_t j = 0; j < c.kv_tokens && (p.desc.causal == 0 || j <= i + p.desc.query_offset); ++j) {
        long double score = 0;
        for (int64_t d = 0; d < c.qk_dim; ++d) {
          score += static_cast<long double>(p.q.Get(0, h, i, d)) * static_cast<long double>(p.k.Get(0, h, j, d));
        }
        score /= std::sqrt(static_cast<long double>(c.qk_dim));
        const auto distance = static_cast<long double>(std::abs(i + p.desc.query_offset - j));
        scores.push_back(score - static_cast<long double>(p.desc.alibi_slopes[h]) * distance);
      }
      const bool sink = p.desc.sink_logits != nullptr;
      long double top = sink ? static_cast<long double>(p.desc.sink_logits[h]) : -HUGE_VALL;
      for (const long double s : scores) top = std::max(top, s);
      long double sum = sink ? std::exp(static_cast<long double>(p.desc.sink_logits[h]) - top) : 0;
      for (size_t j = 0; j < scores.size(); ++j) {
        const long double weight = std::exp(scores[j] - top);
        sum += weight;
        for (int64_t d = 0; d < c.v_dim; ++d) {
          o[d] += weight * static_cast<long double>(p.v.Get(0, h, static_cast<int64_t>(j), d));
        }
      }
      for (int64_t d = 0; d < c.v_dim; ++d) {
        expected.o.Set(0, h, i, d, scores.empty() ? 0.0f : static_cast<float>(o[d] / sum));
      }
      expected.lse.push_back(scores.empty() ? -HUGE_VAL : static_cast<double>(top + std::log(sum)));
    }
  }
  return expected;
}

// Each within a step of the float that it is, and `tolerance`.
void ExpectLse(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    ASSERT_LE(std::fabs(actual[i] - expected[i]), tolerance + std::fabs(expected[i]) * 0x1p-23) << i;
  }
}

// One head at a time, so that none hides behind the others.
double WorstHead(const TestTensor& a, const TestTensor& b) {
  double worst = 0;
  for (int64_t h = 0; h < b.heads; ++h) {
    double difference = 0, size = 0;
    for (int64_t t = 0; t < b.tokens; ++t) {
      for (int64_t d = 0; d < b.dim; ++d) {
        difference += std::fabs(a.Get(0, h, t, d) - b.Get(0, h, t, d));
        size += std::fabs(b.Get(0, h, t, d));
      }
    }
    worst = std::max(worst, difference == 0 ? 0 : difference / size);
  }
  return worst;
}

Problem DistantProblem(int64_t queries, int64_t offset, bool causal, bool sinks) {
  Problem p({.q_heads = kHeads, .q_tokens = queries, .kv_tokens = 200, .seed = 21});
  p.desc.alibi_slopes = kSlopes;
  p.desc.query_offset = offset;
  p.desc.causal = causal ? 1 : 0;
  if (sinks) p.desc.sink_logits = kSinks;
  return p;
}

class AlibiOffsets : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Alibi, AlibiOffsets, ::testing::ValuesIn(kOffsets));

// 5 queries take the direct kernel.
TEST_P(AlibiOffsets, IsTheFormula) {
  for (const int64_t queries : {5, 150}) {
    for (const int features : Quick() ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 2, 3}) {
      Problem p = DistantProblem(queries, GetParam(), (features & 1) != 0, (features & 2) != 0);
      SCOPED_TRACE(std::to_string(queries) + " queries, features " + std::to_string(features));
      const Expected expected = Formula(p);
      const Result reference = Reference(Context(2), p);
      EXPECT_LE(WorstHead(reference.o, expected.o), 1e-6);
      ExpectLse(reference.lse, expected.lse, 1e-6);
      for (const std::string& isa : RunnableIsas()) {
        const Context context(2, isa.c_str());
        for (const sparge_precision precision : kPrecisions) {
          SCOPED_TRACE(isa + " " + Name(precision));
          p.desc.precision = precision;
          const Result run = RunProblem(context, p);
          const double tolerance = Tolerance(precision, SPARGE_F32, p.shape.qk_dim);
          EXPECT_LE(WorstHead(run.o, expected.o), tolerance);
          ExpectLse(run.lse, expected.lse, 4 * tolerance);
        }
      }
    }
  }
}

// Beyond the last key it does not matter to result and map how far.
TEST(Alibi, TilesAreChosenAlikeAtAnyDistance) {
  const Context context(2);
  for (const sparge_select select : {SPARGE_SELECT_CDF, SPARGE_SELECT_FLOOR}) {
    for (const float slope : {0.01f, -0.01f}) {
      const std::vector<float> slopes(2, slope);
      Problem p({.q_heads = 2, .q_tokens = 256, .kv_tokens = 1024, .seed = 22, .correlated = true});
      p.desc.alibi_slopes = slopes.data();
      p.desc.select = select;
      p.desc.params.theta = -1;
      p.desc.params.tau = select == SPARGE_SELECT_CDF ? 0.9 : 0.5;
      p.desc.query_offset = 1024;
      const Result near = RunProblem(context, p);
      EXPECT_LT(near.stats.total.qk_computed, near.stats.total.qk_eligible);
      EXPECT_GT(near.stats.total.qk_computed, near.stats.total.qk_eligible / 10);
      for (const int64_t offset : {int64_t{1} << 20, (int64_t{1} << 24) + 1, kFar}) {
        p.desc.query_offset = offset;
        const Result far = RunProblem(context, p);
        EXPECT_EQ(far.map, near.map) << offset;
        EXPECT_EQ(far.o.bytes(), near.o.bytes()) << offset;
      }
    }
  }
}

// Sums of pools leave as they are, so that parts of the keys can be joined.
TEST(Alibi, SumsOfPoolsHaveTheWholeDistance) {
  const Context context(2);
  const float slopes[] = {0.25f, -0.25f};
  Problem p({.q_heads = 2, .q_tokens = 256, .kv_tokens = 512, .seed = 23});
  p.desc.alibi_slopes = slopes;
  p.desc.select = SPARGE_SELECT_FLOOR;
  std::vector<std::vector<double>> sums;
  for (const int64_t offset : {int64_t{512}, 512 + (int64_t{1} << 20), kFar}) {
    p.desc.query_offset = offset;
    Plan plan(context, p.desc);
    RunArgs args;
    args.q = p.q.view();
    args.k = p.k.view();
    sums.emplace_back(static_cast<size_t>(2 * sparge_plan_pools(plan.get())));
    args.pool_lse_out = sums.back().data();
    plan.Predict(args);
  }
  for (size_t i = 0; i < sums[0].size(); ++i) {
    const double slope = slopes[i / (sums[0].size() / 2)];
    if (std::isinf(sums[0][i])) {  // a place for a query of its own, and there is none
      EXPECT_EQ(sums[1][i], sums[0][i]);
      continue;
    }
    EXPECT_NEAR(sums[1][i], sums[0][i] - slope * 0x1p20, 1e-6);
    EXPECT_NEAR(sums[2][i], sums[0][i] - slope * (0x1p40 - 512), 1e-3);  // a double has 52 bits
  }
}

// A sink of logit s against queries 2^20 further away is one of s + slope * 2^20 without that, in the samples of a
// calibration, too.
TEST(Alibi, CalibrationsSeeSinksAtTheirDistance) {
  const Context context(2);
  const float slope = 0x1p-18f;  // times 2^20: 4
  const float slopes[] = {slope, slope};
  const float sinks[] = {1.0f, 3.0f}, moved[] = {5.0f, 7.0f};
  const auto run = [&](int64_t offset, const float* logits) {
    CalibrationDesc bounds;
    bounds.q_heads = 2;
    bounds.target_l1 = bounds.pv_l1 = 0.5;
    Calibration calibration(bounds);
    Problem p({.q_heads = 2, .q_tokens = 512, .kv_tokens = 1024, .seed = 24, .correlated = true});
    p.desc.alibi_slopes = slopes;
    p.desc.sink_logits = logits;
    p.desc.query_offset = offset;
    p.desc.select = SPARGE_SELECT_AUTO;
    p.desc.calibration = calibration.get();
    Plan plan(context, p.desc);
    RunArgs args;
    args.q = p.q.view();
    args.k = p.k.view();
    args.v = p.v.view();
    for (int i = 0; i < 3; ++i) plan.Calibrate(args, 1.0);
    const Result result = RunProblem(context, p);
    return std::pair(calibration.Head(1), result.o.Get(0, 1, 5, 3));
  };
  const auto [near, near_o] = run(1024, moved);
  const auto [far, far_o] = run(1024 + (1 << 20), sinks);
  const auto [other, other_o] = run(1024, sinks);
  ASSERT_EQ(near.state, SPARGE_HEAD_SPARSE);
  EXPECT_EQ(far.samples, near.samples);
  EXPECT_EQ(far.error, near.error);
  EXPECT_EQ(far.round_l1, near.round_l1);
  EXPECT_EQ(far_o, near_o);
  EXPECT_NE(other.error, near.error);
  EXPECT_NE(other_o, near_o);
}

// Where far keys count most, scores of thousands must be told apart, too.
TEST(Alibi, NegativeSlopesAreExactInLongRows) {
  const float slopes[] = {-4.0f};
  Problem p({.q_tokens = 40, .kv_tokens = 6000, .qk_dim = 16, .seed = 25});
  p.desc.alibi_slopes = slopes;
  p.desc.precision = SPARGE_PRECISION_FP32;
  for (const int64_t offset : {3000, 5960, 100}) {
    p.desc.query_offset = offset;
    p.desc.causal = offset == 5960 ? 1 : 0;
    const Expected expected = Formula(p);
    const Result run = RunProblem(Context(2), p);
    EXPECT_LE(WorstHead(run.o, expected.o), Tolerance(SPARGE_PRECISION_FP32, SPARGE_F32, 16)) << offset;
    ExpectLse(run.lse, expected.lse, 1e-5);
  }
}

}  // namespace
}  // namespace sparge::testing

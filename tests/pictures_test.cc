// Pictures of what happened: true masses of the reference against brute force, PV groups of runs against the
// statistics.
#include <cstring>
#include <numeric>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

RunArgs Inputs(const Problem& p, TestTensor& o) {
  o = TestTensor(p.shape.batch, p.shape.q_heads, p.shape.q_tokens, p.shape.v_dim);
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  args.o = o.view();
  args.mask = p.mask;
  return args;
}

std::vector<float> TrueMasses(const Problem& p) {
  const Context context(2);
  const Plan plan(context, p.desc);
  const auto [q_blocks, k_blocks] = plan.map_shape();
  TestTensor o;
  RunArgs args = Inputs(p, o);
  std::vector<float> masses(static_cast<size_t>(p.desc.batch * p.desc.q_heads * q_blocks * k_blocks), -1.0f);
  args.mass_out = masses.data();
  plan.Reference(args);
  return masses;
}

// exp(score) of one pair, 0 if hidden: the definition, without care for overflow.
double Weight(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const PlanDesc& d = p.desc;
  const int64_t at = i + d.kv_tokens - d.q_tokens;  // bottom-right
  if (d.causal == 1 && j > at) return 0;
  if (d.window > 0 && j <= at - d.window) return 0;
  if (d.mask == SPARGE_MASK_BOOL && p.mask_bytes[static_cast<size_t>(i * p.mask.query_stride + j)] == 0) return 0;
  double dot = 0;
  for (int64_t c = 0; c < d.qk_dim; ++c) {
    dot += static_cast<double>(p.q.Get(b, h, i, c)) * p.k.Get(b, h / (d.q_heads / d.kv_heads), j, c);
  }
  return std::exp(dot / std::sqrt(static_cast<double>(d.qk_dim)));
}

// The mass of every tile, one pair after the other.
std::vector<double> BruteMasses(const Problem& p) {
  const PlanDesc& d = p.desc;
  const int64_t q_blocks = (d.q_tokens + 127) / 128, k_blocks = (d.kv_tokens + 63) / 64;
  std::vector<double> masses(static_cast<size_t>(d.batch * d.q_heads * q_blocks * k_blocks));
  std::vector<int64_t> rows(static_cast<size_t>(d.batch * d.q_heads * q_blocks));
  for (int64_t bh = 0; bh < d.batch * d.q_heads; ++bh) {
    for (int64_t i = 0; i < d.q_tokens; ++i) {
      std::vector<double> weights(static_cast<size_t>(d.kv_tokens));
      for (int64_t j = 0; j < d.kv_tokens; ++j) weights[j] = Weight(p, bh / d.q_heads, bh % d.q_heads, i, j);
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      if (sum == 0) continue;
      const int64_t row = bh * q_blocks + i / 128;
      ++rows[row];
      for (int64_t j = 0; j < d.kv_tokens; ++j) masses[row * k_blocks + j / 64] += weights[j] / sum;
    }
  }
  for (size_t t = 0; t < masses.size(); ++t) masses[t] /= std::max<int64_t>(rows[t / k_blocks], 1);
  return masses;
}

void ExpectMassesEqual(const Problem& p) {
  const std::vector<float> masses = TrueMasses(p);
  const std::vector<double> expected = BruteMasses(p);
  ASSERT_EQ(masses.size(), expected.size());
  const size_t k_blocks = (p.desc.kv_tokens + 63) / 64;
  for (size_t row = 0; row < masses.size(); row += k_blocks) {
    double sum = 0;
    for (size_t j = row; j < row + k_blocks; ++j) {
      sum += masses[j];
      ASSERT_NEAR(masses[j], expected[j], 1e-6) << "tile " << j;
      ASSERT_EQ(masses[j] == 0, expected[j] == 0) << "tile " << j;
    }
    ASSERT_NEAR(sum, 1.0, 1e-5) << "row " << row / k_blocks;
  }
}

TEST(Pictures, TrueMassesEqualBruteForce) {
  Problem dense({.batch = 2, .q_heads = 4, .kv_heads = 2, .q_tokens = 200, .kv_tokens = 330, .qk_dim = 32, .seed = 1});
  ExpectMassesEqual(dense);
  dense.desc.causal = 1;
  ExpectMassesEqual(dense);
  dense.desc.window = 100;
  ExpectMassesEqual(dense);
}

TEST(Pictures, QueriesThatSeeNothingAreLeftOutOfTheMean) {
  Problem p({.q_tokens = 300, .kv_tokens = 130, .qk_dim = 16, .seed = 2});
  p.desc.mask = SPARGE_MASK_BOOL;
  p.mask_bytes.assign(300 * 130, 1);
  for (int64_t i = 100; i < 200; ++i) std::memset(p.mask_bytes.data() + i * 130, 0, 130);
  p.mask = {p.mask_bytes.data(), 0, 0, 130};
  ExpectMassesEqual(p);  // both blocks have other queries, so that their rows still sum to 1
  std::memset(p.mask_bytes.data(), 0, 128 * 130);
  const std::vector<float> masses = TrueMasses(p);
  for (size_t j = 0; j < 3; ++j) EXPECT_EQ(masses[j], 0.0f) << "a block that sees nothing";
  EXPECT_NEAR(masses[3] + masses[4] + masses[5], 1.0, 1e-6);
}

TEST(Pictures, TrueMassesOverAMapAndWithASink) {
  Problem p({.q_tokens = 128, .kv_tokens = 192, .qk_dim = 16, .seed = 3});
  const std::vector<float> all = TrueMasses(p);
  const Context context(1);
  TestTensor o;
  RunArgs args = Inputs(p, o);
  std::vector<float> masses(3);
  const uint8_t map[] = {1, 0, 1};
  args.map = map;
  args.mass_out = masses.data();
  Plan(context, p.desc).Reference(args);
  EXPECT_EQ(masses[1], 0.0f);
  EXPECT_NEAR(masses[0] + masses[2], 1.0, 1e-6);
  const float logit = 5;
  p.desc.sink_logits = &logit;
  args.map = nullptr;
  Plan(context, p.desc).Reference(args);
  for (int j = 0; j < 3; ++j) EXPECT_LT(masses[j], all[j]) << "the sink takes its share";
}

TEST(Pictures, MassesOfAGridAreInTheOrderOfTheCurve) {
  Problem p({.q_tokens = 7 * 6 * 9, .qk_dim = 16, .seed = 6, .correlated = true});
  Problem sorted = p;
  const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, {7, 6, 9});
  const auto along = [&order](const TestTensor& from) {
    return [from, &order](int64_t b, int64_t h, int64_t t, int64_t d) { return from.Get(b, h, order[t], d); };
  };
  sorted.q = TestTensor(1, 1, 378, 16);
  sorted.k = TestTensor(1, 1, 378, 16);
  sorted.q.Fill(along(p.q));
  sorted.k.Fill(along(p.k));
  const std::vector<float> raster = TrueMasses(p);
  p.desc.grid[0] = 7;
  p.desc.grid[1] = 6;
  p.desc.grid[2] = 9;
  const std::vector<float> masses = TrueMasses(p);
  EXPECT_LT(MaxAbsDifference(masses, TrueMasses(sorted)), 1e-6);
  EXPECT_GT(MaxAbsDifference(masses, raster), 1e-3) << "both orders look alike: this case shows nothing";
}

// A run with pv_out: sums against the statistics, zeros where no tile was kept, and the same result as without.
void ExpectGroupsAddUp(const Context& context, const Problem& p, bool must_skip) {
  const Result plain = RunProblem(context, p);
  Plan plan(context, p.desc);
  TestTensor o;
  RunArgs args = Inputs(p, o);
  std::vector<uint8_t> map(plain.map.size()), groups(plain.map.size(), 99);
  std::vector<sparge_head_stats> stats(plain.head_stats.size());
  args.map = p.map.empty() ? nullptr : p.map.data();
  args.map_batch_stride = p.map_batch_stride;
  args.map_head_stride = p.map_head_stride;
  args.map_out = map.data();
  args.pv_out = groups.data();
  args.head_stats = stats.data();
  plan.Run(args);
  EXPECT_EQ(o.bytes(), plain.o.bytes());
  const size_t tiles = groups.size() / stats.size();
  int64_t skipped = 0;
  for (size_t head = 0; head < stats.size(); ++head) {
    int64_t sum = 0;
    for (size_t t = head * tiles; t < (head + 1) * tiles; ++t) {
      sum += groups[t];
      if (map[t] == 0) {
        ASSERT_EQ(groups[t], 0) << t;
      }
    }
    EXPECT_EQ(sum, stats[head].pv_computed) << "head " << head;
    skipped += stats[head].qk_computed * stats[head].pv_eligible - stats[head].pv_computed * stats[head].qk_eligible;
  }
  if (must_skip) {
    EXPECT_GT(skipped, 0) << "nothing was skipped: this case shows nothing";
  }
}

TEST(Pictures, PvGroupsAddUpToTheStatistics) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(3, isa.c_str());
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      SCOPED_TRACE(isa + " " + Name(precision));
      Problem p({.batch = 2, .q_heads = 2, .kv_heads = 1, .q_tokens = 384, .kv_tokens = 700, .correlated = true});
      p.desc.precision = precision;
      p.desc.params.pv_skip = 2;
      ExpectGroupsAddUp(context, p, true);
      p.desc.causal = 1;
      RandomMap(p, 0.5, 4);
      ExpectGroupsAddUp(context, p, true);
    }
  }
}

TEST(Pictures, PvGroupsOfSplitRowsAndOfFewQueries) {
  for (const std::string& isa : RunnableIsas()) {
    SCOPED_TRACE(isa);
    const Context context(3, isa.c_str());
    for (const int64_t queries : {4, 100}) {  // 4: straight from the tensors; both are split along the keys
      Problem p({.q_tokens = queries, .kv_tokens = 4096, .seed = 5, .correlated = true});
      p.desc.params.pv_skip = 1;
      ExpectGroupsAddUp(context, p, true);
    }
  }
}

TEST(Pictures, WithoutSkipEveryGroupOfAKeptTileIsComputed) {
  const Context context(2);
  Problem p({.q_tokens = 200, .kv_tokens = 300});
  Plan plan(context, p.desc);
  TestTensor o;
  RunArgs args = Inputs(p, o);
  std::vector<uint8_t> groups(2 * 5);
  Stats stats;
  args.pv_out = groups.data();
  args.stats = &stats;
  plan.Run(args);
  const int64_t rows = stats.group_rows;
  for (size_t t = 0; t < groups.size(); ++t) EXPECT_EQ(groups[t], ((t < 5 ? 128 : 72) + rows - 1) / rows);
}

TEST(Pictures, RefusedWhereTheyHaveNoMeaning) {
  const Context context(1);
  const Problem p({.q_tokens = 20});
  Plan plan(context, p.desc);
  TestTensor o;
  RunArgs args = Inputs(p, o);
  float mass = -1;
  uint8_t groups = 99;
  const auto text_of = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  args.mass_out = &mass;
  EXPECT_EQ(text_of([&] { plan.Run(args); }), "mass_out is given, but run has no masses");
  args.mass_out = nullptr;
  args.pv_out = &groups;
  EXPECT_EQ(text_of([&] { plan.Predict(args); }), "pv_out is given, but only run computes PV");
  EXPECT_EQ(text_of([&] { plan.Reference(args); }), "pv_out is given, but only run computes PV");
  EXPECT_EQ(mass, -1);
  EXPECT_EQ(groups, 99);
}

}  // namespace
}  // namespace sparge::testing

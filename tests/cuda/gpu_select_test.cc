// The same tiles as on the CPU, from the same integers; and what selection leaves of attention.
#include <cmath>
#include <cstdio>

#include "tests/cuda/gpu_util.h"

namespace sparge::testing {
namespace {

// Both devices take masses from the same integers. The CPU's 2^x in stage 1 is a polynomial with a relative error below
// 2e-4; the GPU's masses are floats. Tiles whose masses differ by less than this may change places.
constexpr double kMassEpsilon = 5e-4;

struct Rule {
  const char* name;
  sparge_select select;
  sparge_predictor predictor;
  double theta, tau, topk;
  bool causal;
  int64_t dim = 64;
  double softcap = 0;
  int64_t window = 0, dense_tail = 0;
  bool outliers = false;  // queries unlike their neighbours
};

const Rule kRules[] = {
    {"floor", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, -1, 0.9, 0, false},
    {"floor_causal", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, -1, 0.8, 0, true},
    {"floor_128", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, -1, 0.9, 0, false, 128},
    {"floor_256", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, 0.1, 0.7, 0, true, 256, 0, 0, 0, true},
    {"floor_outliers", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, 0.1, 0.7, 0, true, 64, 0, 0, 0, true},
    {"floor_paper", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_PAPER, 0.2, 0.9, 0, false},
    {"floor_tail_window", SPARGE_SELECT_FLOOR, SPARGE_PREDICT_DEFAULT, -1, 0.8, 0, true, 64, 0, 400, 150},
    {"cdf", SPARGE_SELECT_CDF, SPARGE_PREDICT_DEFAULT, -1, 0.7, 0, false},
    {"cdf_theta", SPARGE_SELECT_CDF, SPARGE_PREDICT_DEFAULT, 0.35, 0.6, 0, true},
    {"cdf_keys", SPARGE_SELECT_CDF, SPARGE_PREDICT_KEYS, -1, 0.8, 0, false},
    {"cdf_softcap", SPARGE_SELECT_CDF, SPARGE_PREDICT_KEYS, -1, 0.8, 0, false, 64, 3},
    {"cdf_nothing", SPARGE_SELECT_CDF, SPARGE_PREDICT_DEFAULT, -1, 0.0, 0, false},
    {"cdf_all", SPARGE_SELECT_CDF, SPARGE_PREDICT_DEFAULT, -1, 1.0, 0, true},
    {"topk", SPARGE_SELECT_TOPK, SPARGE_PREDICT_DEFAULT, -1, 0, 0.4, false},
    {"topk_keys_causal", SPARGE_SELECT_TOPK, SPARGE_PREDICT_KEYS, -1, 0, 0.3, true},
    {"topk_256", SPARGE_SELECT_TOPK, SPARGE_PREDICT_DEFAULT, 0.3, 0, 0.25, false, 256},
    {"topk_128", SPARGE_SELECT_TOPK, SPARGE_PREDICT_DEFAULT, 0.3, 0, 0.25, false, 128},
};

Problem ProblemFor(const Rule& rule, uint32_t seed) {
  Problem problem({.q_heads = 2,
                   .kv_heads = 1,
                   .q_tokens = 450,
                   .kv_tokens = 900,
                   .qk_dim = rule.dim,
                   .q_type = SPARGE_BF16,
                   .k_type = SPARGE_F16,
                   .seed = seed,
                   .correlated = true});
  problem.desc.select = rule.select;
  problem.desc.predictor = rule.predictor;
  problem.desc.params = {rule.theta, rule.tau, rule.topk, SPARGE_PV_SKIP_OFF};
  problem.desc.causal = rule.causal;
  problem.desc.softcap = rule.softcap;
  problem.desc.window = rule.window;
  problem.desc.dense_tail = rule.dense_tail;
  if (rule.outliers) {
    for (const int64_t t : {5, 70, 75, 200, 201, 333, 400}) {
      for (int64_t d = 0; d < rule.dim; ++d) problem.q.Set(0, t % 2, t, d, d == t % rule.dim ? 30.0f : 0.0f);
    }
    for (int64_t t = 256; t < 384; t += 16) {  // more than are judged one by one
      for (int64_t d = 0; d < rule.dim; ++d) problem.q.Set(0, 0, t, d, d == t / 16 ? -30.0f : 0.0f);
    }
  }
  return problem;
}

class GpuSelect : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rules, GpuSelect, ::testing::Range(0, static_cast<int>(std::size(kRules))),
                         [](const auto& info) { return std::string(kRules[info.param].name); });

// The CPU's masses, for judging tiles in which the maps differ.
std::vector<float> MassesOnCpu(const Context& cpu, const Problem& problem) {
  Plan plan(cpu, problem.desc);
  const auto [q_blocks, k_blocks] = plan.map_shape();
  std::vector<float> masses(static_cast<size_t>(problem.desc.batch * problem.shape.q_heads * q_blocks * k_blocks));
  RunArgs args;
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.mass_out = masses.data();
  plan.Predict(args);
  return masses;
}

// Tiles in which the maps differ. Each must be as good as some tile of its row on which the maps agree otherwise,
// within the epsilon: a row in which they differ in one tile only is at the border of its rule.
int64_t CountDifferences(const GpuResult& gpu, const Result& cpu, const std::vector<float>& masses) {
  int64_t count = 0;
  const auto rows = static_cast<int64_t>(cpu.map.size()) / cpu.k_blocks;
  for (int64_t row = 0; row < rows; ++row) {
    double low = kInf, high = 0;
    for (int64_t i = row * cpu.k_blocks; i < (row + 1) * cpu.k_blocks; ++i) {
      if (gpu.map[i] == cpu.map[i]) continue;
      ++count;
      low = std::min<double>(low, masses[i]);
      high = std::max<double>(high, masses[i]);
    }
    if (high > 0) {
      EXPECT_LE(high - low, kMassEpsilon * high) << "row " << row;
    }
  }
  return count;
}

TEST_P(GpuSelect, SameTilesAsOnTheCpu) {
  const Context cpu(1, "baseline");
  const Context gpu = GpuContext();
  int64_t differences = 0, tiles = 0, kept = 0;
  for (const uint32_t seed : {1u, 2u}) {
    const Problem problem = ProblemFor(kRules[GetParam()], seed);
    const Result expected = Predict(cpu, problem);
    const std::vector<float> masses = MassesOnCpu(cpu, problem);
    const GpuResult result = PredictOnGpu(gpu, problem, /*with_masses=*/true);
    differences += CountDifferences(result, expected, masses);
    tiles += static_cast<int64_t>(expected.map.size());
    for (const uint8_t tile : expected.map) kept += tile;
    for (size_t i = 0; i < masses.size(); ++i) {
      EXPECT_NEAR(result.masses[i], masses[i], kMassEpsilon * masses[i] + 1e-6) << "tile " << i;
    }
    for (size_t h = 0; h < expected.head_stats.size(); ++h) {
      EXPECT_EQ(result.head_stats[h].qk_eligible, expected.head_stats[h].qk_eligible);
    }
    // The run has the map that was predicted.
    EXPECT_EQ(RunOnGpu(gpu, problem).map, result.map);
  }
  std::printf("%lld of %lld tiles differ, %lld are kept\n", static_cast<long long>(differences),
              static_cast<long long>(tiles), static_cast<long long>(kept));
  EXPECT_LE(differences, tiles / 200);
  EXPECT_GT(kept, 0);
}

// What is attended is the map, whatever chose it.
TEST_P(GpuSelect, TheMapIsAttended) {
  const Context cpu(1, "baseline");
  const Problem problem = ProblemFor(kRules[GetParam()], 3);
  const GpuResult result = RunOnGpu(GpuContext(), problem);
  const Result expected = Reference(cpu, problem, result.map);
  // Correlated tokens have scores of some units, and the error of a score is relative: 0.8 % of it per operand.
  EXPECT_LE(RelativeL1(result.o, expected.o), 0.08);
}

// Rows of one tile each have a maximum far above those of all other tiles: all but one can be skipped.
Problem Peaked(int64_t dim, float peak) {
  Problem problem({.q_heads = 1, .q_tokens = 256, .kv_tokens = 640, .qk_dim = dim});
  // Groups of 32 rows look at the keys of one tile, with a score of `peak` instead of 0.
  const auto axis = [](int64_t tile) { return tile * 5 % 64; };
  const auto root = static_cast<float>(std::sqrt(static_cast<double>(dim)));
  problem.q.Fill([&](int64_t, int64_t, int64_t t, int64_t d) { return d == axis(t / 32) ? peak : 0.0f; });
  problem.k.Fill([&](int64_t, int64_t, int64_t t, int64_t d) { return d == axis(t / 64) ? root : 0.0f; });
  problem.v.Fill([](int64_t, int64_t, int64_t t, int64_t d) { return static_cast<float>((t * 7 + d * 3) % 16) / 16; });
  return problem;
}

void CheckSkips(int64_t dim, bool fp8) {
  Problem problem = Peaked(dim, 24);
  const Context cpu(1, "baseline");
  const Context gpu = GpuContext(fp8);
  if (UsesFp8(gpu) != fp8) GTEST_SKIP() << "the driver's GPU is " << gpu.isa();
  problem.desc.params.pv_skip = 10;
  const GpuResult result = RunOnGpu(gpu, problem);
  const Result expected = Reference(cpu, problem);
  // Group g of 8 looks at tile g of 10. Before it all tiles are alike: computed. After it they are skipped.
  int64_t computed = 0;
  for (int64_t group = 0; group < 8; ++group) computed += group + 1;
  EXPECT_EQ(result.head_stats[0].pv_eligible, 80);
  EXPECT_EQ(result.head_stats[0].pv_computed, computed);
  // What is left out weighs at most 576 keys times e^-23 of one; the rest is the rounding of weights and values, of
  // which that of e4m3 is at most 2^-4 each, and of the scores of int8: 24 / 127 / 2 of a unit at most, nearly alike in
  // a tile.
  const double rounding = fp8 ? 0x1p-3 : 0x1p-10;
  EXPECT_LE(RelativeL1(result.o, expected.o), rounding + 576 * std::exp(-23.0) + 0.01);
  problem.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  EXPECT_EQ(RunOnGpu(gpu, problem).head_stats[0].pv_computed, 80);
}
// Skipped tiles count neither in the sums nor in the output: with a small lambda that shows.
void CheckWhatIsLeft(int64_t dim, bool fp8) {
  Problem problem = Peaked(dim, 4);
  const Context gpu = GpuContext(fp8);
  if (UsesFp8(gpu) != fp8) GTEST_SKIP() << "the driver's GPU is " << gpu.isa();
  problem.desc.params.pv_skip = 3;
  const GpuResult result = RunOnGpu(gpu, problem);
  for (int64_t t = 0; t < 256; ++t) {
    // The tiles before the group's own, and that.
    const auto before = static_cast<double>(t / 32);
    const double expected = std::log(64 * (before + std::exp(4.0)));
    // A score of 4 has the error of int8; the nine tiles that the first group skips would add 0.15.
    EXPECT_NEAR(result.lse[t], expected, 0.04) << t;
  }
}
TEST(GpuSkip, SkippedTilesDoNotCount_64_f16) { CheckWhatIsLeft(64, false); }
TEST(GpuSkip, SkippedTilesDoNotCount_128_f16) { CheckWhatIsLeft(128, false); }
TEST(GpuSkip, SkippedTilesDoNotCount_64_fp8) { CheckWhatIsLeft(64, true); }

TEST(GpuSkip, TilesThatCannotMatterAreLeftOut_64_f16) { CheckSkips(64, false); }
TEST(GpuSkip, TilesThatCannotMatterAreLeftOut_128_f16) { CheckSkips(128, false); }
TEST(GpuSkip, TilesThatCannotMatterAreLeftOut_64_fp8) { CheckSkips(64, true); }
TEST(GpuSkip, TilesThatCannotMatterAreLeftOut_128_fp8) { CheckSkips(128, true); }

TEST(GpuEdges, WhatIsNotFiniteStaysWithThoseWhoSeeIt) {
  const Context gpu = GpuContext();
  Problem problem({.q_tokens = 200});
  problem.desc.causal = 1;
  const GpuResult clean = RunOnGpu(gpu, problem);
  problem.k.Set(0, 0, 150, 7, kNan);
  problem.v.Set(0, 0, 180, 3, kInf);
  problem.q.Set(0, 0, 20, 0, -kInf);
  const GpuResult result = RunOnGpu(gpu, problem);
  for (int64_t t = 0; t < 200; ++t) {
    const bool sees = t >= 150 || t == 20;
    for (int64_t d = 0; d < 64; ++d) {
      EXPECT_EQ(std::isnan(result.o.Get(0, 0, t, d)), sees) << "token " << t << " channel " << d;
    }
    if (!sees) {
      EXPECT_TRUE(std::isfinite(result.lse[t])) << t;
    }
  }
  EXPECT_TRUE(AllFinite(clean.o));
}

TEST(GpuEdges, ExtremesStayFinite) {
  const Context gpu = GpuContext();
  for (const float size : {1e-38f, 1e-20f, 1e18f, 1e38f, 3e38f}) {
    Problem problem({.q_tokens = 140, .kv_tokens = 130});
    const auto scaled = [size](const TestTensor& tensor) {
      return [size, tensor](int64_t b, int64_t h, int64_t t, int64_t d) {
        return std::clamp(tensor.Get(b, h, t, d) / 4, -1.0f, 1.0f) * size;
      };
    };
    TestTensor q(1, 1, 140, 64), k(1, 1, 130, 64), v(1, 1, 130, 64);
    q.Fill(scaled(problem.q));
    k.Fill(scaled(problem.k));
    v.Fill(scaled(problem.v));
    problem.q = q;
    problem.k = k;
    problem.v = v;
    const GpuResult result = RunOnGpu(gpu, problem);
    EXPECT_TRUE(AllFinite(result.o)) << size;
  }
}

TEST(GpuEdges, PackedSequences) {
  const Context cpu(1, "baseline");
  const int64_t q_offsets[] = {0, 130, 130, 200, 201, 210};
  const int64_t kv_offsets[] = {0, 70, 140, 300, 300, 301};
  for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_FLOOR, SPARGE_SELECT_CDF}) {
    Problem problem({.q_heads = 2, .kv_heads = 1, .q_tokens = 210, .kv_tokens = 301});
    problem.desc.batch = 5;
    problem.desc.q_offsets = q_offsets;
    problem.desc.kv_offsets = kv_offsets;
    problem.desc.causal = 1;
    problem.desc.select = select;
    const GpuResult result = RunOnGpu(GpuContext(), problem);
    EXPECT_EQ(result.map, Predict(cpu, problem).map);
    const Result expected = Reference(cpu, problem, select == SPARGE_SELECT_ALL ? std::vector<uint8_t>{} : result.map);
    EXPECT_LE(RelativeL1(result.o, expected.o), Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
    EXPECT_LE(MaxAbsDifference(result.lse, expected.lse), 0.2);
    for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(result.o.Get(0, 1, 200, d), 0.0f);
    EXPECT_EQ(result.lse[200], -kInf);
  }
}

TEST(GpuEdges, NoKeysAtAll) {
  Problem problem({.batch = 2, .q_heads = 2, .q_tokens = 70, .kv_tokens = 0});
  const GpuResult result = RunOnGpu(GpuContext(), problem);
  for (const float lse : result.lse) EXPECT_EQ(lse, -kInf);
  for (int64_t t = 0; t < 70; ++t) EXPECT_EQ(result.o.Get(1, 1, t, 5), 0.0f);
}

TEST(GpuEdges, HeadsHaveParametersOfTheirOwn) {
  Problem problem = ProblemFor(kRules[0], 4);
  const sparge_head_params heads[2] = {{-1, 1.0, 0, SPARGE_PV_SKIP_OFF}, {-1, 0.5, 0, 5}};
  problem.desc.heads = heads;
  const GpuResult result = RunOnGpu(GpuContext(), problem);
  const Result expected = Predict(Context(1, "baseline"), problem);
  EXPECT_EQ(result.head_stats[0].qk_computed, result.head_stats[0].qk_eligible);
  EXPECT_LT(result.head_stats[1].qk_computed, result.head_stats[1].qk_eligible);
  EXPECT_EQ(result.map, expected.map);
}

// Attention over three parts of the keys, one of which nobody sees, is attention over all of them.
TEST(GpuMerge, PartsAreJoined) {
  const Context cpu(1), gpu = GpuContext();
  constexpr int64_t kHeads = 2, kTokens = 37, kDim = 24;
  std::vector<sparge_partial> on_cpu, on_gpu;
  std::vector<TestTensor> outputs;
  std::vector<std::vector<float>> sums;
  std::vector<GpuMemory> memory;
  const auto add = [&](const TestTensor& o, const std::vector<float>& lse) {
    outputs.push_back(o);
    sums.push_back(lse);
    sparge_partial part{o.view(), {sums.back().data(), kHeads * kTokens, kTokens}};
    on_cpu.push_back(part);
    memory.emplace_back(o.bytes().data(), o.bytes().size());
    part.o.data = memory.back().data();
    memory.emplace_back(lse.data(), lse.size() * sizeof(float));
    part.lse.data = static_cast<float*>(memory.back().data());
    on_gpu.push_back(part);
  };
  for (int part = 0; part < 4; ++part) {  // the last one takes the result
    TestTensor o(1, kHeads, kTokens, kDim, part == 1 ? SPARGE_F16 : SPARGE_F32, Layout::kPrime);
    std::vector<float> lse(kHeads * kTokens);
    for (size_t i = 0; i < lse.size(); ++i) {
      lse[i] = part == 2 || i % 9 == 4 ? -kInf : std::sin(static_cast<float>(i) * (part + 1)) * 20;
    }
    o.Fill([&](int64_t, int64_t h, int64_t t, int64_t d) {
      return part == 2 ? kNan : std::cos(static_cast<float>(h * 100 + t * 7 + d + part));
    });
    add(o, lse);
  }
  ASSERT_EQ(sparge_merge_parts(cpu.get(), 1, kHeads, kTokens, kDim, on_cpu.data(), 3, &on_cpu[3]), SPARGE_OK);
  ASSERT_EQ(sparge_merge_parts(gpu.get(), 1, kHeads, kTokens, kDim, on_gpu.data(), 3, &on_gpu[3]), SPARGE_OK)
      << sparge_last_error();
  TestTensor o(1, kHeads, kTokens, kDim, SPARGE_F32, Layout::kPrime);
  std::vector<float> lse(kHeads * kTokens);
  memory[6].Read(o.view().data, o.bytes().size());
  memory[7].Read(lse.data(), lse.size() * sizeof(float));
  // fp32, 2^x and log2 within 2 ulp; a weight is 2^x of a difference up to 58.
  EXPECT_LE(RelativeL1(o, outputs[3]), 1e-5);
  EXPECT_LE(MaxAbsDifference(lse, sums[3]), 1e-5);
}

// Needs a driver that has graphs.
TEST(GpuGraph, ARunCanBeCaptured) {
  const Context gpu = GpuContext();
  for (const int rule : {1, 6}) {
    const Problem problem = ProblemFor(kRules[rule], 6);
    const GpuResult captured = RunCaptured(gpu, problem), plain = RunOnGpu(gpu, problem);
    EXPECT_EQ(captured.o.bytes(), plain.o.bytes());
    EXPECT_EQ(captured.lse, plain.lse);
    EXPECT_EQ(captured.map, plain.map);
    EXPECT_EQ(captured.head_stats[1].pv_computed, plain.head_stats[1].pv_computed);
  }
}

TEST(GpuEdges, RunsAreTheSameBitByBit) {
  const Problem problem = ProblemFor(kRules[1], 5);
  const GpuResult a = RunOnGpu(GpuContext(), problem), b = RunOnGpu(GpuContext(), problem);
  EXPECT_EQ(a.o.bytes(), b.o.bytes());
  EXPECT_EQ(a.lse, b.lse);
}

}  // namespace
}  // namespace sparge::testing

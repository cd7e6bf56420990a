// The whole path on a GPU: pack, score, select, attend, against the reference that the CPU's tests use.
#include <array>
#include <cmath>
#include <cstdio>

#include "tests/cuda/gpu_util.h"

namespace sparge::testing {
namespace {

// Roots of mean squares of relative rounding errors. A row of int8 has the step max / 127, and the largest of some
// hundred normal numbers is about 3.5 standard deviations; a step s has the error s / sqrt(12). f16 has 11 bits; e4m3
// has 4, so that its steps are 2^-3 to 2^-4 of a number, 0.09 in the mean of squares.
constexpr double kInt8Error = 3.5 / 127 / 3.4641;
constexpr double kF16Error = 0x1p-10 / 3.4641;
constexpr double kE4m3Error = 0.09 / 3.4641;

// For noise with scores of standard deviation 1, where the error of a score is that of its weight: twice the root of
// the sum of squares, as Tolerance() of test_util.h.
double NoiseTolerance(bool fp8, sparge_dtype o_type) {
  const double pv = fp8 ? kE4m3Error : kF16Error;
  const double output = o_type == SPARGE_F16 ? 0x1p-11 : o_type == SPARGE_BF16 ? 0x1p-8 : 0;
  return 2 * std::sqrt(2 * kInt8Error * kInt8Error + 2 * pv * pv) + output;
}

// Keys and queries that int8 holds exactly: multiples of unit vectors, which the rotation spreads evenly; keys come in
// pairs of opposite sign, so that their mean is 0. Values are powers of two up to 1. What is left is the rounding of
// the weights, the functions 2^x and log2, and sums in fp32.
void MakeExact(Problem& problem, float strength) {
  const int64_t dim = problem.shape.qk_dim;
  const auto axis = [dim](int64_t t) { return (t * 7 + t / 5) % dim; };
  problem.q.Fill([&](int64_t, int64_t h, int64_t t, int64_t d) {
    return d == axis(t + h) ? strength * static_cast<float>(1 + t % 5) : 0.0f;
  });
  problem.k.Fill([&](int64_t, int64_t h, int64_t t, int64_t d) {
    const int64_t pair = t / 2;
    const bool lonely = t == problem.shape.kv_tokens - 1 && t % 2 == 0;  // has no partner: a key of zeros
    if (lonely || d != axis(pair + h)) return 0.0f;
    return (t % 2 == 0 ? 1.0f : -1.0f) * static_cast<float>(1 << pair % 3);
  });
  problem.v.Fill([](int64_t, int64_t, int64_t t, int64_t d) {
    const float size = std::ldexp(1.0f, -static_cast<int>((t + d) % 4));
    return (t * 3 + d * 5) % 7 < 3 ? -size : size;
  });
}

struct Named {
  const char* name;
  Case shape;
  bool causal = false;
  int64_t offset = SPARGE_OFFSET_BOTTOM_RIGHT;
  int64_t window = 0;
  double softcap = 0;
  double map_share = 0;  // of a random map; 0: all tiles
  bool sinks = false;
};

const Named kCases[] = {
    {"one", {.q_tokens = 1}},
    {"tile", {.q_tokens = 128}},
    {"ragged", {.q_heads = 2, .q_tokens = 200, .kv_tokens = 333}},
    {"ragged_128", {.q_tokens = 129, .kv_tokens = 161, .qk_dim = 128}},
    {"few_keys", {.q_tokens = 130, .kv_tokens = 3}},
    // In so few dims a step of the integer sums is a good part of a score.
    {"gqa", {.q_heads = 4, .kv_heads = 2, .q_tokens = 140, .kv_tokens = 130, .qk_dim = 4, .v_dim = 64}},
    {"batch", {.batch = 2, .q_heads = 2, .q_tokens = 65, .kv_tokens = 127}},
    {"causal", {.q_tokens = 257}, true},
    {"causal_128", {.q_tokens = 190, .qk_dim = 128}, true},
    {"causal_more_keys", {.q_tokens = 100, .kv_tokens = 277}, true},
    {"causal_rows_without_keys", {.q_tokens = 277, .kv_tokens = 100}, true},
    {"causal_top_left", {.q_tokens = 150, .kv_tokens = 260}, true, 0},
    {"causal_beyond", {.q_tokens = 150, .kv_tokens = 100}, true, 1000},
    {"window", {.q_tokens = 300}, true, SPARGE_OFFSET_BOTTOM_RIGHT, 140},
    {"window_not_causal", {.q_tokens = 300}, false, 10, 33},
    {"dim_40", {.q_tokens = 150, .kv_tokens = 140, .qk_dim = 40, .v_dim = 24}},
    {"dim_96", {.q_tokens = 150, .kv_tokens = 140, .qk_dim = 96}},
    {"dim_64_128", {.q_tokens = 150, .kv_tokens = 140, .qk_dim = 64, .v_dim = 128}},
    {"dim_256", {.q_tokens = 190, .qk_dim = 256}, true},
    {"dim_64_200", {.q_heads = 2, .q_tokens = 130, .kv_tokens = 140, .qk_dim = 64, .v_dim = 200}},
    {"map_160",
     {.q_tokens = 200, .kv_tokens = 300, .qk_dim = 160, .v_dim = 96},
     false,
     SPARGE_OFFSET_BOTTOM_RIGHT,
     0,
     0,
     0.4},
    {"tokens_first", {.q_heads = 2, .q_tokens = 150, .kv_tokens = 140, .layout = Layout::kTokens}},
    {"f16",
     {.q_tokens = 150,
      .kv_tokens = 140,
      .q_type = SPARGE_F16,
      .k_type = SPARGE_F16,
      .v_type = SPARGE_F16,
      .o_type = SPARGE_F16,
      .layout = Layout::kPrime}},
    {"bf16",
     {.q_tokens = 150,
      .kv_tokens = 140,
      .q_type = SPARGE_BF16,
      .k_type = SPARGE_BF16,
      .v_type = SPARGE_BF16,
      .o_type = SPARGE_BF16,
      .layout = Layout::kPrime}},
    {"map",
     {.batch = 2, .q_heads = 2, .q_tokens = 300, .kv_tokens = 500},
     false,
     SPARGE_OFFSET_BOTTOM_RIGHT,
     0,
     0,
     0.4},
    {"map_128", {.q_tokens = 300, .kv_tokens = 400, .qk_dim = 128}, true, SPARGE_OFFSET_BOTTOM_RIGHT, 0, 0, 0.4},
    {"softcap", {.q_tokens = 150, .kv_tokens = 140}, true, SPARGE_OFFSET_BOTTOM_RIGHT, 0, 2.0},
    {"sinks", {.q_heads = 2, .q_tokens = 150, .kv_tokens = 100}, true, SPARGE_OFFSET_BOTTOM_RIGHT, 0, 0, 0, true},
};

class Gpu : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  const Named& named() const { return kCases[std::get<0>(GetParam())]; }
  bool fp8() const { return std::get<1>(GetParam()); }
  Problem Make() {
    Problem problem(named().shape);
    problem.desc.causal = named().causal;
    problem.desc.query_offset = named().offset;
    problem.desc.window = named().window;
    problem.desc.softcap = named().softcap;
    if (named().map_share > 0) RandomMap(problem, named().map_share, 5);
    if (named().sinks) problem.desc.sink_logits = sinks_.data();
    return problem;
  }
  const std::array<float, 2> sinks_{-1.0f, 2.5f};
};

std::string NameOf(const ::testing::TestParamInfo<std::tuple<int, bool>>& info) {
  return std::string(kCases[std::get<0>(info.param)].name) + (std::get<1>(info.param) ? "_fp8" : "_f16");
}
INSTANTIATE_TEST_SUITE_P(
    All, Gpu, ::testing::Combine(::testing::Range(0, static_cast<int>(std::size(kCases))), ::testing::Bool()), NameOf);

double LargestDifference(const TestTensor& a, const TestTensor& b) {
  double most = 0;
  for (int64_t i = 0; i < b.batch; ++i) {
    for (int64_t h = 0; h < b.heads; ++h) {
      for (int64_t t = 0; t < b.tokens; ++t) {
        for (int64_t d = 0; d < b.dim; ++d) {
          const double difference = std::fabs(static_cast<double>(a.Get(i, h, t, d)) - b.Get(i, h, t, d));
          most = std::isnan(difference) ? kInf : std::max(most, difference);
        }
      }
    }
  }
  return most;
}

TEST_P(Gpu, NoiseIsAttended) {
  const Problem problem = Make();
  const Context cpu(1, "baseline");
  const Context gpu = GpuContext(fp8());
  if (UsesFp8(gpu) != fp8()) GTEST_SKIP() << "the driver's GPU is " << gpu.isa();
  const GpuResult result = RunOnGpu(gpu, problem);
  const Result expected = Reference(cpu, problem, problem.map);
  EXPECT_LE(RelativeL1(result.o, expected.o), NoiseTolerance(UsesFp8(gpu), problem.shape.o_type));
  // The error of a row's log-sum-exp is a mean of errors of scores, each of which is below 6 standard deviations.
  EXPECT_LE(MaxAbsDifference(result.lse, expected.lse), 6 * std::sqrt(2.0) * kInt8Error * 2);
}

TEST_P(Gpu, ExactOperandsAreAttendedExactly) {
  Problem problem = Make();
  const Context cpu(1, "baseline");
  const Context gpu = GpuContext(fp8());
  if (UsesFp8(gpu) != fp8()) GTEST_SKIP() << "the driver's GPU is " << gpu.isa();
  // Rows look at some keys; then at one or two, with scores that no float of another's size could hold.
  for (const float strength : {8.0f, 64.0f}) {
    MakeExact(problem, strength);
    const GpuResult result = RunOnGpu(gpu, problem);
    const Result expected = Reference(cpu, problem, problem.map);
    // Scores are up to 5 * 4 * strength / sqrt(dim), and rounded four times in fp32.
    const double score = 20 * static_cast<double>(strength) / std::sqrt(static_cast<double>(problem.shape.qk_dim));
    const double rounding = 4 * 0x1p-24 * score;
    // Weights have half a step of error: 2^-11 of themselves in f16, 2^-4 in e4m3 (where those below 2^-14 of the
    // largest are lost); values are at most 1. Beside that fp32, and the output's type.
    const double weights = fp8() ? 0x1p-4 + 0x1p-10 : 0x1p-11;
    const sparge_dtype type = problem.shape.o_type;
    const double output = type == SPARGE_F16 ? 0x1p-12 : type == SPARGE_BF16 ? 0x1p-9 : 0;
    EXPECT_LE(LargestDifference(result.o, expected.o), weights + output + 2 * rounding + 1e-5) << strength;
    EXPECT_LE(MaxAbsDifference(result.lse, expected.lse), rounding + 2e-5) << strength;
  }
}

// Tiles as the CPU counts them; row groups follow from the map, for nothing is skipped here.
TEST_P(Gpu, TilesAreCountedAsOnTheCpu) {
  const Problem problem = Make();
  const Context cpu(1, "baseline");
  const Context gpu = GpuContext(fp8());
  if (UsesFp8(gpu) != fp8()) GTEST_SKIP() << "the driver's GPU is " << gpu.isa();
  const GpuResult result = RunOnGpu(gpu, problem);
  const Result expected = Predict(cpu, problem);
  ASSERT_EQ(result.map, expected.map);
  const Case& shape = problem.shape;
  for (size_t h = 0; h < expected.head_stats.size(); ++h) {
    EXPECT_EQ(result.head_stats[h].qk_eligible, expected.head_stats[h].qk_eligible);
    EXPECT_EQ(result.head_stats[h].qk_computed, expected.head_stats[h].qk_computed);
    int64_t groups = 0;
    for (int64_t i = 0; i < result.q_blocks; ++i) {
      const int64_t rows = std::min<int64_t>(SPARGE_BLOCK_Q, shape.q_tokens - i * SPARGE_BLOCK_Q);
      for (int64_t j = 0; j < result.k_blocks; ++j) {
        groups += (rows + 31) / 32 * result.map[(h * result.q_blocks + i) * result.k_blocks + j];
      }
    }
    EXPECT_EQ(result.head_stats[h].pv_computed, groups);
  }
}

}  // namespace
}  // namespace sparge::testing

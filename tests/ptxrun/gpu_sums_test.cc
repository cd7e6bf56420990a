// Cases that the mutants need: what the GPU's cases in tests/cuda would not see.
#include <algorithm>
#include <cmath>

#include "tests/cuda/gpu_util.h"

namespace sparge::testing {
namespace {

// The tile of query t when all rows of a warp have the same one, and when they have not.
int64_t ByWarp(int64_t t) { return t / 32; }
int64_t ByRow(int64_t t) { return t % 8; }

// The score of a query with its own tile is `own`, with all others `other`.
Problem Grouped(int64_t (*tile_of)(int64_t), float own, float other) {
  constexpr int64_t kDim = 64, kTiles = 10;
  Problem problem({.q_heads = 1, .q_tokens = 256, .kv_tokens = kTiles * SPARGE_BLOCK_K, .qk_dim = kDim});
  // Axes 0 to 9 are those of tiles; axis 63 is in every query and key, for the score of all.
  problem.q.Fill([=](int64_t, int64_t, int64_t t, int64_t d) {
    return d == tile_of(t) ? own - other : d == kDim - 1 ? other : 0.0f;
  });
  problem.k.Fill(
      [=](int64_t, int64_t, int64_t t, int64_t d) { return d == t / SPARGE_BLOCK_K || d == kDim - 1 ? 8.0f : 0.0f; });
  problem.v.Fill([](int64_t, int64_t, int64_t t, int64_t d) { return static_cast<float>((t * 7 + d * 3) % 16) / 16; });
  return problem;
}

// Tiles that come after a group's own weigh e^-4 each, and are left out by a skip of 3: of the values and of the sum.
TEST(GpuSums, WhatIsLeftOutIsNotInTheSum) {
  Problem problem = Grouped(ByWarp, 4, 0);
  problem.desc.params.pv_skip = 3;
  const GpuResult result = RunOnGpu(GpuContext(false), problem);
  for (int64_t t = 0; t < 256; ++t) {
    // Those before it were computed. The keys' mean is 0 on no axis, and taken from all scores of a query alike.
    const double expected = 4 + std::log(64 * (1 + static_cast<double>(t / 32) * std::exp(-4.0)));
    // Scores are wrong by 4 / 127 / 2 of a step at most, nearly alike in a tile. The next tile would add 0.016.
    EXPECT_NEAR(result.lse[static_cast<size_t>(t)], expected, 0.014) << t;
  }
}

// The maximum must be that of all steps, also where it grows for another row of the warp: from a tile of score 90 to
// others of -90 a factor is 2^260, no float.
TEST(GpuSums, ScoresMayFallFar) {
  Problem problem = Grouped(ByRow, 90, -90);
  problem.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  const Context cpu(1, "baseline");
  const GpuResult result = RunOnGpu(GpuContext(false), problem);
  const Result expected = Reference(cpu, problem);
  // Within its own tile all weights are alike: what is left is the rounding of values and sums.
  EXPECT_LE(RelativeL1(result.o, expected.o), 0x1p-10);
}

// A window wider than a tile and a warp together, so that some tiles are inside of it for all rows of a warp and others
// only for the first ones. Queries that are zero have the log-sum-exp log(n) for n keys.
TEST(GpuSums, WideWindows) {
  constexpr int64_t kWindow = 150;
  Problem problem({.q_tokens = 300, .kv_tokens = 300, .seed = 3});
  problem.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });
  problem.desc.causal = 1;
  problem.desc.window = kWindow;
  const GpuResult result = RunOnGpu(GpuContext(false), problem);
  for (int64_t t = 0; t < 300; ++t) {
    EXPECT_NEAR(result.lse[static_cast<size_t>(t)], std::log(static_cast<double>(std::min(t + 1, kWindow))), 1e-5) << t;
  }
}

}  // namespace
}  // namespace sparge::testing

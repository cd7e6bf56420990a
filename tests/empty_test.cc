// Sequences without queries or without keys: they cost nothing, disturb nobody, and have the empty result.
#include <algorithm>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr sparge_select kSelects[] = {SPARGE_SELECT_ALL, SPARGE_SELECT_CDF, SPARGE_SELECT_FLOOR, SPARGE_SELECT_AUTO};

// All that a run can write.
struct Outputs {
  TestTensor o;
  std::vector<float> lse;
  std::vector<uint8_t> map;
  std::vector<sparge_head_stats> heads;
  Stats stats;

  Outputs(Plan& plan, const PlanDesc& desc, bool packed) : o(packed ? 1 : desc.batch, desc.q_heads, desc.q_tokens, 64) {
    o.Fill([](int64_t, int64_t, int64_t, int64_t) { return -7.0f; });
    lse.assign(static_cast<size_t>(o.batch * desc.q_heads * desc.q_tokens), -7.0f);
    const auto [q_blocks, k_blocks] = plan.map_shape();
    map.assign(static_cast<size_t>(desc.batch * desc.q_heads * q_blocks * k_blocks), 7);
    heads.assign(static_cast<size_t>(desc.batch * desc.q_heads), {7, 7, 7, 7});
  }
  void SetArgs(RunArgs& args) {
    args.o = o.view();
    args.lse = {lse.data(), o.heads * o.tokens, o.tokens};
    args.map_out = map.data();
    args.head_stats = heads.data();
    args.stats = &stats;
  }
};

Calibration NewCalibration(int64_t heads) {
  CalibrationDesc bounds;
  bounds.q_heads = heads;
  return Calibration(bounds);
}

TEST(Empty, PlansWithoutWorkNeedNoMemory) {
  const Context context(2);
  const Calibration calibration = NewCalibration(3);
  std::vector<float> nothing(1);
  for (const sparge_select select : kSelects) {
    for (const int64_t queries : {0, 1}) {
      PlanDesc desc;
      desc.batch = int64_t{1} << 22;
      desc.q_heads = desc.kv_heads = 3;
      desc.q_tokens = queries;
      desc.kv_tokens = queries == 0 ? 512 : 0;
      desc.qk_dim = desc.v_dim = 1;
      desc.select = select;
      if (select == SPARGE_SELECT_AUTO) desc.calibration = calibration.get();
      Plan plan(context, desc);
      EXPECT_EQ(plan.workspace_size(), 0U);
      RunArgs args;
      args.q = args.k = args.v = ViewHeads(nothing.data(), SPARGE_F32, 0, 0, 0);
      std::vector<float> o(static_cast<size_t>(desc.batch * 3 * queries), -7.0f);
      args.o = ViewHeads(o.data(), SPARGE_F32, 3, queries, 1);
      EXPECT_EQ(sparge_run(plan.get(), &args), SPARGE_OK) << sparge_last_error();  // no workspace given
      EXPECT_TRUE(std::all_of(o.begin(), o.end(), [](float x) { return x == 0; }));
    }
  }
  PlanDesc most;
  most.batch = (int64_t{1} << 31) - 1;
  most.q_heads = most.kv_heads = 1;
  most.kv_tokens = 1;
  most.qk_dim = most.v_dim = 1;
  EXPECT_EQ(Plan(context, most).workspace_size(), 0U);
}

// A cache has places for all sequences, whatever a call brings.
TEST(Empty, CachesDoNotDependOnTokens) {
  const Context context(2);
  const auto plan = [&](int64_t queries, int64_t keys) {
    PlanDesc desc;
    desc.batch = desc.q_heads = desc.kv_heads = 2;
    desc.q_tokens = queries;
    desc.kv_tokens = keys;
    desc.qk_dim = desc.v_dim = 64;
    desc.cache_tokens = 1000;
    return Plan(context, desc);
  };
  EXPECT_GT(plan(300, 900).cache_size(), 0U);
  EXPECT_EQ(plan(300, 0).cache_size(), plan(300, 900).cache_size());
  EXPECT_EQ(plan(0, 900).cache_size(), plan(300, 900).cache_size());
  EXPECT_EQ(plan(300, 0).workspace_size(), 0U);
  EXPECT_EQ(plan(0, 900).workspace_size(), 0U);
}

// Two sequences with work, alone and among many that have none: each in its own place, with the same bits.
TEST(Empty, SequencesWithoutWorkDisturbNobody) {
  constexpr int64_t kMany = 5000, kFirst = 700, kSecond = 3001;
  const Context context(2);
  // Sequence: queries, keys.
  const auto counts = [&](int64_t i) -> std::pair<int64_t, int64_t> {
    if (i == kFirst) return {200, 300};
    if (i == kSecond) return {150, 170};
    return i % 1000 == 999 ? std::pair<int64_t, int64_t>{30, 0} : std::pair<int64_t, int64_t>{0, i % 40 == 0 ? 9 : 0};
  };
  std::vector<int64_t> q_offsets{0}, k_offsets{0};
  for (int64_t i = 0; i < kMany; ++i) {
    q_offsets.push_back(q_offsets.back() + counts(i).first);
    k_offsets.push_back(k_offsets.back() + counts(i).second);
  }
  Problem all({.q_heads = 2, .q_tokens = q_offsets.back(), .kv_tokens = k_offsets.back(), .seed = 31});
  for (const sparge_select select : kSelects) {
    SCOPED_TRACE(select);
    const Calibration calibration = NewCalibration(2), alone_calibration = NewCalibration(2);
    PlanDesc desc = all.desc;
    desc.batch = kMany;
    desc.q_offsets = q_offsets.data();
    desc.kv_offsets = k_offsets.data();
    desc.causal = 1;
    desc.select = select;
    desc.params.tau = 0.9;
    if (select == SPARGE_SELECT_AUTO) desc.calibration = calibration.get();
    Plan plan(context, desc);
    Outputs out(plan, desc, true);
    RunArgs args;
    args.q = all.q.view();
    args.k = all.k.view();
    args.v = all.v.view();
    out.SetArgs(args);
    plan.Run(args);

    // The two alone, in the same tensors.
    const int64_t own_q[] = {0, 200, 350}, own_k[] = {0, 300, 470};
    Problem two({.q_heads = 2, .q_tokens = 350, .kv_tokens = 470});
    const auto take = [](const TestTensor& from, int64_t first, int64_t second, int64_t cut) {
      return [&from, first, second, cut](int64_t b, int64_t h, int64_t t, int64_t d) {
        return from.Get(b, h, t < cut ? first + t : second + t - cut, d);
      };
    };
    two.q.Fill(take(all.q, q_offsets[kFirst], q_offsets[kSecond], 200));
    two.k.Fill(take(all.k, k_offsets[kFirst], k_offsets[kSecond], 300));
    two.v.Fill(take(all.v, k_offsets[kFirst], k_offsets[kSecond], 300));
    PlanDesc alone = desc;
    alone.batch = 2;
    alone.q_tokens = 350;
    alone.kv_tokens = 470;
    alone.q_offsets = own_q;
    alone.kv_offsets = own_k;
    if (select == SPARGE_SELECT_AUTO) alone.calibration = alone_calibration.get();
    Plan alone_plan(context, alone);
    EXPECT_EQ(plan.workspace_size(), alone_plan.workspace_size());
    Outputs expected(alone_plan, alone, true);
    args.q = two.q.view();
    args.k = two.k.view();
    args.v = two.v.view();
    expected.SetArgs(args);
    alone_plan.Run(args);

    EXPECT_EQ(out.stats.total.qk_computed, expected.stats.total.qk_computed);
    EXPECT_EQ(out.stats.key_blocks, expected.stats.key_blocks);
    const auto [q_blocks, k_blocks] = plan.map_shape();
    for (int64_t i = 0; i < kMany; ++i) {
      const int64_t own = i == kFirst ? 0 : i == kSecond ? 1 : -1;
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t t = 0; t < counts(i).first; ++t) {
          const int64_t at = q_offsets[i] + t;
          const float* lse = out.lse.data() + h * desc.q_tokens;
          if (own >= 0) {
            ASSERT_EQ(out.o.Get(0, h, at, 5), expected.o.Get(0, h, own_q[own] + t, 5));
            ASSERT_EQ(lse[at], expected.lse[h * 350 + own_q[own] + t]);
          } else {
            ASSERT_EQ(out.o.Get(0, h, at, 63), 0.0f);
            ASSERT_EQ(lse[at], -kInf);
          }
        }
        const sparge_head_stats& figures = out.heads[i * 2 + h];
        ASSERT_EQ(figures.qk_computed, own < 0 ? 0 : expected.heads[own * 2 + h].qk_computed);
        const uint8_t* map = out.map.data() + (i * 2 + h) * q_blocks * k_blocks;
        const int64_t tiles = std::count(map, map + q_blocks * k_blocks, uint8_t{1});
        ASSERT_EQ(tiles, figures.qk_computed);
        ASSERT_EQ(std::count(map, map + q_blocks * k_blocks, uint8_t{0}), q_blocks * k_blocks - tiles);
      }
    }
    Outputs oracle(plan, desc, true);
    oracle.SetArgs(args);
    args.q = all.q.view();
    args.k = all.k.view();
    args.v = all.v.view();
    args.stats = nullptr;
    plan.Reference(args);
    EXPECT_LE(RelativeL1(out.o, oracle.o), 0.1);
    EXPECT_EQ(oracle.lse[q_offsets[999]], -kInf);
    EXPECT_EQ(oracle.o.Get(0, 1, q_offsets[999] + 29, 63), 0.0f);
  }
}

// Masks and maps are found by the place in the batch.
TEST(Empty, MasksAndMapsOfTheirSequence) {
  const Context context(2);
  const int64_t q_offsets[] = {0, 0, 130, 130}, k_offsets[] = {0, 64, 264, 300};
  Problem p({.q_heads = 1, .q_tokens = 130, .kv_tokens = 300, .seed = 32});
  p.desc.batch = 3;
  p.desc.q_offsets = q_offsets;
  p.desc.kv_offsets = k_offsets;
  p.desc.precision = SPARGE_PRECISION_FP32;
  // The mask of the sequence in the middle, alone of the three, hides all keys but its 70th; its map has all but that.
  std::vector<uint8_t> mask(3 * 130 * 200, 1);
  for (int64_t i = 0; i < 130 * 200; ++i) mask[130 * 200 + i] = i % 200 == 70;
  p.desc.mask = SPARGE_MASK_BOOL;
  Plan masked(context, p.desc);
  TestTensor o(1, 1, 130, 64);
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  args.o = o.view();
  args.mask = {mask.data(), 130 * 200, 0, 200};
  masked.Run(args);
  EXPECT_EQ(o.Get(0, 0, 129, 3), p.v.Get(0, 0, 64 + 70, 3));
  masked.Reference(args);
  EXPECT_EQ(o.Get(0, 0, 129, 3), p.v.Get(0, 0, 64 + 70, 3));

  p.desc.mask = SPARGE_MASK_NONE;
  p.desc.select = SPARGE_SELECT_MAP;
  std::vector<uint8_t> map(3 * 2 * 4, 1), map_out(map.size(), 7);
  map[1 * 2 * 4 + 1] = map[1 * 2 * 4 + 4 + 1] = 0;
  Plan mapped(context, p.desc);
  args.mask = {};
  args.map = map.data();
  args.map_batch_stride = 2 * 4;
  args.map_out = map_out.data();
  mapped.Run(args);
  const std::vector<uint8_t> expected = {0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(map_out, expected);
  TestTensor oracle(1, 1, 130, 64);
  args.o = oracle.view();
  args.map_out = nullptr;
  mapped.Reference(args);
  EXPECT_LE(RelativeL1(o, oracle), 1e-5);
}

}  // namespace
}  // namespace sparge::testing

// What a layer decides, rule by rule: a runner that computes nothing notes what it is asked to run.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/base/status.h"
#include "src/base/workspaces.h"
#include "src/layer/layer.h"
#include "src/layer/rules.h"

namespace sparge::impl {
namespace {

LayerSettings Settings() {
  LayerSettings settings{};
  settings.bounds = {SPARGE_MEASURE_L1, 0.015, 0.02};
  settings.round_l1 = 0.05;
  settings.precision = SPARGE_PRECISION_INT8;
  settings.remembers = settings.keep_keys = true;
  settings.min_keys = 1024;
  settings.dense_tail = 128;
  return settings;
}

sparge_plan_desc Ask(int64_t queries, int64_t keys, bool causal = true) {
  sparge_plan_desc desc{};
  desc.batch = 1;
  desc.q_heads = 4;
  desc.kv_heads = 2;
  desc.qk_dim = desc.v_dim = 64;
  desc.q_tokens = queries;
  desc.kv_tokens = keys;
  desc.causal = causal ? 1 : 0;
  desc.select = SPARGE_SELECT_CDF;
  desc.params.pv_skip = 10;
  return desc;
}

LayerSettings WithPreset(bool causal = true) {
  LayerSettings settings = Settings();
  settings.preset = PresetSettings{4, 2, 64, 64, causal, SPARGE_SELECT_FLOOR, SPARGE_PREDICT_KEYS, {}, {}};
  settings.preset->heads.assign(4, {0.3, 0.9, 0.5, 8.0});
  settings.preset->precision = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8,
                                SPARGE_PRECISION_FP32};
  return settings;
}

// Notes what it is asked for.
struct Notes final : PlanRunner {
  size_t cache_bytes = 1000;
  int made = 0;
  sparge_plan_desc desc{};
  sparge_run_args args{};
  std::function<void()> during = [] {};

  size_t Make(const sparge_plan_desc& asked) override {
    desc = asked;
    ++made;
    return asked.cache_tokens > 0 ? cache_bytes : 0;
  }
  void Run(const sparge_run_args& given) override {
    args = given;
    during();
    args.stats->total.qk_eligible = 10;
    args.stats->total.qk_computed = 4;
    args.stats->pack_ms = 0.5;
    args.stats->kernel_ms = 2;
  }
};

// What the layer makes of a call.
sparge_plan_desc Call(Layer& layer, const sparge_plan_desc& desc, bool dense = false) {
  Notes notes;
  sparge_stats stats{};
  sparge_run_args args{};
  args.stats = &stats;
  layer.Run(notes, desc, args, dense);
  return notes.desc;
}

std::string Refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, SPARGE_INVALID_ARGUMENT);
    return failure.detail;
  }
  return "";
}

void ExpectEveryTile(const sparge_plan_desc& desc) {
  EXPECT_EQ(desc.select, SPARGE_SELECT_ALL);
  EXPECT_EQ(desc.params.pv_skip, SPARGE_PV_SKIP_OFF);
  EXPECT_EQ(desc.heads, nullptr);
  EXPECT_EQ(desc.calibration, nullptr);
  EXPECT_EQ(desc.dense_tail, 0);
  EXPECT_EQ(desc.least_effort, 0);
}

TEST(LayerRules, FewQueriesOrKeysSkipNothing) {
  Layer layer(Settings());
  ExpectEveryTile(Call(layer, Ask(64, 5000)));
  ExpectEveryTile(Call(layer, Ask(500, 1023)));
  EXPECT_EQ(layer.CalibrationCount(), 0);
  EXPECT_EQ(Call(layer, Ask(65, 5000)).select, SPARGE_SELECT_AUTO);
  EXPECT_EQ(Call(layer, Ask(500, 1024)).select, SPARGE_SELECT_AUTO);
  ExpectEveryTile(Call(layer, Ask(500, 1024), /*dense=*/true));
  EXPECT_EQ(layer.Totals().calls, 5);
  EXPECT_EQ(layer.Totals().dense_calls, 3);
}

TEST(LayerRules, OfPackedSequencesTheLongestCounts) {
  Layer layer(Settings());
  const int64_t few[] = {0, 64, 100}, short_ones[] = {0, 1000, 2000};
  const int64_t many[] = {0, 65, 100}, long_ones[] = {0, 1024, 2000};
  sparge_plan_desc desc = Ask(100, 2000);
  desc.batch = 2;
  desc.q_offsets = few;
  desc.kv_offsets = long_ones;
  EXPECT_EQ(Call(layer, desc).select, SPARGE_SELECT_ALL);
  desc.q_offsets = many;
  EXPECT_EQ(Call(layer, desc).select, SPARGE_SELECT_AUTO);
  desc.kv_offsets = short_ones;
  EXPECT_EQ(Call(layer, desc).select, SPARGE_SELECT_ALL);
}

TEST(LayerRules, ExactIsEveryTile) {
  LayerSettings settings = Settings();
  settings.bounds.target = settings.bounds.pv = 0;
  settings.precision = SPARGE_PRECISION_INT16;
  Layer layer(settings);
  const sparge_plan_desc made = Call(layer, Ask(2000, 2000));
  ExpectEveryTile(made);
  EXPECT_EQ(made.precision, SPARGE_PRECISION_INT16);
}

TEST(LayerRules, ACalibrationForEachKindOfCall) {
  Layer layer(Settings());
  const sparge_plan_desc first = Ask(2000, 2000);
  sparge_calibration* const made = Call(layer, first).calibration;
  ASSERT_NE(made, nullptr);
  EXPECT_EQ(Call(layer, Ask(500, 3000)).calibration, made);
  std::vector<sparge_plan_desc> others(5, first);
  others[0].q_heads = 2;
  others[1].kv_heads = 4;
  others[2].qk_dim = 32;
  others[3].v_dim = 32;
  others[4].causal = 0;
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_EQ(layer.CalibrationCount(), static_cast<int64_t>(i) + 1);
    EXPECT_NE(Call(layer, others[i]).calibration, made);
  }
  EXPECT_EQ(layer.CalibrationAt(0), made);
  EXPECT_EQ(layer.CalibrationAt(1)->calibration.q_heads(), 2);
  EXPECT_EQ(layer.CalibrationAt(6), nullptr);
  EXPECT_EQ(layer.CalibrationAt(-1), nullptr);
}

TEST(LayerRules, AForgetfulLayerCalibratesEveryCall) {
  LayerSettings settings = Settings();
  settings.remembers = false;
  Layer layer(settings);
  Call(layer, Ask(4000, 5000));
  const sparge_plan_desc made = Call(layer, Ask(500, 5000));
  EXPECT_NE(made.calibration, nullptr);
  EXPECT_EQ(made.cache_tokens, 0);
  EXPECT_EQ(made.dense_tail, 0);
  EXPECT_EQ(layer.CalibrationCount(), 0);
  EXPECT_EQ(layer.Totals().calls, 2);
}

TEST(LayerRules, TheEndOfAPromptKeepsEveryTile) {
  Layer layer(Settings());
  EXPECT_EQ(Call(layer, Ask(2000, 2000)).dense_tail, 128) << "all at once";
  EXPECT_EQ(Call(layer, Ask(2000, 2000, false)).dense_tail, 0) << "not causal";
  Layer batches(Settings());
  EXPECT_EQ(Call(batches, Ask(500, 1500)).dense_tail, 0);
  EXPECT_EQ(Call(batches, Ask(500, 2000)).dense_tail, 0);
  EXPECT_EQ(Call(batches, Ask(499, 2499)).dense_tail, 128) << "the smaller batch after the others";
  sparge_plan_desc other = Ask(499, 2499);
  other.v_dim = 32;
  EXPECT_EQ(Call(batches, other).dense_tail, 0) << "the first of its kind";
  Layer dense_before(Settings());
  Call(dense_before, Ask(500, 600));
  EXPECT_EQ(Call(dense_before, Ask(499, 1099)).dense_tail, 128) << "calls without skipping count";
}

TEST(LayerRules, TheEndOfOnePackedPromptIsEnough) {
  const int64_t queries[] = {0, 500, 1000, 1000}, on[] = {0, 1500, 3500, 3500}, whole[] = {0, 500, 3500, 3500};
  const int64_t shorter[] = {0, 500, 999, 999};
  Layer layer(Settings());
  sparge_plan_desc desc = Ask(1000, 3500);
  desc.batch = 3;
  desc.q_offsets = queries;
  desc.kv_offsets = on;
  EXPECT_EQ(Call(layer, desc).dense_tail, 0) << "an empty sequence is no end";
  EXPECT_EQ(Call(layer, desc).cache_tokens, 0);
  desc.kv_offsets = whole;
  EXPECT_EQ(Call(layer, desc).dense_tail, 128);
  desc.kv_offsets = on;
  desc.q_offsets = shorter;
  EXPECT_EQ(Call(layer, desc).dense_tail, 128);
}

TEST(LayerRules, APromptThatGoesOnIsSampled) {
  Layer layer(Settings());
  EXPECT_EQ(Call(layer, Ask(500, 1120)).least_effort, 0.25);
  EXPECT_EQ(Call(layer, Ask(500, 4480)).least_effort, 0.0625);
  EXPECT_EQ(Call(layer, Ask(500, 100000)).least_effort, 0.03);
  EXPECT_EQ(Call(layer, Ask(6144, 6144)).least_effort, 0);
  EXPECT_EQ(Call(layer, Ask(500, 6144, false)).least_effort, 0);
  Layer with_preset(WithPreset());
  EXPECT_EQ(Call(with_preset, Ask(500, 6144)).least_effort, 0);
}

TEST(LayerRules, PresetIsInForce) {
  Layer layer(WithPreset());
  const sparge_plan_desc made = Call(layer, Ask(2000, 2000));
  EXPECT_EQ(made.select, SPARGE_SELECT_FLOOR);
  EXPECT_EQ(made.predictor, SPARGE_PREDICT_KEYS);
  EXPECT_EQ(made.calibration, nullptr);
  EXPECT_EQ(made.dense_tail, 128);
  ASSERT_NE(made.heads, nullptr);
  EXPECT_EQ(made.heads[3].tau, 0.9);
  ASSERT_NE(made.head_precision, nullptr);
  EXPECT_EQ(made.head_precision[1], SPARGE_PRECISION_INT16);
  LayerSettings dense = WithPreset();
  dense.preset->select = SPARGE_SELECT_ALL;
  Layer dense_preset(dense);
  EXPECT_EQ(Call(dense_preset, Ask(2000, 2000)).dense_tail, 0) << "everything is computed anyway";
  const sparge_plan_desc few = Call(layer, Ask(10, 2000));
  ExpectEveryTile(few);
  EXPECT_EQ(few.head_precision[1], SPARGE_PRECISION_INT16) << "its precisions, whatever is skipped";
}

TEST(LayerRules, PresetThatDoesNotFit) {
  Layer layer(WithPreset());
  sparge_plan_desc desc = Ask(10, 10);
  desc.q_heads = 8;
  EXPECT_EQ(Refusal([&] { Call(layer, desc); }), "q_heads=8 is not the 4 of the preset");
  desc = Ask(10, 10);
  desc.kv_heads = 1;
  EXPECT_EQ(Refusal([&] { Call(layer, desc); }), "kv_heads=1 is not the 2 of the preset");
  desc = Ask(10, 10);
  desc.qk_dim = 128;
  EXPECT_EQ(Refusal([&] { Call(layer, desc); }), "qk_dim=128 is not the 64 of the preset");
  desc = Ask(10, 10);
  desc.v_dim = 72;
  EXPECT_EQ(Refusal([&] { Call(layer, desc); }), "v_dim=72 is not the 64 of the preset");
  EXPECT_EQ(layer.Totals().calls, 0);
}

TEST(LayerRules, PresetForOtherPositions) {
  Layer layer(WithPreset());
  Call(layer, Ask(10, 2000, false));
  EXPECT_EQ(layer.NextNotice(), nullptr) << "few queries skip nothing anyway";
  const sparge_plan_desc made = Call(layer, Ask(2000, 2000, false));
  ExpectEveryTile(made);
  EXPECT_EQ(made.head_precision[3], SPARGE_PRECISION_FP32);
  Call(layer, Ask(2000, 2000, false));
  EXPECT_STREQ(layer.NextNotice(), "the preset is for causal calls: others have its precisions, and skip nothing");
  EXPECT_EQ(layer.NextNotice(), nullptr);
  Call(layer, Ask(2000, 2000, false));
  EXPECT_EQ(layer.NextNotice(), nullptr) << "once";
  EXPECT_EQ(layer.Totals().dense_calls, 4);
  sparge_plan_desc masked = Ask(2000, 2000, false);
  masked.mask = SPARGE_MASK_BOOL;
  EXPECT_EQ(Call(layer, masked).select, SPARGE_SELECT_FLOOR) << "a mask may hide what a causal model hides";
  Layer other(WithPreset(false));
  ExpectEveryTile(Call(other, Ask(2000, 2000)));
  EXPECT_STREQ(other.NextNotice(),
               "the preset is for calls that are not causal: causal ones have its precisions, and skip nothing");
}

TEST(LayerKeys, AreKeptByPromptsThatGoOn) {
  Layer layer(Settings());
  EXPECT_EQ(Call(layer, Ask(500, 500)).cache_tokens, 0) << "nothing came before";
  EXPECT_EQ(Call(layer, Ask(500, 500)).glance, 0);
  EXPECT_EQ(Call(layer, Ask(500, 1000)).glance, 1) << "known again by a glance";
  EXPECT_EQ(Call(layer, Ask(500, 1000), /*dense=*/true).glance, 0) << "everything is read";
  EXPECT_EQ(Call(layer, Ask(500, 1000), /*dense=*/true).cache_tokens, 4096);
  EXPECT_EQ(Call(layer, Ask(500, 1000)).cache_tokens, 4096) << "whether tiles are skipped or not";
  EXPECT_EQ(Call(layer, Ask(500, 3276)).cache_tokens, 4096);
  EXPECT_EQ(Call(layer, Ask(500, 3280)).cache_tokens, 8192) << "a quarter more has room";
  EXPECT_EQ(Call(layer, Ask(500, 1000)).cache_tokens, 8192) << "room is not given back";
  EXPECT_EQ(Call(layer, Ask(500, 13000)).cache_tokens, 16384);
  EXPECT_EQ(Call(layer, Ask(500, std::numeric_limits<int32_t>::max())).cache_tokens,
            std::numeric_limits<int32_t>::max());
  EXPECT_EQ(Call(layer, Ask(500, 1000, false)).cache_tokens, 0);
  sparge_plan_desc desc = Ask(500, 1000);
  desc.mask = SPARGE_MASK_BOOL;
  EXPECT_EQ(Call(layer, desc).cache_tokens, 0);
  const int64_t q_offsets[] = {0, 500}, kv_offsets[] = {0, 1000};
  desc = Ask(500, 1000);
  desc.q_offsets = q_offsets;
  desc.kv_offsets = kv_offsets;
  EXPECT_EQ(Call(layer, desc).cache_tokens, 0);
  LayerSettings settings = Settings();
  settings.keep_keys = false;
  Layer without(settings);
  EXPECT_EQ(Call(without, Ask(500, 1000)).cache_tokens, 0);
}

TEST(LayerKeys, TheMemoryStays) {
  Layer layer(Settings());
  sparge_stats stats{};
  sparge_run_args args{};
  args.stats = &stats;
  Notes notes;
  layer.Run(notes, Ask(500, 1000), args, false);
  ASSERT_NE(notes.args.cache, nullptr);
  ASSERT_GE(notes.args.cache_size, 1000U);
  auto* const bytes = static_cast<char*>(notes.args.cache);
  EXPECT_EQ(std::string(bytes, 1000), std::string(1000, '\0')) << "zeros are an empty cache";
  std::strcpy(bytes, "packed");
  layer.Run(notes, Ask(500, 1500), args, false);
  EXPECT_STREQ(static_cast<char*>(notes.args.cache), "packed");
  notes.cache_bytes = 2000;
  layer.Run(notes, Ask(500, 3000), args, false);
  EXPECT_GE(notes.args.cache_size, 2000U);
  EXPECT_STREQ(static_cast<char*>(notes.args.cache), "");
  std::strcpy(static_cast<char*>(notes.args.cache), "packed");
  layer.Run(notes, Ask(64, 3000), args, false);
  EXPECT_EQ(notes.desc.decode, 1) << "few queries take what the prompt left";
  EXPECT_EQ(notes.desc.cache_tokens, 4096);
  EXPECT_STREQ(static_cast<char*>(notes.args.cache), "packed");
  notes.cache_bytes = 0;  // so few queries that nothing is packed
  layer.Run(notes, Ask(65, 3000), args, false);
  EXPECT_EQ(notes.args.cache, nullptr);
}

TEST(LayerKeys, FewQueriesTakeThem) {
  Layer layer(Settings());
  EXPECT_EQ(Call(layer, Ask(1, 3000)).decode, 0) << "nothing came before";
  const sparge_plan_desc step = Call(layer, Ask(1, 3001));
  EXPECT_EQ(step.decode, 2) << "one step after the other, of which the first did not look at the keys";
  EXPECT_EQ(Call(layer, Ask(1, 3002)).decode, 1);
  EXPECT_EQ(step.glance, 1) << "as prompts, whose blocks have no checksums";
  EXPECT_EQ(step.select, SPARGE_SELECT_AUTO) << "so that the cache is laid as for a prompt";
  EXPECT_NE(step.calibration, nullptr);
  EXPECT_EQ(step.least_effort, 0);
  EXPECT_EQ(step.dense_tail, 0);
  EXPECT_EQ(Call(layer, Ask(65, 3066)).decode, 0);
  EXPECT_EQ(Call(layer, Ask(64, 3130)).decode, 1);
  EXPECT_EQ(Call(layer, Ask(1, SPARGE_DECODE_KEYS - 1)).decode, 0);
  EXPECT_EQ(Call(layer, Ask(1, SPARGE_DECODE_KEYS)).decode, 2) << "after a call that left the keys alone";
  sparge_plan_desc several = Ask(1, 3000);
  several.batch = 2;
  EXPECT_EQ(Call(layer, several).decode, 0) << "one cache is of one sequence";
  sparge_plan_desc masked = Ask(1, 3000);
  masked.mask = SPARGE_MASK_BOOL;
  EXPECT_EQ(Call(layer, masked).decode, 2);
  for (bool LayerSettings::*const without : {&LayerSettings::keep_keys, &LayerSettings::remembers}) {
    LayerSettings settings = Settings();
    settings.*without = false;
    Layer other(settings);
    for (int64_t keys = 3000; keys < 3003; ++keys) EXPECT_EQ(Call(other, Ask(1, keys)).decode, 0);
  }
  LayerSettings exact = Settings();
  exact.precision = SPARGE_PRECISION_FP32;
  Layer other(exact);
  for (int64_t keys = 3000; keys < 3003; ++keys) EXPECT_EQ(Call(other, Ask(1, keys)).decode, 0) << "nothing to gain";
}

TEST(LayerKeys, GoesOnWithoutMemory) {
  Layer layer(Settings(), [](size_t, size_t) -> void* { return nullptr; });
  sparge_stats stats{};
  sparge_run_args args{};
  args.stats = &stats;
  for (int i = 0; i < 2; ++i) {
    Notes notes;
    layer.Run(notes, Ask(500, 2000), args, false);
    EXPECT_EQ(notes.made, 2);
    EXPECT_EQ(notes.desc.cache_tokens, 0);
    EXPECT_EQ(notes.args.cache, nullptr);
    EXPECT_EQ(notes.args.cache_size, 0U);
  }
  EXPECT_EQ(layer.Totals().calls, 2);
  EXPECT_STREQ(layer.NextNotice(), "no memory for packed keys: every call packs anew");
  EXPECT_EQ(layer.NextNotice(), nullptr);
}

TEST(LayerKeys, DecodesWithoutMemory) {
  Layer layer(Settings(), [](size_t, size_t) -> void* { return nullptr; });
  Call(layer, Ask(1, 3000));
  const sparge_plan_desc step = Call(layer, Ask(1, 3001));
  EXPECT_EQ(step.decode, 0);
  EXPECT_EQ(step.cache_tokens, 0);
  EXPECT_EQ(step.glance, 0);
  EXPECT_EQ(step.select, SPARGE_SELECT_ALL) << "as few queries are computed that have no keys";
  EXPECT_EQ(step.calibration, nullptr);
  EXPECT_EQ(step.heads, nullptr);
  EXPECT_STREQ(layer.NextNotice(), "no memory for packed keys: every call packs anew");
  EXPECT_EQ(layer.NextNotice(), nullptr);
}

// `calls` at once, each of them running `during` where a plan would run.
void CallAtOnce(Layer& layer, const sparge_plan_desc& desc, size_t cache_bytes, int calls,
                const std::function<void()>& during) {
  std::vector<std::thread> threads;
  for (int i = 0; i < calls; ++i) {
    threads.emplace_back([&] {
      Notes notes;
      notes.cache_bytes = cache_bytes;
      notes.during = during;
      sparge_stats stats{};
      sparge_run_args args{};
      args.stats = &stats;
      layer.Run(notes, desc, args, false);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(LayerThreads, CallsThatKeepKeysWait) {
  Layer layer(Settings());
  std::atomic<int> inside{0}, most{0};
  CallAtOnce(layer, Ask(500, 2000), 1000, 4, [&] {
    const int now = ++inside;
    int before = most;
    while (before < now && !most.compare_exchange_weak(before, now)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --inside;
  });
  EXPECT_EQ(most, 1);
  EXPECT_EQ(layer.Totals().calls, 4);
}

TEST(LayerThreads, OthersDoNot) {
  // A call that waited for another one would wait for ever: both have to be here.
  std::barrier both(2);
  const auto meet = [&] { both.arrive_and_wait(); };
  Layer layer(Settings());
  CallAtOnce(layer, Ask(2000, 2000), 1000, 2, meet);
  CallAtOnce(layer, Ask(1, 2000), 0, 2, meet);  // nothing is packed
  EXPECT_EQ(layer.Totals().calls, 4);
  EXPECT_EQ(layer.CalibrationCount(), 1);
}

TEST(LayerTotals, SumsOfCallsThatCameToAnEnd) {
  Layer layer(Settings());
  Call(layer, Ask(500, 2000));
  Call(layer, Ask(500, 2000));
  Notes notes;
  notes.during = [] { Fail(SPARGE_INVALID_ARGUMENT, "no"); };
  sparge_stats stats{};
  sparge_run_args args{};
  args.stats = &stats;
  EXPECT_EQ(Refusal([&] { layer.Run(notes, Ask(4000, 5000), args, false); }), "no");
  const sparge_layer_totals totals = layer.Totals();
  EXPECT_EQ(totals.calls, 2);
  EXPECT_EQ(totals.dense_calls, 0);
  EXPECT_EQ(totals.tiles.qk_eligible, 20);
  EXPECT_EQ(totals.tiles.qk_computed, 8);
  EXPECT_EQ(totals.pack_ms, 1.0);
  EXPECT_EQ(totals.kernel_ms, 4.0);
  EXPECT_EQ(totals.decode_ms, 0.0);
  EXPECT_EQ(Call(layer, Ask(500, 2000)).dense_tail, 0) << "a call that failed was no longer one";
  EXPECT_EQ(Call(layer, Ask(1, 2001)).decode, 1);
  EXPECT_EQ(layer.Totals().kernel_ms, 8.0);
  EXPECT_EQ(layer.Totals().decode_ms, 2.0);
  EXPECT_EQ(layer.Totals().tiles.qk_eligible, 30) << "those of prompts";
}

// ------------------------------------------------------------------ workspaces that a context lends

TEST(Workspaces, AreLentAgain) {
  Workspaces pool;
  const void* first = nullptr;
  {
    const auto lease = pool.Lend(100000);
    first = lease.data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % Arena::kAlignment, 0U);
    EXPECT_EQ(lease.size(), size_t{1} << 17) << "a power of two: the next one is a little larger";
  }
  const auto again = pool.Lend(120000);
  EXPECT_EQ(again.data(), first);
  EXPECT_NE(pool.Lend(120000).data(), first) << "it is taken";
}

TEST(Workspaces, TheSmallestThatWillDo) {
  Workspaces pool;
  const void *small = nullptr, *large = nullptr;
  {
    const auto a = pool.Lend(size_t{1} << 22), b = pool.Lend(1);
    large = a.data();
    small = b.data();
  }
  EXPECT_EQ(pool.Lend(1000).data(), small);
  EXPECT_EQ(pool.Lend(100000).data(), large);
}

TEST(Workspaces, FewAreKeptAndNoneThatIsHuge) {
  Workspaces pool;
  const size_t huge = Workspaces::kLargestKept + 1;
  EXPECT_EQ(pool.Lend(huge).size(), huge);
  EXPECT_LT(pool.Lend(1).size(), huge) << "the huge one is gone";
  {
    std::vector<std::unique_ptr<Workspaces::Lease>> all;
    for (size_t i = 0; i < 2 * Workspaces::kMostKept; ++i) {
      all.push_back(std::make_unique<Workspaces::Lease>(pool, size_t{1} << (17 + i)));
    }
  }
  EXPECT_EQ(pool.Kept(), Workspaces::kMostKept);
  EXPECT_EQ(pool.Lend(1).size(), size_t{1} << (17 + Workspaces::kMostKept)) << "the larger ones stay";
}

TEST(Workspaces, AnyThread) {
  Workspaces pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 200; ++i) {
        const auto lease = pool.Lend(1000 * (i % 90) + 1);
        std::memset(lease.data(), t, lease.size());
        for (size_t at = 0; at < lease.size(); at += 997) ASSERT_EQ(static_cast<char*>(lease.data())[at], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool.Kept(), Workspaces::kMostKept);
}

// ------------------------------------------------------------------ saved form

TEST(LayerSaved, ComesBackTheSame) {
  Layer layer(Settings());
  Call(layer, Ask(500, 1500));
  Call(layer, Ask(2000, 2000, false));
  Call(layer, Ask(10, 10, false));
  const std::vector<std::byte> saved = layer.Save();
  Layer other(Settings());
  sparge_plan_desc unlike = Ask(5000, 6000);
  unlike.v_dim = 32;
  Call(other, unlike);
  other.Restore(saved.data(), saved.size());
  EXPECT_EQ(other.Save(), saved);
  EXPECT_EQ(other.CalibrationCount(), 2) << "what it knew is forgotten";
  EXPECT_EQ(Call(other, Ask(499, 1999)).dense_tail, 128) << "it remembers the larger batch";
  EXPECT_EQ(other.CalibrationCount(), 2);
}

TEST(LayerSaved, ACallThatIsRunningKeepsItsCalibration) {
  Layer layer(Settings());
  const std::vector<std::byte> saved = layer.Save();
  Notes notes;
  notes.during = [&] {
    layer.Restore(saved.data(), saved.size());
    notes.desc.calibration->calibration.NextCall();  // freed memory, if the layer alone had it
  };
  sparge_stats stats{};
  sparge_run_args args{};
  args.stats = &stats;
  layer.Run(notes, Ask(2000, 2000), args, false);
  EXPECT_EQ(layer.CalibrationCount(), 0);
}

TEST(LayerSaved, OtherLayersRefuseIt) {
  Layer layer(Settings());
  Call(layer, Ask(500, 1500));
  const std::vector<std::byte> saved = layer.Save();
  const auto refusal = [&](const LayerSettings& settings) {
    Layer other(settings);
    const std::string text = Refusal([&] { other.Restore(saved.data(), saved.size()); });
    EXPECT_EQ(other.CalibrationCount(), 0);
    return text;
  };
  LayerSettings settings = Settings();
  settings.bounds.target = 0.0125;
  EXPECT_EQ(refusal(settings),
            "data is of a layer with the target 0.014999999999999999, and this one has 0.012500000000000001");
  settings = Settings();
  settings.bounds.measure = SPARGE_MEASURE_L2;
  EXPECT_EQ(refusal(settings), "data is of a layer with bounds in another measure than the l2 of this one");
  settings = Settings();
  settings.bounds.pv = 0.5;
  EXPECT_EQ(refusal(settings), "data is of a layer with the bound with PV skip 0.02, and this one has 0.5");
  settings = Settings();
  settings.round_l1 = 0.25;
  EXPECT_EQ(refusal(settings), "data is of a layer with round_l1 0.050000000000000003, and this one has 0.25");
  settings = Settings();
  settings.seed = 7;
  EXPECT_EQ(refusal(settings), "data is of a layer with seed=0, and this one has 7");
  settings = Settings();
  settings.remembers = false;
  EXPECT_EQ(refusal(settings), "data has 1 kinds of calls, and this layer has remembers=0");
  EXPECT_EQ(refusal(WithPreset()), "data has a calibration, and this layer makes none: it has a preset");
}

TEST(LayerSaved, EveryCutIsRefused) {
  Layer layer(Settings());
  Call(layer, Ask(2000, 2000));
  Call(layer, Ask(2000, 2000, false));
  const std::vector<std::byte> saved = layer.Save();
  for (size_t size = 0; size < saved.size(); size += size < 200 ? 1 : 997) {
    Layer other(Settings());
    // A copy that ends there, so that a sanitizer sees a read beyond it.
    const std::vector<std::byte> part(saved.begin(), saved.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_NE(Refusal([&] { other.Restore(part.data(), part.size()); }), "") << size;
  }
  std::vector<std::byte> more = saved;
  more.push_back({});
  EXPECT_NE(Refusal([&] { layer.Restore(more.data(), more.size()); }).find(" is 1 more than the layer in data has"),
            std::string::npos);
  EXPECT_EQ(layer.Save(), saved) << "a refusal changes nothing";
}

TEST(LayerSaved, BadNumbersAreNamed) {
  Layer layer(Settings());
  Call(layer, Ask(10, 10));
  const std::vector<std::byte> saved = layer.Save();
  // magic, measure, three bounds, seed, kinds; then the kind: five numbers, most queries, bytes.
  const struct {
    size_t at;
    int64_t value;
    const char* text;
  } bad[] = {{0, 1, "data is not a layer that this version saved"},
             {6, 2, "ends within a kind of call that begins at byte 112 and has 56"},
             {7, 0, "data has q_heads=0, which is outside 1..2147483647"},
             {8, 3, "data has q_heads=4, which is not a multiple of kv_heads=3"},
             {8, 5, "data has kv_heads=5, which is outside 1..4"},
             {9, 577, "data has qk_dim=577, which is outside 1..576"},
             {10, -1, "data has v_dim=-1, which is outside 1..576"},
             {11, 2, "data has causal=2, which is outside 0..1"},
             {12, -1, "data has most_queries=-1, which is outside 0..2147483647"},
             {13, 8, "ends within a calibration that begins at byte 112 and has 8"}};
  for (const auto& [at, value, text] : bad) {
    std::vector<std::byte> changed = saved;
    std::memcpy(changed.data() + 8 * at, &value, sizeof(value));
    const std::string refusal = Refusal([&] { layer.Restore(changed.data(), changed.size()); });
    EXPECT_NE(refusal.find(text), std::string::npos) << refusal;
  }
  std::vector<std::byte> twice = saved;
  twice.insert(twice.end(), saved.begin() + 56, saved.end());
  const int64_t two = 2;
  std::memcpy(twice.data() + 48, &two, sizeof(two));
  EXPECT_EQ(Refusal([&] { layer.Restore(twice.data(), twice.size()); }), "data has the kind of call 1 twice");
}

TEST(LayerSaved, ACalibrationOfOtherHeadsIsRefused) {
  Layer layer(Settings());
  Call(layer, Ask(2000, 2000));
  std::vector<std::byte> saved = layer.Save();
  const int64_t heads = 8;
  std::memcpy(saved.data() + 56, &heads, sizeof(heads));
  EXPECT_EQ(Refusal([&] { layer.Restore(saved.data(), saved.size()); }),
            "data has a calibration of 4 heads for calls of 8");
}

// The fuzzer's corpus: what is called ok is read, what is called bad is not.
TEST(LayerSaved, Corpus) {
  LayerSettings settings = Settings();
  settings.bounds = {SPARGE_MEASURE_L2, 0.03, 0.0375};
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SPARGE_FUZZ_CORPUS "/layer")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    Layer layer(settings);
    const std::string refusal =
        Refusal([&] { layer.Restore(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()); });
    EXPECT_EQ(refusal.empty(), entry.path().filename().string().starts_with("ok_")) << entry.path() << refusal;
    ++files;
  }
  EXPECT_GE(files, 20);
}

}  // namespace
}  // namespace sparge::impl

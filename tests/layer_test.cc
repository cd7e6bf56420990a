// Layers through the C ABI: the same bits as the plan that the rules say, whatever the layer keeps; and refusals.
// layer_rules_test.cc has the rules one by one.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 64;

// Heads with structure; if sharp, most tiles hold next to nothing.
Problem Prompt(int64_t tokens, uint32_t seed = 1, float sharp = 6.0f) {
  Problem p({.q_heads = kHeads,
             .kv_heads = kKvHeads,
             .q_tokens = tokens,
             .qk_dim = kDim,
             .k_type = SPARGE_F16,
             .layout = Layout::kTokens,
             .seed = seed,
             .correlated = true});
  p.q.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return sharp * p.q.Get(b, h, t, d); });
  return p;
}

// Queries [begin, end) of a causal prompt against the keys before `end`.
struct Piece {
  Piece(const Problem& p, int64_t begin, int64_t end, bool causal = true)
      : o(p.shape.batch, p.shape.q_heads, end - begin, p.shape.v_dim), desc(p.desc) {
    const PlanDesc defaults;
    desc.select = defaults.select;
    desc.params = defaults.params;
    desc.precision = defaults.precision;
    desc.causal = causal ? 1 : 0;
    desc.q_tokens = end - begin;
    desc.kv_tokens = end;
    args.q = p.q.view();
    args.q.data = static_cast<float*>(args.q.data) + begin * args.q.token_stride;
    args.k = p.k.view();
    args.v = p.v.view();
    args.o = o.view();
    args.stats = &stats;
    lse.resize(static_cast<size_t>(p.shape.q_heads * (end - begin)));
    args.lse = {lse.data(), p.shape.q_heads * (end - begin), end - begin};
  }
  Piece(const Piece&) = delete;

  void By(Layer& layer, const Context& context, uint32_t flags = 0) { layer.Run(context, desc, args, flags); }
  // As the plan that `desc` is made to say; `cache` iff it has cache_tokens.
  void ByPlan(const Context& context, std::vector<std::byte>* cache = nullptr) {
    Plan plan(context, desc);
    if (cache != nullptr) {
      cache->resize(std::max(cache->size(), sparge_plan_cache_size(plan.get())));
      args.cache = cache->data();
      args.cache_size = cache->size();
    }
    plan.Run(args);
  }

  TestTensor o;
  std::vector<float> lse;
  PlanDesc desc;
  RunArgs args;
  Stats stats;
};

void ExpectSame(const Piece& a, const Piece& b) {
  EXPECT_EQ(a.o.bytes(), b.o.bytes());
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.stats.total.qk_computed, b.stats.total.qk_computed);
  EXPECT_EQ(a.stats.total.pv_computed, b.stats.total.pv_computed);
}

Calibration Bounds(double target_l2 = LayerDesc().target_l2) {
  CalibrationDesc bounds;
  bounds.q_heads = kHeads;
  bounds.target_l2 = target_l2;
  return Calibration(bounds);
}

std::string Refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), SPARGE_INVALID_ARGUMENT);
    return error.what();
  }
  return "";
}

TEST(Layer, WholePromptsAreAutomatic) {
  const Context context(2);
  const Problem p = Prompt(2048);
  Layer layer;
  Calibration calibration = Bounds();
  for (int call = 0; call < 4; ++call) {
    Piece have(p, 0, 2048), want(p, 0, 2048);
    have.By(layer, context);
    want.desc.select = SPARGE_SELECT_AUTO;
    want.desc.calibration = calibration.get();
    want.desc.dense_tail = 128;
    want.ByPlan(context);
    ExpectSame(have, want);
    const bool knows_much = call == 3;
    EXPECT_LT(knows_much ? have.stats.total.pv_computed : 0, have.stats.total.pv_eligible);
  }
  EXPECT_EQ(layer.Heads().size(), 1U);
  EXPECT_EQ(layer.Heads()[0][2].samples, calibration.Head(2).samples);
  EXPECT_EQ(layer.Notice(), nullptr);
}

TEST(Layer, BoundsAreThoseOfTheDescriptor) {
  const Context context(2);
  const Problem p = Prompt(1536);
  LayerDesc desc;
  desc.target_l1 = 0.1;
  desc.pv_l1 = 0.3;
  desc.seed = 5;
  desc.precision = SPARGE_PRECISION_INT16;
  Layer layer(desc);
  CalibrationDesc bounds;
  bounds.q_heads = kHeads;
  bounds.target_l1 = 0.1;
  bounds.pv_l1 = 0.3;
  bounds.seed = 5;
  Calibration calibration(bounds);
  for (int call = 0; call < 3; ++call) {
    Piece have(p, 0, 1536, false), want(p, 0, 1536, false);
    have.By(layer, context);
    want.desc.select = SPARGE_SELECT_AUTO;
    want.desc.precision = SPARGE_PRECISION_INT16;
    want.desc.calibration = calibration.get();
    want.ByPlan(context);
    ExpectSame(have, want);
  }
}

// Batches of 384, and a smaller one at the end.
TEST(Layer, APromptInBatchesReusesItsKeys) {
  const Context context(2);
  const Problem p = Prompt(2400);
  Layer layer;
  Calibration calibration = Bounds();
  std::vector<std::byte> cache;
  int64_t key_blocks = 0, reused = 0;
  for (int64_t begin = 0; begin < 2400; begin += 384) {
    const int64_t end = std::min<int64_t>(begin + 384, 2400);
    SCOPED_TRACE(end);
    Piece have(p, begin, end), want(p, begin, end);
    have.By(layer, context);
    if (end < 1024) {
      want.desc.select = SPARGE_SELECT_ALL;
      want.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    } else {
      want.desc.select = SPARGE_SELECT_AUTO;
      want.desc.calibration = calibration.get();
      want.desc.least_effort = std::clamp(280.0 / static_cast<double>(end), 0.03, 0.5);
      if (end == 2400) want.desc.dense_tail = 128;
    }
    if (begin > 0) want.desc.cache_tokens = 4096;
    want.ByPlan(context, begin > 0 ? &cache : nullptr);
    ExpectSame(have, want);
    EXPECT_EQ(have.stats.key_blocks_reused, want.stats.key_blocks_reused);
    key_blocks += have.stats.key_blocks;
    reused += have.stats.key_blocks_reused;
  }
  const LayerTotals totals = layer.Totals();
  EXPECT_EQ(totals.calls, 7);
  EXPECT_EQ(totals.dense_calls, 2);
  EXPECT_EQ(totals.key_blocks, key_blocks);
  EXPECT_EQ(totals.key_blocks_reused, reused);
  EXPECT_GT(reused, key_blocks / 4);
  EXPECT_GT(totals.tiles.qk_eligible, totals.tiles.qk_computed);
  EXPECT_GT(totals.calibrate_ms, 0);
  EXPECT_GT(totals.kernel_ms, 0);
}

// Values that change without their keys in another head than the last: not seen, which is what the rules say, but by a
// call that reads the tensors.
TEST(Layer, TheFlagReadsValuesThatChangedAlone) {
  const Context context(2);
  Problem p = Prompt(900);
  Layer layer, fresh;
  for (const int64_t end : {300, 600, 900}) Piece(p, end - 300, end).By(layer, context);
  for (int64_t d = 0; d < kDim; ++d) p.v.Set(0, 0, 100, d, 50.0f);
  Piece blind(p, 600, 900), seen(p, 600, 900), expected(p, 600, 900);
  blind.By(layer, context);
  seen.By(layer, context, SPARGE_LAYER_DENSE);
  expected.By(fresh, context);
  EXPECT_EQ(blind.stats.key_blocks_reused, blind.stats.key_blocks);
  EXPECT_EQ(seen.stats.key_blocks_reused, 0);
  EXPECT_EQ(seen.o.bytes(), expected.o.bytes());
  EXPECT_NE(blind.o.bytes(), expected.o.bytes());
}

TEST(Layer, KeysOfNoCallAreKeptIfNotWanted) {
  const Context context(2);
  const Problem p = Prompt(1200);
  LayerDesc desc;
  desc.keep_keys = 0;
  Layer layer(desc);
  for (const int64_t end : {800, 1000, 1200}) Piece(p, end - 200, end).By(layer, context);
  EXPECT_GT(layer.Totals().key_blocks, 0);
  EXPECT_EQ(layer.Totals().key_blocks_reused, 0);
}

TEST(Layer, FewQueriesAndTheFlagAreDense) {
  const Context context(2);
  const Problem p = Prompt(1536);
  Layer layer;
  const auto dense = [&](int64_t begin, uint32_t flags) {
    Piece have(p, begin, 1536, false), want(p, begin, 1536, false);
    have.By(layer, context, flags);
    want.desc.select = SPARGE_SELECT_ALL;
    want.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    want.ByPlan(context);
    ExpectSame(have, want);
    EXPECT_EQ(have.stats.total.pv_computed, have.stats.total.pv_eligible);
  };
  dense(1536 - 64, 0);
  dense(0, SPARGE_LAYER_DENSE);
  EXPECT_EQ(sparge_layer_calibrations(layer.get()), 0);
  EXPECT_EQ(layer.Totals().dense_calls, 2);
}

TEST(Layer, ExactIsFp32UnlessSet) {
  const Context context(2);
  const Problem p = Prompt(1200);
  for (const int32_t precision : {SPARGE_PRECISION_AUTO, int32_t{SPARGE_PRECISION_INT8}}) {
    LayerDesc desc;
    desc.target_l1 = 0;
    desc.precision = precision;
    Layer layer(desc);
    Piece have(p, 0, 1200), want(p, 0, 1200);
    have.By(layer, context);
    want.desc.select = SPARGE_SELECT_ALL;
    want.desc.precision = precision < 0 ? SPARGE_PRECISION_FP32 : SPARGE_PRECISION_INT8;
    want.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    want.ByPlan(context);
    ExpectSame(have, want);
  }
}

struct PresetOf {
  PresetOf() {
    desc.q_heads = kHeads;
    desc.kv_heads = kKvHeads;
    desc.qk_dim = desc.v_dim = kDim;
    desc.causal = 1;
    desc.select = SPARGE_SELECT_FLOOR;
    desc.predictor = SPARGE_PREDICT_KEYS;
    desc.heads = heads;
    desc.head_precision = precision;
  }
  sparge_head_params heads[kHeads] = {
      {-1, 0.9, 0, 8}, {0.3, 0.6, 0, 6}, {0.1, 1, 0, SPARGE_PV_SKIP_OFF}, {-1, 0.8, 0, 5}};
  sparge_precision precision[kHeads] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32,
                                        SPARGE_PRECISION_INT8};
  LayerPreset desc;
};

TEST(Layer, APresetIsInForce) {
  const Context context(2);
  const Problem p = Prompt(1536);
  for (const int32_t least : {SPARGE_PRECISION_AUTO, int32_t{SPARGE_PRECISION_INT16}}) {
    std::optional<PresetOf> given(std::in_place);
    LayerDesc desc;
    desc.preset = &given->desc;
    desc.precision = least;
    Layer layer(desc);
    given.reset();  // it was copied
    PresetOf preset;
    if (least == SPARGE_PRECISION_INT16) preset.precision[0] = preset.precision[3] = SPARGE_PRECISION_INT16;
    Piece have(p, 0, 1536), want(p, 0, 1536);
    have.By(layer, context);
    want.desc.select = SPARGE_SELECT_FLOOR;
    want.desc.predictor = SPARGE_PREDICT_KEYS;
    want.desc.heads = preset.heads;
    want.desc.head_precision = preset.precision;
    want.desc.dense_tail = 128;
    want.ByPlan(context);
    ExpectSame(have, want);
    EXPECT_LT(have.stats.total.qk_computed, have.stats.total.qk_eligible);
    EXPECT_EQ(layer.Notice(), nullptr);

    Piece other(p, 0, 1536, false), dense(p, 0, 1536, false);
    other.By(layer, context);
    dense.desc.select = SPARGE_SELECT_ALL;
    dense.desc.head_precision = preset.precision;
    dense.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    dense.ByPlan(context);
    ExpectSame(other, dense);
    EXPECT_NE(layer.Notice(), nullptr);
  }
}

TEST(Layer, PresetsAreChecked) {
  const auto refusal = [](const std::function<void(PresetOf&)>& change) {
    PresetOf preset;
    change(preset);
    LayerDesc desc;
    desc.preset = &preset.desc;
    return Refusal([&] { Layer layer(desc); });
  };
  EXPECT_EQ(refusal([](PresetOf&) {}), "");
  EXPECT_EQ(refusal([](PresetOf& p) { p.heads[1].tau = 1.5; }), "heads[1].tau=1.5 is outside 0..1");
  EXPECT_EQ(refusal([](PresetOf& p) { p.heads[3].pv_skip = -1; }), "heads[3].pv_skip=-1 is not 0 or more");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.heads = nullptr; }), "preset.heads is NULL");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.head_precision = nullptr; }), "preset.head_precision is NULL");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.select = SPARGE_SELECT_TOPK; }),
            "preset.select=2 is none of ALL, CDF and FLOOR");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.kv_heads = 3; }), "q_heads=4 is not a multiple of kv_heads=3");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.qk_dim = 577; }), "qk_dim=577 is outside 1..576");
  EXPECT_EQ(refusal([](PresetOf& p) { p.desc.causal = 2; }), "causal=2 is not 0 or 1");
  const Context context(1);
  PresetOf preset;
  LayerDesc desc;
  desc.preset = &preset.desc;
  Layer layer(desc);
  const Problem p({.q_heads = 6, .kv_heads = 2, .q_tokens = 10});
  EXPECT_EQ(Refusal([&] { Piece(p, 0, 10).By(layer, context); }), "q_heads=6 is not the 4 of the preset");
}

// What descriptors bound, as whoever takes them sees it.
template <class Desc>
void ExpectBounds(double default_l2, double pv_room) {
  const auto expect = [](const Desc& desc, sparge_measure measure, double target, double pv) {
    const auto bounds = BoundsOf(desc);
    EXPECT_EQ(bounds.measure, measure);
    EXPECT_DOUBLE_EQ(bounds.target, target);
    EXPECT_DOUBLE_EQ(bounds.pv, pv);
  };
  Desc desc;
  expect(desc, SPARGE_MEASURE_L2, default_l2, pv_room * default_l2);
  desc.target_l2 = SPARGE_NOT_NAMED;
  expect(desc, SPARGE_MEASURE_L2, default_l2, pv_room * default_l2);
  desc.target_l2 = 0.5;
  desc.pv_l2 = 0.75;
  expect(desc, SPARGE_MEASURE_L2, 0.5, 0.75);
  desc = Desc();
  desc.target_l1 = 0.25;
  expect(desc, SPARGE_MEASURE_L1, 0.25, pv_room * 0.25);
  desc.target_l2 = 0.5;
  EXPECT_EQ(Refusal([&] { BoundsOf(desc); }), "target_l1=0.25 and target_l2=0.5 are two bounds: name one of them");
}

TEST(Layer, BoundsOfDescriptors) {
  ExpectBounds<LayerDesc>(0.03, SPARGE_PV_ROOM);
  ExpectBounds<CalibrationDesc>(0.03, SPARGE_PV_ROOM);
  ExpectBounds<TunerDesc>(0.1, SPARGE_TUNE_PV_ROOM);
  const LayerDesc desc;
  sparge_measure measure;
  double target;
  EXPECT_EQ(sparge_layer_desc_bounds(&desc, &measure, &target, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_desc_bounds(nullptr, &measure, &target, &target), SPARGE_INVALID_ARGUMENT);
}

TEST(Layer, DescriptorsAreChecked) {
  const auto refusal = [](const std::function<void(LayerDesc&)>& change) {
    LayerDesc desc;
    change(desc);
    return Refusal([&] { Layer layer(desc); });
  };
  PresetOf preset;
  EXPECT_EQ(refusal([](LayerDesc&) {}), "");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = -0.5; }), "target_l1=-0.5 is not a number from 0 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l2 = -0.5; }), "target_l2=-0.5 is not a number from 0 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l2 = kNan; }), "target_l2=nan is not a number from 0 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l2 = 0.5, d.pv_l2 = 0.01; }),
            "pv_l2=0.01 is not a number from target_l2=0.5 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0.5, d.pv_l1 = 0.01; }),
            "pv_l1=0.01 is not a number from target_l1=0.5 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0.5, d.pv_l1 = kNan; }),
            "pv_l1=nan is not a number from target_l1=0.5 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0.5, d.target_l2 = 0.25; }),
            "target_l1=0.5 and target_l2=0.25 are two bounds: name one of them");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.pv_l1 = 0.5; }), "pv_l1=0.5 has no effect with target_l2");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0.25, d.pv_l2 = 0.5; }), "pv_l2=0.5 has no effect with target_l1");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.round_l1 = -1; }), "round_l1=-1 is not a number from 0 on");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.precision = 3; }), "precision=3 is outside -1..2");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.remembers = 2; }), "remembers=2 is outside 0..1");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.keep_keys = -1; }), "keep_keys=-1 is outside 0..1");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.min_keys = -1; }), "min_keys=-1 is outside 0..2147483647");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.dense_tail = -2; }), "dense_tail=-2 is outside 0..2147483647");
  // Bounds that nothing would look at.
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0, d.pv_l1 = 0.1; }),
            "pv_l1=0.1 has no effect with a target of 0");
  EXPECT_EQ(refusal([](LayerDesc& d) { d.target_l1 = 0, d.round_l1 = 0.1; }),
            "round_l1=0.1 has no effect with a target of 0");
  EXPECT_EQ(refusal([&](LayerDesc& d) { d.preset = &preset.desc, d.target_l1 = 0.1; }),
            "target_l1=0.1 has no effect with a preset");
  EXPECT_EQ(refusal([&](LayerDesc& d) { d.preset = &preset.desc, d.pv_l2 = 0.1; }),
            "pv_l2=0.1 has no effect with a preset");
  sparge_layer* out = nullptr;
  EXPECT_EQ(sparge_layer_create(nullptr, &out), SPARGE_INVALID_ARGUMENT);
  const LayerDesc desc;
  EXPECT_EQ(sparge_layer_create(&desc, nullptr), SPARGE_INVALID_ARGUMENT);
}

TEST(Layer, WhatItChoosesMustBeLeftToIt) {
  const Context context(1);
  const Problem p = Prompt(100);
  Layer layer;
  const auto refusal = [&](const std::function<void(Piece&)>& change) {
    Piece piece(p, 0, 100);
    change(piece);
    return Refusal([&] { piece.By(layer, context); });
  };
  const std::string to_choose = " is the layer's to choose: leave it as sparge_plan_desc_init set it";
  const sparge_head_params heads[kHeads] = {};
  const sparge_precision precision[kHeads] = {};
  Calibration calibration = Bounds();
  EXPECT_EQ(refusal([](Piece&) {}), "");
  EXPECT_EQ(refusal([](Piece& c) { c.desc.precision = SPARGE_PRECISION_FP32; }), "precision=0" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.select = SPARGE_SELECT_ALL; }), "select=0" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.params.theta = 0.5; }), "params.theta=0.5" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.params.tau = 0.5; }), "params.tau=0.5" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.params.topk = 0.25; }), "params.topk=0.25" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.params.pv_skip = 3; }), "params.pv_skip=3" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.predictor = SPARGE_PREDICT_PAPER; }), "predictor=2" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.dense_tail = 64; }), "dense_tail=64" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.cache_tokens = 512; }), "cache_tokens=512" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.least_effort = 0.5; }), "least_effort=0.5" + to_choose);
  EXPECT_EQ(refusal([](Piece& c) { c.desc.glance = 1; }), "glance=1" + to_choose);
  EXPECT_EQ(refusal([&](Piece& c) { c.desc.heads = heads; }), "heads is given, but is the layer's to choose");
  EXPECT_EQ(refusal([&](Piece& c) { c.desc.head_precision = precision; }),
            "head_precision is given, but is the layer's to choose");
  EXPECT_EQ(refusal([&](Piece& c) { c.desc.calibration = calibration.get(); }),
            "calibration is given, but is the layer's to choose");
  EXPECT_EQ(refusal([](Piece& c) { c.args.cache = &c; }), "cache is given, but the layer has its own");
  EXPECT_EQ(refusal([](Piece& c) { c.desc.qk_dim = 0; }), "qk_dim=0 is outside 1..576");
  EXPECT_EQ(refusal([](Piece& c) { c.args.q.data = nullptr; }), "q.data is NULL");
  EXPECT_EQ(refusal([](Piece& c) { c.desc.all_keys = 128; }),
            "all_queries=0 and all_keys=128 make this a part of a call, and a layer takes whole ones");
  const int64_t offsets[] = {0, 100};
  EXPECT_EQ(refusal([&](Piece& c) { c.desc.q_offsets = offsets; }), "kv_offsets is missing");
  EXPECT_EQ(Refusal([&] { Piece(p, 0, 100).By(layer, context, 2); }), "flags=0x2 has bits that mean nothing");
  EXPECT_EQ(layer.Totals().calls, 1);
  const Piece piece(p, 0, 100);
  EXPECT_EQ(sparge_layer_run(nullptr, context.get(), &piece.desc, &piece.args, 0), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_run(layer.get(), nullptr, &piece.desc, &piece.args, 0), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_run(layer.get(), context.get(), nullptr, &piece.args, 0), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_run(layer.get(), context.get(), &piece.desc, nullptr, 0), SPARGE_INVALID_ARGUMENT);
}

TEST(Layer, AWorkspaceOfTheCallersOwn) {
  const Context context(1);
  const Problem p = Prompt(300);
  Layer layer;
  Piece lent(p, 0, 300), own(p, 0, 300);
  lent.By(layer, context);
  std::vector<std::byte> memory(64 << 20);
  own.args.workspace = memory.data();
  own.args.workspace_size = 100;
  EXPECT_EQ(Refusal([&] { own.By(layer, context); }).find("workspace_size=100 is less than the "), 0U);
  own.args.workspace_size = memory.size();
  own.By(layer, context);
  ExpectSame(own, lent);
  EXPECT_NE(std::count(memory.begin(), memory.end(), std::byte{0}), static_cast<int64_t>(memory.size()));
}

TEST(Layer, SavedAndRestoredItChoosesTheSame) {
  const Context context(2);
  const Problem p = Prompt(2048, 3), unlike = Prompt(2048, 9);
  Layer one;
  for (int call = 0; call < 2; ++call) Piece(p, 0, 2048).By(one, context);
  Piece(p, 512, 2048).By(one, context);
  LayerDesc without_keys;
  without_keys.keep_keys = 0;
  Layer two(without_keys), three(without_keys);
  Piece(unlike, 0, 2048, false).By(two, context);  // forgotten
  two.Restore(one.Save());
  EXPECT_EQ(two.Save(), one.Save());
  EXPECT_EQ(two.Heads().size(), 1U);
  three.Restore(one.Save());
  // The next calls, of kinds that are known and of one that is not.
  for (const auto& [begin, causal] : {std::pair{0, true}, {1024, true}, {0, false}}) {
    Piece a(p, begin, 2048, causal), b(p, begin, 2048, causal);
    a.By(two, context);
    b.By(three, context);
    ExpectSame(a, b);
  }
  EXPECT_EQ(two.Save(), three.Save());
  Piece a(p, 0, 2048), b(p, 0, 2048);
  one.Restore(three.Save());
  a.By(one, context);
  b.By(three, context);
  ExpectSame(a, b);
  Layer fresh;
  Piece c(p, 0, 2048);
  c.By(fresh, context);
  EXPECT_NE(c.stats.total.pv_computed, a.stats.total.pv_computed) << "the test shows nothing";
}

TEST(Layer, SavingChecksTheRoom) {
  const Layer layer;
  const std::vector<std::byte> saved = layer.Save();
  std::vector<std::byte> room(saved.size());
  size_t size = saved.size() - 1;
  EXPECT_EQ(sparge_layer_save(layer.get(), room.data(), &size), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(size, saved.size());
  EXPECT_EQ(sparge_layer_save(layer.get(), nullptr, nullptr), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_save(nullptr, nullptr, &size), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_restore(layer.get(), nullptr, 8), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(sparge_layer_restore(layer.get(), saved.data(), 8), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparge_last_error()),
            "size=8 ends within the header of a layer that begins at byte 0 and has 56");
}

// The bounds of an automatic call, rounding included, for noise that is not sharp.
const double kBound = 1.2 * 0.01875 + Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, kDim);

TestTensor Expected(const Context& context, const Problem& p, int64_t begin) {
  Piece exact(p, begin, p.shape.q_tokens);
  const Plan plan(context, exact.desc);
  plan.Reference(exact.args);
  return exact.o;
}

// Calls of all sorts from two threads; each result is as exact as alone.
TEST(Layer, TwoThreads) {
  const Context context(2);
  const Problem p = Prompt(1536, 1, 1.0f);
  Layer layer;
  const int64_t begins[] = {0, 1024, 1500};  // whole, going on, few
  const TestTensor expected[] = {Expected(context, p, 0), Expected(context, p, 1024), Expected(context, p, 1500)};
  std::atomic<int> failures{0};
  const auto work = [&](int first) {
    for (int i = first; i < first + 9; ++i) {
      Piece piece(p, begins[i % 3], 1536);
      piece.By(layer, context);
      if (!(RelativeL1(piece.o, expected[i % 3]) <= kBound)) ++failures;
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(layer.Totals().calls, 18);
  EXPECT_EQ(sparge_layer_calibrations(layer.get()), 1);
  EXPECT_GT(layer.Totals().key_blocks_reused, 0);
}

// A layer outlives contexts, and serves several of them, of any instruction set.
TEST(Layer, AnyContext) {
  const Problem p = Prompt(1200, 1, 1.0f);
  const TestTensor expected = Expected(Context(2), p, 800);
  Layer layer;
  for (const std::string& isa : RunnableIsas()) {
    for (const int32_t threads : {1, 3}) {
      const Context context(threads, isa.c_str());
      Piece piece(p, 800, 1200);
      piece.By(layer, context);
      EXPECT_LE(RelativeL1(piece.o, expected), kBound) << isa;
    }
  }
}

TEST(Layer, ImagesAndOldHeaders) {
  const Context context(2);
  const Problem p = Prompt(40 * 40);
  LayerDesc desc;
  desc.struct_size = offsetof(sparge_layer_desc, min_keys);  // an older header's
  desc.min_keys = -1;                                        // not its to set
  Layer layer(desc);
  Calibration calibration = Bounds();
  for (int call = 0; call < 2; ++call) {
    Piece have(p, 0, 1600, false), want(p, 0, 1600, false);
    for (Piece* piece : {&have, &want}) std::copy_n((const int64_t[]){1, 40, 40}, 3, piece->desc.grid);
    have.By(layer, context);
    want.desc.select = SPARGE_SELECT_AUTO;
    want.desc.calibration = calibration.get();
    want.ByPlan(context);
    ExpectSame(have, want);
  }
  sparge_layer_totals totals;
  std::memset(&totals, 0xAB, sizeof(totals));
  totals.struct_size = offsetof(sparge_layer_totals, dense_calls);
  ASSERT_EQ(sparge_layer_get_totals(layer.get(), &totals), SPARGE_OK);
  EXPECT_EQ(totals.calls, 2);
  EXPECT_NE(totals.dense_calls, 0) << "beyond what the caller knows";
}

}  // namespace
}  // namespace sparge::testing

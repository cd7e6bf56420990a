// The parts of the ggml backend that need no ggml: structure of masks, layouts by version, settings of the environment,
// and the layers they become.
#include <ggml.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ggml/layers.h"
#include "ggml/mask.h"
#include "ggml/settings.h"
#include "ggml/usage.h"
#include "ggml/versions.h"
#include "tests/test_util.h"

namespace sparge::ggml {
namespace {

constexpr uint16_t kSeen = 0, kHidden = 0xfc00, kOne = 0x3c00;

// A mask of `streams` planes, filled by value(stream, query, key).
struct Mask {
  std::vector<uint16_t> data;
  ggml_tensor tensor{};

  Mask(int64_t streams, int64_t queries, int64_t keys,
       const std::function<uint16_t(int64_t, int64_t, int64_t)>& value) {
    for (int64_t s = 0; s < streams; ++s) {
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t j = 0; j < keys; ++j) data.push_back(value(s, i, j));
      }
    }
    tensor.type = GGML_TYPE_F16;
    tensor.data = data.data();
    const int64_t ne[4] = {keys, queries, 1, streams};
    size_t stride = sizeof(uint16_t);
    for (int d = 0; d < 4; ++d) {
      tensor.ne[d] = ne[d];
      tensor.nb[d] = stride;
      stride *= static_cast<size_t>(ne[d]);
    }
  }
};

uint16_t See(bool seen) { return seen ? kSeen : kHidden; }

TEST(GgmlMask, NoMaskShowsAll) {
  EXPECT_EQ(FindMaskShape(nullptr, 5, 7, 2), (MaskShape{.positional = true, .keys = 7}));
}

TEST(GgmlMask, CausalWithOffsetAndPadding) {
  for (const int64_t offset : {0, 1, 63, 64, 100}) {
    for (const int threads : {1, 2}) {
      const Mask mask(2, 70, 256, [&](int64_t, int64_t i, int64_t j) { return See(j <= i + offset); });
      const MaskShape wanted{.positional = true, .causal = true, .query_offset = offset, .keys = 70 + offset};
      EXPECT_EQ(FindMaskShape(&mask.tensor, 70, 256, threads), wanted) << offset;
    }
  }
}

TEST(GgmlMask, Window) {
  const int64_t offset = 30, window = 17;
  const Mask mask(1, 50, 96,
                  [&](int64_t, int64_t i, int64_t j) { return See(j <= i + offset && j > i + offset - window); });
  const MaskShape wanted{.positional = true, .causal = true, .query_offset = 30, .window = 17, .keys = 80};
  EXPECT_EQ(FindMaskShape(&mask.tensor, 50, 96, 2), wanted);
}

TEST(GgmlMask, AllQueriesSeeTheSame) {
  const Mask mask(1, 9, 64, [](int64_t, int64_t, int64_t j) { return See(j < 40); });
  EXPECT_EQ(FindMaskShape(&mask.tensor, 9, 64, 1), (MaskShape{.positional = true, .keys = 40}));
}

TEST(GgmlMask, OneQuery) {
  const Mask mask(1, 1, 64, [](int64_t, int64_t, int64_t j) { return See(j < 40); });
  const MaskShape shape = FindMaskShape(&mask.tensor, 1, 64, 1);
  EXPECT_TRUE(shape.positional);
  EXPECT_EQ(shape.keys, 40);
  EXPECT_EQ(shape.causal ? shape.query_offset : 39, 39);
}

// Wherever a single value of a causal mask is another one, the rule no longer says the same.
TEST(GgmlMask, OneOddValueIsNoticed) {
  const int64_t queries = 20, keys = 48, offset = 11;
  for (int64_t odd = 0; odd < 2 * queries * keys; odd += 7) {
    for (const uint16_t value : {kSeen, kHidden, kOne}) {
      Mask mask(2, queries, keys, [&](int64_t, int64_t i, int64_t j) { return See(j <= i + offset); });
      const bool changes = mask.data[odd] != value;
      mask.data[odd] = value;
      EXPECT_EQ(FindMaskShape(&mask.tensor, queries, keys, 2).positional, !changes) << odd << " " << value;
    }
  }
}

// What llama.cpp writes for ALiBi. Distances from 2048 on are not exact in f16.
TEST(GgmlMask, Distances) {
  const int64_t queries = 3, keys = 9000, offset = 8900;
  const auto minus = [](int64_t distance) {  // another way to the same: down from a float's bits
    const float value = -static_cast<float>(distance);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (distance == 0) return uint16_t{0x8000};
    const uint32_t exact = (bits & 0x7fffffff) - (112u << 23);
    return static_cast<uint16_t>(0x8000 | ((exact + 0xfff + ((exact >> 13) & 1)) >> 13));
  };
  Mask mask(1, queries, keys,
            [&](int64_t, int64_t i, int64_t j) { return j <= i + offset ? minus(i + offset - j) : kHidden; });
  MaskShape wanted{
      .positional = true, .causal = true, .query_offset = offset, .keys = queries + offset, .distances = true};
  EXPECT_EQ(FindMaskShape(&mask.tensor, queries, keys, 2), wanted);
  mask.data[offset] = kSeen;  // a zero without its sign
  EXPECT_EQ(FindMaskShape(&mask.tensor, queries, keys, 2), wanted);
  for (const int64_t odd : {int64_t{0}, int64_t{5000}, offset - 1, keys + offset + 1, 3 * keys - 1}) {
    const uint16_t before = std::exchange(mask.data[odd], kOne);
    EXPECT_FALSE(FindMaskShape(&mask.tensor, queries, keys, 2).positional) << odd;
    mask.data[odd] = before;
  }
}

TEST(GgmlMask, StreamsThatDifferAreNoRule) {
  const Mask mask(2, 10, 32, [](int64_t s, int64_t i, int64_t j) { return See(j <= i + s); });
  EXPECT_FALSE(FindMaskShape(&mask.tensor, 10, 32, 1).positional);
}

TEST(GgmlMask, NothingVisibleIsNoRule) {
  const Mask mask(1, 10, 32, [](int64_t, int64_t, int64_t) { return kHidden; });
  EXPECT_FALSE(FindMaskShape(&mask.tensor, 10, 32, 1).positional);
}

TEST(GgmlMask, HidesOnly) {
  Mask mask(2, 10, 32, [](int64_t, int64_t i, int64_t j) { return See((i + j) % 3 == 0); });
  EXPECT_TRUE(HidesOnly(&mask.tensor, 10, 2));
  mask.data.back() = kOne;
  EXPECT_FALSE(HidesOnly(&mask.tensor, 10, 2));
  EXPECT_TRUE(HidesOnly(&mask.tensor, 9, 2));  // the last query is not asked for
}

TEST(GgmlVersions, KnownAndUnknown) {
  // Offsets in bytes of graph_compute within the table, which follows one pointer.
  const auto offset = [](const char* version) { return (LayoutOf(version)->graph_compute() - 1) * sizeof(void*); };
  EXPECT_EQ(offset("0.9.8"), 80u);
  for (const char* version : {"0.13.1", "0.21.0", "0.25.3", "0.25.9"}) EXPECT_EQ(offset(version), 96u) << version;
  for (const char* version : {"0.9.7", "0.9.9", "0.13.0", "0.26.0", "1.13.1", "", "new", "0.13"}) {
    EXPECT_FALSE(LayoutOf(version)) << version;
  }
}

struct Environment : ::testing::Test {
  static constexpr const char* kNames[] = {"SPARGE_MODE",   "SPARGE_TARGET_L2",  "SPARGE_TARGET_L1", "SPARGE_PRECISION",
                                           "SPARGE_PRESET", "SPARGE_MIN_TOKENS", "SPARGE_STATS",     "SPARGE_CLAIM_ALL",
                                           "SPARGE_DECODE", "SPARGE_QUIET"};
  void SetUp() override {
    for (const char* name : kNames) unsetenv(name);
  }
  void TearDown() override { SetUp(); }
  static std::string Refusal() {
    try {
      ReadSettings();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }
};
using GgmlSettings = Environment;

TEST_F(GgmlSettings, Defaults) {
  const Settings settings = ReadSettings();
  EXPECT_EQ(settings.mode, Mode::kAuto);
  EXPECT_EQ(settings.bounds.target_l2, LayerDesc().target_l2);
  EXPECT_EQ(settings.bounds.target_l1, SPARGE_NOT_NAMED);
  EXPECT_EQ(settings.precision, SPARGE_PRECISION_INT8);
  EXPECT_EQ(settings.preset, nullptr);
  EXPECT_TRUE(settings.stats.empty());
  EXPECT_FALSE(settings.claim_all);
  EXPECT_FALSE(settings.quiet);
  EXPECT_TRUE(settings.Decodes());
  EXPECT_EQ(Describe(settings), "relative L2 error 0.03 per head");
}

TEST_F(GgmlSettings, Values) {
  setenv("SPARGE_TARGET_L1", "0.01", 1);
  setenv("SPARGE_PRECISION", "int16", 1);
  setenv("SPARGE_MIN_TOKENS", "4096", 1);
  setenv("SPARGE_STATS", "1", 1);
  setenv("SPARGE_CLAIM_ALL", "1", 1);
  const Settings settings = ReadSettings();
  EXPECT_EQ(settings.bounds.target_l1, 0.01);
  EXPECT_EQ(settings.precision, SPARGE_PRECISION_INT16);
  EXPECT_EQ(settings.min_tokens, 4096);
  EXPECT_EQ(settings.stats, "stderr");
  EXPECT_TRUE(settings.claim_all);
  EXPECT_EQ(Describe(settings), "relative L1 error 0.01 per head");
  setenv("SPARGE_DECODE", "0", 1);
  EXPECT_FALSE(ReadSettings().Decodes());
}

// What is said at the end, and why nothing was done.
TEST(GgmlUsage, Lines) {
  Usage usage;
  EXPECT_NE(Describe(usage).find("no flash attention was asked for"), std::string::npos);
  usage.taken = 3;
  EXPECT_NE(Describe(usage).find("before its first prompt"), std::string::npos);
  usage.impossible = 1;
  EXPECT_NE(Describe(usage).find("types or shapes"), std::string::npos);
  usage.few = 1;
  EXPECT_NE(Describe(usage).find("no prompt had more than 64 tokens, and answers are taken from 512"),
            std::string::npos);
  usage.prompts = 1;
  usage.steps = 2;
  usage.ms = 1234;
  EXPECT_EQ(Describe(usage), "computed 1 attention call of prompts and 2 of answers in 1.23 s");
  usage.eligible = 200;
  usage.computed = 50;
  EXPECT_EQ(
      Describe(usage),
      "computed 1 attention call of prompts and 2 of answers in 1.23 s; 75 % of the tiles of prompts were skipped");
}

TEST_F(GgmlSettings, BadValuesAreNamed) {
  const struct {
    const char *name, *value;
  } bad[] = {{"SPARGE_MODE", "fast"},       {"SPARGE_TARGET_L1", "1.5"},  {"SPARGE_TARGET_L1", "-0.1"},
             {"SPARGE_TARGET_L1", "0.02x"}, {"SPARGE_TARGET_L1", "nan"},  {"SPARGE_PRECISION", "int4"},
             {"SPARGE_MIN_TOKENS", "-1"},   {"SPARGE_MIN_TOKENS", "1e3"}, {"SPARGE_CLAIM_ALL", "yes"},
             {"SPARGE_DECODE", "2"},        {"SPARGE_QUIET", "on"}};
  for (const auto& [name, value] : bad) {
    setenv(name, value, 1);
    const std::string refusal = Refusal();
    EXPECT_NE(refusal.find(std::string(name) + "=" + value), std::string::npos) << refusal;
    unsetenv(name);
  }
  setenv("SPARGE_PRESET", "/nowhere/preset.json", 1);
  EXPECT_NE(Refusal().find("/nowhere/preset.json"), std::string::npos) << Refusal();
}

TEST_F(GgmlSettings, WhatHasNoEffectIsRefused) {
  setenv("SPARGE_MODE", "exact", 1);
  setenv("SPARGE_PRECISION", "int16", 1);
  EXPECT_EQ(Refusal(), "SPARGE_PRECISION has no effect with SPARGE_MODE=exact");
  setenv("SPARGE_MODE", "off", 1);
  EXPECT_EQ(Refusal(), "SPARGE_PRECISION has no effect with SPARGE_MODE=off");
  unsetenv("SPARGE_MODE");
  setenv("SPARGE_TARGET_L1", "0", 1);
  EXPECT_EQ(Refusal(), "");
  setenv("SPARGE_MIN_TOKENS", "512", 1);
  EXPECT_EQ(Refusal(), "SPARGE_MIN_TOKENS has no effect with a target of 0");
  unsetenv("SPARGE_MIN_TOKENS");
  setenv("SPARGE_TARGET_L2", "0.05", 1);
  EXPECT_EQ(Refusal(), "SPARGE_TARGET_L2 has no effect with SPARGE_TARGET_L1");
  unsetenv("SPARGE_TARGET_L1");
  EXPECT_EQ(Refusal(), "");
  setenv("SPARGE_DECODE", "1", 1);
  EXPECT_EQ(Refusal(), "");
  setenv("SPARGE_PRECISION", "fp32", 1);
  EXPECT_EQ(Refusal(), "SPARGE_DECODE has no effect with SPARGE_PRECISION=fp32");
}

// ------------------------------------------------------------------ layers

using sparge::testing::Problem;
using sparge::testing::TestTensor;

// Queries [begin, 1280) of a causal prompt.
struct Batch {
  explicit Batch(int64_t begin = 0)
      : p({.q_heads = 4, .kv_heads = 2, .q_tokens = 1280, .qk_dim = 64, .correlated = true}),
        o(1, 4, 1280 - begin, 64) {
    p.q.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return 6 * p.q.Get(b, h, t, d); });
    desc.batch = 1;
    desc.q_heads = 4;
    desc.kv_heads = 2;
    desc.qk_dim = desc.v_dim = 64;
    desc.q_tokens = 1280 - begin;
    desc.kv_tokens = 1280;
    desc.causal = 1;
    args.q = p.q.view();
    args.q.data = static_cast<float*>(args.q.data) + begin * 64;
    args.k = p.k.view();
    args.v = p.v.view();
    args.o = o.view();
  }
  Problem p;
  TestTensor o;
  PlanDesc desc;
  RunArgs args;
};

// The bytes that a layer of the library makes of it.
std::vector<uint8_t> Expected(const Context& context, const LayerDesc& desc) {
  Layer layer(desc);
  const Batch batch;
  layer.Run(context, batch.desc, batch.args);
  return batch.o.bytes();
}

Settings WithPreset(const std::string& layer) {
  io::PresetLayer entry;
  entry.q_heads = 4;
  entry.kv_heads = 2;
  entry.qk_dim = entry.v_dim = 64;
  entry.causal = true;
  entry.heads.resize(4);
  entry.heads[1] = {SPARGE_PRECISION_INT16, SPARGE_SELECT_FLOOR, {-1, 0.7, 0, 6}, {}};
  auto preset = std::make_shared<io::Preset>();
  preset->layers[layer] = entry;
  Settings settings;
  settings.preset = preset;
  settings.preset_path = "p.json";
  return settings;
}

TEST(GgmlLayer, EveryTileInThePrecisionAskedFor) {
  const Context context(2);
  const auto bytes = [&](const Settings& settings) {
    ModelLayer layer(settings, "layer0");
    const Batch batch;
    layer.Run(context, batch.desc, batch.args);
    return batch.o.bytes();
  };
  LayerDesc desc;
  desc.target_l2 = 0;
  Settings settings;
  settings.mode = Mode::kExact;
  EXPECT_EQ(bytes(settings), Expected(context, desc));
  settings = Settings();
  settings.bounds.target_l2 = 0;
  desc.precision = SPARGE_PRECISION_INT8;
  EXPECT_EQ(bytes(settings), Expected(context, desc));
  settings = Settings();
  settings.min_tokens = 1281;
  EXPECT_EQ(bytes(settings), Expected(context, desc));
}

// What llama.cpp gets is what everybody gets.
TEST(GgmlLayer, AutomaticAsEverywhere) {
  const Context context(2);
  Layer library;
  ModelLayer layer(Settings(), "layer0");
  for (const int64_t begin : {768, 768, 1024}) {
    const Batch a(begin), b(begin);
    layer.Run(context, a.desc, a.args);
    library.Run(context, b.desc, b.args);
    EXPECT_EQ(a.o.bytes(), b.o.bytes());
  }
  const Totals sums = layer.Sums();
  EXPECT_GT(sums.Sparsity(), 0.01);
  EXPECT_GT(sums.runs.key_blocks_reused, 0);
  EXPECT_EQ(sums.runs.key_blocks_reused, library.Totals().key_blocks_reused);
  EXPECT_EQ(layer.Estimates().size(), 4U);
}

TEST(GgmlLayer, PresetsByEitherName) {
  const Context context(2);
  for (const char* name : {"layer7", "model.layers.7.self_attn"}) {
    ModelLayer layer(WithPreset(name), "layer7");
    const Batch batch;
    layer.Run(context, batch.desc, batch.args);
    EXPECT_GT(layer.Sums().Sparsity(), 0.01) << name;
    EXPECT_TRUE(layer.Estimates().empty());
  }
}

TEST(GgmlLayer, APresetThatDoesNotFitSkipsNothing) {
  const Context context(2);
  LayerDesc dense;
  dense.target_l2 = 0;
  dense.precision = SPARGE_PRECISION_INT8;
  const std::vector<uint8_t> expected = Expected(context, dense);
  const auto said = [&](const Settings& settings) {
    ::testing::internal::CaptureStderr();
    ModelLayer layer(settings, "layer7");
    for (int call = 0; call < 2; ++call) {
      const Batch batch;
      layer.Run(context, batch.desc, batch.args);
      EXPECT_EQ(batch.o.bytes(), expected);
    }
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string absent = said(WithPreset("layer8"));
  EXPECT_EQ(absent.find("sparge: layer7: p.json"), 0U) << absent;
  EXPECT_NE(absent.find("; this layer skips nothing\n"), std::string::npos) << absent;
  Settings settings = WithPreset("layer7");
  auto wider = std::make_shared<io::Preset>(*settings.preset);
  wider->layers["layer7"].v_dim = 128;
  settings.preset = wider;
  EXPECT_EQ(said(settings), "sparge: layer7: v_dim=64 is not the 128 of the preset; this layer skips nothing\n");
}

TEST(GgmlLayer, OtherPositionsAreSaidOnce) {
  const Context context(2);
  ModelLayer layer(WithPreset("layer0"), "layer0");
  ::testing::internal::CaptureStderr();
  for (int call = 0; call < 2; ++call) {
    Batch batch;
    batch.desc.causal = 0;
    layer.Run(context, batch.desc, batch.args);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "sparge: layer0: the preset is for causal calls: others have its precisions, and skip nothing\n");
  EXPECT_EQ(layer.Sums().Sparsity(), 0);
}

TEST(GgmlLayer, OtherErrorsAreErrors) {
  const Context context(1);
  Batch batch;
  batch.args.q.data = nullptr;
  ModelLayer layer(Settings(), "layer0");
  EXPECT_THROW(layer.Run(context, batch.desc, batch.args), Error);
  ModelLayer with_preset(WithPreset("layer0"), "layer0");
  EXPECT_THROW(with_preset.Run(context, batch.desc, batch.args), Error);
  const Batch good;
  with_preset.Run(context, good.desc, good.args);
  EXPECT_GT(with_preset.Sums().Sparsity(), 0) << "the preset is still in force";
}

TEST(GgmlLayer, SingleHeadsHaveEveryTile) {
  const Context context(2);
  for (const Settings& settings : {Settings(), WithPreset("layer0")}) {
    ModelLayer layer(settings, "layer0");
    Batch batch;
    batch.desc.q_heads = batch.desc.kv_heads = 1;
    layer.RunOneHead(context, batch.desc, batch.args);
    const Totals sums = layer.Sums();
    EXPECT_GT(sums.runs.tiles.qk_eligible, 0);
    EXPECT_EQ(sums.runs.tiles.qk_eligible, sums.runs.tiles.qk_computed);
  }
}

}  // namespace
}  // namespace sparge::ggml

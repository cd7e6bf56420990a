// The parts of the ggml backend that need no ggml: structure of masks, layouts by version, settings of the environment.
#include <ggml.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ggml/mask.h"
#include "ggml/settings.h"
#include "ggml/versions.h"

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

struct Environment : testing::Test {
  static constexpr const char* kNames[] = {"SPARGE_MODE",       "SPARGE_TARGET_L1", "SPARGE_PRECISION", "SPARGE_PRESET",
                                           "SPARGE_MIN_TOKENS", "SPARGE_STATS",     "SPARGE_CLAIM_ALL"};
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
  EXPECT_EQ(settings.target_l1, 0.015);  // the library's
  EXPECT_EQ(settings.precision, SPARGE_PRECISION_INT8);
  EXPECT_EQ(settings.preset, nullptr);
  EXPECT_TRUE(settings.stats.empty());
  EXPECT_FALSE(settings.claim_all);
}

TEST_F(GgmlSettings, Values) {
  setenv("SPARGE_TARGET_L1", "0.01", 1);
  setenv("SPARGE_PRECISION", "int16", 1);
  setenv("SPARGE_MIN_TOKENS", "4096", 1);
  setenv("SPARGE_STATS", "1", 1);
  setenv("SPARGE_CLAIM_ALL", "1", 1);
  const Settings settings = ReadSettings();
  EXPECT_EQ(settings.target_l1, 0.01);
  EXPECT_EQ(settings.precision, SPARGE_PRECISION_INT16);
  EXPECT_EQ(settings.min_tokens, 4096);
  EXPECT_EQ(settings.stats, "stderr");
  EXPECT_TRUE(settings.claim_all);
}

TEST_F(GgmlSettings, BadValuesAreNamed) {
  const struct {
    const char *name, *value;
  } bad[] = {{"SPARGE_MODE", "fast"},       {"SPARGE_TARGET_L1", "1.5"},  {"SPARGE_TARGET_L1", "-0.1"},
             {"SPARGE_TARGET_L1", "0.02x"}, {"SPARGE_TARGET_L1", "nan"},  {"SPARGE_PRECISION", "int4"},
             {"SPARGE_MIN_TOKENS", "-1"},   {"SPARGE_MIN_TOKENS", "1e3"}, {"SPARGE_CLAIM_ALL", "yes"}};
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
  EXPECT_EQ(Refusal(), "SPARGE_MIN_TOKENS has no effect with SPARGE_TARGET_L1=0");
}

}  // namespace
}  // namespace sparge::ggml

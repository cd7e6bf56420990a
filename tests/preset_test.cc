// preset_test.cc - presets survive a round trip, and every refusal names the file, the layer, the head and the value.
#include "io/preset.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "io/tensor.h"

namespace sparge::io {
namespace {

PresetHead SparseHead() {
  PresetHead head;
  head.select = SPARGE_SELECT_FLOOR;
  head.params = {0.3, 0.9, 0, 8.5};
  head.measured = {0.75, 0.2, 0.041, 0.052, 0.013, 2};
  return head;
}

PresetHead DenseHead() {
  PresetHead head;
  head.precision = SPARGE_PRECISION_INT16;
  head.measured = {0, 1, 0, 0, 3e-4, 1};
  return head;
}

Preset Example() {
  Preset preset;
  preset.made_by = "sparge \"x\"";
  preset.bounds = {SPARGE_MEASURE_L1, 0.05, 0.06, 1.0 / 3};  // which needs all its digits
  preset.predictor = SPARGE_PREDICT_PAPER;
  preset.seed = 0xffffffffffffffff;
  PresetLayer layer{2, 1, 64, 32, true, {"a", "b"}, {"c"}, {SparseHead(), DenseHead()}};
  preset.layers["model.layers.0"] = layer;
  layer.heads[0].params.pv_skip = SPARGE_PV_SKIP_OFF;
  layer.heads[0].select = SPARGE_SELECT_CDF;
  preset.layers["model.layers.11"] = layer;
  return preset;
}

void ExpectSame(const PresetLayer& a, const PresetLayer& b) {
  EXPECT_EQ(a.q_heads, b.q_heads);
  EXPECT_EQ(a.kv_heads, b.kv_heads);
  EXPECT_EQ(a.qk_dim, b.qk_dim);
  EXPECT_EQ(a.v_dim, b.v_dim);
  EXPECT_EQ(a.causal, b.causal);
  EXPECT_EQ(a.samples, b.samples);
  EXPECT_EQ(a.held_out, b.held_out);
  ASSERT_EQ(a.heads.size(), b.heads.size());
  for (size_t i = 0; i < a.heads.size(); ++i) {
    EXPECT_EQ(a.heads[i].precision, b.heads[i].precision);
    EXPECT_EQ(a.heads[i].select, b.heads[i].select);
    EXPECT_EQ(a.heads[i].params.theta, b.heads[i].params.theta);
    EXPECT_EQ(a.heads[i].params.tau, b.heads[i].params.tau);
    EXPECT_EQ(a.heads[i].params.pv_skip, b.heads[i].params.pv_skip);
    EXPECT_EQ(a.heads[i].measured, b.heads[i].measured);
  }
}

TEST(Preset, RoundTrip) {
  Preset preset = Example();
  preset.partial = {"with these options", "0123abcd"};
  const Preset again = ParsePreset(PresetText(preset), "p.json");
  EXPECT_EQ(again.made_by, preset.made_by);
  EXPECT_EQ(again.bounds.measure, preset.bounds.measure);
  EXPECT_EQ(again.bounds.target, preset.bounds.target);
  EXPECT_EQ(again.bounds.pv, preset.bounds.pv);
  EXPECT_EQ(again.bounds.round_l1, preset.bounds.round_l1);
  EXPECT_EQ(again.predictor, preset.predictor);
  EXPECT_EQ(again.seed, preset.seed);
  ASSERT_TRUE(again.partial.has_value());
  EXPECT_EQ(again.partial->options, preset.partial->options);
  EXPECT_EQ(again.partial->captures, preset.partial->captures);
  ASSERT_EQ(again.layers.size(), preset.layers.size());
  for (const auto& [name, layer] : preset.layers) ExpectSame(layer, again.layers.at(name));
  EXPECT_EQ(PresetText(again), PresetText(preset));
  EXPECT_EQ(PresetText(ParsePreset(PresetText(Preset()), "p.json")), PresetText(Preset()));
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

TEST(Preset, ReadsOlderVersions) {
  std::string text = Replaced(PresetText(Example()), "\"version\": 3", "\"version\": 2");
  text = Replaced(Replaced(text, "\"error\"", "\"l1\""), "\"pv_error\"", "\"pv_l1\"");
  EXPECT_EQ(PresetText(ParsePreset(text, "p.json")), PresetText(Example()));
  text = Replaced(text, "\"version\": 2", "\"version\": 1");
  text = Replaced(Replaced(text, "\"target_l1\"", "\"l1\""), "\"pv_l1\"", "\"l2\"");
  EXPECT_EQ(text.find("pv_l1"), std::string::npos);
  EXPECT_EQ(PresetText(ParsePreset(text, "p.json")), PresetText(Example()));
}

TEST(Preset, BoundsTheLossOfAModelInstead) {
  Preset preset = Example();
  preset.bounds = {};
  preset.bounds.loss = 1.0 / 300;
  preset.bounds.measured_loss = 0.003;
  const std::string text = PresetText(preset);
  const PresetBounds again = ParsePreset(text, "p.json").bounds;
  EXPECT_TRUE(again.of_loss());
  EXPECT_EQ(again.loss, preset.bounds.loss);
  EXPECT_EQ(again.measured_loss, preset.bounds.measured_loss);
  EXPECT_EQ(PresetText(ParsePreset(text, "p.json")), text);
  EXPECT_FALSE(ParsePreset(PresetText(Example()), "p.json").bounds.of_loss());
  for (const char* older : {"\"version\": 1", "\"version\": 2"}) {
    EXPECT_THROW(ParsePreset(Replaced(text, "\"version\": 3", older), "p.json"), Error) << older;
  }
  EXPECT_THROW(ParsePreset(Replaced(text, "\"measured_loss\"", "\"round_l1\""), "p.json"), Error);
}

TEST(Preset, SaysItsMeasure) {
  Preset preset = Example();
  preset.bounds.measure = SPARGE_MEASURE_L2;
  const std::string text = PresetText(preset);
  EXPECT_NE(text.find("\"target_l2\":0.05,\"pv_l2\":0.06"), std::string::npos) << text;
  EXPECT_EQ(text.find("target_l1"), std::string::npos);
  EXPECT_EQ(ParsePreset(text, "p.json").bounds.measure, SPARGE_MEASURE_L2);
  for (const char* older : {"\"version\": 1", "\"version\": 2"}) {
    EXPECT_THROW(ParsePreset(Replaced(text, "\"version\": 3", older), "p.json"), Error) << older;
  }
  EXPECT_THROW(ParsePreset(Replaced(text, "\"pv_l2\"", "\"pv_l1\""), "p.json"), Error);
}

TEST(Preset, FilesAreWrittenWholeOrNotAtAll) {
  const std::string path = std::filesystem::path(testing::TempDir()) / "preset_test.json";
  WritePreset(path, Example());
  EXPECT_EQ(PresetText(ReadPreset(path)), PresetText(Example()));
  Preset bad = Example();
  bad.layers["\xff"] = bad.layers.begin()->second;
  EXPECT_THROW(WritePreset(path, bad), Error);
  EXPECT_EQ(PresetText(ReadPreset(path)), PresetText(Example()));
  std::filesystem::remove(path);
  EXPECT_THROW(ReadPreset(path), Error);
}

// The example with the first `from` replaced by `to` must be refused, in one line with all of `says`.
void ExpectRefused(const std::string& from, const std::string& to, const std::vector<std::string>& says) {
  std::string text = PresetText(Example());
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  try {
    ParsePreset(text, "p.json");
    ADD_FAILURE() << "accepted: " << to;
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with("p.json: ")) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    for (const std::string& part : says) EXPECT_NE(what.find(part), std::string::npos) << part << " not in: " << what;
  }
}

TEST(Preset, RefusesOtherFiles) {
  ExpectRefused("sparge-preset", "sparge-present", {"'format'"});
  ExpectRefused("\"version\": 3", "\"version\": 4", {"'version'", "'4'", "1 to 3"});
  ExpectRefused("\"version\": 3", "\"version\": 0", {"'version'", "'0'", "1 to 3"});
  ExpectRefused("\"version\": 3", "\"version\": \"3\"", {"'version'"});
  ExpectRefused("\"version\": 3", "\"version\": 1", {"bounds", "unknown field", "'pv_l1'"});
  ExpectRefused("{", "[{", {"JSON"});
  ExpectRefused("\"seed\": ", "\"seed\": 1, \"seed\": ", {"'seed'", "twice"});
  ExpectRefused("\"seed\": ", "\"sead\": 1, \"seed\": ", {"unknown field 'sead'"});
  ExpectRefused("\"seed\": 18446744073709551615", "\"seed\": 1.5", {"'seed'", "'1.5'"});
  ExpectRefused("\"paper\"", "\"crystal ball\"", {"'predictor'", "crystal ball", "'keys' or 'paper'"});
  ExpectRefused("\"pv_l1\":0.06", "\"pv_l1\":-1", {"bounds", "'pv_l1'", "'-1'"});
  ExpectRefused("\"pv_l1\":0.06", "\"l2\":0.06", {"bounds", "unknown field 'l2'"});
  ExpectRefused("\"pv_l1\":0.06", "\"pv_l1\":0.06,\"target_l2\":0.05", {"bounds", "unknown field"});
  ExpectRefused("\"layers\"", "\"lairs\"", {"'lairs'"});
  EXPECT_THROW(ParsePreset(std::string((size_t{1} << 28) + 1, ' '), "p.json"), Error);
}

TEST(Preset, RefusesLayers) {
  const std::string layer = "layer 'model.layers.0'";
  ExpectRefused("\"q_heads\": 2", "\"q_heads\": 3", {layer, "'heads'", "2", "3"});
  ExpectRefused("\"q_heads\": 2", "\"q_heads\": 0", {layer, "'q_heads'", "'0'"});
  ExpectRefused("\"q_heads\": 2,\n", "", {layer, "'q_heads' is missing"});
  ExpectRefused("\"kv_heads\": 1", "\"kv_heads\": 4", {layer, "'kv_heads'", "'4'"});
  ExpectRefused("\"qk_dim\": 64", "\"qk_dim\": 6400", {layer, "'qk_dim'", "'6400'"});
  ExpectRefused("\"qk_dim\": 64", "\"qk_dim\": 64.5", {layer, "'qk_dim'", "'64.5'"});
  ExpectRefused("\"causal\": true", "\"causal\": 1", {layer, "'causal'", "'1'"});
  ExpectRefused("\"samples\": [", "\"samples\": [3,", {layer, "'samples'"});
  ExpectRefused("\"head\":1,\"precision\":\"int16\",\"select\":\"all\"",
                "\"head\":1,\"precision\":\"int16\",\"select\":\"cdf\"", {layer, "head 1", "'cdf'", "'floor'"});
  ExpectRefused("\"model.layers.11\"", "\"model.layers.0\"", {"'model.layers.0'", "twice"});
}

TEST(Preset, RefusesHeads) {
  const std::string head = "layer 'model.layers.0': head 0: ";
  ExpectRefused("\"head\":0", "\"head\":1", {head, "'head'", "'1'"});
  ExpectRefused("\"int8\"", "\"int4\"", {head, "'precision'", "int4"});
  ExpectRefused("\"floor\"", "\"topk\"", {head, "'select'", "topk"});
  ExpectRefused("\"floor\"", "\"all\"", {head, "'tau'", "'0.9'"});
  ExpectRefused("\"theta\":0.3", "\"theta\":\"0.3\"", {head, "'theta'", "0.3"});
  ExpectRefused("\"tau\":0.9", "\"tau\":1.1", {head, "'tau'", "'1.1'"});
  ExpectRefused("\"tau\":0.9", "\"tau\":null", {head, "'tau'", "'null'"});
  ExpectRefused("\"tau\":0.9,", "", {head, "'tau' is missing"});
  ExpectRefused("\"pv_skip\":8.5", "\"pv_skip\":-8.5", {head, "'pv_skip'", "'-8.5'"});
  ExpectRefused("\"pv_skip\":8.5", "\"pv_skip\":\"on\"", {head, "'pv_skip'", "on", "'off'"});
  ExpectRefused("\"sparsity\":0.75", "\"sparsity\":1.75", {head, "measured", "'sparsity'", "'1.75'"});
  ExpectRefused("\"verified_on\":2", "\"verified_on\":0", {head, "measured", "'verified_on'", "'0'"});
  ExpectRefused("\"measured\":{", "\"measured\":[],\"m\":{", {head, "'m'"});
}

TEST(Preset, NamesTheClosestLayers) {
  const Preset preset = Example();
  EXPECT_EQ(&FindLayer(preset, "model.layers.11", "p.json"), &preset.layers.at("model.layers.11"));
  try {
    FindLayer(preset, "model.layers.12", "p.json");
    ADD_FAILURE();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_LT(what.find("'model.layers.11'"), what.find("'model.layers.0'")) << what;  // the closest first
    EXPECT_NE(what.find("'model.layers.12'"), std::string::npos) << what;
  }
  EXPECT_THROW(FindLayer(Preset(), "", "p.json"), Error);
}

}  // namespace
}  // namespace sparge::io

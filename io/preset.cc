// preset.cc - reads and writes presets; every refusal names the file, the layer, the head, the field and the value.
#include "io/preset.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "io/atomic_file.h"
#include "io/strict_json.h"
#include "io/tensor.h"

namespace sparge::io {
namespace {

using Json = nlohmann::json;
using Ordered = nlohmann::ordered_json;

constexpr const char* kFormat = "sparge-preset";
constexpr int64_t kVersion = 3;
constexpr size_t kLargestFile = size_t{1} << 28;  // a thousand layers of a thousand heads
constexpr int kDeepestNesting = 7;                // measured figures of a head lie six levels deep
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr double kLeastLoss = std::numeric_limits<double>::min();  // 0 says that there is none
constexpr double kLargest = std::numeric_limits<double>::max();

constexpr std::pair<const char*, sparge_precision> kPrecisions[] = {
    {"fp32", SPARGE_PRECISION_FP32}, {"int16", SPARGE_PRECISION_INT16}, {"int8", SPARGE_PRECISION_INT8}};
constexpr std::pair<const char*, sparge_select> kSelects[] = {
    {"all", SPARGE_SELECT_ALL}, {"cdf", SPARGE_SELECT_CDF}, {"floor", SPARGE_SELECT_FLOOR}};
constexpr std::pair<const char*, sparge_predictor> kPredictors[] = {{"keys", SPARGE_PREDICT_KEYS},
                                                                    {"paper", SPARGE_PREDICT_PAPER}};

template <class Value, size_t N>
const char* NameOf(const std::pair<const char*, Value> (&known)[N], Value value) {
  for (const auto& [name, candidate] : known) {
    if (candidate == value) return name;
  }
  return "";
}

// What changed between versions: names of fields. Versions 1 and 2 know one measure, L1.
struct FieldNames {
  int64_t version;
  const char* target_l1;         // bounds
  const char* pv_l1;             // bounds
  const char *error, *pv_error;  // measured of a head
};
constexpr FieldNames kVersions[] = {{1, "l1", "l2", "l1", "l2"},
                                    {2, "target_l1", "pv_l1", "l1", "pv_l1"},
                                    {kVersion, "target_l1", "pv_l1", "error", "pv_error"}};

// One JSON object with the place it stands at, for messages.
class Fields {
 public:
  Fields(const Json& object, std::string_view file, std::string where, std::initializer_list<std::string_view> known)
      : object_(object), file_(file), where_(std::move(where)) {
    if (!object.is_object()) throw Error(file_, where_ + "is " + Quoted(object.dump()) + ", must be an object");
    for (const auto& item : object.items()) {
      if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
      throw Error(file_, where_ + "unknown field " + Quoted(item.key()));
    }
  }

  [[noreturn]] void Fail(const std::string& field, const std::string& must) const {
    throw Error(file_, where_ + "field " + Quoted(field) + " is " + Quoted(Value(field).dump()) + ", must be " + must);
  }

  const Json& Value(const std::string& field) const {
    const auto found = object_.find(field);
    if (found == object_.end()) throw Error(file_, where_ + "field " + Quoted(field) + " is missing");
    return *found;
  }

  std::string Text(const std::string& field) const {
    if (!Value(field).is_string()) Fail(field, "a string");
    return Value(field).get<std::string>();
  }

  double Number(const std::string& field, double low, double high) const {
    const Json& value = Value(field);
    const double number = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (number >= low && number <= high) return number;
    if (high == kLargest) Fail(field, "a number of at least " + Json(low).dump());
    Fail(field, "a number from " + Json(low).dump() + " to " + Json(high).dump());
  }

  int64_t Integer(const std::string& field, int64_t low, int64_t high) const {
    const Json& value = Value(field);
    const uint64_t number = value.is_number_unsigned() ? value.get<uint64_t>() : std::numeric_limits<uint64_t>::max();
    if (number >= static_cast<uint64_t>(low) && number <= static_cast<uint64_t>(high)) {
      return static_cast<int64_t>(number);
    }
    Fail(field, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  }

  bool Boolean(const std::string& field) const {
    if (!Value(field).is_boolean()) Fail(field, "true or false");
    return Value(field).get<bool>();
  }

  template <class Choice, size_t N>
  Choice OneOf(const std::string& field, const std::pair<const char*, Choice> (&known)[N]) const {
    std::string names;
    for (const auto& [name, value] : known) {
      if (Value(field) == name) return value;
      names += (names.empty() ? "" : " or ") + Quoted(name);
    }
    Fail(field, names);
  }

  std::vector<std::string> Texts(const std::string& field) const {
    std::vector<std::string> texts;
    if (!Value(field).is_array()) Fail(field, "a list of strings");
    for (const Json& item : Value(field)) {
      if (!item.is_string()) Fail(field, "a list of strings");
      texts.push_back(item.get<std::string>());
    }
    return texts;
  }

 private:
  const Json& object_;
  std::string_view file_;
  std::string where_;
};

PresetMeasured ReadMeasured(const Json& json, std::string_view file, const std::string& where,
                            const FieldNames& names) {
  const Fields fields(
      json, file, where + "measured: ", {"sparsity", "work", names.error, names.pv_error, "round_l1", "verified_on"});
  PresetMeasured measured;
  measured.sparsity = fields.Number("sparsity", 0, 1);
  measured.work = fields.Number("work", 0, 1);
  measured.error = fields.Number(names.error, 0, kLargest);
  measured.pv_error = fields.Number(names.pv_error, 0, kLargest);
  measured.round_l1 = fields.Number("round_l1", 0, kLargest);
  measured.verified_on = fields.Integer("verified_on", 1, kMost);
  return measured;
}

PresetHead ReadHead(const Json& json, std::string_view file, const std::string& where, int64_t index,
                    const FieldNames& names) {
  const Fields fields(json, file, where, {"head", "precision", "select", "theta", "tau", "pv_skip", "measured"});
  if (fields.Integer("head", 0, kMost) != index) {
    fields.Fail("head", std::to_string(index) + ": heads are listed in order, each once");
  }
  PresetHead head;
  head.precision = fields.OneOf("precision", kPrecisions);
  head.select = fields.OneOf("select", kSelects);
  head.params.theta = fields.Number("theta", -1, 1);
  head.params.tau = fields.Number("tau", 0, 1);
  head.params.pv_skip = SPARGE_PV_SKIP_OFF;
  if (fields.Value("pv_skip") != "off") {
    if (!fields.Value("pv_skip").is_number()) fields.Fail("pv_skip", "a number of at least 0, or 'off'");
    head.params.pv_skip = fields.Number("pv_skip", 0, kLargest);
  }
  if (head.dense() && head.params.tau != 1) fields.Fail("tau", "1 where select is 'all'");
  if (head.dense() && !std::isinf(head.params.pv_skip)) fields.Fail("pv_skip", "'off' where select is 'all'");
  head.measured = ReadMeasured(fields.Value("measured"), file, where, names);
  return head;
}

// A plan has one rule for all its heads; dense ones do with any.
void CheckOneRule(const PresetLayer& layer, std::string_view file, const std::string& where) {
  const PresetHead* first = nullptr;
  for (size_t i = 0; i < layer.heads.size(); ++i) {
    const PresetHead& head = layer.heads[i];
    if (head.dense()) continue;
    if (first == nullptr) first = &head;
    if (head.select == first->select) continue;
    throw Error(file, where + "head " + std::to_string(i) + ": field 'select' is '" + NameOf(kSelects, head.select) +
                          "', but a head before it has '" + NameOf(kSelects, first->select) + "'");
  }
}

PresetLayer ReadLayer(const Json& json, std::string_view file, const std::string& where, const FieldNames& names) {
  const Fields fields(json, file, where,
                      {"q_heads", "kv_heads", "qk_dim", "v_dim", "causal", "samples", "held_out", "heads"});
  PresetLayer layer;
  layer.q_heads = fields.Integer("q_heads", 1, kMost);
  layer.kv_heads = fields.Integer("kv_heads", 1, kMost);
  if (layer.q_heads % layer.kv_heads != 0) {
    fields.Fail("kv_heads", "a divisor of q_heads, which is " + std::to_string(layer.q_heads));
  }
  layer.qk_dim = fields.Integer("qk_dim", 1, SPARGE_MAX_HEAD_DIM);
  layer.v_dim = fields.Integer("v_dim", 1, SPARGE_MAX_HEAD_DIM);
  layer.causal = fields.Boolean("causal");
  layer.samples = fields.Texts("samples");
  layer.held_out = fields.Texts("held_out");
  const Json& heads = fields.Value("heads");
  if (!heads.is_array()) fields.Fail("heads", "a list");
  if (heads.size() != static_cast<size_t>(layer.q_heads)) {
    throw Error(file, where + "field 'heads' has " + std::to_string(heads.size()) +
                          " entries, must have q_heads = " + std::to_string(layer.q_heads));
  }
  for (int64_t i = 0; i < layer.q_heads; ++i) {
    layer.heads.push_back(
        ReadHead(heads[static_cast<size_t>(i)], file, where + "head " + std::to_string(i) + ": ", i, names));
  }
  CheckOneRule(layer, file, where);
  return layer;
}

PresetBounds ReadBounds(const Json& json, std::string_view file, const FieldNames& names) {
  PresetBounds bounds;
  if (names.version == kVersion && json.is_object() && json.contains("loss")) {
    const Fields fields(json, file, "bounds: ", {"loss", "measured_loss"});
    bounds.loss = fields.Number("loss", kLeastLoss, kLargest);
    bounds.measured_loss = fields.Number("measured_loss", 0, kLargest);
    return bounds;
  }
  const bool l2 = names.version == kVersion && json.is_object() && json.contains(TargetName(SPARGE_MEASURE_L2));
  bounds.measure = l2 ? SPARGE_MEASURE_L2 : SPARGE_MEASURE_L1;
  const std::string target = l2 ? TargetName(SPARGE_MEASURE_L2) : names.target_l1;
  const std::string pv = l2 ? PvName(SPARGE_MEASURE_L2) : names.pv_l1;
  const Fields fields(json, file, "bounds: ", {target, pv, "round_l1"});
  bounds.target = fields.Number(target, 0, kLargest);
  bounds.pv = fields.Number(pv, 0, kLargest);
  bounds.round_l1 = fields.Number("round_l1", 0, kLargest);
  return bounds;
}

Ordered BoundsJson(const PresetBounds& bounds) {
  if (bounds.of_loss()) return {{"loss", bounds.loss}, {"measured_loss", bounds.measured_loss}};
  return {
      {TargetName(bounds.measure), bounds.target}, {PvName(bounds.measure), bounds.pv}, {"round_l1", bounds.round_l1}};
}

Ordered HeadJson(const PresetHead& head, size_t index) {
  const PresetMeasured& m = head.measured;
  return {{"head", index},
          {"precision", PrecisionName(head.precision)},
          {"select", NameOf(kSelects, head.select)},
          {"theta", head.params.theta},
          {"tau", head.params.tau},
          {"pv_skip", std::isinf(head.params.pv_skip) ? Ordered("off") : Ordered(head.params.pv_skip)},
          {"measured",
           {{"sparsity", m.sparsity},
            {"work", m.work},
            {"error", m.error},
            {"pv_error", m.pv_error},
            {"round_l1", m.round_l1},
            {"verified_on", m.verified_on}}}};
}

// Lines of the fields of an object, without its braces; a head is one line, so that heads can be compared by eye.
std::string Lines(const Ordered& object, const std::string& indent) {
  std::string text;
  for (const auto& [key, value] : object.items()) text += indent + Ordered(key).dump() + ": " + value.dump() + ",\n";
  return text;
}

std::string LayerText(const PresetLayer& layer) {
  std::string text = Lines({{"q_heads", layer.q_heads},
                            {"kv_heads", layer.kv_heads},
                            {"qk_dim", layer.qk_dim},
                            {"v_dim", layer.v_dim},
                            {"causal", layer.causal},
                            {"samples", layer.samples},
                            {"held_out", layer.held_out}},
                           "      ");
  text += "      \"heads\": [";
  for (size_t i = 0; i < layer.heads.size(); ++i) {
    text += std::string(i == 0 ? "" : ",") + "\n        " + HeadJson(layer.heads[i], i).dump();
  }
  return text + "\n      ]";
}

// Number of letters to change, add or drop; what people mean by "almost the same name".
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string TargetName(sparge_measure measure) { return std::string("target_") + sparge_measure_name(measure); }
std::string PvName(sparge_measure measure) { return std::string("pv_") + sparge_measure_name(measure); }
const char* PrecisionName(sparge_precision precision) { return NameOf(kPrecisions, precision); }
const char* PredictorName(sparge_predictor predictor) { return NameOf(kPredictors, predictor); }

Preset ParsePreset(std::string_view text, std::string_view name) {
  if (text.size() > kLargestFile) {
    throw Error(
        name, "is no preset: " + std::to_string(text.size()) + " bytes are more than " + std::to_string(kLargestFile));
  }
  const Json json = ParseStrictJson(text, name, "preset", kDeepestNesting);
  // Format and version first: what else there may be depends on them.
  if (!json.is_object() || !json.contains("format") || json["format"] != kFormat) {
    throw Error(name, std::string("is no preset: field 'format' is missing or not '") + kFormat + "'");
  }
  const FieldNames* names = nullptr;
  for (const FieldNames& known : kVersions) {
    if (json.contains("version") && json["version"] == known.version) names = &known;
  }
  if (names == nullptr) {
    throw Error(name, "field 'version' is " + Quoted(json.contains("version") ? json["version"].dump() : "missing") +
                          ", this program reads 1 to " + std::to_string(kVersion));
  }
  const Fields fields(json, name, "",
                      {"format", "version", "made_by", "bounds", "predictor", "seed", "layers", "partial"});
  Preset preset;
  preset.made_by = fields.Text("made_by");
  preset.bounds = ReadBounds(fields.Value("bounds"), name, *names);
  preset.predictor = fields.OneOf("predictor", kPredictors);
  if (!fields.Value("seed").is_number_unsigned()) fields.Fail("seed", "a whole number from 0 to 2^64-1");
  preset.seed = fields.Value("seed").get<uint64_t>();
  if (!fields.Value("layers").is_object()) fields.Fail("layers", "an object");
  for (const auto& [layer, value] : fields.Value("layers").items()) {
    preset.layers.emplace(layer, ReadLayer(value, name, "layer " + Quoted(layer) + ": ", *names));
  }
  if (json.contains("partial")) {
    const Fields partial(json["partial"], name, "partial: ", {"options", "captures"});
    preset.partial = {partial.Text("options"), partial.Text("captures")};
  }
  return preset;
}

Preset ReadPreset(const std::string& path) {
  const std::vector<std::byte> file = ReadFile(path);
  return ParsePreset({reinterpret_cast<const char*>(file.data()), file.size()}, path);
}

std::string PresetText(const Preset& preset) {
  Ordered head = {{"format", kFormat},
                  {"version", kVersion},
                  {"made_by", preset.made_by},
                  {"bounds", BoundsJson(preset.bounds)},
                  {"predictor", PredictorName(preset.predictor)},
                  {"seed", preset.seed}};
  if (preset.partial) head["partial"] = {{"options", preset.partial->options}, {"captures", preset.partial->captures}};
  std::string text = "{\n" + Lines(head, "  ") + "  \"layers\": {";
  const char* separator = "\n";
  for (const auto& [name, layer] : preset.layers) {
    text += separator + ("    " + Ordered(name).dump()) + ": {\n" + LayerText(layer) + "\n    }";
    separator = ",\n";
  }
  return text + "\n  }\n}\n";
}

void WritePreset(const std::string& path, const Preset& preset) {
  std::string text;
  try {
    text = PresetText(preset);
  } catch (const Ordered::exception&) {
    throw Error(path, "a name of a layer or a sample is not valid UTF-8");
  }
  AtomicFile file(path);
  file.Write(std::as_bytes(std::span(text)));
  file.Commit();
}

const PresetLayer& FindLayer(const Preset& preset, const std::string& layer, std::string_view name) {
  const auto found = preset.layers.find(layer);
  if (found != preset.layers.end()) return found->second;
  constexpr size_t kNamed = 3;
  constexpr size_t kCompared = 200;  // characters: the distance takes the square of it
  std::vector<std::pair<size_t, std::string>> known;
  for (const auto& [candidate, unused] : preset.layers) {
    known.emplace_back(EditDistance(layer.substr(0, kCompared), candidate.substr(0, kCompared)), candidate);
  }
  std::sort(known.begin(), known.end());
  std::string names;
  for (size_t i = 0; i < std::min(kNamed, known.size()); ++i) names += (i == 0 ? "" : ", ") + Quoted(known[i].second);
  throw Error(name, "has no layer " + Quoted(layer) + "; " +
                        (names.empty() ? "it has no layers" : "most like it: " + names) + " (of " +
                        std::to_string(known.size()) + ")");
}

}  // namespace sparge::io

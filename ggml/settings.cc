#include "ggml/settings.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace sparge::ggml {
namespace {

// A value that is set but empty counts as not set: that is how a shell takes a variable back for one command.
std::string_view Value(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

[[noreturn]] void Refuse(const char* name, std::string_view value, const char* wanted) {
  throw std::runtime_error(std::string(name) + "=" + std::string(value) + " is not " + wanted);
}

template <class Number>
Number ReadNumber(const char* name, Number fallback, Number least, Number most, const char* wanted) {
  const std::string_view value = Value(name);
  if (value.empty()) return fallback;
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole = error == std::errc() && end == value.data() + value.size();
  if (!whole || !(number >= least && number <= most)) Refuse(name, value, wanted);
  return number;
}

bool ReadSwitch(const char* name, bool fallback) {
  const std::string_view value = Value(name);
  if (value.empty()) return fallback;
  if (value != "0" && value != "1") Refuse(name, value, "0 or 1");
  return value == "1";
}

Mode ReadMode() {
  const std::string_view value = Value("SPARGE_MODE");
  if (value.empty() || value == "auto") return Mode::kAuto;
  if (value == "exact") return Mode::kExact;
  if (value == "off") return Mode::kOff;
  Refuse("SPARGE_MODE", value, "auto, exact or off");
}

sparge_precision ReadPrecision() {
  const std::string_view value = Value("SPARGE_PRECISION");
  if (value.empty()) return SPARGE_PRECISION_INT8;
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
    if (value == io::PrecisionName(precision)) return precision;
  }
  Refuse("SPARGE_PRECISION", value, "int8, int16 or fp32");
}

// A variable that the mode leaves without effect is refused: its user expects one.
void RefuseIdle(const Settings& settings) {
  const auto refuse = [](const char* name, const char* beside) {
    if (!Value(name).empty()) throw std::runtime_error(std::string(name) + " has no effect with " + beside);
  };
  if (settings.mode != Mode::kAuto) {
    const char* mode = settings.mode == Mode::kExact ? "SPARGE_MODE=exact" : "SPARGE_MODE=off";
    for (const char* name : {"SPARGE_TARGET_L2", "SPARGE_TARGET_L1", "SPARGE_PRECISION", "SPARGE_PRESET",
                             "SPARGE_MIN_TOKENS", "SPARGE_DECODE"}) {
      refuse(name, mode);
    }
  }
  if (settings.precision == SPARGE_PRECISION_FP32) refuse("SPARGE_DECODE", "SPARGE_PRECISION=fp32");
  if (settings.preset) {
    for (const char* name : {"SPARGE_TARGET_L2", "SPARGE_TARGET_L1"}) refuse(name, "SPARGE_PRESET");
  }
  if (!Value("SPARGE_TARGET_L1").empty()) refuse("SPARGE_TARGET_L2", "SPARGE_TARGET_L1");
  if (BoundsOf(settings.bounds).target == 0) refuse("SPARGE_MIN_TOKENS", "a target of 0");
}

}  // namespace

Settings ReadSettings() {
  Settings settings;
  settings.mode = ReadMode();
  for (const auto& [name, target] :
       {std::pair("SPARGE_TARGET_L1", &settings.bounds.target_l1), {"SPARGE_TARGET_L2", &settings.bounds.target_l2}}) {
    *target = ReadNumber(name, *target, 0.0, 1.0, "a number from 0 to 1");
  }
  settings.precision = ReadPrecision();
  settings.min_tokens =
      ReadNumber<int64_t>("SPARGE_MIN_TOKENS", settings.min_tokens, 0, INT32_MAX, "a number of tokens");
  settings.preset_path = Value("SPARGE_PRESET");
  if (!settings.preset_path.empty()) {
    settings.preset = std::make_shared<const io::Preset>(io::ReadPreset(settings.preset_path));
  }
  settings.stats = Value("SPARGE_STATS");
  if (settings.stats == "0") settings.stats.clear();
  if (settings.stats == "1") settings.stats = "stderr";
  settings.quiet = ReadSwitch("SPARGE_QUIET", false);
  settings.decode = ReadSwitch("SPARGE_DECODE", true);
  settings.claim_all = ReadSwitch("SPARGE_CLAIM_ALL", false);
  RefuseIdle(settings);
  return settings;
}

}  // namespace sparge::ggml

// flags.cc - parses the texts of flags.
#include "cli/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "io/tensor.h"

namespace sparge::cli {

using io::Quoted;

CLI::App* AddVerb(CLI::App& program, const std::string& name, const std::string& help, const std::string& footer) {
  return program.add_subcommand(name, help)->footer(footer);
}

void AddText(CLI::App& app, const std::string& flag, const std::string& kind, const std::string& help,
             const std::string& group, const std::function<void(const std::string&)>& take) {
  app.add_option_function<std::string>(flag, take, help)->type_name(kind)->group(group);
}

double ParseNumber(const std::string& flag, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop != end || error != std::errc{}) throw UsageError(flag + ": " + Quoted(text) + " is not a number");
  if (!std::isfinite(value)) throw UsageError(flag + ": " + Quoted(text) + " is not finite");
  return value;
}

double ParseNumber(const std::string& flag, const std::string& text, double low, double high) {
  const double value = ParseNumber(flag, text);
  if (value < low || value > high) {
    const std::string range = std::isinf(high)
                                  ? "at least " + CLI::detail::to_string(low)
                                  : "from " + CLI::detail::to_string(low) + " to " + CLI::detail::to_string(high);
    throw UsageError(flag + ": " + Quoted(text) + " is out of range, must be " + range);
  }
  return value;
}

int64_t ParseInteger(const std::string& flag, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop != end || error == std::errc::invalid_argument) {
    throw UsageError(flag + ": " + Quoted(text) + " is not a whole number");
  }
  if (error != std::errc{} || value < low || value > high) {
    throw UsageError(flag + ": " + Quoted(text) + " is out of range, must be from " + std::to_string(low) + " to " +
                     std::to_string(high));
  }
  return value;
}

std::string ParseChoice(const std::string& flag, const std::string& text, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    throw UsageError(flag + ": " + Quoted(text) + " is not one of " + JoinChoices(choices));
  }
  return text;
}

std::string JoinChoices(const std::vector<std::string>& choices) {
  std::string text;
  for (const std::string& choice : choices) text += (text.empty() ? "" : "|") + choice;
  return text;
}

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace sparge::cli

// grid.cc - parses and checks the grid of image and video tokens.
#include "io/grid.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <vector>

#include "io/tensor.h"

namespace sparge::io {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // tokens that the library can take

// "1,2,3" in parts; an empty part stays, to be refused.
std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t comma; (comma = text.find(',', begin)) != std::string::npos; begin = comma + 1) {
    parts.push_back(text.substr(begin, comma - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

int64_t ParseCount(const std::string& where, const std::string& text, int64_t least) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop != end || error == std::errc::invalid_argument) throw Error(where, Quoted(text) + " is not a whole number");
  if (error != std::errc{} || value < least || value > kMost) {
    throw Error(where, Quoted(text) + " is out of range, must be from " + std::to_string(least) + " to " +
                           std::to_string(kMost));
  }
  return value;
}

}  // namespace

GridSides ParseGrid(const std::string& where, const std::string& text) {
  const std::vector<std::string> parts = SplitList(text);
  if (parts.size() != 3) throw Error(where, Quoted(text) + " is not T,H,W");
  GridSides sides;
  for (size_t i = 0; i < 3; ++i) sides[i] = ParseCount(where, parts[i], 1);
  if (sides[1] > kMost / sides[0] || sides[2] > kMost / (sides[0] * sides[1])) {
    throw Error(where, Quoted(text) + " is more than " + std::to_string(kMost) + " tokens");
  }
  return sides;
}

TextTokens ParseTextTokens(const std::string& where, const std::string& text) {
  const std::vector<std::string> parts = SplitList(text);
  const bool after = parts.size() == 2 && parts[1] == "after";
  if (parts.size() > 1 && !after) throw Error(where, Quoted(text) + " is not N or N,after");
  return {ParseCount(where, parts[0], 0), after};
}

std::string GridText(const GridSides& sides) {
  return std::to_string(sides[0]) + "," + std::to_string(sides[1]) + "," + std::to_string(sides[2]);
}

std::string TextTokensText(const TextTokens& text) { return std::to_string(text.count) + (text.after ? ",after" : ""); }

std::string OrderObstacle(const sparge_plan_desc& desc) {
  if (desc.causal != 0) return "causal attention";
  if (desc.q_tokens == desc.kv_tokens) return "";
  return std::to_string(desc.q_tokens) + " queries on " + std::to_string(desc.kv_tokens) + " keys";
}

std::string GridMisfit(const GridSides& sides, const TextTokens& text, const sparge_plan_desc& desc) {
  const int64_t made = text.count + sides[0] * sides[1] * sides[2];
  if (made == desc.q_tokens) return "";
  return "grid " + GridText(sides) + " and " + std::to_string(text.count) + " text tokens make " +
         std::to_string(made) + " tokens, but there are " + std::to_string(desc.q_tokens);
}

void TakeGridOrder(const GridSides& sides, const TextTokens& text, sparge_plan_desc& desc) {
  std::copy(sides.begin(), sides.end(), desc.grid);
  desc.text_tokens = text.count;
  desc.text_after = text.after ? 1 : 0;
}

}  // namespace sparge::io

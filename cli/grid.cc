// grid.cc - parses and checks the grid of image and video tokens.
#include "cli/grid.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>

#include "cli/flags.h"
#include "io/tensor.h"

namespace sparge::cli {
namespace {

using io::Quoted;

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // tokens that the library can take

GridSides ParseGrid(const std::string& where, const std::string& text) {
  const std::vector<std::string> parts = SplitList(text);
  if (parts.size() != 3) throw UsageError(where + ": " + Quoted(text) + " is not T,H,W");
  GridSides sides;
  for (size_t i = 0; i < 3; ++i) sides[i] = ParseInteger(where, parts[i], 1, kMost);
  if (sides[1] > kMost / sides[0] || sides[2] > kMost / (sides[0] * sides[1])) {
    throw UsageError(where + ": " + Quoted(text) + " is more than " + std::to_string(kMost) + " tokens");
  }
  return sides;
}

TextTokens ParseText(const std::string& where, const std::string& text) {
  const std::vector<std::string> parts = SplitList(text);
  const bool after = parts.size() == 2 && parts[1] == "after";
  if (parts.size() > 1 && !after) throw UsageError(where + ": " + Quoted(text) + " is not N or N,after");
  return {ParseInteger(where, parts[0], 0, kMost), after};
}

std::string TextTokensText(const TextTokens& text) { return std::to_string(text.count) + (text.after ? ",after" : ""); }

// What keeps a problem from being taken in another order; empty = nothing does.
std::string Obstacle(const PlanDesc& desc) {
  if (desc.causal != 0) return "causal attention";
  if (desc.window != 0) return "--window " + std::to_string(desc.window);
  if (desc.mask != SPARGE_MASK_NONE) return "--mask";
  if (desc.q_tokens != desc.kv_tokens) {
    return std::to_string(desc.q_tokens) + " queries on " + std::to_string(desc.kv_tokens) + " keys";
  }
  return "";
}

void CheckTokens(const std::string& where, const TokenGrid& grid, int64_t tokens) {
  const int64_t made = grid.text.count + grid.sides[0] * grid.sides[1] * grid.sides[2];
  if (made == tokens) return;
  throw UsageError(where + " and " + std::to_string(grid.text.count) + " text tokens make " + std::to_string(made) +
                   " tokens, but there are " + std::to_string(tokens));
}

void Describe(const TokenGrid& grid, PlanDesc& desc) {
  std::copy(grid.sides.begin(), grid.sides.end(), desc.grid);
  desc.text_tokens = grid.text.count;
  desc.text_after = grid.text.after ? 1 : 0;
}

}  // namespace

std::string GridText(const GridSides& sides) {
  return std::to_string(sides[0]) + "," + std::to_string(sides[1]) + "," + std::to_string(sides[2]);
}

void RegisterGrid(CLI::App& app, GridOptions& options) {
  AddText(app, "--grid", "T,H,W", "tokens of an image (1,H,W) or video, row by row: take them along a Hilbert curve",
          "Attention", [&options](const std::string& text) { options.sides = ParseGrid("--grid", text); });
  AddText(app, "--text-tokens", "N[,after]", "N tokens before, or after, the grid that are none of it; default 0",
          "Attention", [&options](const std::string& text) { options.text = ParseText("--text-tokens", text); });
  AddText(app, "--order", "hilbert|raster", "order of grid tokens in blocks; default hilbert", "Attention",
          [&options](const std::string& text) {
            options.order = ParseChoice("--order", text, {"hilbert", "raster"});
          });
}

std::optional<TokenGrid> TakeGrid(const GridOptions& options, const io::Metadata& metadata, const std::string& path,
                                  PlanDesc& desc, std::vector<std::string>& notes) {
  const auto found = metadata.find("grid");
  const auto text_found = metadata.find("text_tokens");
  if (!options.sides && found == metadata.end()) {
    const std::string without = " has no meaning without --grid, or a grid in the metadata of the file";
    if (options.text) throw UsageError("--text-tokens " + TextTokensText(*options.text) + without);
    if (options.order) throw UsageError("--order " + *options.order + without);
    return std::nullopt;
  }
  TokenGrid grid{};
  grid.sides = options.sides ? *options.sides : ParseGrid(path + ": metadata 'grid'", found->second);
  const bool own_text = !options.text && text_found != metadata.end();
  if (options.text) grid.text = *options.text;
  if (own_text) grid.text = ParseText(path + ": metadata 'text_tokens'", text_found->second);
  grid.hilbert = options.order.value_or("hilbert") == "hilbert";

  const std::string where =
      options.sides ? "--grid " + GridText(grid.sides) : path + ": metadata grid " + GridText(grid.sides);
  const std::string obstacle = Obstacle(desc);
  if (grid.hilbert && !obstacle.empty()) {
    // A file's grid is a default, and gives way; a flag is an order.
    if (options.sides || options.text || options.order) {
      throw UsageError(where + " cannot be combined with " + obstacle + ", unless with --order raster");
    }
    notes.push_back("grid " + GridText(grid.sides) + " not used, because of " + obstacle);
    grid.hilbert = false;
    return grid;
  }
  if (grid.hilbert || options.sides) CheckTokens(where, grid, desc.q_tokens);
  if (!options.sides) notes.push_back("grid " + GridText(grid.sides) + (grid.hilbert ? "" : " (not used)"));
  if (own_text) notes.push_back("text_tokens " + TextTokensText(grid.text));
  if (grid.hilbert) Describe(grid, desc);
  return grid;
}

}  // namespace sparge::cli

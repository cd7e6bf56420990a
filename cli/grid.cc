// grid.cc - decides between the flags and the metadata of a file.
#include "cli/grid.h"

#include <CLI/CLI.hpp>

#include "cli/flags.h"

namespace sparge::cli {
namespace {

// What keeps a call from being taken in another order; empty = nothing does.
std::string Obstacle(const PlanDesc& desc) {
  if (desc.window != 0) return "--window " + std::to_string(desc.window);
  if (desc.mask != SPARGE_MASK_NONE) return "--mask";
  return io::OrderObstacle(desc);
}

}  // namespace

void RegisterGrid(CLI::App& app, GridOptions& options) {
  AddText(app, "--grid", "T,H,W", "tokens of an image (1,H,W) or video, row by row: take them along a Hilbert curve",
          "Attention", [&options](const std::string& text) { options.sides = io::ParseGrid("--grid", text); });
  AddText(app, "--text-tokens", "N[,after]", "N tokens before, or after, the grid that are none of it; default 0",
          "Attention",
          [&options](const std::string& text) { options.text = io::ParseTextTokens("--text-tokens", text); });
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
    if (options.text) throw UsageError("--text-tokens " + io::TextTokensText(*options.text) + without);
    if (options.order) throw UsageError("--order " + *options.order + without);
    return std::nullopt;
  }
  TokenGrid grid{};
  grid.sides = options.sides ? *options.sides : io::ParseGrid(path + ": metadata 'grid'", found->second);
  const bool own_text = !options.text && text_found != metadata.end();
  if (options.text) grid.text = *options.text;
  if (own_text) grid.text = io::ParseTextTokens(path + ": metadata 'text_tokens'", text_found->second);
  grid.hilbert = options.order.value_or("hilbert") == "hilbert";

  const std::string where =
      options.sides ? "--grid " + io::GridText(grid.sides) : path + ": metadata grid " + io::GridText(grid.sides);
  const std::string obstacle = Obstacle(desc);
  if (grid.hilbert && !obstacle.empty()) {
    // A file's grid is a default, and gives way; a flag is an order.
    if (options.sides || options.text || options.order) {
      throw UsageError(where + " cannot be combined with " + obstacle + ", unless with --order raster");
    }
    notes.push_back("grid " + io::GridText(grid.sides) + " not used, because of " + obstacle);
    grid.hilbert = false;
    return grid;
  }
  const std::string misfit = grid.hilbert || options.sides ? io::GridMisfit(grid.sides, grid.text, desc) : "";
  if (!misfit.empty()) throw UsageError((options.sides ? "--" : path + ": metadata ") + misfit);
  if (!options.sides) notes.push_back("grid " + io::GridText(grid.sides) + (grid.hilbert ? "" : " (not used)"));
  if (own_text) notes.push_back("text_tokens " + io::TextTokensText(grid.text));
  if (grid.hilbert) io::TakeGridOrder(grid.sides, grid.text, desc);
  return grid;
}

}  // namespace sparge::cli

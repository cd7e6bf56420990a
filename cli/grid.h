// grid.h - image and video tokens on the command line: the grid they lie on, text beside it, and in which order they
// are taken.
#ifndef SPARGE_CLI_GRID_H_
#define SPARGE_CLI_GRID_H_

#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "io/grid.h"
#include "io/safetensors.h"

namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

// As given.
struct GridOptions {
  std::optional<io::GridSides> sides;
  std::optional<io::TextTokens> text;
  std::optional<std::string> order;  // "hilbert" or "raster"
};

// In force.
struct TokenGrid {
  io::GridSides sides;
  io::TextTokens text;
  bool hilbert;  // else the tokens are taken as they lie
};

// --grid, --text-tokens and --order.
void RegisterGrid(CLI::App& app, GridOptions& options);

// Flags before the metadata of `path`; nothing if there is no grid. In Hilbert order the grid goes into `desc`, whose
// tokens, causality, window and mask must have been set. What was taken from the metadata is added to `notes`.
std::optional<TokenGrid> TakeGrid(const GridOptions& options, const io::Metadata& metadata, const std::string& path,
                                  PlanDesc& desc, std::vector<std::string>& notes);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_GRID_H_

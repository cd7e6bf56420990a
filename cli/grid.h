// grid.h - image and video tokens on the command line: the grid they lie on, text beside it, and in which order they
// are taken.
#ifndef SPARGE_CLI_GRID_H_
#define SPARGE_CLI_GRID_H_

#include <array>
#include <cstdint>
#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace CLI {
class App;
}  // namespace CLI

namespace sparge::cli {

using GridSides = std::array<int64_t, 3>;  // T, H, W

struct TextTokens {
  int64_t count = 0;
  bool after = false;
};

// As given.
struct GridOptions {
  std::optional<GridSides> sides;
  std::optional<TextTokens> text;
  std::optional<std::string> order;  // "hilbert" or "raster"
};

// In force.
struct TokenGrid {
  GridSides sides;
  TextTokens text;
  bool hilbert;  // else the tokens are taken as they lie
};

// --grid, --text-tokens and --order.
void RegisterGrid(CLI::App& app, GridOptions& options);

// Flags before the metadata of `path`; nothing if there is no grid. In Hilbert order the grid goes into `desc`, whose
// tokens, causality, window and mask must have been set. What was taken from the metadata is added to `notes`.
std::optional<TokenGrid> TakeGrid(const GridOptions& options, const io::Metadata& metadata, const std::string& path,
                                  PlanDesc& desc, std::vector<std::string>& notes);

std::string GridText(const GridSides& sides);  // "8,16,16"

}  // namespace sparge::cli
#endif  // SPARGE_CLI_GRID_H_

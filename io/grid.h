// grid.h - image and video tokens: the grid they lie on and the text beside it, as texts and in a plan.
#ifndef SPARGE_IO_GRID_H_
#define SPARGE_IO_GRID_H_

#include <sparge/sparge.h>

#include <array>
#include <cstdint>
#include <string>

namespace sparge::io {

using GridSides = std::array<int64_t, 3>;  // T, H, W

struct TextTokens {
  int64_t count = 0;
  bool after = false;  // the grid, instead of before it
};

// `where` is what messages call the source of the text. Both throw Error.
GridSides ParseGrid(const std::string& where, const std::string& text);         // "8,16,16"
TextTokens ParseTextTokens(const std::string& where, const std::string& text);  // "32" or "32,after"
std::string GridText(const GridSides& sides);
std::string TextTokensText(const TextTokens& text);

// What keeps the tokens of a recorded call from being taken in another order, in words; empty = nothing does.
std::string OrderObstacle(const sparge_plan_desc& desc);
// "grid 8,16,16 and 0 text tokens make 2048 tokens, but there are 2000"; empty = they are as many.
std::string GridMisfit(const GridSides& sides, const TextTokens& text, const sparge_plan_desc& desc);
// The plan takes its tokens along a curve through the grid.
void TakeGridOrder(const GridSides& sides, const TextTokens& text, sparge_plan_desc& desc);

}  // namespace sparge::io
#endif  // SPARGE_IO_GRID_H_

// report_picture.h - pictures of tiles: one pixel per tile of the block map, in colours that colour-blind people can
// tell apart, and their PNG files.
#ifndef SPARGE_CLI_REPORT_PICTURE_H_
#define SPARGE_CLI_REPORT_PICTURE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sparge::cli {

struct Color {
  uint8_t red, green, blue;
};
std::string HexColor(Color color);  // "#0072b2"

struct Image {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb;  // row by row

  Image() = default;
  Image(int64_t columns, int64_t rows)
      : width(columns), height(rows), rgb(static_cast<size_t>(3 * columns * rows), 0xff) {}
  Color At(int64_t x, int64_t y) const {
    const uint8_t* pixel = rgb.data() + 3 * (y * width + x);
    return {pixel[0], pixel[1], pixel[2]};
  }
  void Set(int64_t x, int64_t y, Color color) {
    uint8_t* pixel = rgb.data() + 3 * (y * width + x);
    pixel[0] = color.red;
    pixel[1] = color.green;
    pixel[2] = color.blue;
  }
};

// Masses are coloured by their logarithm, from this one (and all below) up to 1.
inline constexpr double kLeastMass = 1e-5;
// Colours at equal steps of the scale, from dark to bright.
std::span<const Color> MassScale();

// What a tile can be; the order of kTileColors.
enum class Tile { kHidden, kDropped, kMissed, kKept, kPartlySkipped, kSkipped };
inline constexpr std::array<Color, 6> kTileColors = {{{0xe4, 0xe4, 0xe4},    // no query of it sees a key of it
                                                      {0xff, 0xff, 0xff},    // not computed
                                                      {0xcc, 0x79, 0xa7},    // not computed, but holds kMissedMass
                                                      {0x00, 0x72, 0xb2},    // computed
                                                      {0x56, 0xb4, 0xe9},    // QK computed, PV of some row groups not
                                                      {0xe6, 0x9f, 0x00}}};  // QK computed, PV of no row group
// A tile that was left out and holds this share of its row's attention deserves a look.
inline constexpr double kMissedMass = 0.01;

// The tiles of one head, `columns` key blocks in `rows` rows of query blocks.
struct TileGrid {
  int64_t rows, columns;
};
Image DrawMasses(TileGrid grid, std::span<const float> mass, std::span<const uint8_t> visible);
Image DrawTiles(TileGrid grid, std::span<const Tile> tiles);

// Pixels repeated, `x` times in width and `y` times in height.
Image Enlarge(const Image& image, int64_t x, int64_t y);
// Images of the same height side by side, `gap` white pixels between them.
Image Beside(std::span<const Image> images, int64_t gap);

std::vector<std::byte> EncodePng(const Image& image);
std::string DataUri(const Image& image);  // "data:image/png;base64,..."

}  // namespace sparge::cli
#endif  // SPARGE_CLI_REPORT_PICTURE_H_

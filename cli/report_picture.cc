// report_picture.cc - draws tiles, and encodes images as PNG by libpng.
#include "cli/report_picture.h"

#include <png.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cli/report.h"

namespace sparge::cli {
namespace {

// The map "viridis" at steps of 1/8: brightness rises evenly, also in grey and to colour-blind eyes.
constexpr std::array<Color, 9> kScale = {{{68, 1, 84},
                                          {71, 44, 122},
                                          {59, 81, 139},
                                          {44, 113, 142},
                                          {33, 144, 141},
                                          {39, 173, 129},
                                          {92, 200, 99},
                                          {170, 220, 50},
                                          {253, 231, 37}}};

// More tiles than this per side share pixels: a picture on the page has no more.
constexpr int64_t kMostPixels = 280;

Color MassColor(double mass) {
  const double at = mass > kLeastMass ? 1 - std::log(std::min(mass, 1.0)) / std::log(kLeastMass) : 0;
  const double step = at * (kScale.size() - 1);
  const auto low = std::min(static_cast<size_t>(step), kScale.size() - 2);
  const double share = step - static_cast<double>(low);
  const auto mix = [share](uint8_t a, uint8_t b) { return static_cast<uint8_t>(std::lround(a + share * (b - a))); };
  const Color a = kScale[low], b = kScale[low + 1];
  return {mix(a.red, b.red), mix(a.green, b.green), mix(a.blue, b.blue)};
}

// Tiles that share a pixel along one side.
int64_t TilesPerPixel(int64_t tiles) { return std::max<int64_t>(1, (tiles + kMostPixels - 1) / kMostPixels); }

// draw(x, y, first column, end, first row, end) for every pixel of a picture of the grid.
template <class Draw>
Image ForEachPixel(TileGrid grid, const Draw& draw) {
  const int64_t across = TilesPerPixel(grid.columns), down = TilesPerPixel(grid.rows);
  Image image((grid.columns + across - 1) / across, (grid.rows + down - 1) / down);
  for (int64_t y = 0; y < image.height; ++y) {
    for (int64_t x = 0; x < image.width; ++x) {
      image.Set(
          x, y,
          draw(x * across, std::min((x + 1) * across, grid.columns), y * down, std::min((y + 1) * down, grid.rows)));
    }
  }
  return image;
}

}  // namespace

std::string HexColor(Color color) { return Format("#%02x%02x%02x", color.red, color.green, color.blue); }

std::span<const Color> MassScale() { return kScale; }

Image DrawMasses(TileGrid grid, std::span<const float> mass, std::span<const uint8_t> visible) {
  return ForEachPixel(grid, [&](int64_t left, int64_t right, int64_t top, int64_t bottom) {
    double most = 0;  // the largest of the tiles that share the pixel: a mean would hide single bright ones
    bool any = false;
    for (int64_t y = top; y < bottom; ++y) {
      for (int64_t x = left; x < right; ++x) {
        const auto tile = static_cast<size_t>(y * grid.columns + x);
        any = any || visible[tile] != 0;
        most = std::max<double>(most, mass[tile]);
      }
    }
    return any ? MassColor(most) : kTileColors[static_cast<size_t>(Tile::kHidden)];
  });
}

Image DrawTiles(TileGrid grid, std::span<const Tile> tiles) {
  return ForEachPixel(grid, [&](int64_t left, int64_t right, int64_t top, int64_t bottom) {
    int64_t red = 0, green = 0, blue = 0;  // tiles that share a pixel mix their colours
    for (int64_t y = top; y < bottom; ++y) {
      for (int64_t x = left; x < right; ++x) {
        const Color color = kTileColors[static_cast<size_t>(tiles[static_cast<size_t>(y * grid.columns + x)])];
        red += color.red;
        green += color.green;
        blue += color.blue;
      }
    }
    const int64_t count = (right - left) * (bottom - top);
    return Color{static_cast<uint8_t>(red / count), static_cast<uint8_t>(green / count),
                 static_cast<uint8_t>(blue / count)};
  });
}

Image Enlarge(const Image& image, int64_t x, int64_t y) {
  Image large(image.width * x, image.height * y);
  for (int64_t row = 0; row < large.height; ++row) {
    for (int64_t column = 0; column < large.width; ++column) large.Set(column, row, image.At(column / x, row / y));
  }
  return large;
}

Image Beside(std::span<const Image> images, int64_t gap) {
  int64_t width = -gap, height = 0;
  for (const Image& image : images) {
    width += image.width + gap;
    height = std::max(height, image.height);
  }
  Image joined(std::max<int64_t>(width, 0), height);
  int64_t left = 0;
  for (const Image& image : images) {
    for (int64_t y = 0; y < image.height; ++y) {
      for (int64_t x = 0; x < image.width; ++x) joined.Set(left + x, y, image.At(x, y));
    }
    left += image.width + gap;
  }
  return joined;
}

std::vector<std::byte> EncodePng(const Image& image) {
  png_image header = {};
  header.version = PNG_IMAGE_VERSION;
  header.width = static_cast<png_uint_32>(image.width);
  header.height = static_cast<png_uint_32>(image.height);
  header.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(header);
  std::vector<std::byte> bytes(size);
  if (png_image_write_to_memory(&header, bytes.data(), &size, 0, image.rgb.data(), 0, nullptr) == 0) {
    throw std::runtime_error(std::string("PNG: ") + header.message);
  }
  bytes.resize(size);
  return bytes;
}

std::string DataUri(const Image& image) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::vector<std::byte> bytes = EncodePng(image);
  std::string text = "data:image/png;base64,";
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j)
      group = group << 8 | (i + j < bytes.size() ? static_cast<uint32_t>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) {
      const bool padding = i + j > bytes.size();  // one byte has two digits, two have three
      text += padding ? '=' : kDigits[group >> (18 - 6 * j) & 63];
    }
  }
  return text;
}

}  // namespace sparge::cli

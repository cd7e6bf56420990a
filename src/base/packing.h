// What every device does alike when it packs queries and keys, so that they get the same integers: the rotation of rows
// before they become 8-bit numbers, and how large a score may be.
#ifndef SPARGE_SRC_BASE_PACKING_H_
#define SPARGE_SRC_BASE_PACKING_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/base/units.h"

namespace sparge::impl {

// No score exceeds this in log2 units (rotated rows: this times the root of the rotation block, at most 23). It is far
// beyond where softmax is one-hot for any two different floats, and its differences and negations are finite.
inline constexpr double kScoreLimit = 1e30;
inline constexpr double kStoredKeyMax = 4;  // |key - mean| <= 2 max|key|, and max|key| < 2 k_unit

// Rows of `dim` numbers are rotated in blocks of this many: the largest power of two that divides dim rounded up to
// whole quads of int8. Rotating both sides multiplies q . k by it.
inline constexpr int64_t RotationBlock(int64_t dim) {
  const int64_t width = RoundUp(dim, 4);
  return width & -width;
}

// Without the signs a constant row would become a single spike.
struct RandomSigns {
  alignas(64) float sign[RoundUp(SPARGE_MAX_HEAD_DIM, 16)];
  constexpr RandomSigns() : sign() {
    uint32_t state = 0x9E3779B9;
    for (float& s : sign) {
      state ^= state << 13;
      state ^= state >> 17;
      state ^= state << 5;
      s = (state >> 16) % 2 == 0 ? 1.0f : -1.0f;
    }
  }
};
inline constexpr RandomSigns kRandomSigns;

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_PACKING_H_

// Rotation of a query or key row before it becomes 8-bit numbers, compiled once per instruction set.
//
// q . k does not change if both are rotated. A Hadamard rotation after fixed random signs spreads an outlier channel
// over all channels, so that the largest number of a row, which sets the step of its grid, is close to the others;
// docs/numerics.md has the figures.
#if defined(SPARGE_SRC_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_ROTATE_INL_H_
#undef SPARGE_SRC_ROTATE_INL_H_
#else
#define SPARGE_SRC_ROTATE_INL_H_
#endif

#include <hwy/highway.h>

#include "src/base/vector-inl.h"
#include "src/pack_ops.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
namespace HWY_NAMESPACE {
// Without the signs a constant row would become a single spike.
struct RandomSigns {
  alignas(64) float sign[RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign)];
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

// sign[k][i] = -1 iff bit k of lane i is set.
struct LaneSigns {
  alignas(64) float sign[4][16];
  constexpr LaneSigns() : sign() {
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 16; ++i) sign[k][i] = (i >> k) % 2 == 0 ? 1.0f : -1.0f;
    }
  }
};
inline constexpr LaneSigns kLaneSigns;

// Sums and differences of lane pairs: lane i takes partner + own if bit k of i is 0, else partner - own. The partner of
// i is i with its bits 0..k flipped, which is what the Reverse operations give.
HWY_INLINE VF LanePairs(VF own, VF partner, int k) {
  const F32 d;
  return hn::MulAdd(own, hn::Load(d, kLaneSigns.sign[k]), partner);
}

// row = rotation(row) in blocks of RotationBlock(dim); grows every norm by the square root of the block. Returns the
// largest magnitudes.
HWY_INLINE VF RotateRow(float* row, int64_t dim, int64_t pad) {
  const F32 d;
  const int64_t block = RotationBlock(dim);
  VF top = hn::Zero(d);
  for (int64_t i = 0; i < pad; i += kLanes) {
    VF x = hn::Mul(hn::Load(d, row + i), hn::Load(d, kRandomSigns.sign + i));
    if (block >= 2) x = LanePairs(x, hn::Reverse2(d, x), 0);
    if (block >= 4) x = LanePairs(x, hn::Reverse4(d, x), 1);
    if constexpr (kLanes >= 8) {
      if (block >= 8) x = LanePairs(x, hn::Reverse8(d, x), 2);
    }
    if constexpr (kLanes >= 16) {
      if (block >= 16) x = LanePairs(x, hn::Reverse(d, x), 3);
    }
    hn::Store(x, d, row + i);
    if (block <= kLanes) top = hn::Max(top, hn::Abs(x));
  }
  for (int64_t half = kLanes; half < block; half *= 2) {
    for (int64_t base = 0; base < RoundUp(dim, 4); base += 2 * half) {
      for (int64_t i = base; i < base + half; i += kLanes) {
        const VF a = hn::Load(d, row + i);
        const VF b = hn::Load(d, row + i + half);
        hn::Store(hn::Add(a, b), d, row + i);
        hn::Store(hn::Sub(a, b), d, row + i + half);
        // |a| + |b| is the larger of |a + b| and |a - b|.
        if (2 * half == block) top = hn::Max(top, hn::Add(hn::Abs(a), hn::Abs(b)));
      }
    }
  }
  return top;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

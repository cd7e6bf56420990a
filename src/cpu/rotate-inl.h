// Rotation of a query or key row before it becomes 8-bit numbers, compiled once per instruction set.
//
// q . k does not change if both are rotated. A Hadamard rotation after fixed random signs spreads an outlier channel
// over all channels, so that the largest number of a row, which sets the step of its grid, is close to the others;
// docs/numerics.md has the figures.
#if defined(SPARGE_SRC_CPU_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_ROTATE_INL_H_
#undef SPARGE_SRC_CPU_ROTATE_INL_H_
#else
#define SPARGE_SRC_CPU_ROTATE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "src/base/packing.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {
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

// kVectors vectors at `row`, rotated in registers: within vectors up to `block` lanes, then across vectors. Returns the
// largest magnitudes.
template <int kVectors>
HWY_INLINE VF RotateChunk(float* row, const float* sign, int64_t block) {
  const F32 d;
  VF x[kVectors];
  Unroll<kVectors>([&](auto v) SPARGE_INLINE {
    VF y = hn::Mul(hn::Load(d, row + v * kLanes), hn::Load(d, sign + v * kLanes));
    if (kVectors > 1 || block >= 2) y = LanePairs(y, hn::Reverse2(d, y), 0);
    if (kVectors > 1 || block >= 4) y = LanePairs(y, hn::Reverse4(d, y), 1);
    if constexpr (kLanes >= 8) {
      if (kVectors > 1 || block >= 8) y = LanePairs(y, hn::Reverse8(d, y), 2);
    }
    if constexpr (kLanes >= 16) {
      if (kVectors > 1 || block >= 16) y = LanePairs(y, hn::Reverse(d, y), 3);
    }
    x[v] = y;
  });
  const auto stage = [&](auto half) SPARGE_INLINE {
    if constexpr (half < kVectors) {
      Unroll<kVectors>([&](auto v) SPARGE_INLINE {
        if constexpr ((v & half) == 0) {
          const VF sum = hn::Add(x[v], x[v + half]);
          x[v + half] = hn::Sub(x[v], x[v + half]);
          x[v] = sum;
        }
      });
    }
  };
  stage(std::integral_constant<int, 1>{});
  stage(std::integral_constant<int, 2>{});
  stage(std::integral_constant<int, 4>{});
  stage(std::integral_constant<int, 8>{});
  static_assert(kVectors <= 16);
  VF top = hn::Zero(d);
  Unroll<kVectors>([&](auto v) SPARGE_INLINE {
    hn::Store(x[v], d, row + v * kLanes);
    top = hn::Max(top, hn::Abs(x[v]));
  });
  return top;
}

template <int kVectors>
HWY_INLINE VF RotateChunks(float* row, int64_t pad, int64_t block) {
  VF top = hn::Zero(F32());
  for (int64_t i = 0; i < pad; i += kVectors * kLanes) {
    top = hn::Max(top, RotateChunk<kVectors>(row + i, kRandomSigns.sign + i, block));
  }
  return top;
}

// row = rotation(row) in blocks of `block` = RotationBlock(dim); grows every norm by the square root of the block.
// Returns the largest magnitudes.
HWY_INLINE VF RotateRow(float* row, int64_t block, int64_t pad) {
  constexpr int64_t kInRegisters = 64;
  const F32 d;
  const int64_t vectors = std::min(block, kInRegisters) / kLanes;
  VF top = vectors <= 1   ? RotateChunks<1>(row, pad, block)
           : vectors == 2 ? RotateChunks<2>(row, pad, block)
           : vectors == 4 ? RotateChunks<4>(row, pad, block)
           : vectors == 8 ? RotateChunks<8>(row, pad, block)
                          : RotateChunks<kInRegisters / kLanes>(row, pad, block);
  for (int64_t half = kInRegisters; half < block; half *= 2) {
    top = hn::Zero(d);
    for (int64_t i = 0; i < pad; i += kLanes) {
      if ((i & half) != 0) continue;
      const VF a = hn::Load(d, row + i);
      const VF b = hn::Load(d, row + i + half);
      hn::Store(hn::Add(a, b), d, row + i);
      hn::Store(hn::Sub(a, b), d, row + i + half);
      top = hn::Max(top, hn::Add(hn::Abs(a), hn::Abs(b)));  // the larger of |a + b| and |a - b|
    }
  }
  return top;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

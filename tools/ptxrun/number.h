// Numbers narrower than float, and results that are only about right.
#ifndef SPARGE_TOOLS_PTXRUN_NUMBER_H_
#define SPARGE_TOOLS_PTXRUN_NUMBER_H_

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "src/base/half.h"

namespace ptxrun {

using sparge::impl::Bf16FromFloat;
using sparge::impl::F16FromFloat;
using sparge::impl::FloatFromBf16;
using sparge::impl::FloatFromF16;

// To a float such that rounding it once more, to at most 22 bits, gives what rounding `value` would have given: what is
// cut off shows in the last bit.
inline float NarrowForRounding(double value) {
  const auto narrow = static_cast<float>(value);
  if (!std::isfinite(narrow) || static_cast<double>(narrow) == value) return narrow;
  auto bits = std::bit_cast<uint32_t>(narrow);
  if (std::fabs(static_cast<double>(narrow)) > std::fabs(value)) --bits;  // toward zero
  return std::bit_cast<float>(bits | 1);
}

// 8-bit floats: kFraction bits of fraction, exponents from 1 - kBias on; `max`: largest finite.
template <int kFraction, int kBias, uint8_t kMax>
struct Float8 {
  static constexpr uint8_t kNan = 0x7F;

  // To nearest even; what is too large becomes the largest finite number (.satfinite).
  static uint8_t From(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
    if (std::isnan(value)) return kNan;
    const float magnitude = std::fabs(value);
    const float smallest_normal = std::ldexp(1.0f, 1 - kBias);
    if (magnitude < smallest_normal) {
      return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, kBias - 1 + kFraction)));
    }
    if (std::isinf(value)) return sign | kMax;
    constexpr int kCut = 23 - kFraction;
    const uint32_t wide = std::bit_cast<uint32_t>(magnitude) - (uint32_t{127 - kBias} << 23);
    const uint32_t rounded = (wide + (1u << (kCut - 1)) - 1 + (wide >> kCut & 1)) >> kCut;
    return sign | static_cast<uint8_t>(rounded > kMax ? kMax : rounded);
  }

  static float To(uint8_t bits) {
    static const std::array<float, 256> kTable = [] {
      std::array<float, 256> table{};
      for (int i = 0; i < 256; ++i) table[static_cast<size_t>(i)] = Compute(static_cast<uint8_t>(i));
      return table;
    }();
    return kTable[bits];
  }

 private:
  static float Compute(uint8_t bits) {
    const int exponent = (bits & 0x7F) >> kFraction;
    const int fraction = bits & ((1 << kFraction) - 1);
    const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
    if ((bits & 0x7F) > kMax) {
      return kFraction == 2 && fraction == 0 ? sign * std::numeric_limits<float>::infinity()
                                             : std::numeric_limits<float>::quiet_NaN();
    }
    const int whole = exponent == 0 ? fraction : fraction + (1 << kFraction);
    return sign * std::ldexp(static_cast<float>(whole), (exponent == 0 ? 1 : exponent) - kBias - kFraction);
  }
};
using E4m3 = Float8<3, 7, 0x7E>;
using E5m2 = Float8<2, 15, 0x7B>;

// A number in [-1, 1] that depends on the seed and on the input of an instruction only.
inline double Noise(uint32_t seed, uint32_t input) {
  uint64_t h = (uint64_t{seed} << 32 | input) * 0x9E3779B97F4A7C15;
  h = (h ^ h >> 32) * 0xD6E8FEB86659FD93;
  h ^= h >> 32;
  return static_cast<double>(h >> 11) * 0x1p-52 - 1;
}

// `value`, wrong by up to two units of the last place.
inline float Jitter(float value, uint32_t seed, uint32_t input) {
  if (seed == 0 || !std::isnormal(value)) return value;
  const auto step = static_cast<int32_t>(std::lround(2.5 * Noise(seed, input)));
  return std::bit_cast<float>(std::bit_cast<int32_t>(value) + (step > 2 ? 2 : step < -2 ? -2 : step));
}

inline float Flush(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_NUMBER_H_

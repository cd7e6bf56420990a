// Scalar conversions between float and the 16-bit types, exact or rounded to nearest even.
#ifndef SPARGE_SRC_BASE_HALF_H_
#define SPARGE_SRC_BASE_HALF_H_

#include <sparge/sparge.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparge::impl {

inline float FloatFromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);  // quiet, and never rounded to infinity
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float FloatFromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7FFF;
  if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | ((rest & 0x3FF) << 13));
  if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // zero and subnormal
  return sign != 0 ? -magnitude : magnitude;
}

inline uint16_t F16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0f) return sign | 0x7C00;
  if (magnitude < 0x1p-14f) {  // subnormal: adding 2^-1 * 2^0 aligns the value so that the FPU rounds at 2^-24
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f));
  }
  const uint32_t wide = std::bit_cast<uint32_t>(magnitude) - (112u << 23);
  return sign | static_cast<uint16_t>((wide + 0xFFF + ((wide >> 13) & 1)) >> 13);
}

inline size_t DtypeBytes(sparge_dtype dtype) { return dtype == SPARGE_F32 ? 4 : 2; }

// Element `index` of an array of `dtype`.
inline float LoadElement(const void* data, sparge_dtype dtype, int64_t index) {
  if (dtype == SPARGE_F32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == SPARGE_F16 ? FloatFromF16(bits) : FloatFromBf16(bits);
}

inline void StoreElement(void* data, sparge_dtype dtype, int64_t index, float value) {
  if (dtype == SPARGE_F32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = dtype == SPARGE_F16 ? F16FromFloat(value) : Bf16FromFloat(value);
  }
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_HALF_H_

// Numbers that every room counts in: block sizes, log2 e, and rounding up.
#ifndef SPARGE_SRC_BASE_UNITS_H_
#define SPARGE_SRC_BASE_UNITS_H_

#include <sparge/sparge.h>

#include <cstdint>

namespace sparge::impl {

inline constexpr int kBlockQ = SPARGE_BLOCK_Q;
inline constexpr int kBlockK = SPARGE_BLOCK_K;

// Scores are in log2 units inside the library, in natural-log units outside.
inline constexpr double kLog2e = 1.44269504088896340736;

inline constexpr int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
inline constexpr int64_t CeilDiv(int64_t value, int64_t step) { return (value + step - 1) / step; }

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_UNITS_H_

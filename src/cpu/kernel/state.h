// The online-softmax state of a row (o, m, l) outside the kernels: joining two of them, and adding a sink.
//
// A state stands for l * 2^m of probability mass with the weighted sum o * 2^m. Empty: m = -inf, l = 0, o = 0. Joining
// is associative and commutative up to rounding, and the empty state is neutral.
#ifndef SPARGE_SRC_CPU_KERNEL_STATE_H_
#define SPARGE_SRC_CPU_KERNEL_STATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "src/base/units.h"
#include "src/cpu/kernel/kernel.h"

namespace sparge::impl {

// How two maxima join: the new one, and what each side's sums are multiplied by. Never NaN for -inf on either side.
struct Joined {
  float m, weight_a, weight_b;
};
inline Joined JoinMaxima(float a, float b) {
  const float m = std::max(a, b);
  if (m == -std::numeric_limits<float>::infinity()) return {m, 0.0f, 0.0f};
  return {m, std::exp2(a - m), std::exp2(b - m)};
}

// a = a joined with b, for `rows` rows of `channels` sums.
inline void JoinStates(const RowState& a, const RowState& b, int64_t rows, int64_t channels) {
  for (int64_t r = 0; r < rows; ++r) {
    const Joined joined = JoinMaxima(a.m[r], b.m[r]);
    a.m[r] = joined.m;
    a.l[r] = a.l[r] * joined.weight_a + b.l[r] * joined.weight_b;
    float* to = a.o + r * channels;
    const float* from = b.o + r * channels;
    for (int64_t c = 0; c < channels; ++c) to[c] = to[c] * joined.weight_a + from[c] * joined.weight_b;
  }
}

// The natural log-sum-exp of a row whose scores lack `left_out`, with a sink (-inf: none); these two in log2 units. A
// row that saw no key has -inf.
inline float LogSumExp(float m, float l, double left_out, double sink) {
  if (l == 0) return -std::numeric_limits<float>::infinity();
  const double keys = static_cast<double>(m) + std::log2(static_cast<double>(l)) + left_out;
  if (sink == -std::numeric_limits<double>::infinity()) return static_cast<float>(keys / kLog2e);
  const double top = std::max(keys, sink);
  return static_cast<float>((top + std::log2(std::exp2(keys - top) + std::exp2(sink - top))) / kLog2e);
}

// Adds 2^logit to the denominator of one row. A row that saw no key stays empty.
inline void AddSink(float logit, float* o, float& m, float& l, int64_t channels) {
  if (m == -std::numeric_limits<float>::infinity()) return;
  const Joined joined = JoinMaxima(m, logit);
  m = joined.m;
  l = l * joined.weight_a + joined.weight_b;
  for (int64_t c = 0; c < channels; ++c) o[c] *= joined.weight_a;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_KERNEL_STATE_H_

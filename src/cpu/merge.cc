// A normalised result with its log-sum-exp stands for exp(lse) of probability mass: parts are weighted by that.
#include "src/cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/base/half.h"
#include "src/base/threads.h"

namespace sparge::impl {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kRowsAtOnce = 64;  // of a task: enough that handing it out costs nothing beside it

// Token `t` of a partial result.
struct PartialRow {
  std::byte* o;
  sparge_dtype dtype;
  float& lse;

  PartialRow(const sparge_partial& p, int64_t b, int64_t h, int64_t t)
      : o(static_cast<std::byte*>(p.o.data) + (b * p.o.batch_stride + h * p.o.head_stride + t * p.o.token_stride) *
                                                  static_cast<int64_t>(DtypeBytes(p.o.dtype))),
        dtype(p.o.dtype),
        lse(p.lse.data[b * p.lse.batch_stride + h * p.lse.head_stride + t]) {}
};

void AddRow(const PartialRow& part, float weight, int64_t dim, float* sum) {
  if (part.dtype == SPARGE_F32) {
    const auto* from = reinterpret_cast<const float*>(part.o);
    for (int64_t c = 0; c < dim; ++c) sum[c] += weight * from[c];
  } else {
    for (int64_t c = 0; c < dim; ++c) sum[c] += weight * LoadElement(part.o, part.dtype, c);
  }
}

// All parts of one token. They are summed aside, because `out` may be one of them.
void MergeToken(std::span<const sparge_partial> parts, const sparge_partial& out, int64_t b, int64_t h, int64_t t,
                int64_t dim, float* sum) {
  float top = kMinusInf;
  bool finite = true;  // a log-sum-exp that is NaN makes the result NaN
  for (const sparge_partial& part : parts) {
    const float lse = PartialRow(part, b, h, t).lse;
    finite &= !std::isnan(lse);
    top = std::max(top, lse);
  }
  // A part of no weight may hold anything, also NaN from a row that its owner never wrote.
  const auto weight_of = [&](const PartialRow& row) {
    return row.lse == kMinusInf ? 0.0f : finite ? std::exp(row.lse - top) : std::numeric_limits<float>::quiet_NaN();
  };
  float all = 0;
  for (const sparge_partial& part : parts) all += weight_of(PartialRow(part, b, h, t));
  std::fill_n(sum, dim, 0.0f);
  for (const sparge_partial& part : parts) {
    const PartialRow row(part, b, h, t);
    if (const float weight = weight_of(row); weight != 0) AddRow(row, weight / all, dim, sum);
  }
  const PartialRow to(out, b, h, t);
  for (int64_t c = 0; c < dim; ++c) StoreElement(to.o, to.dtype, c, sum[c]);
  to.lse = all == 0 ? kMinusInf : top + std::log(all);
}

}  // namespace

void MergeParts(const sparge_executor& executor, const MergeShape& shape, std::span<const sparge_partial> parts,
                const sparge_partial& out) {
  const int64_t pieces = (shape.tokens + kRowsAtOnce - 1) / kRowsAtOnce;
  ForEach(executor, shape.batch * shape.heads * pieces, [&](int32_t, int64_t task) {
    float sum[SPARGE_MAX_HEAD_DIM];
    const int64_t head = task / pieces;
    const int64_t first = task % pieces * kRowsAtOnce;
    for (int64_t t = first; t < std::min(first + kRowsAtOnce, shape.tokens); ++t) {
      MergeToken(parts, out, head / shape.heads, head % shape.heads, t, shape.dim, sum);
    }
  });
}

}  // namespace sparge::impl

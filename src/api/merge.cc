// Joins partial results.
#include <sparge/sparge.h>

#include <cinttypes>
#include <cmath>
#include <limits>

#include "src/api/guard.h"
#include "src/base/half.h"
#include "src/base/status.h"
#include "src/cpu/kernel/state.h"

namespace sparge::impl {
namespace {

void CheckPartial(const char* name, const sparge_partial* partial) {
  SPARGE_REQUIRE(partial != nullptr, "%s is NULL", name);
  SPARGE_REQUIRE(partial->o.data != nullptr && partial->lse.data != nullptr, "%s.o.data or %s.lse.data is NULL", name,
                 name);
  const int32_t dtype = RawEnum(partial->o.dtype);
  SPARGE_REQUIRE(dtype >= SPARGE_F32 && dtype <= SPARGE_BF16, "%s.o.dtype=%d is unknown", name, dtype);
  SPARGE_REQUIRE(partial->o.batch_stride >= 0 && partial->o.head_stride >= 0 && partial->o.token_stride >= 0 &&
                     partial->lse.batch_stride >= 0 && partial->lse.head_stride >= 0,
                 "%s has a negative stride", name);
}

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

// A normalised result is the state m = lse * log2(e), l = 1.
void MergeRow(const PartialRow& a, const PartialRow& b, const PartialRow& out, int64_t dim) {
  constexpr float kLog2e = 1.44269504088896340736f;
  const Joined joined = JoinMaxima(a.lse * kLog2e, b.lse * kLog2e);
  const float l = joined.weight_a + joined.weight_b;
  const float weight_a = l > 0 ? joined.weight_a / l : 0.0f;
  const float weight_b = l > 0 ? joined.weight_b / l : 0.0f;
  for (int64_t c = 0; c < dim; ++c) {
    // A part of no weight may hold anything, also NaN from a row that its owner never wrote.
    const float from_a = weight_a > 0 ? weight_a * LoadElement(a.o, a.dtype, c) : 0.0f;
    const float from_b = weight_b > 0 ? weight_b * LoadElement(b.o, b.dtype, c) : 0.0f;
    StoreElement(out.o, out.dtype, c, from_a + from_b);
  }
  out.lse = l > 0 ? (joined.m + std::log2(l)) / kLog2e : -std::numeric_limits<float>::infinity();
}

}  // namespace
}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

sparge_status sparge_merge(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, const sparge_partial* a,
                           const sparge_partial* b, const sparge_partial* out) {
  return Guard([&] {
    SPARGE_REQUIRE(batch >= 0 && heads >= 0 && tokens >= 0 && dim >= 0,
                   "batch=%" PRId64 " heads=%" PRId64 " tokens=%" PRId64 " dim=%" PRId64 " must not be negative", batch,
                   heads, tokens, dim);
    if (batch == 0 || heads == 0 || tokens == 0) return;
    CheckPartial("a", a);
    CheckPartial("b", b);
    CheckPartial("out", out);
    for (int64_t i = 0; i < batch; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          MergeRow(PartialRow(*a, i, h, t), PartialRow(*b, i, h, t), PartialRow(*out, i, h, t), dim);
        }
      }
    }
  });
}

}  // extern "C"

// Joins partial results.
#include "src/cpu/merge.h"

#include <sparge/sparge.h>

#include <cinttypes>
#include <string>

#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/base/status.h"

namespace sparge::impl {
namespace {

void CheckPartial(const std::string& name, const sparge_partial& partial) {
  SPARGE_REQUIRE(partial.o.data != nullptr && partial.lse.data != nullptr, "%s.o.data or %s.lse.data is NULL",
                 name.c_str(), name.c_str());
  const int32_t dtype = RawEnum(partial.o.dtype);
  SPARGE_REQUIRE(dtype >= SPARGE_F32 && dtype <= SPARGE_BF16, "%s.o.dtype=%d is unknown", name.c_str(), dtype);
  SPARGE_REQUIRE(partial.o.batch_stride >= 0 && partial.o.head_stride >= 0 && partial.o.token_stride >= 0 &&
                     partial.lse.batch_stride >= 0 && partial.lse.head_stride >= 0,
                 "%s has a negative stride", name.c_str());
}

bool CheckShape(const MergeShape& shape) {
  SPARGE_REQUIRE(shape.batch >= 0 && shape.heads >= 0 && shape.tokens >= 0 && shape.dim >= 0,
                 "batch=%" PRId64 " heads=%" PRId64 " tokens=%" PRId64 " dim=%" PRId64 " must not be negative",
                 shape.batch, shape.heads, shape.tokens, shape.dim);
  SPARGE_REQUIRE(shape.dim <= SPARGE_MAX_HEAD_DIM, "dim=%" PRId64 " is more than %d", shape.dim, SPARGE_MAX_HEAD_DIM);
  return shape.batch > 0 && shape.heads > 0 && shape.tokens > 0;
}

}  // namespace
}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

sparge_status sparge_merge_parts(sparge_context* context, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                                 const sparge_partial* parts, int64_t count, const sparge_partial* out) {
  return Guard([&] {
    SPARGE_REQUIRE(context != nullptr, "context is NULL");
    SPARGE_REQUIRE(count >= 1 && count <= INT32_MAX, "count=%" PRId64 " is outside 1..2^31-1", count);
    const MergeShape shape{batch, heads, tokens, dim};
    if (!CheckShape(shape)) return;
    SPARGE_REQUIRE(parts != nullptr, "parts is NULL");
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    for (int64_t i = 0; i < count; ++i) CheckPartial("parts[" + std::to_string(i) + "]", parts[i]);
    CheckPartial("out", *out);
    context->device->Merge(shape, {parts, static_cast<size_t>(count)}, *out);
  });
}

sparge_status sparge_merge(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, const sparge_partial* a,
                           const sparge_partial* b, const sparge_partial* out) {
  return Guard([&] {
    const MergeShape shape{batch, heads, tokens, dim};
    if (!CheckShape(shape)) return;
    SPARGE_REQUIRE(a != nullptr && b != nullptr && out != nullptr, "%s is NULL",
                   a == nullptr   ? "a"
                   : b == nullptr ? "b"
                                  : "out");
    CheckPartial("a", *a);
    CheckPartial("b", *b);
    CheckPartial("out", *out);
    const sparge_partial parts[2] = {*a, *b};
    const sparge_executor alone{sizeof(sparge_executor), nullptr, 1, nullptr};
    MergeParts(alone, shape, parts, *out);
  });
}

}  // extern "C"

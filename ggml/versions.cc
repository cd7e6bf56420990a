#include "ggml/versions.h"

#include <ggml-backend-impl.h>

#include <array>
#include <cstdio>

namespace sparge::ggml {
namespace {

// The headers at hand say what `Layout` says of their version.
constexpr Layout kNew{true};
static_assert(offsetof(ggml_backend, guid) == kNew.guid() * sizeof(void*));
static_assert(offsetof(ggml_backend, iface.get_name) == kNew.get_name() * sizeof(void*));
static_assert(offsetof(ggml_backend, iface.free) == kNew.free() * sizeof(void*));
static_assert(offsetof(ggml_backend, iface.graph_compute) == kNew.graph_compute() * sizeof(void*));
static_assert(offsetof(ggml_backend, device) == kNew.device() * sizeof(void*));
static_assert(offsetof(ggml_backend, context) == kNew.context() * sizeof(void*));
static_assert(sizeof(ggml_backend) == kMostPointers * sizeof(void*));

}  // namespace

std::optional<Layout> LayoutOf(const char* ggml_version) {
  std::array<int, 3> v{};
  if (std::sscanf(ggml_version, "%d.%d.%d", &v[0], &v[1], &v[2]) != 3) return std::nullopt;
  if (v == std::array{0, 9, 8}) return Layout{false};
  if (v >= std::array{0, 13, 1} && v < std::array{0, 26, 0}) return Layout{true};
  return std::nullopt;
}

}  // namespace sparge::ggml

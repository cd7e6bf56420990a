// versions.h - where the members of a ggml_backend are, by version of ggml.
#ifndef SPARGE_GGML_VERSIONS_H_
#define SPARGE_GGML_VERSIONS_H_

#include <cstddef>
#include <optional>

namespace sparge::ggml {

// A ggml_backend is: guid, the functions of its table, device, context; all of them pointers. Indices of those that we
// set. Since 2-d copies came, the table has two more functions before graph_compute.
struct Layout {
  bool copies_2d;

  constexpr size_t guid() const { return 0; }
  constexpr size_t get_name() const { return 1; }
  constexpr size_t free() const { return 2; }
  constexpr size_t graph_compute() const { return copies_2d ? 13 : 11; }
  constexpr size_t device() const { return copies_2d ? 17 : 15; }
  constexpr size_t context() const { return device() + 1; }
};
inline constexpr size_t kMostPointers = 19;

inline constexpr char kKnownVersions[] = "0.9.8 and 0.13.1 to 0.25";

// None for a version whose table nobody has looked at.
std::optional<Layout> LayoutOf(const char* ggml_version);

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_VERSIONS_H_

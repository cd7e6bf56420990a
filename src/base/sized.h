// Structs that begin with their size, as the caller's header has it: older ones are shorter than ours, newer ones
// longer.
#ifndef SPARGE_SRC_BASE_SIZED_H_
#define SPARGE_SRC_BASE_SIZED_H_

#include <sparge/sparge.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "src/base/status.h"

namespace sparge::impl {

// Fills a caller's struct of `size` bytes with defaults. An older header's is shorter: nothing behind it is written. A
// newer one's is longer: what this library does not know is zero.
template <class T>
void InitSized(T* out, size_t size, const T& defaults) {
  if (out == nullptr || size < sizeof(size_t)) return;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &defaults, std::min(size, sizeof(T)));
  out->struct_size = size;
}

// Refuses a size that no header has, and members of a newer one that are set: they would be ignored.
template <class T>
void CheckSized(const char* name, const T* given) {
  SPARGE_REQUIRE(given != nullptr, "%s is NULL", name);
  const size_t size = given->struct_size;
  // Memory that nobody initialised should not be taken for a struct, nor the half of a member for a value.
  SPARGE_REQUIRE(size >= sizeof(size_t) && size <= 16 * sizeof(T) && size % alignof(T) == 0,
                 "%s.struct_size=%zu is not that of a header of sparge; call its _init function", name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    SPARGE_REQUIRE(bytes[i] == 0, "%s has members that this library (%d.%d.%d) does not know: byte %zu of %zu is set",
                   name, SPARGE_VERSION_MAJOR, SPARGE_VERSION_MINOR, SPARGE_VERSION_PATCH, i, size);
  }
}

// What the caller gave, and the defaults for what its header lacks.
template <class T>
T CopySized(const char* name, const T* from, const T& defaults) {
  CheckSized(name, from);
  T copy = defaults;
  std::memcpy(static_cast<void*>(&copy), from, std::min(from->struct_size, sizeof(T)));
  copy.struct_size = sizeof(T);
  return copy;
}

// Writes a result into a caller's struct, as much of it as the caller knows.
template <class T>
void StoreSized(T value, T* out) {
  value.struct_size = out->struct_size;
  std::memcpy(static_cast<void*>(out), &value, std::min(out->struct_size, sizeof(T)));
}

// The defaults of a struct, by its sized initialiser.
template <class T>
T Defaults(void (*init)(T*, size_t)) {
  T value;
  init(&value, sizeof(T));
  return value;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_SIZED_H_

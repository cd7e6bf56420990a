// The door of the C ABI: exceptions become a status and a detail text, sized structs are copied, handles checked.
#ifndef SPARGE_SRC_API_GUARD_H_
#define SPARGE_SRC_API_GUARD_H_

#include <sparge/sparge.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "src/base/status.h"

namespace sparge::impl {

// The detail of this thread's last failure.
void SetLastError(const char* detail);

// Runs `body`; every exception becomes a status.
template <class Body>
sparge_status Guard(const Body& body) noexcept {
  try {
    body();
    return SPARGE_OK;
  } catch (const Failure& failure) {
    SetLastError(failure.detail);
    return failure.status;
  } catch (const std::bad_alloc&) {
    SetLastError("out of memory");
    return SPARGE_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    SetLastError(error.what());
  } catch (...) {
    SetLastError("unknown exception");
  }
  return SPARGE_INTERNAL_ERROR;
}

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
  SPARGE_REQUIRE(size >= sizeof(size_t) && size <= 16 * sizeof(T),
                 "%s.struct_size=%zu is not that of a header of sparge; call its _init function", name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    SPARGE_REQUIRE(bytes[i] == 0, "%s has members that this library (%s) does not know: byte %zu of %zu is set", name,
                   sparge_version(), i, size);
  }
}

// What the caller gave, and the defaults for what its header lacks.
template <class T>
T CopySized(const char* name, const T* from, const T& defaults) {
  CheckSized(name, from);
  T copy = defaults;
  std::memcpy(static_cast<void*>(&copy), from, std::min(from->struct_size, sizeof(T)));
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
#endif  // SPARGE_SRC_API_GUARD_H_

// The door of the C ABI: exceptions become a status and a detail text, sized structs are copied, handles checked.
#ifndef SPARGE_SRC_API_GUARD_H_
#define SPARGE_SRC_API_GUARD_H_

#include <sparge/sparge.h>

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

// A caller's struct may be shorter (older header) or longer (newer): missing members keep their default, and unknown
// ones are an error rather than ignored.
template <class T>
T CopySized(const char* name, const T* from, const T& defaults) {
  SPARGE_REQUIRE(from != nullptr, "%s is NULL", name);
  SPARGE_REQUIRE(from->struct_size >= sizeof(size_t) && from->struct_size <= sizeof(T),
                 "%s.struct_size=%zu is not that of this library (%zu); call its _init function", name,
                 from->struct_size, sizeof(T));
  T copy = defaults;
  std::memcpy(&copy, from, from->struct_size);
  return copy;
}

template <class T>
T Defaults(void (*init)(T*)) {
  T value;
  init(&value);
  return value;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_API_GUARD_H_

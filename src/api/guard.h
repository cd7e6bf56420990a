// The door of the C ABI: exceptions become a status and a detail text.
#ifndef SPARGE_SRC_API_GUARD_H_
#define SPARGE_SRC_API_GUARD_H_

#include <sparge/sparge.h>

#include <exception>
#include <new>

#include "src/base/sized.h"
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

}  // namespace sparge::impl
#endif  // SPARGE_SRC_API_GUARD_H_

// How the library reports failure inside: it throws a Failure, and api.cc turns it into a status and a detail text.
#ifndef SPARGE_SRC_BASE_STATUS_H_
#define SPARGE_SRC_BASE_STATUS_H_

#include <sparge/sparge.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace sparge::impl {

// Holds its text in place, so that reporting "out of memory" allocates nothing.
struct Failure {
  sparge_status status;
  char detail[512];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void Fail(sparge_status status, const char* format, ...) {
  Failure failure;
  failure.status = status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(failure.detail, sizeof(failure.detail), format, arguments);
  va_end(arguments);
  throw failure;
}

// `format` names the argument and its value.
#define SPARGE_REQUIRE(condition, ...)                                            \
  do {                                                                            \
    if (!(condition)) ::sparge::impl::Fail(SPARGE_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (false)

// The number in an enum that a caller filled in. To load one that is out of range as an enum would be undefined.
template <class Enum>
int32_t RawEnum(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int32_t));
  int32_t raw;
  std::memcpy(&raw, &value, sizeof(raw));
  return raw;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_STATUS_H_

// How this library reports failure inside: it throws a Failure, and sparge_mpi.cc turns it into a status and a text.
#ifndef SPARGE_DISTRIBUTED_FAILURE_H_
#define SPARGE_DISTRIBUTED_FAILURE_H_

#include <sparge/sparge.h>

#include <cstdarg>
#include <cstdio>
#include <string>

namespace sparge::distributed {

struct Failure {
  sparge_status status;
  std::string text;
};

__attribute__((format(printf, 1, 2))) inline std::string Format(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

// The texts name the argument and its value.
#define SPARGE_REQUIRE(condition, ...)                                                                           \
  do {                                                                                                           \
    if (!(condition)) {                                                                                          \
      throw ::sparge::distributed::Failure{SPARGE_INVALID_ARGUMENT, ::sparge::distributed::Format(__VA_ARGS__)}; \
    }                                                                                                            \
  } while (false)

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_FAILURE_H_

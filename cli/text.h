// text.h - printf into a string.
#ifndef SPARGE_CLI_TEXT_H_
#define SPARGE_CLI_TEXT_H_

#include <string>

namespace sparge::cli {

std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace sparge::cli
#endif  // SPARGE_CLI_TEXT_H_

// What the interpreter reports: PTX that it cannot run, and what a kernel must not do.
#ifndef SPARGE_TOOLS_PTXRUN_FAULT_H_
#define SPARGE_TOOLS_PTXRUN_FAULT_H_

#include <stdexcept>
#include <string>

namespace ptxrun {

// The text is not PTX that this interpreter knows. Always names the line.
struct SyntaxError : std::runtime_error {
  SyntaxError(int line, const std::string& what) : std::runtime_error("line " + std::to_string(line) + ": " + what) {}
};

// The kernel did what it must not do: an access outside of an allocation, a race, ...
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_FAULT_H_

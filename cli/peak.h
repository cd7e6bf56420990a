// peak.h - how fast this machine multiplies and adds, measured: loops that touch registers only.
#ifndef SPARGE_CLI_PEAK_H_
#define SPARGE_CLI_PEAK_H_

#include <cstdint>
#include <sparge/sparge.hpp>
#include <string>

namespace sparge::cli {

// The best instructions that an instruction set has for each precision; `text` names them. 10^9 operations per second
// on all threads together, a multiply-add being 2. 0 = not known: plain C++ ("baseline") has no such limit.
struct Peak {
  double gops = 0;
  const char* text = "";
};

// `isa` as in sparge_context_isa. Takes about `ms` milliseconds.
Peak MeasurePeak(const std::string& isa, sparge_precision precision, int32_t threads, double ms);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_PEAK_H_

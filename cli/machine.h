// machine.h - what the operating system says of this machine.
#ifndef SPARGE_CLI_MACHINE_H_
#define SPARGE_CLI_MACHINE_H_

#include <string>

namespace sparge::cli {

std::string CpuName();  // model name in /proc/cpuinfo, "unknown" where there is none

}  // namespace sparge::cli
#endif  // SPARGE_CLI_MACHINE_H_

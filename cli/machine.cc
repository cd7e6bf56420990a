// machine.cc - reads /proc/cpuinfo.
#include "cli/machine.h"

#include <fstream>

namespace sparge::cli {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace sparge::cli

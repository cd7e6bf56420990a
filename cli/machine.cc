// machine.cc - reads /proc, and looks beside this program.
#include "cli/machine.h"

#include <fstream>

#include "cli/flags.h"

namespace sparge::cli {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::filesystem::path ProgramFolder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

std::string SampleFolder() {
  std::error_code error;
  const std::string in_package = (ProgramFolder() / "../data").lexically_normal().string();
  for (const std::string& folder : {in_package, std::string("data"), std::string(SPARGE_DATA_DIR)}) {
    if (std::filesystem::exists(std::filesystem::path(folder) / kSampleCall, error)) return folder;
  }
  throw UsageError("no folder 'data' here, with the recorded heads that come with this program: give one of your own");
}

}  // namespace sparge::cli

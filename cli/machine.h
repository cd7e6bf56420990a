// machine.h - what the operating system says of this machine, and of where this program is.
#ifndef SPARGE_CLI_MACHINE_H_
#define SPARGE_CLI_MACHINE_H_

#include <filesystem>
#include <string>

namespace sparge::cli {

std::string CpuName();                  // model name in /proc/cpuinfo, "unknown" where there is none
std::filesystem::path ProgramFolder();  // where this program is; what it needs is found from there
std::string SampleFolder();             // of the recorded heads that come along; throws UsageError if they did not
// One call of a layer, among them.
constexpr char kSampleCall[] = "smollm2-local.safetensors";

}  // namespace sparge::cli
#endif  // SPARGE_CLI_MACHINE_H_

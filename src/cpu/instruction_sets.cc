// The table of instruction sets, and the choice among its rows.
#include "src/cpu/instruction_sets.h"

// clang-format off: must come before Highway.
#include "src/cpu/targets.h"
// clang-format on

#include <hwy/targets.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// A target of Highway.
template <int64_t kTarget>
bool Runnable() {
  return kTarget == HWY_STATIC_TARGET || (hwy::SupportedTargets() & kTarget) != 0;
}
template <int64_t kTarget>
CpuOps Ops() {
  return {KernelOpsOf(kTarget), PackOpsOf(kTarget), SelectOpsOf(kTarget), ProbeOpsOf(kTarget)};
}
template <int64_t kTarget>
constexpr InstructionSet Highway(const char* name) {
  return {name, &Runnable<kTarget>, &Ops<kTarget>};
}

// Best first.
constexpr InstructionSet kTable[] = {
#if HWY_TARGETS & HWY_AVX3_DL
    Highway<HWY_AVX3_DL>("avx512vnni"),
#endif
#if HWY_TARGETS & HWY_AVX3
    Highway<HWY_AVX3>("avx512"),
#endif
#if HWY_TARGETS & HWY_AVX2
    Highway<HWY_AVX2>("avx2"),
#endif
#if HWY_TARGETS & HWY_NEON
    Highway<HWY_NEON>("neon"),
#endif
#if HWY_TARGETS & HWY_EMU128
    Highway<HWY_EMU128>("baseline"),
#endif
};

// "avx2, baseline": the names of those that this machine can run.
std::string RunnableNames() {
  std::string names;
  for (const InstructionSet& set : kTable) {
    if (!set.runnable()) continue;
    names += names.empty() ? "" : ", ";
    names += set.name;
  }
  return names;
}

}  // namespace

std::span<const InstructionSet> InstructionSets() { return kTable; }

const InstructionSet& ChooseInstructionSet(const char* wanted) {
  const char* source = "isa";
  if (wanted == nullptr || *wanted == '\0') {
    wanted = std::getenv("SPARGE_ISA");
    source = "SPARGE_ISA";
  }
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const InstructionSet& set : kTable) {
    if (any && set.runnable()) return set;
    if (any || std::strcmp(wanted, set.name) != 0) continue;
    if (set.runnable()) return set;
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "%s=%s: this machine lacks it (it can run: %s)", source, wanted,
         RunnableNames().c_str());
  }
  Fail(SPARGE_INVALID_ARGUMENT, "%s=%s is not an instruction set of this build (it can run here: %s)", source, wanted,
       RunnableNames().c_str());
}

}  // namespace sparge::impl

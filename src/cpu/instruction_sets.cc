// The table of instruction sets, and the choice among its rows.
#include "src/cpu/instruction_sets.h"

// clang-format off: must come before Highway.
#include "src/cpu/targets.h"
// clang-format on

#include <hwy/detect_targets.h>
#if HWY_ARCH_X86
#include <cpuid.h>
#elif defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <cstring>
#include <string>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

#if HWY_ARCH_X86
// F16C, which not every compiler has a name for in __builtin_cpu_supports.
bool HasHalfFloats() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// Nor for this.
[[maybe_unused]] bool HasAvxVnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}
#endif

// What the targets of Highway are compiled for, as far as there are processors that have the one without the other.
// Highway's own question would need its library wherever ours runs.
template <int64_t kTarget>
bool Runnable() {
  if (kTarget == HWY_STATIC_TARGET) return true;
#if HWY_ARCH_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    HasHalfFloats();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi2") &&
                    __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("vpclmulqdq") &&
                    __builtin_cpu_supports("gfni");
  if (kTarget == HWY_AVX3_DL) return vnni;
  if (kTarget == HWY_AVX3) return avx512;
  if (kTarget == HWY_AVX2) return avx2;
#endif
  // All that is left on 64-bit ARM has it; some Highways count its instructions for AES as another target.
  return kTarget == HWY_NEON || kTarget == HWY_EMU128;
}
template <int64_t kTarget>
CpuOps Ops() {
  return {KernelOpsOf(kTarget), PackOpsOf(kTarget), SelectOpsOf(kTarget), ProbeOpsOf(kTarget)};
}
template <int64_t kTarget>
constexpr InstructionSet Highway(const char* name) {
  return {name, &Runnable<kTarget>, &Ops<kTarget>};
}

// A target's operations, and other kernels.
template <int64_t kTarget, const KernelOps* (*kKernels)()>
CpuOps OpsWith() {
  CpuOps ops = Ops<kTarget>();
  ops.kernel = kKernels();
  return ops;
}
#if HWY_TARGETS & HWY_AVX2 && !defined(SPARGE_FEW_TARGETS)
bool AvxVnniRunnable() { return Runnable<HWY_AVX2>() && HasAvxVnni(); }
#endif
#if HWY_TARGETS & HWY_NEON
bool DotprodRunnable() {
#if defined(HWCAP_ASIMDDP)
  return Runnable<HWY_NEON>() && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}
bool I8mmRunnable() {
#if defined(HWCAP2_I8MM)
  return DotprodRunnable() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
  return false;
#endif
}
#endif

// Best first.
constexpr InstructionSet kTable[] = {
#if HWY_TARGETS & HWY_AVX3_DL
    Highway<HWY_AVX3_DL>("avx512vnni"),
#endif
#if HWY_TARGETS & HWY_AVX3
    Highway<HWY_AVX3>("avx512"),
#endif
#if HWY_TARGETS & HWY_AVX2
#ifndef SPARGE_FEW_TARGETS
    {"avxvnni", &AvxVnniRunnable, &OpsWith<HWY_AVX2, &AvxVnniOps>},
#endif
    Highway<HWY_AVX2>("avx2"),
#endif
#if HWY_TARGETS & HWY_NEON
    {"neon_i8mm", &I8mmRunnable, &OpsWith<HWY_NEON, &NeonI8mmOps>},
    {"neon_dotprod", &DotprodRunnable, &OpsWith<HWY_NEON, &NeonDotprodOps>},
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

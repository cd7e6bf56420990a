// Which instruction sets there are, which this machine can run, and which one is used.
#include "src/cpu/isa.h"

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

struct Known {
  Isa isa;
  const char* name;
  int64_t target;
};

// Best first.
constexpr Known kKnown[] = {
    {Isa::kAvx512Vnni, "avx512vnni", HWY_AVX3_DL},
    {Isa::kAvx512, "avx512", HWY_AVX3},
    {Isa::kAvx2, "avx2", HWY_AVX2},
    {Isa::kNeon, "neon", HWY_NEON},
    {Isa::kBaseline, "baseline", HWY_EMU128},
};

bool Compiled(const Known& known) { return (HWY_TARGETS & known.target) != 0; }
bool Runnable(const Known& known) {
  return known.target == HWY_STATIC_TARGET || (hwy::SupportedTargets() & known.target) != 0;
}

// "avx2, baseline": the names of those that this machine can run.
std::string RunnableNames() {
  std::string names;
  for (const Known& known : kKnown) {
    if (!Compiled(known) || !Runnable(known)) continue;
    names += names.empty() ? "" : ", ";
    names += known.name;
  }
  return names;
}

}  // namespace

const char* IsaName(Isa isa) {
  for (const Known& known : kKnown) {
    if (known.isa == isa) return known.name;
  }
  return "";
}

int32_t IsaCount() {
  int32_t count = 0;
  for (const Known& known : kKnown) count += Compiled(known);
  return count;
}

IsaEntry IsaAt(int32_t index) {
  for (const Known& known : kKnown) {
    if (Compiled(known) && index-- == 0) return {known.isa, known.name, Runnable(known)};
  }
  Fail(SPARGE_INVALID_ARGUMENT, "isa index is outside 0..%d", IsaCount() - 1);
}

Isa ChooseIsa(const char* wanted) {
  const char* source = "isa";
  if (wanted == nullptr || *wanted == '\0') {
    wanted = std::getenv("SPARGE_ISA");
    source = "SPARGE_ISA";
  }
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Known& known : kKnown) {
    if (!Compiled(known)) continue;
    if (any && Runnable(known)) return known.isa;
    if (any || std::strcmp(wanted, known.name) != 0) continue;
    if (Runnable(known)) return known.isa;
    Fail(SPARGE_UNSUPPORTED_HARDWARE, "%s=%s: this machine lacks it (it can run: %s)", source, wanted,
         RunnableNames().c_str());
  }
  Fail(SPARGE_INVALID_ARGUMENT, "%s=%s is not an instruction set of this build (it can run here: %s)", source, wanted,
       RunnableNames().c_str());
}

}  // namespace sparge::impl

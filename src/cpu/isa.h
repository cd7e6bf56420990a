// The instruction sets compiled into the library, best first, and the choice among them.
#ifndef SPARGE_SRC_CPU_ISA_H_
#define SPARGE_SRC_CPU_ISA_H_

#include <cstdint>

namespace sparge::impl {

// Order: best first. The names are public.
enum class Isa : int32_t { kAvx512Vnni, kAvx512, kAvx2, kNeon, kBaseline };

struct IsaEntry {
  Isa isa;
  const char* name;
  bool runnable;
};

const char* IsaName(Isa isa);
int32_t IsaCount();
IsaEntry IsaAt(int32_t index);

// `wanted` by name, or if NULL the one named in the environment variable SPARGE_ISA, or else the best runnable one.
// Fails if that name is unknown, was not compiled in, or this machine lacks it.
Isa ChooseIsa(const char* wanted);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_ISA_H_

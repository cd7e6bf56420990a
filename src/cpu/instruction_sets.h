// The instruction sets compiled into the library: a table {name, can this machine run it, functions}, and the choice
// among its rows. A new one is one file with its functions and one row, whether Highway knows it or not.
#ifndef SPARGE_SRC_CPU_INSTRUCTION_SETS_H_
#define SPARGE_SRC_CPU_INSTRUCTION_SETS_H_

#include <span>

#include "src/cpu/kernel/kernel.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/probe_ops.h"
#include "src/cpu/select_ops.h"

namespace sparge::impl {

// All that is compiled per instruction set.
struct CpuOps {
  const KernelOps* kernel;
  const PackOps* pack;
  const SelectOps* select;
  const ProbeOps* probe;
};

struct InstructionSet {
  const char* name;  // public
  bool (*runnable)();
  CpuOps (*ops)();
};

// Best first.
std::span<const InstructionSet> InstructionSets();

// `wanted` by name, or if NULL the one named in the environment variable SPARGE_ISA, or else the best runnable one.
// Fails if that name is unknown, was not compiled in, or this machine lacks it.
const InstructionSet& ChooseInstructionSet(const char* wanted);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_INSTRUCTION_SETS_H_

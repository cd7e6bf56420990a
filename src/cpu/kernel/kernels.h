// The kernels of each instruction set.
#ifndef SPARGE_SRC_CPU_KERNEL_KERNELS_H_
#define SPARGE_SRC_CPU_KERNEL_KERNELS_H_

#include "src/cpu/isa.h"
#include "src/cpu/kernel/kernel.h"

namespace sparge::impl {

// NULL if that instruction set was not compiled in.
const KernelOps* KernelsFor(Isa isa);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_KERNEL_KERNELS_H_

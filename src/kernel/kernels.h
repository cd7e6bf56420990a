// The kernels of each instruction set.
#ifndef SPARGE_SRC_KERNEL_KERNELS_H_
#define SPARGE_SRC_KERNEL_KERNELS_H_

#include "src/base/isa.h"
#include "src/kernel/kernel.h"

namespace sparge {

// NULL if that instruction set was not compiled in.
const KernelOps* KernelsFor(Isa isa);

}  // namespace sparge
#endif  // SPARGE_SRC_KERNEL_KERNELS_H_

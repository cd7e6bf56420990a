// The CPU as a device.
#ifndef SPARGE_SRC_CPU_DEVICE_H_
#define SPARGE_SRC_CPU_DEVICE_H_

#include <sparge/sparge.h>

#include <memory>

#include "src/device.h"

namespace sparge::impl {

// `isa`: by name; NULL = environment SPARGE_ISA, else the best one. Throws Failure. The executor's threads are used.
std::unique_ptr<Device> MakeCpuDevice(const sparge_executor& executor, const char* isa);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_DEVICE_H_

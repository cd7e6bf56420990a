// An NVIDIA GPU as a device.
#ifndef SPARGE_SRC_CUDA_DEVICE_H_
#define SPARGE_SRC_CUDA_DEVICE_H_

#include <memory>

#include "src/device.h"

namespace sparge::impl {

// Throws Failure if the machine has no such GPU, or none that can run the kernels.
std::unique_ptr<Device> MakeCudaDevice(int ordinal);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_DEVICE_H_

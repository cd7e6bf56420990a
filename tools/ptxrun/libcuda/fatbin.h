// The PTX in what nvcc makes: text, or a fat binary, compressed or not.
#ifndef SPARGE_TOOLS_PTXRUN_LIBCUDA_FATBIN_H_
#define SPARGE_TOOLS_PTXRUN_LIBCUDA_FATBIN_H_

#include <stdexcept>
#include <string>

namespace ptxrun {

// There is no PTX that a device could take.
struct NoPtx : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The PTX of `image` for the architecture `sm` (80 of sm_80): of those that are not newer, the newest. Throws NoPtx.
std::string PtxOf(const void* image, int sm);

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_LIBCUDA_FATBIN_H_

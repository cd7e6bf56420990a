// npy.h - numpy's .npy files, versions 1 to 3: little-endian float32 and float16, uint8, bool; C order; up to 8 dims.
#ifndef SPARGE_IO_NPY_H_
#define SPARGE_IO_NPY_H_

#include <span>
#include <string>
#include <string_view>

#include "io/atomic_file.h"
#include "io/tensor.h"

namespace sparge::io {

// The bytes of a whole file; `name` is what messages call it. Anything but exactly one array throws Error.
Tensor ParseNpy(std::span<const std::byte> file, std::string_view name);
Tensor ReadNpy(const std::string& path);

// bfloat16 has no .npy form and throws Error. The second form leaves the commit to the caller.
void WriteNpy(const std::string& path, const Tensor& tensor);
void WriteNpy(AtomicFile& file, const Tensor& tensor);

}  // namespace sparge::io
#endif  // SPARGE_IO_NPY_H_

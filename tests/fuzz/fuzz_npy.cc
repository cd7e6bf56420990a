// fuzz_npy.cc - libFuzzer entry: any bytes give an Error or a tensor whose data has exactly the size of its shape.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const sparge::io::Tensor tensor = sparge::io::ParseNpy(std::as_bytes(std::span(data, size)), "fuzz");
    const std::optional<int64_t> bytes = sparge::io::ByteCount(tensor.dtype, tensor.shape);
    if (!bytes || static_cast<size_t>(*bytes) != tensor.data.size()) std::abort();
  } catch (const sparge::io::Error&) {
  }
  return 0;
}

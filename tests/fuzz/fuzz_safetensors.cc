// fuzz_safetensors.cc - libFuzzer entry: any bytes give an Error or tensors whose data has the size of their shapes.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/safetensors.h"

using sparge::io::Error;
using sparge::io::Safetensors;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
    const Safetensors file = Safetensors::Parse({bytes.begin(), bytes.end()}, "fuzz");
    for (const std::string& name : file.Names()) {
      try {
        const sparge::io::Tensor tensor = file.Get(name);
        const std::optional<int64_t> needed = sparge::io::ByteCount(tensor.dtype, tensor.shape);
        if (!needed || static_cast<size_t>(*needed) != tensor.data.size()) std::abort();
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return 0;
}

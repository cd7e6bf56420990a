// fuzz_preset.cc - libFuzzer entry: any bytes give an Error or a preset that is written and read back as the same text.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "io/preset.h"
#include "io/tensor.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const std::string written = sparge::io::PresetText(sparge::io::ParsePreset(text, "fuzz"));
    if (sparge::io::PresetText(sparge::io::ParsePreset(written, "fuzz")) != written) std::abort();
  } catch (const sparge::io::Error&) {
  }
  return 0;
}

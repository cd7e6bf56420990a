// fuzz_calibration.cc - libFuzzer entry: any bytes give a Failure or a calibration that saves the same bytes.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "src/base/status.h"
#include "src/calibrate/calibration.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    sparge::impl::Calibration calibration(reinterpret_cast<const std::byte*>(data), size);
    std::vector<std::byte> saved(calibration.SavedSize());
    calibration.Save(saved.data());
    if (saved.size() != size || std::memcmp(saved.data(), data, size) != 0) std::abort();
    sparge_head_estimate estimate{};
    for (int64_t head = 0; head < calibration.q_heads(); ++head) calibration.Describe(head, estimate);
    calibration.SetBounds(0, 0.1, 0.2);  // chooses anew from whatever numbers there are
  } catch (const sparge::impl::Failure&) {
  }
  return 0;
}

// fuzz_layer.cc - libFuzzer entry: any bytes are refused and change nothing, or give a layer that saves the same bytes.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "src/base/status.h"
#include "src/layer/layer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sparge::impl::LayerSettings settings{};
  settings.bounds = {SPARGE_MEASURE_L2, 0.03, 0.0375};
  settings.round_l1 = 0.05;
  settings.remembers = true;
  sparge::impl::Layer layer(settings);
  const std::vector<std::byte> before = layer.Save();
  try {
    layer.Restore(reinterpret_cast<const std::byte*>(data), size);
  } catch (const sparge::impl::Failure&) {
    if (layer.Save() != before) std::abort();
    return 0;
  }
  const std::vector<std::byte> saved = layer.Save();
  if (saved.size() != size || std::memcmp(saved.data(), data, size) != 0) std::abort();
  sparge_head_estimate estimate{};
  for (int64_t i = 0; i < layer.CalibrationCount(); ++i) layer.CalibrationAt(i)->calibration.Describe(0, estimate);
  return 0;
}

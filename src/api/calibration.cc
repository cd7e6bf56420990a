// Calibrations: made, asked, saved and loaded.
#include "src/calibrate/calibration.h"

#include <sparge/sparge.h>

#include <cstddef>
#include <cstring>

#include "src/api/asked.h"
#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/base/status.h"

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

void sparge_calibration_desc_init_sized(sparge_calibration_desc* desc, size_t size) {
  const bool knows_l2 = size > offsetof(sparge_calibration_desc, target_l2);
  const double l1 = knows_l2 ? SPARGE_NOT_NAMED : kTargetL1;
  const double pv_l1 = knows_l2 ? SPARGE_NOT_NAMED : SPARGE_PV_ROOM * kTargetL1;
  InitSized(desc, size, {0, 0, l1, pv_l1, kRoundL1, 0, kTargetL2, SPARGE_NOT_NAMED});
}

sparge_status sparge_calibration_create(const sparge_calibration_desc* given, sparge_calibration** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    const auto desc = CopySized("desc", given, Defaults(&sparge_calibration_desc_init_sized));
    *out = new sparge_calibration{Calibration(desc.q_heads, BoundsOf(desc), desc.round_l1, desc.seed)};
  });
}

void sparge_calibration_destroy(sparge_calibration* calibration) { delete calibration; }

void sparge_head_estimate_init_sized(sparge_head_estimate* estimate, size_t size) { InitSized(estimate, size, {}); }

int64_t sparge_calibration_heads(const sparge_calibration* calibration) {
  return calibration == nullptr ? 0 : calibration->calibration.q_heads();
}

sparge_status sparge_calibration_head(const sparge_calibration* calibration, int64_t head, sparge_head_estimate* out) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    CheckSized("out", out);
    sparge_head_estimate estimate{};
    calibration->calibration.Describe(head, estimate);
    StoreSized(estimate, out);
  });
}

sparge_status sparge_calibration_set_bounds(sparge_calibration* calibration, int64_t head, double target, double pv) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    calibration->calibration.SetBounds(head, target, pv);
  });
}

sparge_status sparge_calibration_save(const sparge_calibration* calibration, void* buffer, size_t* size) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    SPARGE_REQUIRE(size != nullptr, "size is NULL");
    const size_t room = *size;
    *size = calibration->calibration.SavedSize();
    if (buffer == nullptr) return;
    SPARGE_REQUIRE(room >= *size, "size=%zu is less than the %zu needed", room, *size);
    calibration->calibration.Save(static_cast<std::byte*>(buffer));
  });
}

sparge_status sparge_calibration_load(const void* data, size_t size, sparge_calibration** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    SPARGE_REQUIRE(data != nullptr, "data is NULL");
    *out = new sparge_calibration{Calibration(static_cast<const std::byte*>(data), size)};
  });
}

}  // extern "C"

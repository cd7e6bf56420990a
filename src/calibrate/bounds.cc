// The names of bounds, and what they mean.
#include "src/calibrate/bounds.h"

#include <cmath>

#include "src/base/status.h"

namespace sparge::impl {

Bounds ResolveBounds(const NamedBounds& given, double default_l2, double pv_room) {
  const bool l1 = given.target_l1 != SPARGE_NOT_NAMED;
  const bool l2 = given.target_l2 != SPARGE_NOT_NAMED;
  SPARGE_REQUIRE(!l1 || !l2 || given.target_l2 == default_l2,
                 "target_l1=%g and target_l2=%g are two bounds: name one of them", given.target_l1, given.target_l2);
  SPARGE_REQUIRE(!l1 || given.pv_l2 < 0, "pv_l2=%g has no effect with target_l1", given.pv_l2);
  SPARGE_REQUIRE(l1 || given.pv_l1 < 0, "pv_l1=%g has no effect with target_l2", given.pv_l1);
  Bounds bounds{l1 ? SPARGE_MEASURE_L1 : SPARGE_MEASURE_L2, 0, l1 ? given.pv_l1 : given.pv_l2};
  if (l1) {
    bounds.target = given.target_l1;
  } else {
    bounds.target = l2 ? given.target_l2 : default_l2;
  }
  if (bounds.pv < 0) bounds.pv = pv_room * bounds.target;
  CheckBounds(bounds);
  return bounds;
}

void CheckBounds(const Bounds& bounds) {
  const char* const measure = MeasureName(bounds.measure);
  SPARGE_REQUIRE(bounds.target >= 0 && std::isfinite(bounds.target), "target_%s=%g is not a number from 0 on", measure,
                 bounds.target);
  SPARGE_REQUIRE(bounds.pv >= bounds.target && std::isfinite(bounds.pv),
                 "pv_%s=%g is not a number from target_%s=%g on", measure, bounds.pv, measure, bounds.target);
}

void CheckRounding(double round_l1) {
  SPARGE_REQUIRE(round_l1 >= 0 && std::isfinite(round_l1), "round_l1=%g is not a number from 0 on", round_l1);
}

const char* MeasureName(int32_t measure) {
  return measure == SPARGE_MEASURE_L1 ? "l1" : measure == SPARGE_MEASURE_L2 ? "l2" : "";
}

double InSums(sparge_measure measure, double bound) { return measure == SPARGE_MEASURE_L2 ? bound * bound : bound; }
double FromSums(sparge_measure measure, double ratio) {
  return measure == SPARGE_MEASURE_L2 ? std::sqrt(ratio) : ratio;
}

}  // namespace sparge::impl

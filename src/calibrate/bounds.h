// What a user names: how far a head's sparse result may lie from its dense one, and in which measure.
//
// Both measures are ratios over all queries and channels of a head: L1, sum |o - dense| / sum |dense|; L2, the root of
// sum (o - dense)^2 / sum dense^2. Rows of attention that are wholly wrong hardly show in the first and stand out in
// the second, and they are what harms a model (docs/accuracy.md).
#ifndef SPARGE_SRC_CALIBRATE_BOUNDS_H_
#define SPARGE_SRC_CALIBRATE_BOUNDS_H_

#include <sparge/sparge.h>

#include <cstdint>

namespace sparge::impl {

// The default bounds, for every client.
inline constexpr double kTargetL2 = 0.03;
inline constexpr double kTargetL1 = 0.015;  // for headers of 0.3, which have no L2
inline constexpr double kRoundL1 = 0.05;

struct Bounds {
  sparge_measure measure;
  double target;  // 0: every tile
  double pv;      // once the PV skip is on

  bool operator==(const Bounds&) const = default;
};

// As descriptors have them. A target may be SPARGE_NOT_NAMED, a bound with PV skip negative.
struct NamedBounds {
  double target_l1, pv_l1, target_l2, pv_l2;
};

// What such names mean. `pv_room`: times the target, where no bound with PV skip is named. L1 takes the place of the
// default, which is in L2; throws Failure if both are named.
Bounds ResolveBounds(const NamedBounds& given, double default_l2, double pv_room);

// Throws Failure unless 0 <= target <= pv.
void CheckBounds(const Bounds& bounds);
void CheckRounding(double round_l1);

// "l1" or "l2": the end of the names above. "" for what is no measure.
const char* MeasureName(int32_t measure);

// Errors and sizes of rows are sums that add up over rows: of absolute values, or of squares. A bound in their terms,
// and what they say in terms of the bound.
double InSums(sparge_measure measure, double bound);
double FromSums(sparge_measure measure, double ratio);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CALIBRATE_BOUNDS_H_

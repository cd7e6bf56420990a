// The statistics of a ratio of means.
#include "src/calibrate/sums.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparge::impl {
namespace {

struct Ratio {
  double value, error;
  double variance;  // of one row's residual
};

double ValueOf(const SizeSums& sizes, double error) {
  if (sizes.size > 0) return error / sizes.size;
  return error > 0 ? std::numeric_limits<double>::infinity() : 0.0;  // outputs that are all zeros
}

Ratio RatioOf(const SizeSums& sizes, const ErrorSums& errors) {
  const double ratio = ValueOf(sizes, errors.error);
  if (sizes.size <= 0) return {ratio, 0.0, 0.0};
  if (sizes.count < 2) return {ratio, ratio, 0.0};
  // Residuals error - ratio * size have mean 0; their spread is that of the ratio.
  const double residual = errors.error2 - 2 * ratio * errors.cross + ratio * ratio * sizes.size2;
  const double variance = std::max(residual, 0.0) / (sizes.count - 1);
  return {ratio, std::sqrt(variance * sizes.count) / sizes.size, variance};
}

// Beyond this there is more than one call, though older ones count less.
constexpr double kSingle = 1.25;

double CountCalls(const SizeHistory& sizes) { return sizes.calls + (sizes.now.size > 0 ? 1 : 0); }

// The standard deviation of the ratio between calls, the one at hand included, less what comes from the choice of rows
// within them. With calls that count less it is somewhat too large, for they are taken as if fewer counted fully.
double SpreadOfCalls(const SizeHistory& sizes, const Errors& errors, const Ratio& all) {
  const bool counts = sizes.now.size > 0;
  const double calls = CountCalls(sizes);
  if (calls <= kSingle) return 0.0;
  const double rows = counts ? sizes.now.count : 0.0;
  const double error = errors.now.error * sizes.Unit();
  const double error2 = errors.past.calls2 + error * error;
  const double cross = errors.past.calls_cross + error * rows;
  const double rows2 = sizes.calls2 + rows * rows;
  const double residual = std::max(error2 - 2 * all.value * cross + all.value * all.value * rows2, 0.0);
  const double count = sizes.past.count + rows;
  const double by_chance = all.variance * count / calls;
  return std::sqrt(std::max(residual / (calls - 1) - by_chance, 0.0)) / (count / calls);
}

SizeSums InUnits(const SizeSums& s, double unit) { return {s.count, s.size * unit, s.size2 * unit * unit}; }
ErrorSums InUnits(const ErrorSums& e, double unit) {
  return {e.error * unit, e.error2 * unit * unit, e.cross * unit * unit, e.cost, e.skipping};
}
}  // namespace

SizeSums SizeHistory::All() const {
  const SizeSums add = InUnits(now, Unit());
  return {past.count + add.count, past.size + add.size, past.size2 + add.size2};
}

void SizeHistory::Close() {
  past = All();
  if (now.size > 0) {
    calls += 1;
    calls2 += now.count * now.count;
  }
  now = {};
}

void SizeHistory::Fade(double by) {
  for (double* sum : {&past.count, &past.size, &past.size2, &calls, &calls2}) *sum *= by;
}

void ErrorPast::Close(const SizeHistory& sizes, const ErrorSums& now) {
  const double call = now.error * sizes.Unit();
  calls2 += call * call;
  calls_cross += call * sizes.now.count;
  sums.Add(InUnits(now, sizes.Unit()));
}

void ErrorPast::Fade(double by) {
  for (double* sum : {&sums.error, &sums.error2, &sums.cross, &sums.cost, &sums.skipping, &calls2, &calls_cross})
    *sum *= by;
}

Estimate EstimateAll(const SizeHistory& sizes, const Errors& errors) {
  ErrorSums sums = errors.past.sums;
  sums.Add(InUnits(errors.now, sizes.Unit()));
  const Ratio all = RatioOf(sizes.All(), sums);
  return {all.value, all.error, std::isfinite(all.value) ? SpreadOfCalls(sizes, errors, all) : 0.0, CountCalls(sizes)};
}

double ValueOfAll(const SizeHistory& sizes, const Errors& errors) {
  return ValueOf(sizes.All(), errors.past.sums.error + errors.now.error * sizes.Unit());
}

Estimate EstimateOne(const SizeSums& sizes, const ErrorSums& errors) {
  const Ratio ratio = RatioOf(sizes, errors);
  return {ratio.value, ratio.error, 0.0, 1.0};
}

Estimate EstimatePast(const SizeHistory& sizes, const Errors& errors) {
  return EstimateOne(sizes.past, errors.past.sums);
}
Estimate EstimateNow(const SizeHistory& sizes, const Errors& errors) { return EstimateOne(sizes.now, errors.now); }

}  // namespace sparge::impl

// metrics.cc - the sums behind relative L1 and L2, cosine, largest error and root mean square error.
#include "cli/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sparge::cli {
namespace {

// std::max drops a NaN on one side; here it must win.
double LargerOrNan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace

void ErrorTotals::Add(std::span<const float> result, std::span<const float> reference) {
  const size_t count = std::min(result.size(), reference.size());
  for (size_t i = 0; i < count; ++i) {
    const double o = result[i];
    const double ref = reference[i];
    const double error = std::abs(o - ref);
    abs_error_ += error;
    abs_reference_ += std::abs(ref);
    square_error_ += error * error;
    square_result_ += o * o;
    square_reference_ += ref * ref;
    product_ += o * ref;
    max_error_ = LargerOrNan(max_error_, error);
  }
  count_ += static_cast<int64_t>(count);
}

void ErrorTotals::Add(const ErrorTotals& other) {
  abs_error_ += other.abs_error_;
  abs_reference_ += other.abs_reference_;
  square_error_ += other.square_error_;
  square_result_ += other.square_result_;
  square_reference_ += other.square_reference_;
  product_ += other.product_;
  max_error_ = LargerOrNan(max_error_, other.max_error_);
  count_ += other.count_;
}

double ErrorTotals::Ratio(double error, double size) {
  if (size == 0) return error == 0 ? 0.0 : error * std::numeric_limits<double>::infinity();
  return error / size;
}

double ErrorTotals::RelativeL2() const { return std::sqrt(Ratio(square_error_, square_reference_)); }

double ErrorTotals::Cosine() const {
  const double norms = std::sqrt(square_result_) * std::sqrt(square_reference_);
  if (norms == 0) return square_result_ == square_reference_ ? 1.0 : 0.0;
  return product_ / norms;
}

double ErrorTotals::Rmse() const { return count_ == 0 ? 0.0 : std::sqrt(square_error_ / static_cast<double>(count_)); }

}  // namespace sparge::cli

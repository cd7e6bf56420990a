// metrics.h - how far one result is from another: sums that add up over heads and files, in double.
#ifndef SPARGE_CLI_METRICS_H_
#define SPARGE_CLI_METRICS_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <span>

namespace sparge::cli {

// NaN in either input makes every figure NaN: a broken result must not look good.
class ErrorTotals {
 public:
  void Add(std::span<const float> result, std::span<const float> reference);
  void Add(const ErrorTotals& other);

  // sum |o - ref| / sum |ref|. Reference all zero: 0 if the result is too, else infinity.
  double RelativeL1() const { return Ratio(abs_error_, abs_reference_); }
  // The root of sum (o - ref)^2 / sum ref^2, likewise.
  double RelativeL2() const;
  double Relative(sparge_measure measure) const { return measure == SPARGE_MEASURE_L2 ? RelativeL2() : RelativeL1(); }
  // Of this error against another reference's size.
  double RelativeL1(const ErrorTotals& to) const { return Ratio(abs_error_, to.abs_reference_); }
  // 1 if both are all zero, 0 if one is.
  double Cosine() const;
  double MaxError() const { return max_error_; }
  double Rmse() const;

 private:
  static double Ratio(double error, double size);

  double abs_error_ = 0, abs_reference_ = 0;
  double square_error_ = 0, square_result_ = 0, square_reference_ = 0, product_ = 0;
  double max_error_ = 0;
  int64_t count_ = 0;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_METRICS_H_

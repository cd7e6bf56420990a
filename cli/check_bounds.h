// check_bounds.h - are the heads within the error bounds that a preset promises?
#ifndef SPARGE_CLI_CHECK_BOUNDS_H_
#define SPARGE_CLI_CHECK_BOUNDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cli/checker.h"
#include "cli/report.h"
#include "io/preset.h"

namespace sparge::cli {

// Bounds hold for the mean over the samples that a head was tuned for, so a single new one may lie somewhat beyond: of
// so many heads no further than SPARGE_SINGLE_CALL times.
inline constexpr double kShareWithin = 0.95;

class BoundsJudge {
 public:
  explicit BoundsJudge(const io::Preset& preset) : preset_(preset) {}

  void Add(const std::string& name, const StageErrors& errors);  // one head of one file

  double ShareWithin(double slack) const;  // of the heads, within `slack` times the bounds; 1 without heads
  bool passed() const;                     // with a preset by loss: whether all results are finite
  Json Report() const;
  std::string Text() const;  // a line per head beyond its bounds, and a summary

 private:
  struct Head {
    std::string name;
    double error, pv_error, round_l1, sparsity;
    double excess;  // the largest of error / bound
  };
  double MeanSparsity() const;

  const io::Preset& preset_;
  std::vector<Head> heads_;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CHECK_BOUNDS_H_

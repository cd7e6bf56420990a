// What a calibration knows: for each head, how much error each choice of (theta, tau) and of lambda costs and how much
// work it saves, as sums over measured samples; and the choice that follows. Numbers only: a
// device takes the samples (sampling.h says where).
//
// A sample is a few rows of one query block. Its dense result is known, and the result under every tau and lambda of a
// fixed grid, so that one pass over the tiles measures the whole frontier. The relative L1 of a head is estimated as
// sum of errors / sum of sizes, with the standard error of such a ratio; and since one prompt differs from another, the
// spread of that ratio between calls is followed as well.
#ifndef SPARGE_SRC_CALIBRATE_CALIBRATION_H_
#define SPARGE_SRC_CALIBRATE_CALIBRATION_H_

#include <sparge/sparge.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace sparge::impl {

// The default bounds, for every client.
inline constexpr double kTargetL1 = 0.015;
inline constexpr double kRoundL1 = 0.05;

// Standard deviations beyond which one call in twenty lies: a single one shall stay within SPARGE_SINGLE_CALL times the
// bound so often.
inline constexpr double kOneInTwenty = 1.645;

// The grids. 1 - tau: 0, then from 1e-5 to 0.95 in steps of 20 %. Theta of query blocks: off, 0.1 .. 0.7. Lambda: off,
// 12 .. 2.
inline constexpr int kTaus = 64;
inline constexpr int kThetas = 8;
inline constexpr int kSkips = 14;
double TauAt(int index);
double ThetaAt(int index);
double SkipAt(int index);

// A choice of theta and tau. Tau index 0 is dense.
struct Cell {
  int32_t theta = 0, tau = 0;
  bool operator==(const Cell&) const = default;
};

// Where to measure: some rows of a query block (Plan::QueryBlock), from first_row on.
struct Sample {
  uint64_t call;
  int64_t head, row, first_row;
  double keys;      // of the longest sequence of the call
  Cell cell;        // lambda is measured at this choice of theta and tau
  bool with_skips;  // there is such a choice
  bool with_rounding;
};

// What a sample says. Sizes and errors are sums of absolute values over the rows; tiles and groups are counts.
struct SampleResult {
  bool valid;  // false: something was not finite, or no query saw a key
  double similarity;
  double size;
  double tiles;
  std::array<double, kTaus> error, kept;
  std::array<double, kSkips> skip_error, skip_groups;
  double round_error, round_size;
};

// Sums for a ratio of means, sum of errors / sum of sizes; `2` are squares, `cross` is error * size. `call` sums the
// call at hand, `calls` the squares of such sums. Sizes are shared by all choices of a head.
struct SizeSums {
  double count = 0, size = 0, size2 = 0;
  double calls = 0, call = 0, calls2 = 0;
};
struct ErrorSums {
  double error = 0, error2 = 0, cross = 0, cost = 0;
  double call = 0, calls2 = 0, calls_cross = 0;
};
struct Estimate {
  double value;   // the ratio
  double error;   // its standard error
  double spread;  // its standard deviation from call to call; 0 while there are fewer than three
};
Estimate EstimateRatio(const SizeSums& sizes, const ErrorSums& errors);

struct HeadRecord {
  double target_l1, pv_l1;
  double call = 0;  // of the last sample, counted from 1
  double keys = 0;  // the most of a sample so far
  // Of the last two dozen samples, older ones fading: what was chosen, as it turns out.
  double recent_count = 0, recent_error = 0, recent_size = 0;
  // theta, tau
  SizeSums sizes;
  double tiles = 0;
  std::array<std::array<ErrorSums, kTaus>, kThetas> cells{};
  // lambda, at `cell` or close to it
  SizeSums skip_sizes;
  std::array<ErrorSums, kSkips> skips{};
  // rounding of the fewest bits
  SizeSums round_sizes;
  ErrorSums rounding;
  // The choice.
  sparge_head_state state = SPARGE_HEAD_UNKNOWN;
  Cell cell;
  int32_t skip = 0;
  bool needs_int16 = false;  // int8 is not exact enough
};

// What is in force for a head.
struct HeadSetting {
  sparge_head_params params;
  Cell cell;
  bool sparse;
  bool needs_int16;
  bool settled;  // enough samples: from now on only looked after
  bool rounding_known;
  int64_t missing;  // samples until a first choice can be made
};

struct Calibration {
 public:
  explicit Calibration(const sparge_calibration_desc& desc);
  // Saved bytes. Throws Failure.
  Calibration(const std::byte* data, size_t size);
  size_t SavedSize() const;
  void Save(std::byte* out) const;

  int64_t q_heads() const { return q_heads_; }
  uint64_t seed() const { return seed_; }
  // Counts the calls that measure: each takes other samples.
  uint64_t NextCall();
  HeadSetting Setting(int64_t head) const;
  // Adds a sample and chooses anew.
  void Learn(const Sample& sample, const SampleResult& result);
  void SetBounds(int64_t head, double target_l1, double pv_l1);
  void Describe(int64_t head, sparge_head_estimate& out) const;

 private:
  void Choose(HeadRecord& head) const;

  mutable std::mutex mutex_;
  int64_t q_heads_ = 0;
  double round_l1_ = 0;
  uint64_t seed_ = 0;
  uint64_t calls_ = 0;
  std::vector<HeadRecord> heads_;
};

// Throws Failure unless 0 <= target_l1 <= pv_l1.
void CheckBounds(double target_l1, double pv_l1);

}  // namespace sparge::impl

// The public handle: here, because layers hand out their own.
struct sparge_calibration {
  sparge::impl::Calibration calibration;
};
#endif  // SPARGE_SRC_CALIBRATE_CALIBRATION_H_

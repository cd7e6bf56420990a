// What a calibration knows: for each head, how much error each choice of (theta, tau) and of lambda costs and how much
// work it saves, as sums over measured rows; and the choice that follows. Numbers only: a device takes the samples
// (sampling.h says where).
//
// A sample is a few rows of a head, far from each other. The dense result of a row is known, and its result under every
// tau and lambda of a fixed grid, so that one pass over the tiles measures the whole frontier.
//
// A call is measured before its tiles are skipped. Rows of this call that agree with those of earlier calls add to what
// is known; rows that disagree take its weight; and where they say that the choice is beyond the bound, all that was
// known is forgotten: the head is measured as if it were new, in this same call.
#ifndef SPARGE_SRC_CALIBRATE_CALIBRATION_H_
#define SPARGE_SRC_CALIBRATE_CALIBRATION_H_

#include <sparge/sparge.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/calibrate/bounds.h"
#include "src/calibrate/sums.h"

namespace sparge::impl {

// Rows that a choice needs. Errors are concentrated in few rows: with fewer, none of them may be one of those.
inline constexpr double kFewest = 40;

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

// What such a choice, with a lambda of the grid, means for a plan. Cell{} and 0: every tile, and its products.
sparge_head_params ParamsAt(const Cell& cell, int32_t skip);

// Where to measure: `count` queries of a sequence and head, `step` apart.
struct Sample {
  uint64_t call;
  int64_t head, sequence, first, step, count;
  double keys;            // of the longest sequence of the call
  Cell cell;              // lambda is measured at this choice of theta and tau
  bool with_skips;        // there is such a choice
  int64_t rounding_rows;  // of which the precision's error is measured, too: so many, evenly spread
};

// What a row says. Sizes and errors are sums over its channels, of absolute values or of squares, as the measure of the
// calibration has it; those of rounding are of absolute values.
struct RowResult {
  bool valid;  // false: something was not finite, or the query saw no key
  float similarity;
  float size;
  float tiles;                                      // visible ones
  std::array<float, kTaus> error, kept;             // by tau; kept tiles
  std::array<float, kSkips> skip_error, skip_kept;  // by lambda
  float round_error, round_size;
};

struct HeadRecord {
  Bounds bounds;
  double call = 0;       // of the last sample, counted from 1
  double judged = 0;     // the call that was last compared with earlier ones
  double keys = 0;       // the most of a sample so far
  bool learned = false;  // rows since the last choice
  // theta, tau. The call at hand by the largest theta that a row's block is alike at.
  SizeHistory sizes;
  std::array<std::array<ErrorSums, kTaus>, kThetas> now{};
  std::array<double, kThetas> tiles_now{};
  std::array<std::array<ErrorPast, kTaus>, kThetas> past{};
  double tiles_past = 0;
  // lambda, at `skip_cell` or close to it
  Cell skip_cell;
  SizeHistory skip_sizes;
  std::array<ErrorSums, kSkips> skips_now{};
  std::array<ErrorPast, kSkips> skips_past{};
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
  bool fresh;             // nothing is known from earlier calls
  bool settled;           // so much is known that less is measured
  int64_t rounding_rows;  // of a call, on which the precision's error is still to be measured
  bool rounding_now;      // in this call; else when it is the head's turn
  int64_t missing;        // rows until a first choice can be made
};

// What a call means for what is known from earlier ones.
enum class Follow {
  kParts,  // all calls are parts of one whole
  kLean,   // the input may change: where the call disagrees, earlier ones count no more than it does
  kAnew    // where it is beyond the bound, they do not count at all: the call has rows enough for a choice
};

struct Calibration {
 public:
  Calibration(int64_t q_heads, const Bounds& bounds, double round_l1, uint64_t seed);
  // Saved bytes. Throws Failure.
  Calibration(const std::byte* data, size_t size);
  size_t SavedSize() const;
  void Save(std::byte* out) const;

  int64_t q_heads() const { return q_heads_; }
  uint64_t seed() const { return seed_; }
  sparge_measure measure() const { return measure_; }
  // Counts the calls that measure: each takes other samples.
  uint64_t NextCall();
  HeadSetting Setting(int64_t head) const;
  // Adds the rows of a sample.
  void Learn(const Sample& sample, std::span<const RowResult> rows);
  // Chooses anew, if the call had samples of this head.
  void Decide(int64_t head, uint64_t call, Follow follow);
  void SetBounds(int64_t head, double target, double pv);
  void Describe(int64_t head, sparge_head_estimate& out) const;

 private:
  void Choose(HeadRecord& head, bool judges_moves) const;
  std::mutex& LockOf(int64_t head) const { return locks_[static_cast<size_t>(head)]; }

  int64_t q_heads_ = 0;
  sparge_measure measure_ = SPARGE_MEASURE_L2;
  double round_l1_ = 0;
  uint64_t seed_ = 0;
  std::atomic<uint64_t> calls_ = 0;
  std::vector<HeadRecord> heads_;
  std::unique_ptr<std::mutex[]> locks_;  // one per head: they learn and decide side by side
};

}  // namespace sparge::impl

// The public handle: here, because layers hand out their own.
struct sparge_calibration {
  sparge::impl::Calibration calibration;
};
#endif  // SPARGE_SRC_CALIBRATE_CALIBRATION_H_

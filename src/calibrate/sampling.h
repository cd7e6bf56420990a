// When to measure, and where: the samples of one call. They depend on the seed, the call and the settings only.
#ifndef SPARGE_SRC_CALIBRATE_SAMPLING_H_
#define SPARGE_SRC_CALIBRATE_SAMPLING_H_

#include <cstdint>

#include "src/calibrate/calibration.h"
#include "src/problem/problem.h"

namespace sparge::impl {

// A row costs about so many times what it costs in a dense call: tile by tile, with sums and distances.
inline constexpr double kSampleCost = 2.0;
// Shares of a dense call that runs spend on a head: while its first choice is missing, and after.
inline constexpr double kFirstEffort = 0.045;
inline constexpr double kWatchEffort = 0.01;
// At most so much for a first choice, if that is enough for it: a long prompt may be the only call there is.
inline constexpr double kMostFirstEffort = 0.05;
// Of the least effort that a plan asks for, what a head gets of which much is known.
inline constexpr double kSettledShare = 0.5;
// Measured at a time; bounds the memory for results.
inline constexpr int64_t kSamplesAtOnce = 128;

// A call is sampled in two rounds. The first one tells whether a choice holds; the second is for heads that have none,
// or none any more, and measures lambda at the tau that the first one suggests.
inline constexpr int kRounds = 2;

// The samples of one round, in an order of their own: walks through heads, and through the queries of each.
struct Sampling {
  uint64_t call;
  double effort;        // of a dense call; negative: one of those above, as each head needs
  int64_t sample_rows;  // queries of a sample, as the device measures them
  int round = 0;
  int64_t head = 0;
  int64_t samples = 0, taken = 0;  // of this head
};

// Whether any round of the call may sample the head.
bool MaySample(const Problem& problem, const Sampling& sampling, int64_t head);

// How many samples this round takes of a head.
int64_t CountSamples(const Problem& problem, const Sampling& sampling, int64_t head);

// What the samples of such a call mean for what is known from earlier ones.
Follow FollowFor(const Problem& problem, const Sampling& sampling);

// Fills up to kSamplesAtOnce samples of active heads before `end_head`; returns their number, 0 at the end.
int64_t NextSamples(const Problem& problem, const HeadChoice& heads, int64_t end_head, Sampling& sampling, Sample* out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CALIBRATE_SAMPLING_H_

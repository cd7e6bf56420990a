// Draws samples.
#include "src/calibrate/sampling.h"

#include <algorithm>
#include <cmath>

namespace sparge::impl {
namespace {

// Of the most that a first choice may cost, what the second round may take.
constexpr double kSecondShare = 0.65;
// Rounding is dear whatever the number of rows, for all keys and values are read as they are: so heads take turns, each
// in one of so many calls.
constexpr uint64_t kRoundingTurn = 8;
// Numbers that look random, per head and round.
constexpr int64_t kChancesPerRound = 1 << 20;

// A number that looks random and depends on what is given only (the finaliser of splitmix64), as a share of 1.
double Chance(uint64_t seed, uint64_t call, uint64_t head, uint64_t which) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u * (1 + which + 0x10001 * head + 0x100000007 * call);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Queries [begin, end) of a head, counted through all sequences. Of those of the sequence at `at`: evenly spread ones
// from a place that `chance` says.
Sample SampleFrom(const Problem& problem, int64_t sample_rows, int64_t begin, int64_t end, int64_t at, double chance) {
  size_t sequence = 0;
  int64_t before = 0;
  while (at - before >= problem.sequences[sequence].q_count) before += problem.sequences[sequence++].q_count;
  begin = std::max(begin - before, int64_t{0});
  end = std::min(end - before, problem.sequences[sequence].q_count);
  if (end - begin < sample_rows) {  // the part of a sequence that is too little: all of it
    begin = 0;
    end = problem.sequences[sequence].q_count;
  }
  Sample sample{};
  sample.sequence = static_cast<int64_t>(sequence);
  sample.count = std::min(sample_rows, end - begin);
  sample.step = (end - begin) / sample.count;
  const int64_t places = end - begin - (sample.count - 1) * sample.step;
  sample.first = begin + std::min(static_cast<int64_t>(chance * static_cast<double>(places)), places - 1);
  sample.keys = static_cast<double>(problem.k_blocks * kBlockK);
  return sample;
}

// Chance `which` of a head in this round.
double ChanceOf(const Problem& problem, const Sampling& sampling, int64_t head, int64_t which) {
  return Chance(problem.calibration->seed(), sampling.call, static_cast<uint64_t>(head),
                static_cast<uint64_t>(which + sampling.round * kChancesPerRound));
}

int64_t CountQueries(const Problem& problem) {
  int64_t queries = 0;
  for (const Sequence& s : problem.sequences) queries += s.q_count;
  return queries;
}

// Rows that this round takes of a head, as a run decides by itself.
double CountRows(const Problem& problem, const Sampling& sampling, const HeadSetting& setting) {
  const double per_effort = static_cast<double>(CountQueries(problem)) / kSampleCost;
  const double least = problem.least_effort * (setting.settled ? kSettledShare : 1.0);
  if (!setting.fresh && setting.missing == 0) {
    if (sampling.round > 0) return 0;
    // A choice is never used unseen.
    return std::max(std::max(kWatchEffort, least) * per_effort,
                    setting.sparse ? static_cast<double>(sampling.sample_rows) : 0.0);
  }
  const double rows = std::max(kFirstEffort, least) * per_effort / kRounds;
  // What is missing, if this round can afford it. The second one follows either as much, or the little that is measured
  // of a head that has a choice.
  const double share = sampling.round == 0 ? 1.0 / kRounds : kSecondShare;
  const double missing = static_cast<double>(setting.missing) / (kRounds - sampling.round);
  if (missing > kMostFirstEffort * per_effort * share) return rows;
  const auto sample_rows = static_cast<double>(sampling.sample_rows);
  return std::max(rows, std::ceil(missing / sample_rows) * sample_rows);
}

// Whether this call measures the head's rounding.
bool RoundsNow(const Sampling& sampling, int64_t head, const HeadSetting& setting) {
  const bool turn = (sampling.call + static_cast<uint64_t>(head)) % kRoundingTurn == 0;
  return setting.rounding_rows > 0 && (setting.rounding_now || turn || sampling.effort >= 0);
}

}  // namespace

bool MaySample(const Problem& problem, const Sampling& sampling, int64_t head) {
  const HeadSetting setting = problem.calibration->Setting(head);
  return sampling.effort >= 0 || setting.fresh || setting.missing > 0 || CountSamples(problem, sampling, head) > 0;
}

int64_t CountSamples(const Problem& problem, const Sampling& sampling, int64_t head) {
  const auto queries = static_cast<double>(CountQueries(problem));
  const double rows = sampling.effort < 0 ? CountRows(problem, sampling, problem.calibration->Setting(head))
                                          : sampling.effort * queries / kSampleCost / kRounds;
  // What is left of a sample is taken with that chance, so that small calls spend no more on average.
  return static_cast<int64_t>(rows / static_cast<double>(sampling.sample_rows) + ChanceOf(problem, sampling, head, 0));
}

Follow FollowFor(const Problem& problem, const Sampling& sampling) {
  if (sampling.effort >= 0) return Follow::kParts;
  const double second = kSecondShare * kMostFirstEffort * static_cast<double>(CountQueries(problem)) / kSampleCost;
  return second + static_cast<double>(sampling.sample_rows) >= kFewest ? Follow::kAnew : Follow::kLean;
}

int64_t NextSamples(const Problem& problem, const HeadChoice& heads, int64_t end_head, Sampling& sampling,
                    Sample* out) {
  const int64_t queries = CountQueries(problem);
  int64_t count = 0;
  for (; sampling.head < end_head; ++sampling.head, sampling.taken = 0) {
    const int64_t head = sampling.head;
    if (!heads.active[head]) continue;
    const HeadSetting setting = problem.calibration->Setting(head);
    if (sampling.taken == 0) sampling.samples = std::min(CountSamples(problem, sampling, head), queries);
    for (; sampling.taken < sampling.samples; ++sampling.taken) {
      if (count == kSamplesAtOnce) return count;
      // One from each of as many equal parts of the queries.
      const int64_t begin = sampling.taken * queries / sampling.samples;
      const int64_t end = (sampling.taken + 1) * queries / sampling.samples;
      const auto chance = [&](int64_t which) {
        return ChanceOf(problem, sampling, head, 1 + 2 * sampling.taken + which);
      };
      const int64_t at = begin + static_cast<int64_t>(chance(0) * static_cast<double>(end - begin));
      Sample& sample = out[count++] = SampleFrom(problem, sampling.sample_rows, begin, end, at, chance(1));
      sample.call = sampling.call;
      sample.head = head;
      sample.cell = setting.cell;
      sample.with_skips = setting.cell.tau > 0;
      // One of a call; where time is given, as many rows as it takes.
      const double chosen = ChanceOf(problem, sampling, head, kChancesPerRound - 1);
      const bool with_rounding = problem.precision != SPARGE_PRECISION_FP32 && RoundsNow(sampling, head, setting) &&
                                 sampling.round == 0 &&
                                 sampling.taken == static_cast<int64_t>(chosen * static_cast<double>(sampling.samples));
      if (with_rounding) sample.rounding_rows = sampling.effort < 0 ? setting.rounding_rows : sample.count;
    }
  }
  return count;
}

}  // namespace sparge::impl

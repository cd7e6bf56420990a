// Draws samples.
#include "src/calibrate/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sparge::impl {
namespace {

// One sample in so many is compared with fp32, which costs as much again; at least one of a call, at most two.
constexpr int64_t kRoundingOneIn = 6;

// A number that looks random and depends on what is given only (the finaliser of splitmix64), as a share of 1.
double Chance(uint64_t seed, uint64_t call, uint64_t head, uint64_t which) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u * (1 + which + 0x10001 * head + 0x100000007 * call);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Steps through `count` parts such that any few in a row are spread over all of them, and each comes once: the golden
// section. A calibration looks at its latest samples, and in causal attention late queries are unlike early ones.
int64_t Stride(int64_t count) {
  auto stride = std::max<int64_t>(1, std::llround(0.618 * static_cast<double>(count)));
  while (std::gcd(stride, count) != 1) ++stride;
  return stride;
}

// The sample that belongs to the given query of a head, counted through all sequences.
Sample SampleAt(const Problem& problem, int64_t sample_rows, int64_t head, int64_t query) {
  size_t sequence = 0;
  while (query >= problem.sequences[sequence].q_count) query -= problem.sequences[sequence++].q_count;
  const Sequence& s = problem.sequences[sequence];
  const int64_t block = query / kBlockQ;
  // The samples of a block are disjoint and equally likely, so that every row counts as much as any other: those at the
  // edges of a block are the least like its means.
  const int64_t samples = CeilDiv(s.QueriesIn(block), sample_rows);
  Sample sample{};
  sample.head = head;
  sample.keys = static_cast<double>(problem.k_blocks * kBlockK);
  sample.row = problem.QueryBlock(head, s, block);
  sample.first_row = query % kBlockQ * samples / s.QueriesIn(block) * sample_rows;
  return sample;
}

// Chance `which` of a head in this call.
double ChanceOf(const Problem& problem, const Sampling& sampling, int64_t head, int64_t which) {
  return Chance(problem.calibration->seed(), sampling.call, static_cast<uint64_t>(head), static_cast<uint64_t>(which));
}

int64_t CountQueries(const Problem& problem) {
  int64_t queries = 0;
  for (const Sequence& s : problem.sequences) queries += s.q_count;
  return queries;
}

}  // namespace

int64_t CountSamples(const Problem& problem, const Sampling& sampling, int64_t head) {
  const HeadSetting setting = problem.calibration->Setting(head);
  const double units = static_cast<double>(CountQueries(problem)) / static_cast<double>(sampling.sample_rows);
  const double own = setting.settled ? kWatchEffort : setting.missing > 0 ? kCalibrationEffort : kRefineEffort;
  const double effort = sampling.effort < 0 ? std::max(own, problem.least_effort) : sampling.effort;
  // What is left of a sample is taken with that chance, so that small calls spend no more on average.
  const auto samples = static_cast<int64_t>(effort * units / kSampleCost + ChanceOf(problem, sampling, head, 0));
  const bool within_reach = static_cast<double>(setting.missing) <= kFirstEffort * units / kSampleCost;
  return sampling.effort < 0 && within_reach ? std::max(samples, setting.missing) : samples;
}

int64_t NextSamples(const Problem& problem, const HeadChoice& heads, int64_t end_head, Sampling& sampling,
                    Sample* out) {
  const int64_t queries = CountQueries(problem);
  int64_t count = 0;
  for (; sampling.head < end_head; ++sampling.head, sampling.taken = 0) {
    const int64_t head = sampling.head;
    if (!heads.active[head]) continue;
    const HeadSetting setting = problem.calibration->Setting(head);
    if (sampling.taken == 0) sampling.samples = CountSamples(problem, sampling, head);
    for (; sampling.taken < sampling.samples; ++sampling.taken) {
      if (count == kSamplesAtOnce) return count;
      // One from each of as many equal parts of the queries.
      const int64_t part = sampling.taken * Stride(sampling.samples) % sampling.samples;
      const double at = (static_cast<double>(part) + ChanceOf(problem, sampling, head, 1 + sampling.taken)) /
                        static_cast<double>(sampling.samples) * static_cast<double>(queries);
      Sample& sample = out[count++] =
          SampleAt(problem, sampling.sample_rows, head, std::min(static_cast<int64_t>(at), queries - 1));
      sample.call = sampling.call;
      sample.cell = setting.cell;
      sample.with_skips = setting.sparse;
      sample.with_rounding = problem.precision != SPARGE_PRECISION_FP32 && !setting.rounding_known &&
                             !setting.needs_int16 &&
                             sampling.taken < std::clamp<int64_t>(sampling.samples / kRoundingOneIn, 1, 2);
    }
  }
  return count;
}

}  // namespace sparge::impl

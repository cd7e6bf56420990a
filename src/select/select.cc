// The rules, one function each. In double throughout: it costs nothing here, and ties and sums come out as the rule
// says.
#include "src/select/select.h"

#include <algorithm>
#include <limits>

#include "src/select/block_map.h"

namespace sparge::impl {
namespace {

// Most probable first, ties by lower index.
auto ByRank(const RowScores& row) {
  return [score = row.score](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; };
}

// How many of the candidates hold the mass tau, at least 1; these come out first. row.score: their probabilities.
int64_t TakeMass(const RowScores& row, int64_t count, double tau) {
  // Halving finds where the mass is reached without sorting all: the tiles before `begin` are needed and hold `mass`,
  // those from `end` on are not.
  constexpr int64_t kFew = 32;
  int64_t begin = 0, end = count;
  double mass = 0;
  while (end - begin > kFew) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(row.order + begin, row.order + middle, row.order + end, ByRank(row));
    double half = mass;
    for (int64_t c = begin; c < middle; ++c) half += row.score[row.order[c]];
    if (half >= tau) {
      end = middle;
    } else {
      begin = middle;
      mass = half;
    }
  }
  std::sort(row.order + begin, row.order + end, ByRank(row));
  while (mass < tau && begin < end) mass += row.score[row.order[begin++]];
  return std::max<int64_t>(begin, 1);
}

// Puts the masses of the candidates side by side into row.score; those that were logarithms then sum to 1. Returns the
// largest.
double GatherMasses(const RowScores& row, int64_t count) {
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t c = 0; c < count; ++c) top = std::max(top, row.score[row.order[c]]);
  if (!(top > 0) && !row.logs &&
      !row.part) {  // pooled queries that are all zeros or not finite tell nothing: all are alike
    std::fill_n(row.score, count, 1.0 / static_cast<double>(count));
    return row.score[0];
  }
  double sum = 0;
  for (int64_t c = 0; c < count; ++c) {  // c <= order[c], so nothing is overwritten that is still needed
    const double score = row.score[row.order[c]];
    row.score[c] = row.logs ? std::exp(score - top) : score;
    sum += row.score[c];
  }
  if (!row.logs) return top;
  for (int64_t c = 0; c < count; ++c) row.score[c] /= sum;
  return 1.0 / sum;
}

// Keeps the smallest set of candidates that holds the mass tau. Which of two tiles is more probable cannot be foreseen,
// and branches on it cost more than all the rest; so a border is found first by adding up vectors: tiles from `high` on
// hold less than tau, tiles from `low` on hold it. Only those between have to be ranked.
void KeepMass(const RowRule& rule, const RowScores& row, int64_t count, uint64_t* kept) {
  const double tau = rule.params.tau;
  const double largest = GatherMasses(row, count);
  // Tiles below a fair share of 1 - tau hold less than that together; the margin is for rounding.
  double low = std::min(0.999 * (1 - tau) / static_cast<double>(count), largest);
  double high = 2;
  constexpr int kSteps = 12;  // narrows a factor of 10^4 to 0.3 %
  for (int step = 0; step < kSteps; ++step) {
    const double middle = std::sqrt(low * high);
    (middle <= largest && rule.mass_from(row.score, count, middle) >= tau ? low : high) = middle;
  }
  double mass = 0;
  int64_t between = 0;
  for (int64_t c = 0; c < count; ++c) {  // without branches, too
    const double p = row.score[c];
    const int32_t tile = row.order[c];
    const bool sure = p >= high;
    kept[tile / 64] |= static_cast<uint64_t>(sure) << (tile % 64);
    mass += sure ? p : 0.0;
    row.score[between] = p;
    row.order[between] = tile;
    between += p >= low && !sure;
  }
  for (int64_t c = between - 1; c >= 0; --c) row.score[row.order[c]] = row.score[c];  // by tile again
  if (between == 0 || (mass >= tau && mass > 0)) return;
  const int64_t take = TakeMass(row, between, tau - mass);
  for (int64_t c = 0; c < take; ++c) SetBit(kept, row.order[c]);
}

// Keeps the candidates whose mass reaches the floor, and the best one in any case: which that is, a part cannot know.
void KeepFloor(const RowRule& rule, const RowScores& row, int64_t count, uint64_t* kept) {
  const double floor = MassFloor(rule.params.tau, rule.visible);
  const double best = GatherMasses(row, count);
  const double least = row.part ? floor : std::min(floor, best);
  for (int64_t c = 0; c < count; ++c) {
    const int32_t tile = row.order[c];
    kept[tile / 64] |= static_cast<uint64_t>(row.score[c] >= least) << (tile % 64);
  }
}

// Candidates are the visible tiles of self-similar key blocks.
void SelectTiles(const RowRule& rule, const RowScores& row, int64_t candidates, uint64_t* kept) {
  if (candidates == 0) return;
  if (rule.select == SPARGE_SELECT_FLOOR && rule.params.tau < 1) return KeepFloor(rule, row, candidates, kept);
  if (rule.select == SPARGE_SELECT_CDF && rule.params.tau < 1) return KeepMass(rule, row, candidates, kept);
  int64_t take = candidates;
  if (rule.select == SPARGE_SELECT_TOPK) {
    const auto wanted = static_cast<int64_t>(std::ceil(rule.params.topk * static_cast<double>(rule.visible)));
    take = std::clamp<int64_t>(wanted, 1, candidates);
    // Scores have the order of their probabilities, and which tiles come first needs no order among them.
    std::nth_element(row.order, row.order + take - 1, row.order + candidates, ByRank(row));
  }
  for (int64_t c = 0; c < take; ++c) SetBit(kept, row.order[c]);
}

}  // namespace

void SelectRow(const RowRule& rule, const RowScores& row, uint64_t* kept) {
  int64_t candidates = 0;
  for (int64_t j = 0; j < row.tiles; ++j) {
    if (!row.visible[j]) continue;
    if (IsForced(rule, j)) SetBit(kept, j);
    const bool trusted = rule.query_alike && (rule.k_similarity == nullptr || rule.k_similarity[j] > rule.params.theta);
    if (trusted) row.order[candidates++] = static_cast<int32_t>(j);
    if (!trusted) SetBit(kept, j);  // a mean tells nothing about it: compute
  }
  SelectTiles(rule, row, candidates, kept);
}

}  // namespace sparge::impl

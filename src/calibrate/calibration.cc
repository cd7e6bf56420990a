// Sums over samples, and the choice that follows from them.
#include "src/calibrate/calibration.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// From here on a prompt in small batches takes fewer samples.
constexpr double kSettled = 256;
// Rounding is measured in fp32 on so many rows in all, a few of a call: some in the first one, for a rough head has to
// be noticed there. From this share of its bound on the rest follows at once.
constexpr double kRoundingRows = 24;
constexpr int64_t kRoundingPerCall = 4;
constexpr double kDoubtful = 0.5;
// Older rows fade, so that a head that changes slowly is followed.
constexpr double kWindow = 320;
// Rows of a call that are enough to compare it with earlier ones.
constexpr double kJudged = 4;
// What this many standard errors do not explain, and is no trifle beside the bound, is another input: earlier calls
// then count no more than this one.
constexpr double kDisagree = 2.0;
constexpr double kTrifle = 0.1;
// A call this far beyond the bound, by more than a standard error or so, is no chance.
constexpr double kAlarm = 1.3;
// Sparse code has to save this share of the tiles to be worth its prediction.
constexpr double kWorthwhile = 0.08;
// A choice stays while another one is not cheaper by this share, for a change forgets what is known of lambda.
constexpr double kLoyalty = 0.02;

// How far below the bound an estimate has to stay, in standard errors: one, and more while rows are so few that the
// standard error itself is in doubt. Rows that skip nothing say nothing: with a theta that few blocks are alike at, all
// rows but a handful are of this kind.
double Margin(double skipping_rows) { return 1.0 + 60.0 / skipping_rows; }
// Fewer rows that skip are not believed at all. With lambda, they skip parts of what is known to be within the bound.
constexpr double kFewestSkipping = 20;
constexpr double kFewestLambda = 10;

// Likewise for what a single call says: the standard error of a few rows is hardly known.
double JudgeMargin(double rows) { return 1.0 + 8.0 / rows; }

// How calls differ is judged from so many on: two say little about it.
constexpr double kSpreadCalls = 3;

bool Meets(const Estimate& estimate, double skipping_rows, sparge_measure measure, double bound) {
  const double spread = estimate.calls >= kSpreadCalls ? estimate.spread : 0.0;
  return estimate.value + Margin(skipping_rows) * estimate.error <= InSums(measure, bound) &&
         estimate.value + kOneInTwenty * spread <= InSums(measure, SPARGE_SINGLE_CALL * bound);
}

// Few rows hold most of an error, and a choice is made where it looks small: so it takes more standard errors than one
// would think until 19 of 20 heads are below a limit, and until what is called known is right (docs/accuracy.md).
constexpr double kLimitErrors = 7;
constexpr double kKnownErrors = 5;
// Errors below this share of the bound are not told apart.
constexpr double kNegligible = 0.1;

// Of two independent errors. std::hypot is another one since glibc 2.35, and packages are to run with older ones.
double Together(double a, double b) { return std::sqrt(a * a + b * b); }

// In terms of the bound: the error that lies so many standard errors above the estimate, differences of calls included.
double Above(const Estimate& estimate, double errors, sparge_measure measure) {
  return FromSums(measure, estimate.value + errors * Together(estimate.error, estimate.spread));
}

using CellSums = std::array<std::array<ErrorSums, kTaus>, kThetas>;

// The call at hand under every choice: a block that is not alike at theta is computed in full.
CellSums NowOf(const HeadRecord& head) {
  CellSums sums = head.now;
  double in_full = 0;
  for (int theta = kThetas - 1; theta-- > 0;) {
    for (int tau = 0; tau < kTaus; ++tau) sums[theta][tau].Add(sums[theta + 1][tau]);
  }
  for (int theta = 1; theta < kThetas; ++theta) {
    in_full += head.tiles_now[theta - 1];
    for (int tau = 0; tau < kTaus; ++tau) sums[theta][tau].cost += in_full;
  }
  return sums;
}
ErrorSums NowAt(const HeadRecord& head, const Cell& cell) {
  ErrorSums sums;
  for (int theta = 0; theta < kThetas; ++theta) {
    if (theta >= cell.theta) sums.Add(head.now[theta][cell.tau]);
    if (theta < cell.theta) sums.cost += head.tiles_now[theta];
  }
  return sums;
}

Errors At(const HeadRecord& head, const Cell& cell) { return {head.past[cell.theta][cell.tau], NowAt(head, cell)}; }
Errors SkipErrors(const HeadRecord& head, int32_t skip) { return {head.skips_past[skip], head.skips_now[skip]}; }
double TilesOf(const HeadRecord& head) {
  return std::accumulate(head.tiles_now.begin(), head.tiles_now.end(), head.tiles_past);
}

// The call at hand becomes one of many.
void CloseCall(HeadRecord& head) {
  if (head.sizes.now.count > 0) {
    const CellSums now = NowOf(head);
    for (int theta = 0; theta < kThetas; ++theta) {
      for (int tau = 0; tau < kTaus; ++tau) head.past[theta][tau].Close(head.sizes, now[theta][tau]);
    }
    head.tiles_past = TilesOf(head);
    head.sizes.Close();
    head.now = {};
    head.tiles_now = {};
  }
  if (head.skip_sizes.now.count > 0) {
    for (int skip = 0; skip < kSkips; ++skip) head.skips_past[skip].Close(head.skip_sizes, head.skips_now[skip]);
    head.skip_sizes.Close();
    head.skips_now = {};
  }
}

// What is known of earlier calls counts so much less.
void Fade(HeadRecord& head, double by) {
  if (by == 1) return;
  head.sizes.Fade(by);
  head.tiles_past *= by;
  for (auto& row : head.past) {
    for (ErrorPast& cell : row) cell.Fade(by);
  }
  head.skip_sizes.Fade(by);
  for (ErrorPast& skip : head.skips_past) skip.Fade(by);
}

// So that no more than `most` rows of earlier calls count.
void LimitPast(HeadRecord& head, double most) {
  if (head.sizes.past.count > most) Fade(head, most / head.sizes.past.count);
}

void LearnCells(const RowResult& row, HeadRecord& head) {
  const auto size = static_cast<double>(row.size);
  int theta = 0;
  while (theta + 1 < kThetas && static_cast<double>(row.similarity) > ThetaAt(theta + 1)) ++theta;
  head.sizes.now.Add(size);
  head.tiles_now[theta] += static_cast<double>(row.tiles);
  for (int tau = 0; tau < kTaus; ++tau) {
    head.now[theta][tau].AddRow(
        {static_cast<double>(row.error[tau]), size, static_cast<double>(row.kept[tau]), row.kept[tau] < row.tiles});
  }
}

void LearnSkips(const RowResult& row, HeadRecord& head) {
  const auto size = static_cast<double>(row.size);
  head.skip_sizes.now.Add(size);
  for (int skip = 0; skip < kSkips; ++skip) {
    head.skips_now[skip].AddRow({static_cast<double>(row.skip_error[skip]), size,
                                 static_cast<double>(row.skip_kept[skip]), row.skip_kept[skip] < row.skip_kept[0]});
  }
}

void ForgetSkips(HeadRecord& head) {
  head.skip_sizes = {};
  head.skips_now = {};
  head.skips_past = {};
}

// The cheapest theta and tau within the bound; tau index 0 always is. The cost falls with tau. `judges_moves`: the call
// at hand has to be within the bound, too, at another choice than the one in force, which has been judged. Where the
// input has changed, earlier calls know nothing of other choices, and yet their many rows would speak for them.
Cell ChooseCell(const HeadRecord& head, bool judges_moves) {
  const CellSums now = NowOf(head);
  // A guess may rest on fewer.
  const double fewest = head.sizes.Rows() < kFewest ? 1.0 : kFewestSkipping;
  const double most = InSums(head.bounds.measure, head.bounds.target);
  const auto meets = [&](const Errors& errors) {
    return errors.Skipping() >= fewest && ValueOfAll(head.sizes, errors) <= most &&
           Meets(EstimateAll(head.sizes, errors), errors.Skipping(), head.bounds.measure, head.bounds.target);
  };
  const bool judges = judges_moves && head.sizes.now.count >= kJudged;
  const double most_now = judges ? most * head.sizes.now.size : std::numeric_limits<double>::infinity();
  const auto at = [&](const Cell& cell) { return Errors{head.past[cell.theta][cell.tau], now[cell.theta][cell.tau]}; };
  Cell best;
  double best_cost = at(best).Cost();
  for (int32_t theta = 0; theta < kThetas; ++theta) {
    for (int32_t tau = kTaus; tau-- > 1;) {
      const Errors errors = at({theta, tau});
      if (errors.Cost() >= best_cost) break;
      if (errors.now.error > most_now || !meets(errors)) continue;
      // Of those that cost the same the most careful one.
      best = {theta, tau};
      best_cost = errors.Cost();
      while (best.tau > 1 && at({theta, best.tau - 1}).Cost() <= best_cost) --best.tau;
      break;
    }
  }
  const bool stay = head.state == SPARGE_HEAD_SPARSE && meets(at(head.cell)) &&
                    at(head.cell).Cost() <= best_cost + kLoyalty * TilesOf(head);
  return stay ? head.cell : best;
}

// What a skip adds to an error was measured at this choice of theta and tau or close to it: then it says something
// here.
bool Near(const Cell& a, const Cell& b) { return a.theta == b.theta && std::abs(a.tau - b.tau) <= 6; }

// The error at the head's choice with a skip: what it is without, and what the skip added where it was measured.
template <class EstimateOf>
Estimate WithSkip(const HeadRecord& head, int32_t skip, const EstimateOf& estimate) {
  const Estimate plain = estimate(head.sizes, At(head, head.cell));
  if (skip == 0 || head.skip_sizes.Rows() == 0) return plain;
  const Estimate with = estimate(head.skip_sizes, SkipErrors(head, skip));
  const double added = with.value - estimate(head.skip_sizes, SkipErrors(head, 0)).value;
  const double spread = with.calls >= kSpreadCalls ? std::max(plain.spread, with.spread) : plain.spread;
  return {plain.value + std::max(added, 0.0), std::max(plain.error, with.error), spread, plain.calls};
}

int32_t ChooseSkip(const HeadRecord& head) {
  int32_t best = 0;
  if (!Near(head.cell, head.skip_cell)) return best;
  for (int32_t skip = 1; skip < kSkips; ++skip) {
    const Errors errors = SkipErrors(head, skip);
    if (errors.Skipping() >= kFewestLambda && errors.Cost() < SkipErrors(head, best).Cost() &&
        Meets(WithSkip(head, skip, EstimateAll), errors.Skipping(), head.bounds.measure, head.bounds.pv)) {
      best = skip;
    }
  }
  return best;
}

// Looks at how the choice does in the call at hand.
void Judge(HeadRecord& head, Follow follow) {
  LimitPast(head, kWindow);
  const double rows = head.sizes.now.count;
  if (head.state != SPARGE_HEAD_SPARSE || rows < kJudged || head.sizes.past.count == 0) return;
  const auto in_sums = [&](double bound) { return InSums(head.bounds.measure, bound); };
  // Few rows with large errors have a standard error as large as their mean, whatever made them large. So they also
  // count as beyond if rows like the earlier ones would not scatter so far; where the head can be measured anew at
  // once.
  const double scatter = std::sqrt(1 + head.sizes.past.count / rows);
  const auto beyond = [&](const Estimate& now, const Estimate& past, double bound) {
    const double far = kDisagree * JudgeMargin(rows) * scatter * past.error;
    return now.value > in_sums(kAlarm * bound) && (now.value - JudgeMargin(rows) * now.error > in_sums(bound) ||
                                                   (follow == Follow::kAnew && now.value - past.value > far));
  };
  const Estimate now = EstimateNow(head.sizes, At(head, head.cell));
  const Estimate past = EstimatePast(head.sizes, At(head, head.cell));
  const bool skips = head.skip > 0 && head.skip_sizes.now.count >= kJudged;
  const Bounds& bounds = head.bounds;
  if (beyond(now, past, bounds.target) ||
      (skips && beyond(WithSkip(head, head.skip, EstimateNow), WithSkip(head, head.skip, EstimatePast), bounds.pv))) {
    LimitPast(head, follow == Follow::kAnew ? 0.0 : rows);
    head.state = SPARGE_HEAD_UNKNOWN;
  } else if (std::fabs(now.value - past.value) >
             std::max(kDisagree * JudgeMargin(rows) * Together(now.error, past.error),
                      in_sums((1 + kTrifle) * bounds.target) - in_sums(bounds.target))) {
    LimitPast(head, std::max(rows, kFewest - rows));
  }
}

bool Counts(const RowResult& row) {
  return row.valid && std::isfinite(row.size) &&
         std::all_of(row.error.begin(), row.error.end(), [](float e) { return std::isfinite(e); });
}

// In terms of the bound: that of a root, to first order.
double StandardError(sparge_measure measure, const Estimate& estimate) {
  if (measure == SPARGE_MEASURE_L1 || estimate.value == 0) return estimate.error;
  return estimate.error / (2 * std::sqrt(estimate.value));
}

double Share(double part, double whole) { return whole > 0 ? part / whole : 1.0; }

}  // namespace

double TauAt(int index) {
  static const auto kTauGrid = [] {
    constexpr double kLeast = 1e-5, kMost = 0.95;
    std::array<double, kTaus> taus{1.0};
    for (int i = 1; i < kTaus; ++i) taus[i] = 1.0 - kLeast * std::pow(kMost / kLeast, (i - 1) / double{kTaus - 2});
    return taus;
  }();
  return kTauGrid[index];
}

double ThetaAt(int index) { return index == 0 ? -1.0 : 0.1 * index; }

double SkipAt(int index) {
  constexpr double kOff = std::numeric_limits<double>::infinity();
  constexpr double kSkipGrid[kSkips] = {kOff, 12, 10, 8, 7, 6, 5.5, 5, 4.5, 4, 3.5, 3, 2.5, 2};
  return kSkipGrid[index];
}

sparge_head_params ParamsAt(const Cell& cell, int32_t skip) {
  return {ThetaAt(cell.theta), TauAt(cell.tau), 1.0, SkipAt(skip)};
}

Calibration::Calibration(int64_t q_heads, const Bounds& bounds, double round_l1, uint64_t seed)
    : q_heads_(q_heads), measure_(bounds.measure), round_l1_(round_l1), seed_(seed) {
  constexpr int64_t kMostHeads = 1 << 16;
  SPARGE_REQUIRE(q_heads >= 1 && q_heads <= kMostHeads, "q_heads=%" PRId64 " is outside 1..%" PRId64, q_heads,
                 kMostHeads);
  CheckBounds(bounds);
  CheckRounding(round_l1);
  heads_.resize(static_cast<size_t>(q_heads_));
  locks_ = std::make_unique<std::mutex[]>(heads_.size());
  for (HeadRecord& head : heads_) head.bounds = bounds;
}

uint64_t Calibration::NextCall() {
  for (int64_t h = 0; h < q_heads_; ++h) {
    const std::lock_guard lock(LockOf(h));
    CloseCall(heads_[static_cast<size_t>(h)]);
  }
  return calls_++;
}

void Calibration::Choose(HeadRecord& head, bool judges_moves) const {
  head.needs_int16 = EstimateOne(head.round_sizes, head.rounding).value > round_l1_;
  if (head.sizes.Rows() == 0) return;
  head.cell = head.bounds.target > 0 ? ChooseCell(head, judges_moves) : Cell{};
  if (head.sizes.Rows() < kFewest) {  // a guess, good enough to measure lambda at
    head.state = SPARGE_HEAD_UNKNOWN;
    head.skip = 0;
    return;
  }
  const bool worthwhile = At(head, head.cell).Cost() <= (1 - kWorthwhile) * TilesOf(head);
  head.state = worthwhile ? SPARGE_HEAD_SPARSE : SPARGE_HEAD_DENSE;
  head.skip = worthwhile ? ChooseSkip(head) : 0;
}

void Calibration::Learn(const Sample& sample, std::span<const RowResult> rows) {
  const std::lock_guard lock(LockOf(sample.head));
  HeadRecord& head = heads_[static_cast<size_t>(sample.head)];
  const auto call = static_cast<double>(sample.call + 1);
  if (call != head.call) CloseCall(head);  // of another thread; one's own was closed when the next began
  head.call = call;
  // A prompt in batches against ever more keys: with more of them there is more to miss, so that what was measured with
  // fewer counts less.
  if (sample.keys > head.keys && head.keys > 0) Fade(head, head.keys / sample.keys);
  head.keys = std::max(head.keys, sample.keys);
  head.learned = true;
  // The choice may have moved in the meantime: far away, this sample tells nothing about lambda.
  const bool skips = sample.with_skips && Near(sample.cell, head.cell);
  if (skips && !Near(sample.cell, head.skip_cell)) {
    ForgetSkips(head);
    head.skip_cell = sample.cell;
  }
  for (const RowResult& row : rows) {
    if (!Counts(row)) continue;
    LearnCells(row, head);
    if (skips) LearnSkips(row, head);
    if (sample.rounding_rows == 0 || !(row.round_size > 0) || !std::isfinite(row.round_error + row.round_size))
      continue;
    head.round_sizes.Add(static_cast<double>(row.round_size));
    head.rounding.AddRow({static_cast<double>(row.round_error), static_cast<double>(row.round_size), 0, false});
  }
}

void Calibration::Decide(int64_t index, uint64_t call, Follow follow) {
  const std::lock_guard lock(LockOf(index));
  HeadRecord& head = heads_[static_cast<size_t>(index)];
  const auto number = static_cast<double>(call + 1);
  if (head.call != number || !head.learned) return;  // nothing was measured, or another call came in between
  head.learned = false;
  if (follow != Follow::kParts && head.judged != number) Judge(head, follow);
  head.judged = number;
  Choose(head, follow == Follow::kAnew);
}

void Calibration::SetBounds(int64_t index, double target, double pv) {
  SPARGE_REQUIRE(index >= 0 && index < q_heads_, "head=%" PRId64 " is outside 0..%" PRId64, index, q_heads_ - 1);
  const Bounds bounds{measure_, target, pv};
  CheckBounds(bounds);
  const std::lock_guard lock(LockOf(index));
  HeadRecord& head = heads_[static_cast<size_t>(index)];
  head.bounds = bounds;
  head.state = SPARGE_HEAD_UNKNOWN;  // so that the old choice has no claim to stay
  Choose(head, false);
}

HeadSetting Calibration::Setting(int64_t index) const {
  const std::lock_guard lock(LockOf(index));
  const HeadRecord& head = heads_[static_cast<size_t>(index)];
  const bool sparse = head.state == SPARGE_HEAD_SPARSE;
  HeadSetting setting{};
  setting.params = sparse ? ParamsAt(head.cell, head.skip) : ParamsAt(Cell{}, 0);
  setting.cell = head.cell;
  setting.sparse = sparse;
  setting.needs_int16 = head.needs_int16;
  setting.fresh = head.sizes.past.count == 0;
  setting.settled = head.sizes.Rows() >= kSettled && head.skip_sizes.Rows() >= (sparse ? kFewest : 0);
  if (!head.needs_int16 && head.round_sizes.count < kRoundingRows) {
    const bool first = head.round_sizes.count == 0;
    setting.rounding_rows = kRoundingPerCall;
    setting.rounding_now = first || EstimateOne(head.round_sizes, head.rounding).value > kDoubtful * round_l1_;
  }
  setting.missing = static_cast<int64_t>(std::ceil(std::max(kFewest - head.sizes.Rows(), 0.0)));
  return setting;
}

void Calibration::Describe(int64_t index, sparge_head_estimate& out) const {
  SPARGE_REQUIRE(index >= 0 && index < q_heads_, "head=%" PRId64 " is outside 0..%" PRId64, index, q_heads_ - 1);
  const HeadSetting setting = Setting(index);
  const std::lock_guard lock(LockOf(index));
  const HeadRecord& head = heads_[static_cast<size_t>(index)];
  out.state = head.state;
  out.precision = head.needs_int16 ? SPARGE_PRECISION_INT16 : SPARGE_PRECISION_INT8;
  out.params = setting.params;
  out.samples = static_cast<int64_t>(std::llround(head.sizes.Rows()));
  const Errors cell = At(head, setting.sparse ? head.cell : Cell{});
  const Estimate plain = EstimateAll(head.sizes, cell);
  const bool skips = setting.sparse && head.skip_sizes.Rows() > 0;
  const Estimate pv = setting.sparse ? WithSkip(head, head.skip, EstimateAll) : plain;
  const Estimate rounding = EstimateOne(head.round_sizes, head.rounding);
  out.measure = measure_;
  out.error = FromSums(measure_, plain.value);
  out.error_se = StandardError(measure_, plain);
  out.pv_error = FromSums(measure_, pv.value);
  out.pv_error_se = StandardError(measure_, pv);
  const double least = setting.sparse ? kNegligible * head.bounds.target : 0.0;
  out.limit = std::max(Above(pv, kLimitErrors, measure_), least);
  out.known = std::isfinite(out.pv_error) && Above(pv, kKnownErrors, measure_) <= SPARGE_KNOWN_WITHIN * out.pv_error;
  out.round_l1 = rounding.value;
  out.round_l1_error = rounding.error;
  const double qk = Share(cell.Cost(), TilesOf(head));
  out.sparsity = 1 - qk;
  // PV of the tiles that are computed, less the share of it that is skipped.
  const double skipped = skips ? 1 - Share(SkipErrors(head, head.skip).Cost(), SkipErrors(head, 0).Cost()) : 0.0;
  out.work = 0.5 * (qk + qk * (1 - skipped));
}

}  // namespace sparge::impl

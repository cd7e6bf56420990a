// Sums over samples, and the choice that follows from them.
#include "src/calibrate/calibration.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// Errors are concentrated in few rows. With fewer samples than this, none of them may have met one.
constexpr double kFewest = 12;
// From here on a head is only looked after: its standard error is about an eighth of the spread between samples.
constexpr double kSettled = 64;
constexpr double kSettledSkips = 32;
constexpr double kRoundingSamples = 4;
// Older samples fade, so that a head that changes is noticed within some hundred samples.
constexpr double kWindow = 256;
// Recent samples this far beyond the bound are no chance any more: the head has changed, and is measured anew. What is
// known of it counts a quarter, so that new samples decide soon, and the head is no longer settled.
constexpr double kRecent = 24;
constexpr double kAlarm = 1.5;
constexpr double kDistrust = 0.25;
// Sparse code has to save this share of the tiles to be worth its prediction.
constexpr double kWorthwhile = 0.02;
// A choice stays while another one is not cheaper by this share, for a change forgets what is known of lambda.
constexpr double kLoyalty = 0.02;

// How far below the bound an estimate has to stay, in standard errors: one, and more while samples are so few that the
// standard error itself is in doubt.
double Margin(double count) { return 1.0 + 24.0 / count; }

bool Meets(const Estimate& estimate, double count, double bound) {
  return estimate.value + Margin(count) * estimate.error <= bound &&
         estimate.value + kOneInTwenty * estimate.spread <= SPARGE_SINGLE_CALL * bound;
}

void Fade(SizeSums& sizes, double by) {
  for (double* sum : {&sizes.count, &sizes.size, &sizes.size2, &sizes.calls, &sizes.calls2}) *sum *= by;
}
void Fade(ErrorSums& errors, double by) {
  for (double* sum :
       {&errors.error, &errors.error2, &errors.cross, &errors.cost, &errors.calls2, &errors.calls_cross}) {
    *sum *= by;
  }
}
void Add(SizeSums& sizes, double size) {
  sizes.count += 1;
  sizes.size += size;
  sizes.size2 += size * size;
  sizes.call += size;
}
void Add(ErrorSums& errors, double error, double size, double cost) {
  errors.error += error;
  errors.error2 += error * error;
  errors.cross += error * size;
  errors.cost += cost;
  errors.call += error;
}

// A new call begins: what was summed of the last one becomes one of many.
void Close(const SizeSums& sizes, ErrorSums& errors) {
  errors.calls2 += errors.call * errors.call;
  errors.calls_cross += errors.call * sizes.call;
  errors.call = 0;
}
void Close(SizeSums& sizes) {
  if (sizes.call > 0) sizes.calls += 1;
  sizes.calls2 += sizes.call * sizes.call;
  sizes.call = 0;
}
void CloseCall(HeadRecord& head) {
  for (auto& row : head.cells) {
    for (ErrorSums& cell : row) Close(head.sizes, cell);
  }
  Close(head.sizes);
  for (ErrorSums& skip : head.skips) Close(head.skip_sizes, skip);
  Close(head.skip_sizes);
}

double FadeFor(const SizeSums& sizes) { return sizes.count < kWindow ? 1.0 : 1.0 - 1.0 / kWindow; }

void LearnCells(const SampleResult& result, HeadRecord& head) {
  const double by = FadeFor(head.sizes);
  Fade(head.sizes, by);
  Add(head.sizes, result.size);
  head.tiles = head.tiles * by + result.tiles;
  for (int theta = 0; theta < kThetas; ++theta) {
    const bool alike = result.similarity > ThetaAt(theta);  // else the block is computed in full
    for (int tau = 0; tau < kTaus; ++tau) {
      ErrorSums& cell = head.cells[theta][tau];
      Fade(cell, by);
      Add(cell, alike ? result.error[tau] : 0.0, result.size, alike ? result.kept[tau] : result.tiles);
    }
  }
}

void LearnSkips(const SampleResult& result, HeadRecord& head) {
  const double by = FadeFor(head.skip_sizes);
  Fade(head.skip_sizes, by);
  Add(head.skip_sizes, result.size);
  for (int skip = 0; skip < kSkips; ++skip) {
    Fade(head.skips[skip], by);
    Add(head.skips[skip], result.skip_error[skip], result.size, result.skip_groups[skip]);
  }
}

void ForgetSkips(HeadRecord& head) {
  head.skip_sizes = {};
  head.skips = {};
  head.skip = 0;
}

// The cheapest theta and tau within the bound; tau index 0 always is.
Cell ChooseCell(const HeadRecord& head) {
  const auto meets = [&](const Cell& cell) {
    return cell.tau == 0 ||
           Meets(EstimateRatio(head.sizes, head.cells[cell.theta][cell.tau]), head.sizes.count, head.target_l1);
  };
  const auto cost = [&](const Cell& cell) { return head.cells[cell.theta][cell.tau].cost; };
  Cell best;
  for (int32_t theta = 0; theta < kThetas; ++theta) {
    for (int32_t tau = 1; tau < kTaus; ++tau) {
      const Cell cell{theta, tau};
      if (cost(cell) < cost(best) && meets(cell)) best = cell;
    }
  }
  const bool stay =
      head.state == SPARGE_HEAD_SPARSE && meets(head.cell) && cost(head.cell) <= cost(best) + kLoyalty * head.tiles;
  return stay ? head.cell : best;
}

// What a skip adds to an error was measured at this choice of theta and tau or close to it: then it says something
// here.
bool Near(const Cell& a, const Cell& b) { return a.theta == b.theta && std::abs(a.tau - b.tau) <= 6; }

// The error at the head's choice with a skip: what it is without, and what the skip added where it was measured.
Estimate EstimateSkip(const HeadRecord& head, int32_t skip) {
  const Estimate plain = EstimateRatio(head.sizes, head.cells[head.cell.theta][head.cell.tau]);
  if (skip == 0 || head.skip_sizes.count == 0) return plain;
  const Estimate with = EstimateRatio(head.skip_sizes, head.skips[skip]);
  const double added = with.value - EstimateRatio(head.skip_sizes, head.skips[0]).value;
  return {plain.value + std::max(added, 0.0), std::max(plain.error, with.error), std::max(plain.spread, with.spread)};
}

int32_t ChooseSkip(const HeadRecord& head) {
  int32_t best = 0;
  if (head.skip_sizes.count < kFewest) return best;
  for (int32_t skip = 1; skip < kSkips; ++skip) {
    if (head.skips[skip].cost < head.skips[best].cost &&
        Meets(EstimateSkip(head, skip), head.skip_sizes.count, head.pv_l1)) {
      best = skip;
    }
  }
  return best;
}

void Fade(HeadRecord& head, double by) {
  Fade(head.sizes, by);
  head.tiles *= by;
  for (auto& row : head.cells) {
    for (ErrorSums& cell : row) Fade(cell, by);
  }
  Fade(head.skip_sizes, by);
  for (ErrorSums& skip : head.skips) Fade(skip, by);
}

// Looks at how the choice does on new samples.
void Watch(const SampleResult& result, HeadRecord& head) {
  constexpr double kFade = 1 - 1 / kRecent;
  const bool alike = result.similarity > ThetaAt(head.cell.theta);
  head.recent_count = head.recent_count * kFade + 1;
  head.recent_error = head.recent_error * kFade + (alike ? result.error[head.cell.tau] : 0.0);
  head.recent_size = head.recent_size * kFade + result.size;
  if (head.recent_count < kRecent / 2 || head.recent_error <= kAlarm * head.target_l1 * head.recent_size) return;
  Fade(head, kDistrust);
  head.recent_count = head.recent_error = head.recent_size = 0;
}

bool Counts(const SampleResult& result) {
  return result.valid && std::isfinite(result.size) &&
         std::all_of(result.error.begin(), result.error.end(), [](double e) { return std::isfinite(e); });
}

// The standard deviation of the ratio between calls, the one at hand included, less what comes from the choice of
// samples within them: `variance` is that of one sample.
double SpreadOfCalls(const SizeSums& sizes, const ErrorSums& errors, double ratio, double variance) {
  const double calls = sizes.calls + (sizes.call > 0 ? 1 : 0);
  if (calls < 3) return 0.0;
  const double error2 = errors.calls2 + errors.call * errors.call;
  const double cross = errors.calls_cross + errors.call * sizes.call;
  const double size2 = sizes.calls2 + sizes.call * sizes.call;
  const double residual = std::max(error2 - 2 * ratio * cross + ratio * ratio * size2, 0.0);
  const double by_chance = variance * sizes.count / calls;
  return std::sqrt(std::max(residual / (calls - 1) - by_chance, 0.0)) / (sizes.size / calls);
}

double Share(double part, double whole) { return whole > 0 ? part / whole : 1.0; }

}  // namespace

double TauAt(int index) {
  if (index == 0) return 1.0;
  constexpr double kLeast = 1e-5, kMost = 0.95;
  return 1.0 - kLeast * std::pow(kMost / kLeast, (index - 1) / static_cast<double>(kTaus - 2));
}

double ThetaAt(int index) { return index == 0 ? -1.0 : 0.1 * index; }

double SkipAt(int index) {
  constexpr double kOff = std::numeric_limits<double>::infinity();
  constexpr double kSkipGrid[kSkips] = {kOff, 12, 10, 8, 7, 6, 5.5, 5, 4.5, 4, 3.5, 3, 2.5, 2};
  return kSkipGrid[index];
}

Estimate EstimateRatio(const SizeSums& sizes, const ErrorSums& errors) {
  if (sizes.size <= 0) {  // outputs that are all zeros: any error is infinitely large
    return {errors.error > 0 ? std::numeric_limits<double>::infinity() : 0.0, 0.0, 0.0};
  }
  const double ratio = errors.error / sizes.size;
  if (sizes.count < 2) return {ratio, ratio, 0.0};
  // Residuals error - ratio * size have mean 0; their spread is that of the ratio.
  const double residual = errors.error2 - 2 * ratio * errors.cross + ratio * ratio * sizes.size2;
  const double variance = std::max(residual, 0.0) / (sizes.count - 1);
  return {ratio, std::sqrt(variance * sizes.count) / sizes.size, SpreadOfCalls(sizes, errors, ratio, variance)};
}

void CheckBounds(double target_l1, double pv_l1) {
  SPARGE_REQUIRE(target_l1 >= 0 && std::isfinite(target_l1), "target_l1=%g is not a number from 0 on", target_l1);
  SPARGE_REQUIRE(pv_l1 >= target_l1 && std::isfinite(pv_l1), "pv_l1=%g is not a number from target_l1=%g on", pv_l1,
                 target_l1);
}

Calibration::Calibration(const sparge_calibration_desc& desc)
    : q_heads_(desc.q_heads), round_l1_(desc.round_l1), seed_(desc.seed) {
  constexpr int64_t kMostHeads = 1 << 16;
  SPARGE_REQUIRE(desc.q_heads >= 1 && desc.q_heads <= kMostHeads, "q_heads=%" PRId64 " is outside 1..%" PRId64,
                 desc.q_heads, kMostHeads);
  CheckBounds(desc.target_l1, desc.pv_l1);
  SPARGE_REQUIRE(desc.round_l1 >= 0 && std::isfinite(desc.round_l1), "round_l1=%g is not a number from 0 on",
                 desc.round_l1);
  heads_.resize(static_cast<size_t>(q_heads_));
  for (HeadRecord& head : heads_) {
    head.target_l1 = desc.target_l1;
    head.pv_l1 = desc.pv_l1;
  }
}

uint64_t Calibration::NextCall() {
  const std::lock_guard lock(mutex_);
  return calls_++;
}

void Calibration::Choose(HeadRecord& head) const {
  head.needs_int16 = head.round_sizes.count >= 1 && EstimateRatio(head.round_sizes, head.rounding).value > round_l1_;
  if (head.sizes.count < kFewest) return;
  const Cell cell = head.target_l1 > 0 ? ChooseCell(head) : Cell{};
  if (!Near(cell, head.cell)) ForgetSkips(head);
  head.cell = cell;
  const double kept = head.cells[cell.theta][cell.tau].cost;
  const bool worthwhile = kept <= (1 - kWorthwhile) * head.tiles;
  head.state = worthwhile ? SPARGE_HEAD_SPARSE : SPARGE_HEAD_DENSE;
  head.skip = worthwhile ? ChooseSkip(head) : 0;
}

void Calibration::Learn(const Sample& sample, const SampleResult& result) {
  if (!Counts(result)) return;
  const std::lock_guard lock(mutex_);
  HeadRecord& head = heads_[static_cast<size_t>(sample.head)];
  const auto call = static_cast<double>(sample.call + 1);
  if (call != head.call) CloseCall(head);
  head.call = call;
  // A prompt in batches against ever more keys: with more of them there is more to miss, so that what was measured with
  // fewer counts less.
  if (sample.keys > head.keys && head.keys > 0) Fade(head, head.keys / sample.keys);
  head.keys = std::max(head.keys, sample.keys);
  // The choice may have moved in the meantime: far away, this sample tells nothing about lambda.
  const bool skips = sample.with_skips && Near(sample.cell, head.cell) && head.state == SPARGE_HEAD_SPARSE;
  if (head.state == SPARGE_HEAD_SPARSE) Watch(result, head);
  LearnCells(result, head);
  if (skips) LearnSkips(result, head);
  if (sample.with_rounding && result.round_size > 0 && std::isfinite(result.round_error)) {
    Add(head.round_sizes, result.round_size);
    Add(head.rounding, result.round_error, result.round_size, 0);
  }
  Choose(head);
}

void Calibration::SetBounds(int64_t index, double target_l1, double pv_l1) {
  SPARGE_REQUIRE(index >= 0 && index < q_heads_, "head=%" PRId64 " is outside 0..%" PRId64, index, q_heads_ - 1);
  CheckBounds(target_l1, pv_l1);
  const std::lock_guard lock(mutex_);
  HeadRecord& head = heads_[static_cast<size_t>(index)];
  head.target_l1 = target_l1;
  head.pv_l1 = pv_l1;
  head.state = SPARGE_HEAD_UNKNOWN;  // so that the old choice has no claim to stay
  Choose(head);
}

HeadSetting Calibration::Setting(int64_t index) const {
  const std::lock_guard lock(mutex_);
  const HeadRecord& head = heads_[static_cast<size_t>(index)];
  const bool sparse = head.state == SPARGE_HEAD_SPARSE;
  HeadSetting setting{};
  setting.params = {ThetaAt(sparse ? head.cell.theta : 0), TauAt(sparse ? head.cell.tau : 0), 1.0,
                    SkipAt(sparse ? head.skip : 0)};
  setting.cell = head.cell;
  setting.sparse = sparse;
  setting.needs_int16 = head.needs_int16;
  setting.settled = head.sizes.count >= kSettled && (!sparse || head.skip_sizes.count >= kSettledSkips);
  setting.rounding_known = head.round_sizes.count >= kRoundingSamples;
  setting.missing = static_cast<int64_t>(std::ceil(std::max(kFewest - head.sizes.count, 0.0)));
  return setting;
}

void Calibration::Describe(int64_t index, sparge_head_estimate& out) const {
  SPARGE_REQUIRE(index >= 0 && index < q_heads_, "head=%" PRId64 " is outside 0..%" PRId64, index, q_heads_ - 1);
  const HeadSetting setting = Setting(index);
  const std::lock_guard lock(mutex_);
  const HeadRecord& head = heads_[static_cast<size_t>(index)];
  out.state = head.state;
  out.precision = head.needs_int16 ? SPARGE_PRECISION_INT16 : SPARGE_PRECISION_INT8;
  out.params = setting.params;
  out.samples = static_cast<int64_t>(std::llround(head.sizes.count));
  const ErrorSums& cell = head.cells[setting.sparse ? head.cell.theta : 0][setting.sparse ? head.cell.tau : 0];
  const Estimate l1 = EstimateRatio(head.sizes, cell);
  const bool skips = setting.sparse && head.skip_sizes.count > 0;
  const Estimate pv = setting.sparse ? EstimateSkip(head, head.skip) : l1;
  const Estimate rounding = EstimateRatio(head.round_sizes, head.rounding);
  out.l1 = l1.value;
  out.l1_error = l1.error;
  out.pv_l1 = pv.value;
  out.pv_l1_error = pv.error;
  out.round_l1 = rounding.value;
  out.round_l1_error = rounding.error;
  const double qk = Share(cell.cost, head.tiles);
  out.sparsity = 1 - qk;
  // PV of the tiles that are computed, less the share of it that is skipped.
  const double skipped = skips ? 1 - Share(head.skips[head.skip].cost, head.skips[0].cost) : 0.0;
  out.work = 0.5 * (qk + qk * (1 - skipped));
}

// ---------------------------------------------------------------- saved form: a header, then numbers per head

namespace {

constexpr char kMagic[8] = {'s', 'p', 'a', 'r', 'g', 'e', 'C', '2'};

struct Header {
  char magic[8];
  uint64_t q_heads, seed, calls, grid;
  double round_l1;
};
// A file from a version with other grids says nothing here.
constexpr uint64_t kGrid = kTaus + 1000 * kThetas + 1000000 * kSkips;

// visit(number) for every measured number of a record, in the order of the saved form.
template <class Record, class Visit>
void VisitNumbers(Record& head, const Visit& visit) {
  const auto sizes = [&](auto& s) {
    visit(s.count), visit(s.size), visit(s.size2), visit(s.calls), visit(s.call), visit(s.calls2);
  };
  const auto errors = [&](auto& e) {
    visit(e.error), visit(e.error2), visit(e.cross), visit(e.cost), visit(e.call), visit(e.calls2),
        visit(e.calls_cross);
  };
  visit(head.target_l1), visit(head.pv_l1), visit(head.call), visit(head.keys);
  visit(head.recent_count), visit(head.recent_error), visit(head.recent_size);
  sizes(head.sizes), visit(head.tiles);
  for (auto& row : head.cells) {
    for (auto& cell : row) errors(cell);
  }
  sizes(head.skip_sizes);
  for (auto& skip : head.skips) errors(skip);
  sizes(head.round_sizes), errors(head.rounding);
}

// The choice, behind the numbers.
struct SavedChoice {
  int32_t state, theta, tau, skip, needs_int16;
};

size_t RecordBytes() {
  HeadRecord head{};
  size_t numbers = 0;
  VisitNumbers(head, [&](double&) { ++numbers; });
  return numbers * sizeof(double) + sizeof(SavedChoice);
}

template <class T>
void Put(const T& value, std::byte*& to) {
  std::memcpy(to, &value, sizeof(T));
  to += sizeof(T);
}
template <class T>
T Get(const std::byte*& from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  from += sizeof(T);
  return value;
}

HeadRecord LoadHead(const std::byte*& from) {
  HeadRecord head{};
  VisitNumbers(head, [&](double& number) {
    number = Get<double>(from);
    SPARGE_REQUIRE(std::isfinite(number) && number >= 0, "data has the number %g, which no calibration saves", number);
  });
  CheckBounds(head.target_l1, head.pv_l1);
  const auto choice = Get<SavedChoice>(from);
  const auto within = [](int32_t value, int32_t end) { return value >= 0 && value < end; };
  SPARGE_REQUIRE(within(choice.state, SPARGE_HEAD_DENSE + 1) && within(choice.theta, kThetas) &&
                     within(choice.tau, kTaus) && within(choice.skip, kSkips) && within(choice.needs_int16, 2),
                 "data has a choice %d, %d, %d, %d, %d that is not on the grid", choice.state, choice.theta, choice.tau,
                 choice.skip, choice.needs_int16);
  head.state = static_cast<sparge_head_state>(choice.state);
  head.cell = {choice.theta, choice.tau};
  head.skip = choice.skip;
  head.needs_int16 = choice.needs_int16 != 0;
  return head;
}

}  // namespace

size_t Calibration::SavedSize() const { return sizeof(Header) + heads_.size() * RecordBytes(); }

void Calibration::Save(std::byte* out) const {
  const std::lock_guard lock(mutex_);
  Header header{{}, static_cast<uint64_t>(q_heads_), seed_, calls_, kGrid, round_l1_};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  Put(header, out);
  for (const HeadRecord& head : heads_) {
    VisitNumbers(head, [&](const double& number) { Put(number, out); });
    Put(SavedChoice{head.state, head.cell.theta, head.cell.tau, head.skip, head.needs_int16}, out);
  }
}

Calibration::Calibration(const std::byte* data, size_t size) {
  SPARGE_REQUIRE(size >= sizeof(Header), "size=%zu is too small for a saved calibration", size);
  const auto header = Get<Header>(data);
  SPARGE_REQUIRE(std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.grid == kGrid,
                 "data is not a calibration that this version saved");
  const size_t heads = (size - sizeof(Header)) / RecordBytes();
  SPARGE_REQUIRE(heads >= 1 && header.q_heads == heads && size == sizeof(Header) + heads * RecordBytes(),
                 "size=%zu does not fit a calibration of %" PRIu64 " heads", size, header.q_heads);
  SPARGE_REQUIRE(std::isfinite(header.round_l1) && header.round_l1 >= 0, "data has round_l1=%g", header.round_l1);
  q_heads_ = static_cast<int64_t>(heads);
  round_l1_ = header.round_l1;
  seed_ = header.seed;
  calls_ = header.calls;
  heads_.reserve(heads);
  for (size_t h = 0; h < heads; ++h) heads_.push_back(LoadHead(data));
}

}  // namespace sparge::impl

// The saved form of a calibration: a header, then numbers per head.
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "src/base/status.h"
#include "src/calibrate/calibration.h"

namespace sparge::impl {
namespace {

constexpr char kMagic[8] = {'s', 'p', 'a', 'r', 'g', 'e', 'C', '4'};

struct Header {
  char magic[8];
  uint64_t q_heads, seed, calls, grid, measure;
  double round_l1;
};
// A file from a version with other grids says nothing here.
constexpr uint64_t kGrid = kTaus + 1000 * kThetas + 1000000 * kSkips;

// visit(number) for every measured number of a record, in the order of the saved form.
template <class Record, class Visit>
void VisitNumbers(Record& head, const Visit& visit) {
  const auto size_sums = [&](auto& s) { visit(s.count), visit(s.size), visit(s.size2); };
  const auto error_sums = [&](auto& e) {
    visit(e.error), visit(e.error2), visit(e.cross), visit(e.cost), visit(e.skipping);
  };
  const auto sizes = [&](auto& s) { size_sums(s.now), size_sums(s.past), visit(s.calls), visit(s.calls2); };
  const auto past = [&](auto& e) { error_sums(e.sums), visit(e.calls2), visit(e.calls_cross); };
  const auto each = [](auto& all, const auto& one) {
    for (auto& item : all) one(item);
  };
  visit(head.bounds.target), visit(head.bounds.pv), visit(head.call), visit(head.judged), visit(head.keys);
  sizes(head.sizes), visit(head.tiles_past), each(head.tiles_now, visit);
  each(head.now, [&](auto& row) { each(row, error_sums); });
  each(head.past, [&](auto& row) { each(row, past); });
  sizes(head.skip_sizes), each(head.skips_now, error_sums), each(head.skips_past, past);
  size_sums(head.round_sizes), error_sums(head.rounding);
}

// The choice, behind the numbers.
struct SavedChoice {
  int32_t state, theta, tau, skip, skip_theta, skip_tau, needs_int16;
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

HeadRecord LoadHead(sparge_measure measure, const std::byte*& from) {
  HeadRecord head{};
  head.bounds.measure = measure;
  VisitNumbers(head, [&](double& number) {
    number = Get<double>(from);
    SPARGE_REQUIRE(std::isfinite(number) && number >= 0, "data has the number %g, which no calibration saves", number);
  });
  CheckBounds(head.bounds);
  const auto choice = Get<SavedChoice>(from);
  const auto within = [](int32_t value, int32_t end) { return value >= 0 && value < end; };
  SPARGE_REQUIRE(within(choice.state, SPARGE_HEAD_DENSE + 1) && within(choice.theta, kThetas) &&
                     within(choice.tau, kTaus) && within(choice.skip_theta, kThetas) &&
                     within(choice.skip_tau, kTaus) && within(choice.skip, kSkips) && within(choice.needs_int16, 2),
                 "data has a choice %d, %d, %d, %d, %d, %d, %d that is not on the grid", choice.state, choice.theta,
                 choice.tau, choice.skip, choice.skip_theta, choice.skip_tau, choice.needs_int16);
  head.state = static_cast<sparge_head_state>(choice.state);
  head.cell = {choice.theta, choice.tau};
  head.skip = choice.skip;
  head.skip_cell = {choice.skip_theta, choice.skip_tau};
  head.needs_int16 = choice.needs_int16 != 0;
  return head;
}

}  // namespace

size_t Calibration::SavedSize() const { return sizeof(Header) + heads_.size() * RecordBytes(); }

void Calibration::Save(std::byte* out) const {
  Header header{{}, static_cast<uint64_t>(q_heads_), seed_, calls_, kGrid, measure_, round_l1_};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  Put(header, out);
  for (int64_t h = 0; h < q_heads_; ++h) {
    const std::lock_guard lock(LockOf(h));
    const HeadRecord& head = heads_[static_cast<size_t>(h)];
    VisitNumbers(head, [&](const double& number) { Put(number, out); });
    Put(SavedChoice{head.state, head.cell.theta, head.cell.tau, head.skip, head.skip_cell.theta, head.skip_cell.tau,
                    head.needs_int16},
        out);
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
  SPARGE_REQUIRE(header.measure <= SPARGE_MEASURE_L2, "data has the measure %" PRIu64 ", which is none",
                 header.measure);
  CheckRounding(header.round_l1);
  measure_ = static_cast<sparge_measure>(header.measure);
  q_heads_ = static_cast<int64_t>(heads);
  round_l1_ = header.round_l1;
  seed_ = header.seed;
  calls_ = header.calls;
  heads_.reserve(heads);
  for (size_t h = 0; h < heads; ++h) heads_.push_back(LoadHead(measure_, data));
  locks_ = std::make_unique<std::mutex[]>(heads);
}

}  // namespace sparge::impl

// The saved form of what a layer learned: a header, then for each kind of call what is remembered of it.
#include <cinttypes>
#include <cstring>

#include "src/base/status.h"
#include "src/layer/layer.h"

namespace sparge::impl {
namespace {

constexpr char kMagic[8] = {'s', 'p', 'a', 'r', 'g', 'e', 'L', '2'};

struct Header {
  char magic[8];
  uint64_t measure;
  double target, pv, round_l1;
  uint64_t seed, kinds;
};
struct SavedKind {
  CallKind kind;
  int64_t most_queries;
  uint64_t calibration_bytes;  // that follow; 0 = none
};

template <class T>
void Put(const T& value, std::vector<std::byte>& to) {
  to.resize(to.size() + sizeof(T));
  std::memcpy(to.data() + to.size() - sizeof(T), &value, sizeof(T));
}

// Bytes that are read from their beginning on.
class Reader {
 public:
  Reader(const std::byte* data, size_t size) : data_(data), size_(size) {}

  const std::byte* Take(size_t size, const char* what) {
    SPARGE_REQUIRE(size <= size_ - used_, "size=%zu ends within %s that begins at byte %zu and has %zu", size_, what,
                   used_, size);
    const std::byte* at = data_ + used_;
    used_ += size;
    return at;
  }
  template <class T>
  T Get(const char* what) {
    T value;
    std::memcpy(&value, Take(sizeof(T), what), sizeof(T));
    return value;
  }
  size_t left() const { return size_ - used_; }

 private:
  const std::byte* data_;
  size_t size_;
  size_t used_ = 0;
};

void CheckHeader(const Header& header, const LayerSettings& settings) {
  SPARGE_REQUIRE(std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0, "data is not a layer that this version saved");
  const auto check = [](const char* name, double has, double wants) {
    SPARGE_REQUIRE(has == wants, "data is of a layer with %s %.17g, and this one has %.17g", name, has, wants);
  };
  SPARGE_REQUIRE(header.measure == settings.bounds.measure,
                 "data is of a layer with bounds in another measure than the %s of this one",
                 MeasureName(settings.bounds.measure));
  check("the target", header.target, settings.bounds.target);
  check("the bound with PV skip", header.pv, settings.bounds.pv);
  check("round_l1", header.round_l1, settings.round_l1);
  SPARGE_REQUIRE(header.seed == settings.seed, "data is of a layer with seed=%" PRIu64 ", and this one has %" PRIu64,
                 header.seed, settings.seed);
}

void CheckKind(const SavedKind& saved) {
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    SPARGE_REQUIRE(value >= low && value <= high, "data has %s=%" PRId64 ", which is outside %" PRId64 "..%" PRId64,
                   name, value, low, high);
  };
  check("q_heads", saved.kind.q_heads, 1, INT32_MAX);
  check("kv_heads", saved.kind.kv_heads, 1, saved.kind.q_heads);
  check("qk_dim", saved.kind.qk_dim, 1, SPARGE_MAX_HEAD_DIM);
  check("v_dim", saved.kind.v_dim, 1, SPARGE_MAX_HEAD_DIM);
  check("causal", saved.kind.causal, 0, 1);
  check("most_queries", saved.most_queries, 0, INT32_MAX);
  SPARGE_REQUIRE(saved.kind.q_heads % saved.kind.kv_heads == 0,
                 "data has q_heads=%" PRId64 ", which is not a multiple of kv_heads=%" PRId64, saved.kind.q_heads,
                 saved.kind.kv_heads);
}

KindRecord ReadKind(const LayerSettings& settings, Reader& reader) {
  const auto saved = reader.Get<SavedKind>("a kind of call");
  CheckKind(saved);
  KindRecord record{saved.kind, saved.most_queries, nullptr};
  if (saved.calibration_bytes == 0) return record;
  SPARGE_REQUIRE(settings.Calibrates(), "data has a calibration, and this layer makes none: it has %s",
                 settings.preset ? "a preset" : "a target of 0");
  const std::byte* bytes = reader.Take(saved.calibration_bytes, "a calibration");
  record.calibration.reset(new sparge_calibration{Calibration(bytes, saved.calibration_bytes)});
  const sparge_measure measure = record.calibration->calibration.measure();
  SPARGE_REQUIRE(measure == settings.bounds.measure, "data has a calibration in %s for a layer in %s",
                 MeasureName(measure), MeasureName(settings.bounds.measure));
  const int64_t heads = record.calibration->calibration.q_heads();
  SPARGE_REQUIRE(heads == saved.kind.q_heads, "data has a calibration of %" PRId64 " heads for calls of %" PRId64,
                 heads, saved.kind.q_heads);
  return record;
}

}  // namespace

std::vector<std::byte> Layer::Save() const {
  const std::lock_guard lock(mutex_);
  const Bounds& bounds = settings_.bounds;
  Header header{{}, bounds.measure, bounds.target, bounds.pv, settings_.round_l1, settings_.seed, kinds_.size()};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::vector<std::byte> out;
  Put(header, out);
  for (const KindRecord& record : kinds_) {
    const size_t bytes = record.calibration ? record.calibration->calibration.SavedSize() : 0;
    Put(SavedKind{record.kind, record.most_queries, bytes}, out);
    out.resize(out.size() + bytes);
    if (record.calibration) record.calibration->calibration.Save(out.data() + out.size() - bytes);
  }
  return out;
}

void Layer::Restore(const std::byte* data, size_t size) {
  Reader reader(data, size);
  const auto header = reader.Get<Header>("the header of a layer");
  CheckHeader(header, settings_);
  SPARGE_REQUIRE(settings_.remembers || header.kinds == 0,
                 "data has %" PRIu64 " kinds of calls, and this layer has remembers=0", header.kinds);
  std::vector<KindRecord> kinds;
  for (uint64_t i = 0; i < header.kinds; ++i) {
    KindRecord record = ReadKind(settings_, reader);
    for (const KindRecord& other : kinds) {
      SPARGE_REQUIRE(!(other.kind == record.kind), "data has the kind of call %" PRIu64 " twice", i);
    }
    kinds.push_back(std::move(record));
  }
  SPARGE_REQUIRE(reader.left() == 0, "size=%zu is %zu more than the layer in data has", size, reader.left());
  const std::lock_guard lock(mutex_);
  kinds_.swap(kinds);
}

}  // namespace sparge::impl

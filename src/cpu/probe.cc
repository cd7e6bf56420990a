// Takes samples: what the result of their rows is under every tau and lambda.
#include "src/cpu/probe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "src/base/threads.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/probe_ops.h"

namespace sparge::impl {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kMostRows = kChannelAlign;

int64_t MaskWords(const Plan& plan) { return CeilDiv(plan.k_blocks, 64); }
int64_t RowBytes(const Plan& plan) { return plan.row_lanes() * kLaneBytes; }

// One worker's part of the memory.
ProbeMemory OfWorker(const Plan& plan, const ProbeMemory& all, int32_t worker) {
  const int64_t rows = SampleRows(plan);
  ProbeMemory mine = all;
  mine.rows += worker * rows * RowBytes(plan);
  mine.queries += worker * rows * plan.dim_pad();
  mine.tiles += worker * plan.k_blocks;
  mine.masked += worker * MaskWords(plan);
  mine.o += worker * plan.k_blocks * rows * plan.channels();
  mine.m += worker * plan.k_blocks * kMostRows;
  mine.l += worker * plan.k_blocks * kMostRows;
  mine.weight += worker * plan.k_blocks * kMostRows;
  mine.row_weight += worker * plan.k_blocks;
  mine.bucket += worker * plan.k_blocks;
  mine.sums += int64_t{worker} * (kTaus + 1) * plan.channels();
  mine.dense += worker * plan.channels();
  mine.exact += worker * rows * plan.channels();
  return mine;
}

// How many taus of the grid keep a tile: those with 1 - tau <= scaled, which is its mass * sqrt(visible tiles), as in
// MassFloor. The grid is geometric, so that a logarithm finds the place up to a step.
uint8_t CountKeepers(double scaled) {
  static const auto kLeast = [] {
    std::array<double, kTaus + 1> least{};
    for (int i = 0; i < kTaus; ++i) least[static_cast<size_t>(i)] = 1 - TauAt(i);
    least[kTaus] = std::numeric_limits<double>::infinity();
    return least;
  }();
  static const double kPerOctave = (kTaus - 2) / std::log2(kLeast[kTaus - 1] / kLeast[1]);
  if (!(scaled >= kLeast[1])) return 1;
  // log2 as in the bits: the exponent, and the mantissa as if it were linear.
  const auto log2_of = [](double x) { return static_cast<double>(std::bit_cast<int64_t>(x)) * 0x1p-52; };
  const double octaves = log2_of(scaled) - log2_of(kLeast[1]);
  int count = std::clamp(static_cast<int>(octaves * kPerOctave) + 1, 1, kTaus);
  while (kLeast[static_cast<size_t>(count)] <= scaled) ++count;
  while (kLeast[static_cast<size_t>(count - 1)] > scaled) --count;
  return static_cast<uint8_t>(count);
}

// How many lambdas of the grid keep a tile that lies so far below the best before it, natural-log units.
uint8_t CountUnskipped(float depth) {
  static const auto kLambdas = [] {
    std::array<float, kSkips> lambdas{};
    for (int i = 0; i < kSkips; ++i) lambdas[static_cast<size_t>(i)] = static_cast<float>(SkipAt(i));
    return lambdas;
  }();
  int count = kSkips;
  while (count > 1 && kLambdas[static_cast<size_t>(count - 1)] <= depth) --count;  // "off" keeps all
  return static_cast<uint8_t>(count);
}

// One sample at work.
class Probe {
 public:
  Probe(const Plan& plan, const sparge_run_args& args, const Packed& packed, const MassStore& store,
        const BlockMap& map, const ProbeMemory& memory, int32_t worker, const Sample& sample)
      : plan_(plan),
        args_(args),
        packed_(packed),
        store_(store),
        map_(map),
        ops_(*plan.machine.ops.probe),
        my_(OfWorker(plan, memory, worker)),
        distance_(ops_.distance[plan.calibration->measure()]),
        sample_(sample),
        sequence_(plan.sequences[sample.sequence]),
        channels_(plan.channels()),
        rows_(sample.count) {}

  void Run(RowResult* results) {
    GatherRows();
    FindTiles();
    AttendTiles();
    FindTops();
    if (sample_.with_rounding) AttendExactly();
    for (int64_t r = 0; r < rows_; ++r) {
      results[r] = {};
      results[r].valid = Follow(r, results[r]);
    }
  }

 private:
  BlockId BlockOf(int64_t r) const {
    return {sample_.head, sample_.sequence, (sample_.first + r * sample_.step) / kBlockQ};
  }
  int64_t IndexOf(const BlockId& id) const { return plan_.QueryBlock(id.head, sequence_, id.block); }
  float* O(int64_t tile) const { return my_.o + tile * rows_ * channels_; }
  float* M(int64_t tile) const { return my_.m + tile * kMostRows; }
  float* L(int64_t tile) const { return my_.l + tile * kMostRows; }

  // The kernel's arguments for rows of several blocks.
  void GatherRows() {
    kernel_ = BlockArgs(plan_, args_, packed_, BlockOf(0));
    for (int64_t r = 0; r < rows_; ++r) {
      const BlockId id = BlockOf(r);
      const int64_t place = IndexOf(id) * kBlockQ + (sample_.first + r * sample_.step) % kBlockQ;
      CopyQuery(plan_, packed_, place, r, {my_.rows, factor_, shift_});
      mass_[r] = store_.Row(IndexOf(id));
    }
    kernel_.query = {my_.rows,      plan_.row_lanes(),       factor_,     shift_,
                     sample_.first, static_cast<int>(rows_), sample_.step};
    kernel_.rule.mask = MaskRow(plan_, args_.mask, sample_.sequence, sample_.head, sample_.first);
    kernel_.rule.mask_stride *= sample_.step;
    kernel_.skip = std::numeric_limits<float>::infinity();
  }

  // The tiles that any of the rows sees, and those of them that a mask changes.
  void FindTiles() {
    tiles_ = 0;
    for (int64_t j = 0; j < sequence_.k_blocks; ++j) {
      bool seen = false;
      for (int64_t r = 0; r < rows_; ++r) seen = seen || mass_[r][j] != MassStore::kHidden;
      if (seen) my_.tiles[tiles_++] = static_cast<int32_t>(j);
    }
    if (map_.masked == nullptr) return;
    std::fill_n(my_.masked, MaskWords(plan_), uint64_t{0});
    for (int64_t r = 0; r < rows_; ++r) {
      const uint64_t* of_block = map_.MaskedRow(IndexOf(BlockOf(r)));
      for (int64_t w = 0; w < MaskWords(plan_); ++w) my_.masked[w] |= of_block[w];
    }
    // A tile that is hidden from the block of one row and plain for that of another is masked, too.
    for (int64_t t = 0; t < tiles_; ++t) {
      const int64_t tile = my_.tiles[t];
      for (int64_t r = 0; r < rows_; ++r) {
        if (mass_[r][tile] == MassStore::kHidden) SetBit(my_.masked, tile);
      }
    }
    kernel_.masked_tiles = my_.masked;
  }

  void AttendTiles() {
    for (int64_t t = 0; t < tiles_; ++t) {
      std::fill_n(M(t), kMostRows, kMinusInf);
      kernel_.kept = my_.tiles + t;
      kernel_.kept_count = 1;
      kernel_.state = {O(t), M(t), L(t)};
      plan_.kernel().attend[plan_.precision](kernel_);
    }
  }

  // The sink logit relative to the scores of a row, log2 units.
  float SinkOf(int64_t row, float shift) const {
    const int64_t query = kernel_.query.Position(row);
    return static_cast<float>(SinkLogit(plan_, sample_.head) -
                              LeftOut(plan_, sequence_.visible, sample_.head, query, shift));
  }

  // What the tiles of a row are relative to from here on, and their weights.
  void FindTops() {
    std::fill_n(top_, kMostRows, kMinusInf);
    for (int64_t r = 0; r < rows_; ++r) {
      top_[r] = sink_[r] = SinkOf(r, shift_[r]);
    }
    for (int64_t t = 0; t < tiles_; ++t) {
      for (int64_t r = 0; r < kMostRows; ++r) top_[r] = std::max(top_[r], M(t)[r]);
    }
    std::replace(top_, top_ + kMostRows, kMinusInf, 0.0f);  // a row that sees nothing
    for (int64_t t = 0; t < tiles_; ++t) ops_.weights(M(t), top_, kMostRows, my_.weight + t * kMostRows);
  }

  // Puts every tile of a row into the bucket of the taus that keep it. Returns how many tiles the row's block sees.
  int64_t Sort(int64_t r) {
    const BlockId id = BlockOf(r);
    const float* mass = mass_[r];
    const RowRule rule = ForcedRule(plan_, id);
    const bool in_full = packed_.q.similarity[IndexOf(id)] == kNotAlike;
    int64_t visible = 0;
    float best = 0;
    for (int64_t t = 0; t < tiles_; ++t) {
      visible += mass[my_.tiles[t]] != MassStore::kHidden;
      best = std::max(best, mass[my_.tiles[t]]);
    }
    const double scale = std::sqrt(static_cast<double>(visible));
    for (int64_t t = 0; t < tiles_; ++t) {
      const int64_t tile = my_.tiles[t];
      my_.row_weight[t] = my_.weight[t * kMostRows + r];
      if (mass[tile] == MassStore::kHidden) {
        my_.bucket[t] = ProbeOps::kNowhere;
      } else if (in_full || mass[tile] >= best || IsForced(rule, tile)) {
        my_.bucket[t] = kTaus;
      } else {
        my_.bucket[t] = CountKeepers(static_cast<double>(mass[tile]) * scale);
      }
    }
    return visible;
  }

  // What buckets hold: a result is the sum of all buckets after some.
  struct Bucket {
    float l = 0;
    int64_t tiles = 0;
  };
  void Collect(int64_t r, std::span<Bucket> buckets) {
    std::fill_n(my_.sums, static_cast<int64_t>(buckets.size()) * channels_, 0.0f);
    for (int64_t t = 0; t < tiles_; ++t) {
      if (my_.bucket[t] == ProbeOps::kNowhere) continue;
      Bucket& bucket = buckets[my_.bucket[t]];
      bucket.l += my_.row_weight[t] * L(t)[r];
      bucket.tiles += 1;
    }
    ops_.collect({my_.o + r * channels_, rows_ * channels_, tiles_, channels_}, my_.row_weight, my_.bucket, my_.sums);
  }
  float* Sum(size_t bucket) const { return my_.sums + static_cast<int64_t>(bucket) * channels_; }

  // errors[i] and kept[i] of the result without the buckets up to i.
  void Distances(std::span<const Bucket> buckets, float sink, float dense_l, std::span<float> errors,
                 std::span<float> kept) {
    const size_t last = buckets.size() - 1;
    float* sum = Sum(last);
    float l = sink + buckets[last].l;
    int64_t tiles = buckets[last].tiles;
    for (size_t i = last; i-- > 0;) {
      const bool same = i + 1 < last && buckets[i + 1].tiles == 0;
      if (i + 1 < last && !same) {
        ops_.add(sum, Sum(i + 1), channels_);
        l += buckets[i + 1].l;
        tiles += buckets[i + 1].tiles;
      }
      kept[i] = static_cast<float>(tiles);
      errors[i] = same ? errors[i + 1] : Distance(sum, l, dense_l);
    }
  }
  float Distance(const float* sum, float l, float dense_l) const {
    return static_cast<float>(distance_(sum, l > 0 ? 1 / l : 0.0f, my_.dense, 1 / dense_l, channels_));
  }

  // Everything about one row. False if there is nothing to measure.
  bool Follow(int64_t r, RowResult& result) {
    const int64_t visible = Sort(r);
    if (visible == 0 || std::isnan(shift_[r])) return false;
    Bucket buckets[kTaus + 1];
    Collect(r, buckets);
    const float sink = sink_[r] == kMinusInf ? 0.0f : std::exp2(sink_[r] - top_[r]);
    float dense_l = sink;
    std::fill_n(my_.dense, channels_, 0.0f);
    for (size_t i = 0; i <= kTaus; ++i) {
      if (buckets[i].tiles == 0) continue;
      dense_l += buckets[i].l;
      ops_.add(my_.dense, Sum(i), channels_);
    }
    if (!(dense_l > 0)) return false;  // NaN, or no key
    result.similarity = packed_.q.similarity[IndexOf(BlockOf(r))];
    result.size = Distance(my_.dense, 0.0f, dense_l);
    result.tiles = static_cast<float>(visible);
    Distances(buckets, sink, dense_l, result.error, result.kept);
    result.error[0] = 0;  // every tile: what is left is the order of summation
    if (sample_.with_skips) FollowSkip(r, sink, dense_l, result);
    if (r < exact_rows_) Round(r, dense_l, result);
    return true;
  }

  // Lambda, over the tiles of the sample's cell. The running maximum does not depend on lambda, since what is skipped
  // never moves it: so each tile has one lambda from which on it is dropped. A row group drops it only if all its rows
  // do, and these rows are of different groups: errors with skips are those of rows that decide alone, which is more.
  void FollowSkip(int64_t r, float sink, float dense_l, RowResult& result) {
    const bool alike = static_cast<double>(result.similarity) > ThetaAt(sample_.cell.theta);
    float running = kMinusInf;
    for (int64_t t = 0; t < tiles_; ++t) {
      const uint8_t keepers = my_.bucket[t];
      if (keepers == ProbeOps::kNowhere) continue;
      if (alike && keepers <= sample_.cell.tau) {
        my_.bucket[t] = ProbeOps::kNowhere;
        continue;
      }
      const float m = M(t)[r];
      const bool can_skip = m > kMinusInf && running > kMinusInf;
      my_.bucket[t] =
          can_skip ? CountUnskipped((running - m) * static_cast<float>(std::numbers::ln2)) : uint8_t{kSkips};
      running = std::max(running, m);
    }
    Bucket buckets[kSkips + 1];
    Collect(r, buckets);
    Distances(buckets, sink, dense_l, result.skip_error, result.skip_kept);
  }

  // The first rows in fp32, straight from the tensors.
  void AttendExactly() {
    float factor[kMostRows], shift[kMostRows], m[kMostRows], l[kMostRows];
    exact_rows_ = std::min<int64_t>(rows_, plan_.kernel().group_rows);
    for (int64_t r = 0; r < exact_rows_; ++r) {
      DirectRowsArgs row{};
      row.tokens = RowsOf(plan_, args_.q, sample_.sequence, sample_.head, sequence_.q_begin + kernel_.query.Position(r),
                          1, plan_.qk_dim);
      row.dim_pad = plan_.dim_pad();
      row.score_factor = plan_.scale * kLog2e;
      row.out = my_.queries + r * plan_.dim_pad();
      row.factor = factor + r;
      row.shift = shift + r;
      plan_.machine.ops.pack->direct_rows(row);
    }
    KernelArgs k = kernel_;
    k.query.rows = reinterpret_cast<const std::byte*>(my_.queries);
    k.query.row_lanes = plan_.dim_pad();
    k.query.factor = factor;
    k.query.shift = shift;
    k.query.count = static_cast<int>(exact_rows_);
    k.direct = TokensOf(plan_, args_, BlockOf(0));
    k.kept = my_.tiles;
    k.kept_count = tiles_;
    k.state = {my_.exact, m, l};
    plan_.kernel().attend_direct(k);
    for (int64_t r = 0; r < exact_rows_; ++r) {
      const float sink = SinkOf(r, 0.0f);
      exact_l_[r] = l[r] + (l[r] > 0 ? std::exp2(sink - m[r]) : 0.0f);
    }
  }

  // What rounding does to a row: the dense result of the plan's precision against that in fp32.
  void Round(int64_t r, float dense_l, RowResult& result) const {
    const int64_t unit = plan_.KvUnit(sample_.sequence, sample_.head / plan_.heads_per_kv);
    const auto value_unit = static_cast<float>(packed_.units[unit].v_unit);
    const float by = exact_l_[r] > 0 ? 1 / exact_l_[r] : 0.0f;
    const float* exact = my_.exact + r * channels_;
    result.round_error =
        static_cast<float>(ops_.distance[SPARGE_MEASURE_L1](exact, by, my_.dense, value_unit / dense_l, channels_));
    result.round_size = static_cast<float>(ops_.distance[SPARGE_MEASURE_L1](exact, by, my_.dense, 0.0f, channels_));
  }

  const Plan& plan_;
  const sparge_run_args& args_;
  const Packed& packed_;
  const MassStore& store_;
  const BlockMap& map_;
  const ProbeOps& ops_;
  const ProbeMemory my_;
  const ProbeOps::Distance distance_;  // in the measure of the calibration
  const Sample& sample_;
  const Sequence& sequence_;
  const int64_t channels_;
  const int64_t rows_;
  KernelArgs kernel_{};
  int64_t tiles_ = 0;
  int64_t exact_rows_ = 0;        // that were computed in fp32, too
  const float* mass_[kMostRows];  // per row: the masses of its block's tiles
  float factor_[kMostRows], shift_[kMostRows];
  alignas(64) float top_[kMostRows];  // per row: what all tiles are relative to
  float sink_[kMostRows];             // per row: log2 units
  float exact_l_[kMostRows];          // per row: sum in fp32
};

}  // namespace

int64_t SampleRows(const Plan& plan) {
  // A sample reads all keys and values: with two groups that costs less by the row, where so many rows are wanted.
  constexpr int64_t kManyQueries = 4096;
  const int64_t groups = plan.q_tokens >= kManyQueries ? 2 : 1;
  return std::min(groups * int64_t{plan.kernel().group_rows}, kMostRows);
}

ProbeMemory LayProbeMemory(const Plan& plan, Arena& arena) {
  const int64_t workers = plan.machine.executor.workers;
  const int64_t rows = workers * SampleRows(plan);
  const int64_t tiles = workers * plan.k_blocks;
  ProbeMemory memory{};
  memory.rows = arena.Take<std::byte>(rows * RowBytes(plan));
  memory.queries = arena.Take<float>(rows * plan.dim_pad());
  memory.tiles = arena.Take<int32_t>(tiles);
  memory.masked = arena.Take<uint64_t>(workers * MaskWords(plan));
  memory.o = arena.Take<float>(plan.k_blocks * rows * plan.channels());
  memory.m = arena.Take<float>(tiles * kMostRows);
  memory.l = arena.Take<float>(tiles * kMostRows);
  memory.weight = arena.Take<float>(tiles * kMostRows);
  memory.row_weight = arena.Take<float>(tiles);
  memory.bucket = arena.Take<uint8_t>(tiles);
  memory.sums = arena.Take<float>(workers * (kTaus + 1) * plan.channels());
  memory.dense = arena.Take<float>(workers * plan.channels());
  memory.exact = arena.Take<float>(rows * plan.channels());
  memory.samples = arena.Take<Sample>(kSamplesAtOnce);
  memory.results = arena.Take<RowResult>(kSamplesAtOnce * SampleRows(plan));
  return memory;
}

void ProbeSamples(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& stage1,
                  const BlockMap& map, const ProbeMemory& memory, int64_t count) {
  const int64_t rows = SampleRows(plan);
  ForEach(plan.machine.executor, count, [&](int32_t worker, int64_t i) {
    Probe(plan, args, packed, stage1.store, map, memory, worker, memory.samples[i]).Run(memory.results + i * rows);
  });
  for (int64_t i = 0; i < count; ++i) {
    const Sample& sample = memory.samples[i];
    plan.calibration->Learn(sample, {memory.results + i * rows, static_cast<size_t>(sample.count)});
  }
}

}  // namespace sparge::impl

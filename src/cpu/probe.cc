// Takes samples: what the result of their rows is under every tau and lambda.
#include "src/cpu/probe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <numbers>
#include <numeric>
#include <span>

#include "src/base/threads.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/probe_ops.h"

namespace sparge::impl {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kMostRows = kChannelAlign;
constexpr uint8_t kNowhere = 255;  // a bucket for tiles that are left out
static_assert(kTaus <= ProbeSteps::kMost && kSkips <= kTaus);

int64_t MaskWords(const Plan& plan) { return CeilDiv(plan.k_blocks, 64); }
int64_t RowBytes(const Plan& plan) { return plan.row_lanes() * kLaneBytes; }
// Of the rows' results against a tile. One line more than they take: else the tiles of a row would lie a power of two
// apart, and share few places in the cache.
int64_t TileFloats(const Plan& plan) { return SampleRows(plan) * plan.channels() + kChannelAlign; }

// One worker's part of the memory.
ProbeMemory OfWorker(const Plan& plan, const ProbeMemory& all, int32_t worker) {
  const int64_t rows = SampleRows(plan);
  ProbeMemory mine = all;
  mine.rows += worker * rows * RowBytes(plan);
  mine.queries += worker * rows * plan.dim_pad();
  mine.tiles += worker * plan.k_blocks;
  mine.masked += worker * MaskWords(plan);
  mine.o += worker * plan.k_blocks * TileFloats(plan);
  mine.m += worker * plan.k_blocks * kMostRows;
  mine.l += worker * plan.k_blocks * kMostRows;
  mine.best += worker * plan.k_blocks * kMostRows;
  mine.weight += worker * plan.k_blocks * kMostRows;
  mine.bucket += worker * plan.k_blocks;
  mine.order += worker * plan.k_blocks;
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
  // That is off by at most 0.09 octaves, and a step is 0.26.
  const double octaves = log2_of(scaled) - log2_of(kLeast[1]);
  int count = std::clamp(static_cast<int>(octaves * kPerOctave) + 1, 1, kTaus);
  count += static_cast<int>(kLeast[static_cast<size_t>(count)] <= scaled);
  count -= static_cast<int>(kLeast[static_cast<size_t>(count - 1)] > scaled);
  return static_cast<uint8_t>(count);
}

// How many lambdas of the grid keep a tile that lies so far below the best before it, natural-log units.
uint8_t CountUnskipped(float depth) {
  static const auto kLambdas = [] {
    std::array<float, kSkips> lambdas{};
    for (int i = 0; i < kSkips; ++i) lambdas[static_cast<size_t>(i)] = static_cast<float>(SkipAt(i));
    return lambdas;
  }();
  int count = 1;  // "off" keeps all
  for (size_t i = 1; i < kSkips; ++i) count += static_cast<int>(kLambdas[i] > depth);
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
        distances_(ops_.distances[plan.calibration->measure()]),
        sample_(sample),
        sequence_(plan.sequences[sample.sequence]),
        channels_(plan.channels()),
        rows_(sample.count) {}

  void Run(RowResult* results) {
    GatherRows();
    FindTiles();
    AttendTiles();
    FindTops();
    if (sample_.rounding_rows > 0) AttendExactly();
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
  float* M(int64_t tile) const { return my_.m + tile * kMostRows; }
  float* L(int64_t tile) const { return my_.l + tile * kMostRows; }
  float* Best(int64_t tile) const { return my_.best + tile * kMostRows; }

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
      for (int64_t r = rows_; r-- > 0;) seen = seen || mass_[r][j] != MassStore::kHidden;
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

  // Tile by tile, each beside the ones before it as in a dense run, for what rounding does depends on these.
  void AttendTiles() {
    alignas(64) float none[kMostRows], keep[kMostRows];
    float sum[kMostRows] = {};  // of all tiles so far, relative to their M
    std::fill_n(none, kMostRows, kMinusInf);
    KernelArgs k = kernel_;
    k.kept_count = 1;
    for (int64_t t = 0; t < tiles_; ++t) {
      const float* before = t == 0 ? none : M(t - 1);
      std::fill_n(M(t), kMostRows, kMinusInf);
      k.kept = my_.tiles + t;
      k.known = before;
      k.known_sum = sum;
      k.state = {my_.o + t * TileFloats(plan_), M(t), L(t)};
      k.best = Best(t);
      plan_.kernel().attend[plan_.precision](k);
      ops_.weights(before, M(t), kMostRows, keep);
      for (int64_t r = 0; r < rows_; ++r) {
        const float old = M(t)[r] == before[r] ? sum[r] : sum[r] * keep[r];
        sum[r] = L(t)[r];
        L(t)[r] -= old;
      }
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
    for (int64_t r = 0; tiles_ > 0 && r < kMostRows; ++r) top_[r] = std::max(top_[r], M(tiles_ - 1)[r]);
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
      if (mass[tile] == MassStore::kHidden) {
        my_.bucket[t] = kNowhere;
      } else if (in_full || mass[tile] >= best || IsForced(rule, tile)) {
        my_.bucket[t] = kTaus;
      } else {
        my_.bucket[t] = CountKeepers(static_cast<double>(mass[tile]) * scale);
      }
    }
    return visible;
  }

  // Tiles of a row by the bucket that they are in; a result is the sum of all buckets after some.
  struct Buckets {
    int64_t tiles[kTaus + 1] = {};
    float l[kTaus + 1] = {};
  };
  // Counts what the buckets hold, and brings the tiles into their order.
  Buckets Collect(int64_t r) {
    Buckets all;
    for (int64_t t = 0; t < tiles_; ++t) {
      const uint8_t bucket = my_.bucket[t];
      if (bucket == kNowhere) continue;
      all.l[bucket] += my_.weight[t * kMostRows + r] * L(t)[r];
      all.tiles[bucket] += 1;
    }
    int64_t place[kTaus + 1], next = 0;
    for (int b = kTaus; b >= 0; next += all.tiles[b--]) place[b] = next;
    for (int64_t t = 0; t < tiles_; ++t) {
      if (my_.bucket[t] != kNowhere) my_.order[place[my_.bucket[t]]++] = static_cast<int32_t>(t);
    }
    return all;
  }
  TileResults ResultsOf(int64_t r) const {
    return {my_.o + r * channels_, TileFloats(plan_), channels_, my_.weight + r, kMostRows, my_.order};
  }

  // errors[i] and kept[i] of the result without the buckets up to i, of errors.size() + 1 buckets.
  void Distances(int64_t r, const Buckets& all, float sink, std::span<float> errors, std::span<float> kept) {
    const size_t last = errors.size();
    ProbeSteps steps;
    size_t step_of[kTaus];
    float l = sink;
    int64_t tiles = 0;
    for (size_t i = last; i-- > 0;) {
      if (i + 1 == last || all.tiles[i + 1] > 0) {
        l += all.l[i + 1];
        tiles += all.tiles[i + 1];
        steps.ends[steps.count] = tiles;
        steps.by[steps.count++] = l > 0 ? 1 / l : 0.0f;
      }
      kept[i] = static_cast<float>(tiles);
      step_of[i] = static_cast<size_t>(steps.count - 1);
    }
    float distance[ProbeSteps::kMost];
    distances_(ResultsOf(r), steps, my_.dense, distance);
    for (size_t i = 0; i < last; ++i) errors[i] = distance[step_of[i]];
  }
  // The same of a result without any tile.
  float Size(int64_t r) const {
    ProbeSteps nothing;
    nothing.count = 1;
    nothing.ends[0] = 0;
    nothing.by[0] = 0;
    float size;
    distances_(ResultsOf(r), nothing, my_.dense, &size);
    return size;
  }

  // Everything about one row. False if there is nothing to measure.
  bool Follow(int64_t r, RowResult& result) {
    const int64_t visible = Sort(r);
    if (visible == 0 || std::isnan(shift_[r])) return false;
    const Buckets all = Collect(r);
    const float sink = sink_[r] == kMinusInf ? 0.0f : std::exp2(sink_[r] - top_[r]);
    const float dense_l = std::accumulate(std::begin(all.l), std::end(all.l), sink);
    if (!(dense_l > 0)) return false;  // NaN, or no key
    ops_.sum(ResultsOf(r), visible, 1 / dense_l, my_.dense);
    result.similarity = packed_.q.similarity[IndexOf(BlockOf(r))];
    result.size = Size(r);
    result.tiles = static_cast<float>(visible);
    Distances(r, all, sink, result.error, result.kept);
    result.error[0] = 0;  // every tile: what is left is the order of summation
    if (sample_.with_skips) FollowSkip(r, sink, result);
    if (const int64_t i = exact_.IndexOf(r); i >= 0) Round(i, result);
    return true;
  }

  // Lambda, over the tiles of the sample's cell. The running maximum does not depend on lambda, since what is skipped
  // never moves it: so each tile has one lambda from which on it is dropped. A row group drops it only if all its rows
  // do, and these rows are of different groups: errors with skips are those of rows that decide alone, which is more.
  void FollowSkip(int64_t r, float sink, RowResult& result) {
    const bool alike = static_cast<double>(result.similarity) > ThetaAt(sample_.cell.theta);
    float running = kMinusInf;
    for (int64_t t = 0; t < tiles_; ++t) {
      const uint8_t keepers = my_.bucket[t];
      if (keepers == kNowhere) continue;
      if (alike && keepers <= sample_.cell.tau) {
        my_.bucket[t] = kNowhere;
        continue;
      }
      const float m = Best(t)[r];
      const bool can_skip = m > kMinusInf && running > kMinusInf;
      my_.bucket[t] =
          can_skip ? CountUnskipped((running - m) * static_cast<float>(std::numbers::ln2)) : uint8_t{kSkips};
      running = std::max(running, m);
    }
    Distances(r, Collect(r), sink, result.skip_error, result.skip_kept);
  }

  // Some of the rows in fp32, straight from the tensors.
  void AttendExactly() {
    float factor[kMostRows], shift[kMostRows], m[kMostRows], l[kMostRows];
    const int64_t most = std::min<int64_t>(rows_, plan_.kernel().group_rows);
    const int64_t rows = std::min(sample_.rounding_rows, most);
    exact_.count = rows;
    exact_.step = rows_ / rows;
    exact_.first = (rows_ - 1 - (rows - 1) * exact_.step) / 2;
    const auto position = [&](int64_t i) { return kernel_.query.Position(exact_.first + i * exact_.step); };
    for (int64_t i = 0; i < rows; ++i) {
      DirectRowsArgs row{};
      row.tokens =
          RowsOf(plan_, args_.q, sample_.sequence, sample_.head, sequence_.q_begin + position(i), 1, plan_.qk_dim);
      row.dim_pad = plan_.dim_pad();
      row.score_factor = plan_.scale * kLog2e;
      row.out = my_.queries + i * plan_.dim_pad();
      row.factor = factor + i;
      row.shift = shift + i;
      plan_.machine.ops.pack->direct_rows(row);
    }
    KernelArgs k = kernel_;
    k.query = {reinterpret_cast<const std::byte*>(my_.queries),
               plan_.dim_pad(),
               factor,
               shift,
               position(0),
               static_cast<int>(rows),
               kernel_.query.step * exact_.step};
    k.rule.mask = MaskRow(plan_, args_.mask, sample_.sequence, sample_.head, position(0));
    k.rule.mask_stride = kernel_.rule.mask_stride * exact_.step;
    k.direct = TokensOf(plan_, args_, BlockOf(0));
    k.kept = my_.tiles;
    k.kept_count = tiles_;
    k.state = {my_.exact, m, l};
    plan_.kernel().attend_direct(k);
    for (int64_t i = 0; i < rows; ++i) {
      const float sink = SinkOf(exact_.first + i * exact_.step, 0.0f);
      exact_l_[i] = l[i] + (l[i] > 0 ? std::exp2(sink - m[i]) : 0.0f);
    }
  }

  // What rounding does to a row: the dense result of the plan's precision against that in fp32, which is the i-th.
  void Round(int64_t i, RowResult& result) const {
    const int64_t unit = plan_.KvUnit(sample_.sequence, sample_.head / plan_.heads_per_kv);
    const auto value_unit = static_cast<float>(packed_.units[unit].v_unit);
    const float by = exact_l_[i] > 0 ? 1 / exact_l_[i] : 0.0f;
    const float* exact = my_.exact + i * channels_;
    result.round_error = static_cast<float>(ops_.distance(exact, by, my_.dense, value_unit, channels_));
    result.round_size = static_cast<float>(ops_.distance(exact, by, my_.dense, 0.0f, channels_));
  }

  const Plan& plan_;
  const sparge_run_args& args_;
  const Packed& packed_;
  const MassStore& store_;
  const BlockMap& map_;
  const ProbeOps& ops_;
  const ProbeMemory my_;
  const ProbeOps::Distances distances_;  // in the measure of the calibration
  const Sample& sample_;
  const Sequence& sequence_;
  const int64_t channels_;
  const int64_t rows_;
  KernelArgs kernel_{};
  int64_t tiles_ = 0;
  // The rows that were computed in fp32, too: from the first one on, `step` apart.
  struct ExactRows {
    int64_t count = 0, first = 0, step = 1;
    int64_t IndexOf(int64_t r) const {
      const bool is = r >= first && (r - first) % step == 0 && (r - first) / step < count;
      return is ? (r - first) / step : -1;
    }
  } exact_;
  const float* mass_[kMostRows];  // per row: the masses of its block's tiles
  float factor_[kMostRows], shift_[kMostRows];
  alignas(64) float top_[kMostRows];  // per row: what all tiles are relative to
  float sink_[kMostRows];             // per row: log2 units
  float exact_l_[kMostRows];          // of these: sum in fp32
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
  memory.o = arena.Take<float>(tiles * TileFloats(plan));
  memory.m = arena.Take<float>(tiles * kMostRows);
  memory.l = arena.Take<float>(tiles * kMostRows);
  memory.best = arena.Take<float>(tiles * kMostRows);
  memory.weight = arena.Take<float>(tiles * kMostRows);
  memory.bucket = arena.Take<uint8_t>(tiles);
  memory.order = arena.Take<int32_t>(tiles);
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
  // Heads side by side, the samples of each in their order.
  ForEach(plan.machine.executor, count, [&](int32_t, int64_t first) {
    const int64_t head = memory.samples[first].head;
    if (first > 0 && memory.samples[first - 1].head == head) return;  // done with the first of its kind
    for (int64_t i = first; i < count && memory.samples[i].head == head; ++i) {
      const Sample& sample = memory.samples[i];
      plan.calibration->Learn(sample, {memory.results + i * rows, static_cast<size_t>(sample.count)});
    }
  });
}

}  // namespace sparge::impl

// Takes samples: where, and what the result of their rows is under every tau and lambda.
#include "src/cpu/probe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "src/base/threads.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/probe_ops.h"
#include "src/select/select.h"

namespace sparge::impl {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
// What is left of a row's sum below this share of all of it is rounding: the row has lost every tile.
constexpr float kNothingLeft = 1e-6f;
constexpr int64_t kSampleGroups = 2;

int64_t DropsOf(const Plan& plan) { return plan.k_blocks * kSampleGroups; }

// One worker's part of the memory.
ProbeMemory OfWorker(const Plan& plan, const ProbeMemory& all, int32_t worker) {
  const int64_t rows = SampleRows(plan);
  const int64_t tile_rows = plan.k_blocks * rows;
  ProbeMemory mine = all;
  mine.o += worker * tile_rows * plan.channels();
  mine.m += worker * tile_rows;
  mine.l += worker * tile_rows;
  mine.sum += worker * rows * plan.channels();
  mine.dense += worker * rows * plan.channels();
  mine.queries += worker * rows * plan.dim_pad();
  mine.kept += worker * plan.k_blocks;
  mine.drops += worker * DropsOf(plan);
  return mine;
}

// One sample at work.
class Probe {
 public:
  Probe(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& stage1, const BlockMap& map,
        const ProbeMemory& memory, int32_t worker, const Sample& sample)
      : plan_(plan),
        args_(args),
        ops_(*plan.machine.ops.probe),
        my_(OfWorker(plan, memory, worker)),
        sample_(sample),
        id_(FindQueryBlock(plan, sample.row)),
        channels_(plan.channels()),
        similarity_(packed.q.similarity[sample.row]),
        ranked_(RankRow(plan, stage1, map, worker, sample.row)),
        kernel_(BlockArgs(plan, args, packed, id_)) {
    QueryBlock& query = kernel_.query;
    const int64_t skipped = sample.first_row;
    rows_ = std::min(SampleRows(plan), query.count - skipped);
    query.rows += skipped * query.row_lanes * kLaneBytes;
    query.factor += skipped;
    query.shift += skipped;
    query.first += skipped;
    query.count = static_cast<int>(rows_);
    kernel_.rule.mask = MaskRow(plan, args.mask, id_.sequence, id_.head, query.first);
    kernel_.masked_tiles = ranked_.masked;
    kernel_.skip = std::numeric_limits<float>::infinity();
    value_unit_ = static_cast<float>(packed.units[plan.KvUnit(id_.sequence, id_.head / plan.heads_per_kv)].v_unit);
  }

  void Run(SampleResult& result) {
    result = {};
    AttendTiles();
    if (!FindDense(result)) return;
    FollowTau(result);
    if (sample_.with_skips) FollowSkip(result);
    if (sample_.with_rounding) Round(result);
    result.valid = true;
  }

 private:
  float* O(int64_t tile) const { return my_.o + tile * rows_ * channels_; }
  float* M(int64_t tile) const { return my_.m + tile * rows_; }
  float* L(int64_t tile) const { return my_.l + tile * rows_; }
  bool Forced(int64_t tile) const { return TestBit(ranked_.forced, ranked_.order[tile]); }

  // The rows against each visible tile by itself.
  void AttendTiles() {
    for (int64_t t = 0; t < ranked_.count; ++t) {
      kernel_.kept = ranked_.order + t;
      kernel_.kept_count = 1;
      kernel_.state = {O(t), M(t), L(t)};
      plan_.kernel().attend[plan_.precision](kernel_);
    }
  }

  // The sink logit relative to the scores of a row, log2 units.
  float SinkOf(int64_t row, float shift) const {
    const Visible& visible = plan_.sequences[id_.sequence].visible;
    const int64_t query = kernel_.query.first + row;
    return static_cast<float>(SinkLogit(plan_, id_.head) - LeftOut(plan_, visible, id_.head, query, shift));
  }

  // Brings the tiles to a common maximum per row, so that from here on results are plain sums; then the dense result.
  // Returns false if there is nothing to measure.
  bool FindDense(SampleResult& result) {
    for (int64_t r = 0; r < rows_; ++r) {
      sink_[r] = SinkOf(r, kernel_.query.shift[r]);
      top_[r] = sink_[r];
      for (int64_t t = 0; t < ranked_.count; ++t) top_[r] = std::max(top_[r], M(t)[r]);
      if (std::isnan(kernel_.query.shift[r])) return false;
      dense_l_[r] = top_[r] == kMinusInf ? 0.0f : std::exp2(sink_[r] - top_[r]);
    }
    float by[kBlockQ];
    std::fill_n(my_.sum, rows_ * channels_, 0.0f);
    for (int64_t t = 0; t < ranked_.count; ++t) {
      for (int64_t r = 0; r < rows_; ++r) {
        by[r] = M(t)[r] == kMinusInf ? 0.0f : std::exp2(M(t)[r] - top_[r]);
        L(t)[r] *= by[r];
        dense_l_[r] += L(t)[r];
      }
      ops_.scale(O(t), by, rows_, channels_);
      ops_.add(my_.sum, O(t), 1.0f, rows_, channels_);
    }
    if (std::any_of(dense_l_, dense_l_ + rows_, [](float l) { return std::isnan(l); })) return false;
    std::copy_n(my_.sum, rows_ * channels_, my_.dense);
    std::copy_n(dense_l_, rows_, l_);
    Inverse(by);
    ops_.scale(my_.dense, by, rows_, channels_);
    std::fill_n(by, rows_, 0.0f);
    result.similarity = similarity_;
    result.size = ops_.distance(my_.sum, by, my_.dense, rows_, channels_);
    result.tiles = static_cast<double>(ranked_.count);
    return ranked_.count > 0;
  }

  void Inverse(float* by) const {
    for (int64_t r = 0; r < rows_; ++r) by[r] = l_[r] > kNothingLeft * dense_l_[r] ? 1.0f / l_[r] : 0.0f;
  }
  double Error() const {
    float by[kBlockQ];
    Inverse(by);
    return ops_.distance(my_.sum, by, my_.dense, rows_, channels_);
  }
  // Takes rows of a tile out of the result at work.
  void Remove(int64_t tile, int64_t first, int64_t count) {
    ops_.add(my_.sum + first * channels_, O(tile) + first * channels_, -1.0f, count, channels_);
    for (int64_t r = first; r < first + count; ++r) l_[r] -= L(tile)[r];
  }

  // Whether the tile of this rank is the last one that tau does not want; the best one is always kept.
  bool Leaves(int64_t tile, double tau) const {
    return tile > 0 && ranked_.mass[ranked_.order[tile]] < MassFloor(tau, ranked_.count);
  }

  // Tau from 1 down: tiles leave in the order of rank.
  void FollowTau(SampleResult& result) {
    int64_t end = ranked_.count, kept = ranked_.count;
    for (int i = 0; i < kTaus; ++i) {
      const int64_t before = kept;
      for (; Leaves(end - 1, TauAt(i)); --end) {
        if (Forced(end - 1)) continue;
        Remove(end - 1, 0, rows_);
        --kept;
      }
      result.kept[i] = static_cast<double>(kept);
      result.error[i] = i == 0 ? 0.0 : before == kept ? result.error[i - 1] : Error();
    }
  }

  // How many tiles tau keeps by rank, forced ones aside.
  int64_t EndOf(double tau) const {
    int64_t end = ranked_.count;
    while (Leaves(end - 1, tau)) --end;
    return end;
  }

  // Lambda from infinity down, over the tiles of the sample's cell. The running maximum does not depend on lambda,
  // since what is skipped never moves it: so each pair of tile and group has one lambda from which on it is dropped.
  void FollowSkip(SampleResult& result) {
    const bool alike = similarity_ > ThetaAt(sample_.cell.theta);
    const int64_t end = alike ? EndOf(TauAt(sample_.cell.tau)) : ranked_.count;
    std::fill_n(my_.sum, rows_ * channels_, 0.0f);
    for (int64_t r = 0; r < rows_; ++r) l_[r] = top_[r] == kMinusInf ? 0.0f : std::exp2(sink_[r] - top_[r]);
    int64_t kept = 0;
    for (int64_t t = 0; t < ranked_.count; ++t) {
      if (t >= end && !Forced(t)) continue;
      my_.kept[kept++] = static_cast<int32_t>(t);
      ops_.add(my_.sum, O(t), 1.0f, rows_, channels_);
      for (int64_t r = 0; r < rows_; ++r) l_[r] += L(t)[r];
    }
    std::sort(my_.kept, my_.kept + kept, [&](int32_t a, int32_t b) { return ranked_.order[a] < ranked_.order[b]; });
    const int64_t drops = FindDrops(kept);
    const int64_t group_rows = plan_.kernel().group_rows;
    const int64_t groups = CeilDiv(rows_, group_rows);
    int64_t dropped = 0;
    for (int i = 0; i < kSkips; ++i) {
      for (; dropped < drops && my_.drops[dropped].depth >= static_cast<float>(SkipAt(i)); ++dropped) {
        const Drop& drop = my_.drops[dropped];
        const int64_t first = drop.group * group_rows;
        Remove(drop.tile, first, std::min(group_rows, rows_ - first));
      }
      result.skip_groups[i] = static_cast<double>(kept * groups - dropped);
      result.skip_error[i] = Error();
    }
  }

  // The pairs that some lambda of the grid drops, the first to go first. Returns their number.
  int64_t FindDrops(int64_t kept) {
    const int64_t group_rows = plan_.kernel().group_rows;
    float running[kBlockQ];
    std::fill_n(running, rows_, kMinusInf);
    int64_t count = 0;
    for (int64_t i = 0; i < kept; ++i) {
      const float* m = M(my_.kept[i]);
      for (int64_t first = 0; first < rows_; first += group_rows) {
        float above = kMinusInf;  // of the best row
        for (int64_t r = first; r < std::min(first + group_rows, rows_); ++r) {
          if (m[r] > kMinusInf) above = std::max(above, running[r] == kMinusInf ? 0.0f : m[r] - running[r]);
          running[r] = std::max(running[r], m[r]);
        }
        const float depth = -above * static_cast<float>(std::numbers::ln2);
        if (above == kMinusInf || depth < static_cast<float>(SkipAt(kSkips - 1))) continue;
        my_.drops[count++] = {depth, my_.kept[i], static_cast<int32_t>(first / group_rows)};
      }
    }
    std::sort(my_.drops, my_.drops + count, [](const Drop& a, const Drop& b) { return a.depth > b.depth; });
    return count;
  }

  // The first row group in fp32, straight from the tensors, against the dense result of the plan's precision.
  void Round(SampleResult& result) {
    const int64_t count = std::min<int64_t>(plan_.kernel().group_rows, rows_);
    const Sequence& s = plan_.sequences[id_.sequence];
    float factor[kBlockQ], shift[kBlockQ], m[kBlockQ], l[kBlockQ], by[kBlockQ];
    DirectRowsArgs rows{};
    rows.tokens = RowsOf(plan_, args_.q, id_.sequence, id_.head, s.q_begin + kernel_.query.first, count, plan_.qk_dim);
    rows.dim_pad = plan_.dim_pad();
    rows.score_factor = plan_.scale * kLog2e;
    rows.out = my_.queries;
    rows.factor = factor;
    rows.shift = shift;
    plan_.machine.ops.pack->direct_rows(rows);
    KernelArgs k = kernel_;
    k.query = {reinterpret_cast<const std::byte*>(my_.queries),
               plan_.dim_pad(),
               factor,
               shift,
               kernel_.query.first,
               static_cast<int>(count)};
    k.direct = TokensOf(plan_, args_, id_);
    std::copy_n(ranked_.order, ranked_.count, my_.kept);
    std::sort(my_.kept, my_.kept + ranked_.count);
    k.kept = my_.kept;
    k.kept_count = ranked_.count;
    k.state = {my_.sum, m, l};
    plan_.kernel().attend_direct(k);
    for (int64_t r = 0; r < count; ++r) {
      const float sink = SinkOf(r, 0.0f);
      const float all = l[r] + (l[r] > 0 ? std::exp2(sink - m[r]) : 0.0f);
      by[r] = all > 0 ? 1.0f / all : 0.0f;
    }
    ops_.scale(my_.sum, by, count, channels_);
    std::fill_n(by, count, value_unit_);
    result.round_error = ops_.distance(my_.dense, by, my_.sum, count, channels_);
    std::fill_n(by, count, 0.0f);
    result.round_size = ops_.distance(my_.dense, by, my_.sum, count, channels_);
  }

  const Plan& plan_;
  const sparge_run_args& args_;
  const ProbeOps& ops_;
  const ProbeMemory my_;
  const Sample& sample_;
  const BlockId id_;
  const int64_t channels_;
  const double similarity_;
  const RankedRow ranked_;
  KernelArgs kernel_;
  int64_t rows_;
  float value_unit_;
  float top_[kBlockQ];        // per row: what all tiles are relative to
  float sink_[kBlockQ];       // per row: log2 units
  float dense_l_[kBlockQ]{};  // per row: sum of the dense result
  float l_[kBlockQ];          // per row: sum of the result at work
};

}  // namespace

int64_t SampleRows(const Plan& plan) { return kSampleGroups * plan.kernel().group_rows; }

ProbeMemory LayProbeMemory(const Plan& plan, Arena& arena) {
  const int64_t workers = plan.machine.executor.workers;
  const int64_t rows = SampleRows(plan);
  const int64_t tile_rows = workers * plan.k_blocks * rows;
  ProbeMemory memory{};
  memory.o = arena.Take<float>(tile_rows * plan.channels());
  memory.m = arena.Take<float>(tile_rows);
  memory.l = arena.Take<float>(tile_rows);
  memory.sum = arena.Take<float>(workers * rows * plan.channels());
  memory.dense = arena.Take<float>(workers * rows * plan.channels());
  memory.queries = arena.Take<float>(workers * rows * plan.dim_pad());
  memory.kept = arena.Take<int32_t>(workers * plan.k_blocks);
  memory.drops = arena.Take<Drop>(workers * DropsOf(plan));
  memory.samples = arena.Take<Sample>(kSamplesAtOnce);
  memory.results = arena.Take<SampleResult>(kSamplesAtOnce);
  return memory;
}

void ProbeSamples(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& stage1,
                  const BlockMap& map, const ProbeMemory& memory, int64_t count) {
  ForEach(plan.machine.executor, count, [&](int32_t worker, int64_t i) {
    Probe(plan, args, packed, stage1, map, memory, worker, memory.samples[i]).Run(memory.results[i]);
  });
  for (int64_t i = 0; i < count; ++i) plan.calibration->Learn(memory.samples[i], memory.results[i]);
}

}  // namespace sparge::impl

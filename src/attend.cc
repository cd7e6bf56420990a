// The algorithm, top to bottom: pack, predict, schedule, kernel, output.
#include "src/attend.h"

#include <bit>
#include <chrono>
#include <cmath>

#include "src/base/arena.h"
#include "src/base/half.h"
#include "src/base/threads.h"
#include "src/kernel/state.h"
#include "src/pack.h"
#include "src/predict.h"
#include "src/schedule.h"

namespace sparge {
namespace {

constexpr double kLog2e = 1.44269504088896340736;

// All memory of one call.
struct Workspace {
  Packed packed;
  BlockMap map;
  Schedule schedule;
  int32_t* kept;  // per worker: indices of a row's kept tiles
  float* states;  // per worker, then per part: one query block's (m, l, o)

  static int64_t StateFloats(const Plan& plan) { return kBlockQ * (2 + plan.channels()); }
  RowState StateAt(const Plan& plan, int64_t index) const {
    float* base = states + index * StateFloats(plan);
    return {base + 2 * kBlockQ, base, base + kBlockQ};
  }
  RowState WorkerState(const Plan& plan, int32_t worker) const { return StateAt(plan, worker); }
  RowState PartState(const Plan& plan, int64_t part) const {
    return StateAt(plan, plan.runtime.executor.workers + part);
  }
};

Workspace LayWorkspace(const Plan& plan, Arena& arena) {
  const int64_t workers = plan.runtime.executor.workers;
  Workspace w{};
  w.packed = plan.direct() ? LayDirect(plan, arena) : LayPacked(plan, arena);
  w.map = LayBlockMap(plan, arena);
  w.schedule = LaySchedule(plan, arena);
  w.kept = arena.Take<int32_t>(workers * plan.k_blocks);
  w.states = arena.Take<float>((workers + MaxParts(plan)) * Workspace::StateFloats(plan));
  return w;
}

// The caller's memory, from its first aligned byte on.
Workspace PlaceWorkspace(const Plan& plan, const sparge_run_args& args) {
  const auto address = reinterpret_cast<uintptr_t>(args.workspace);
  Arena arena(static_cast<std::byte*>(args.workspace) + (RoundUp(address, Arena::kAlignment) - address));
  return LayWorkspace(plan, arena);
}

class Stopwatch {
 public:
  // Milliseconds since the last call.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    return ms;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Indices of the begin'th to the end'th set bit of a row.
int64_t ListKept(const uint64_t* bits, int64_t words, int64_t begin, int64_t end, int32_t* out) {
  int64_t seen = 0;
  int64_t count = 0;
  for (int64_t w = 0; w < words && seen < end; ++w) {
    for (uint64_t rest = bits[w]; rest != 0 && seen < end; rest &= rest - 1) {
      if (seen++ >= begin) out[count++] = static_cast<int32_t>(w * 64 + std::countr_zero(rest));
    }
  }
  return count;
}

// The kernel's arguments for one work item.
KernelArgs ArgsFor(const Plan& plan, const sparge_run_args& args, const Workspace& w, const WorkItem& item) {
  const BlockId id = FindQueryBlock(plan, item.row);
  const Sequence& s = plan.sequences[id.sequence];
  const Packed& p = w.packed;
  const int64_t keys = plan.KeyBlock(id.head / plan.heads_per_kv, s, 0);
  KernelArgs k{};
  const int64_t lanes = plan.direct() ? plan.dim_pad() : plan.row_lanes();
  k.query = {p.queries + item.row * kBlockQ * lanes * kLaneBytes,
             lanes,
             p.q_factor + item.row * kBlockQ,
             p.q_shift + item.row * kBlockQ,
             id.block * kBlockQ,
             static_cast<int>(s.QueriesIn(id.block))};
  k.rule.visible = s.visible;
  k.rule.softcap = static_cast<float>(plan.softcap * kLog2e);
  k.rule.slope = plan.alibi_slopes.empty() ? 0.0f : static_cast<float>(plan.alibi_slopes[id.head] * kLog2e);
  k.rule.mask_type = plan.mask;
  k.rule.mask = MaskRow(plan, args.mask, id.sequence, id.head, k.query.first);
  k.rule.mask_stride = args.mask.query_stride;
  k.masked_tiles = w.map.MaskedRow(item.row);
  k.skip = static_cast<float>(plan.heads[id.head].pv_skip * kLog2e);
  k.blocks.channels = plan.channels();
  if (plan.direct()) {
    const int64_t kv_head = id.head / plan.heads_per_kv;
    k.direct = {RowsOf(plan, args.k, id.sequence, kv_head, s.k_begin, s.k_count, plan.qk_dim),
                RowsOf(plan, args.v, id.sequence, kv_head, s.k_begin, s.k_count, plan.v_dim)};
    return k;
  }
  const int64_t values = keys * (kBlockK / PerLane(plan.precision)) * plan.channels() * kLaneBytes;
  k.blocks = {p.keys + keys * kBlockK * lanes * kLaneBytes,
              p.key_scale + keys * kBlockK,
              p.key_start + keys * plan.grid().Sums(plan.row_lanes()) * kBlockK,
              p.poison + keys,
              p.values + values,
              p.value_scale + keys * plan.channels(),
              p.fine_values + values,
              p.fine + keys,
              plan.channels()};
  return k;
}

// Output of one query block: sink, log-sum-exp, o / l.
void FinishRow(const Plan& plan, const sparge_run_args& args, const Workspace& w, int64_t row, const RowState& state) {
  const BlockId id = FindQueryBlock(plan, row);
  const Sequence& s = plan.sequences[id.sequence];
  const int64_t first = id.block * kBlockQ;
  const int64_t count = s.QueriesIn(id.block);
  const int64_t unit = id.sequence * plan.kv_heads + id.head / plan.heads_per_kv;
  const float* shift = w.packed.q_shift + row * kBlockQ;
  const RowPlaces out = PlacesOf(plan, args.o, id.sequence, id.head, s.q_begin + first);
  float* lse = LseRow(plan, args.lse, id.sequence, id.head);
  for (int64_t r = 0; r < count; ++r) {
    // With a softcap the kernel has already added the shift to the scores.
    const double missing = plan.softcap > 0 ? 0.0 : shift[r];
    if (!plan.sink_logits.empty()) {
      const double logit = static_cast<double>(plan.sink_logits[id.head]) * kLog2e - missing;
      AddSink(static_cast<float>(logit), state.o + r * plan.channels(), state.m[r], state.l[r], plan.channels());
    }
    if (std::isnan(shift[r]) && state.l[r] > 0) state.l[r] = shift[r];  // a query that is not finite
    if (lse != nullptr) {
      const double log2_sum = static_cast<double>(state.m[r]) + std::log2(static_cast<double>(state.l[r]));
      lse[out.order == nullptr ? first + r : out.order[r]] =
          static_cast<float>((state.l[r] == 0 ? log2_sum : log2_sum + missing) / kLog2e);
    }
  }
  plan.runtime.kernels->finish({state, plan.channels(), count, plan.v_dim,
                                static_cast<float>(w.packed.units[unit].v_unit), out.data, args.o.dtype,
                                args.o.token_stride, out.order});
}

void RunItem(const Plan& plan, const sparge_run_args& args, const Workspace& w, int32_t worker, WorkItem& item) {
  int32_t* kept = w.kept + worker * plan.k_blocks;
  KernelArgs k = ArgsFor(plan, args, w, item);
  k.kept = kept;
  k.kept_count = ListKept(w.map.KeptRow(item.row), w.map.words, item.begin, item.end, kept);
  k.state = item.part < 0 ? w.WorkerState(plan, worker) : w.PartState(plan, item.part);
  if (args.pv_out != nullptr) k.pv_groups = args.pv_out + TileRow(plan, FindQueryBlock(plan, item.row));
  const KernelOps& kernels = *plan.runtime.kernels;
  item.skipped = (plan.direct() ? kernels.attend_direct : kernels.attend[plan.precision])(k);
  if (item.part < 0) FinishRow(plan, args, w, item.row, k.state);
}

void JoinParts(const Plan& plan, const sparge_run_args& args, const Workspace& w, const SplitRow& split) {
  const BlockId id = FindQueryBlock(plan, split.row);
  const RowState state = w.PartState(plan, split.first_part);
  for (int64_t p = 1; p < split.parts; ++p) {
    JoinStates(state, w.PartState(plan, split.first_part + p), plan.sequences[id.sequence].QueriesIn(id.block),
               plan.channels());
  }
  FinishRow(plan, args, w, split.row, state);
}

void Add(const sparge_head_stats& from, sparge_head_stats& to) {
  to.qk_eligible += from.qk_eligible;
  to.qk_computed += from.qk_computed;
  to.pv_eligible += from.pv_eligible;
  to.pv_computed += from.pv_computed;
}

// Row groups of a query block.
int64_t GroupsOf(const Plan& plan, const BlockId& id) {
  return CeilDiv(plan.sequences[id.sequence].QueriesIn(id.block), plan.runtime.kernels->group_rows);
}

void CountWork(const Plan& plan, const sparge_run_args& args, const Workspace& w, sparge_stats& stats) {
  const auto count = [&](const BlockId& id, const sparge_head_stats& part) {
    Add(part, stats.total);
    if (args.head_stats != nullptr) Add(part, args.head_stats[id.sequence * plan.q_heads + id.head]);
  };
  if (args.head_stats != nullptr) std::fill_n(args.head_stats, plan.batch() * plan.q_heads, sparge_head_stats{});
  for (int64_t row = 0; row < plan.q_heads * plan.all_q_blocks; ++row) {
    const BlockId id = FindQueryBlock(plan, row);
    const int64_t groups = GroupsOf(plan, id);
    const int64_t eligible = w.map.eligible[row];
    const int64_t computed = w.map.computed[row];
    count(id, {eligible, computed, eligible * groups, computed * groups});
  }
  for (int64_t i = 0; i < w.schedule.item_count; ++i) {
    const WorkItem& item = w.schedule.items[i];
    count(FindQueryBlock(plan, item.row), {0, 0, 0, -item.skipped});
  }
}

void WriteResults(const Plan& plan, const sparge_run_args& args, const Workspace& w, sparge_stats& stats) {
  if (args.map_out != nullptr) WriteMap(plan, w.map, args.map_out);
  if (args.stats == nullptr && args.head_stats == nullptr) return;
  CountWork(plan, args, w, stats);
  stats.group_rows = plan.runtime.kernels->group_rows;
  stats.threads = plan.runtime.executor.workers;
  stats.isa = IsaName(plan.runtime.isa);
  stats.total_ms = stats.pack_ms + stats.predict_ms + stats.schedule_ms + stats.kernel_ms;
  if (args.stats != nullptr) {
    stats.struct_size = args.stats->struct_size;
    std::copy_n(reinterpret_cast<const std::byte*>(&stats), std::min(stats.struct_size, sizeof(stats)),
                reinterpret_cast<std::byte*>(args.stats));
  }
}

}  // namespace

size_t WorkspaceSize(const Plan& plan) {
  Arena arena;
  LayWorkspace(plan, arena);
  return arena.used() + Arena::kAlignment;  // the caller's memory need not be aligned
}

void Attend(const Plan& plan, const sparge_run_args& args) {
  Workspace w = PlaceWorkspace(plan, args);
  sparge_stats stats{};
  Stopwatch watch;

  if (plan.direct()) {
    PackDirect(plan, args, w.packed);
  } else {
    PackAll(plan, args, /*with_values=*/true, w.packed);
  }
  stats.pack_ms = watch.Lap();

  PredictAll(plan, args, w.packed, w.map);
  stats.predict_ms = watch.Lap();

  MakeSchedule(plan, w.map, w.schedule);
  stats.schedule_ms = watch.Lap();

  const sparge_executor& executor = plan.runtime.executor;
  if (args.pv_out != nullptr) std::fill_n(args.pv_out, plan.AllTiles(), uint8_t{0});
  ForEach(executor, w.schedule.item_count,
          [&](int32_t worker, int64_t i) { RunItem(plan, args, w, worker, w.schedule.items[i]); });
  ForEach(executor, w.schedule.split_count,
          [&](int32_t, int64_t i) { JoinParts(plan, args, w, w.schedule.split_rows[i]); });
  stats.kernel_ms = watch.Lap();

  WriteResults(plan, args, w, stats);
}

void Predict(const Plan& plan, const sparge_run_args& args) {
  Workspace w = PlaceWorkspace(plan, args);
  sparge_stats stats{};
  Stopwatch watch;
  if (plan.predicts()) PackAll(plan, args, /*with_values=*/false, w.packed);
  stats.pack_ms = watch.Lap();
  PredictAll(plan, args, w.packed, w.map);
  stats.predict_ms = watch.Lap();
  WriteResults(plan, args, w, stats);
}

}  // namespace sparge

// The algorithm, top to bottom: pack, (measure,) predict, schedule, kernel, output.
#include "src/cpu/attend.h"

#include <bit>
#include <chrono>
#include <cmath>
#include <utility>

#include "src/base/arena.h"
#include "src/base/half.h"
#include "src/base/threads.h"
#include "src/cpu/kernel/state.h"
#include "src/cpu/pack.h"
#include "src/cpu/predict.h"
#include "src/cpu/probe.h"
#include "src/cpu/schedule.h"

namespace sparge::impl {
namespace {

// All memory of one call.
struct Workspace {
  Packed packed;
  BlockMap map;
  Schedule schedule;
  Measuring measuring;  // automatic plans only
  int32_t* kept;        // per worker: indices of a row's kept tiles
  float* states;        // per worker, then per part: one query block's (m, l, o)

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

// `cache`: the caller's, for plans that have one.
Workspace LayWorkspace(const Plan& plan, Arena& arena, Arena& cache) {
  const int64_t workers = plan.runtime.executor.workers;
  Workspace w{};
  w.packed = plan.direct() ? LayDirect(plan, arena) : LayPacked(plan, arena, cache);
  w.map = LayBlockMap(plan, arena);
  w.schedule = LaySchedule(plan, arena);
  w.kept = arena.Take<int32_t>(workers * plan.k_blocks);
  if (plan.measures()) w.measuring = LayMeasuring(plan, arena);
  w.states = arena.Take<float>((workers + MaxParts(plan)) * Workspace::StateFloats(plan));
  return w;
}

// What an automatic plan decides per call, before the workspace.
struct Decisions {
  sparge_head_params* params;  // per query head
  uint8_t* active;             // per query head: in the plan at hand
  uint8_t* done;               // per query head: computed by this or an earlier plan
  uint8_t* measured;           // per query head: likewise, samples taken
};

Decisions LayDecisions(const Plan& plan, Arena& arena) {
  if (!plan.measures()) return {};
  return {arena.Take<sparge_head_params>(plan.q_heads), arena.Take<uint8_t>(plan.q_heads),
          arena.Take<uint8_t>(plan.q_heads), arena.Take<uint8_t>(plan.q_heads)};
}

// The caller's memory, from its first aligned byte on.
Arena ArenaOf(void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return Arena(static_cast<std::byte*>(memory) + (RoundUp(address, Arena::kAlignment) - address));
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

void RunItem(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w, int32_t worker,
             WorkItem& item) {
  int32_t* kept = w.kept + worker * plan.k_blocks;
  const BlockId id = FindQueryBlock(plan, item.row);
  KernelArgs k = BlockArgs(plan, args, w.packed, id);
  k.masked_tiles = w.map.MaskedRow(item.row);
  k.skip = static_cast<float>(heads.params[id.head].pv_skip * kLog2e);
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

// The figures of one pass, added to those of the passes before.
void CountPass(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w,
               sparge_stats& stats) {
  if (args.map_out != nullptr) WriteMap(plan, heads, w.map, args.map_out);
  if (args.stats != nullptr || args.head_stats != nullptr) CountWork(plan, args, w, stats);
}

// What passes add to begins with zeros.
void ClearResults(const Plan& plan, const sparge_run_args& args) {
  if (args.map_out != nullptr) std::fill_n(args.map_out, plan.AllTiles(), uint8_t{0});
  if (args.pv_out != nullptr) std::fill_n(args.pv_out, plan.AllTiles(), uint8_t{0});
  if (args.mass_out != nullptr) std::fill_n(args.mass_out, plan.AllTiles(), 0.0f);
  if (args.head_stats != nullptr) std::fill_n(args.head_stats, plan.batch() * plan.q_heads, sparge_head_stats{});
}

void WriteStats(const Plan& plan, const sparge_run_args& args, sparge_stats& stats) {
  if (args.stats == nullptr) return;
  stats.group_rows = plan.runtime.kernels->group_rows;
  stats.threads = plan.runtime.executor.workers;
  stats.isa = IsaName(plan.runtime.isa);
  stats.total_ms = stats.pack_ms + stats.calibrate_ms + stats.predict_ms + stats.schedule_ms + stats.kernel_ms;
  stats.struct_size = args.stats->struct_size;  // the caller's header may be older: no byte more than it knows
  std::copy_n(reinterpret_cast<const std::byte*>(&stats), std::min(stats.struct_size, sizeof(stats)),
              reinterpret_cast<std::byte*>(args.stats));
}

// An automatic plan: which heads it takes. Of two plans, the first one has fewer bits and leaves to the second what
// needs more.
void TakeHeads(const std::vector<Plan>& plans, const Plan& plan, const Decisions& decisions) {
  const bool first = &plan == &plans.front();
  const bool last = &plan == &plans.back();
  for (int64_t h = 0; h < plan.q_heads; ++h) {
    if (first) decisions.done[h] = decisions.measured[h] = 0;
    decisions.active[h] = last ? !decisions.done[h] : !plan.calibration->Setting(h).wide;
  }
}

// Measures samples of the active heads, and takes what the calibration makes of them. `sampling.head` is 0.
void Decide(const std::vector<Plan>& plans, const Plan& plan, const sparge_run_args& args, const Workspace& w,
            Sampling sampling, const Decisions& decisions) {
  for (int64_t h = 0; h < plan.q_heads; ++h) decisions.measured[h] = decisions.active[h] && !decisions.measured[h];
  const HeadChoice heads{decisions.params, decisions.measured};  // a head that moved to this plan has been measured
  while (const int64_t count = NextSamples(plan, heads, sampling, w.measuring.samples)) {
    MeasureSamples(plan, args, w.packed, w.map, w.measuring, count);
  }
  const bool last = &plan == &plans.back();
  for (int64_t h = 0; h < plan.q_heads; ++h) {
    const HeadSetting setting = plan.calibration->Setting(h);
    decisions.params[h] = setting.params;
    decisions.measured[h] |= decisions.active[h];
    if (setting.wide && !last) decisions.active[h] = 0;
    decisions.done[h] |= decisions.active[h];
  }
}

// All stages for the active heads of one plan.
void AttendHeads(const std::vector<Plan>& plans, const Plan& plan, const HeadChoice& heads, const sparge_run_args& args,
                 Workspace& w, const Decisions& decisions, const Sampling& sampling, sparge_stats& stats) {
  Stopwatch watch;
  if (plan.direct()) {
    PackDirect(plan, args, w.packed);
  } else {
    const KeyBlockCounts counts = PackAll(plan, heads, args, /*with_values=*/true, w.packed);
    stats.key_blocks += counts.all;
    stats.key_blocks_reused += counts.reused;
  }
  stats.pack_ms += watch.Lap();

  if (plan.measures()) Decide(plans, plan, args, w, sampling, decisions);
  stats.calibrate_ms += watch.Lap();

  PredictAll(plan, heads, args, w.packed, w.map);
  stats.predict_ms += watch.Lap();

  MakeSchedule(plan, heads, w.map, w.schedule);
  stats.schedule_ms += watch.Lap();

  const sparge_executor& executor = plan.runtime.executor;
  ForEach(executor, w.schedule.item_count,
          [&](int32_t worker, int64_t i) { RunItem(plan, heads, args, w, worker, w.schedule.items[i]); });
  ForEach(executor, w.schedule.split_count,
          [&](int32_t, int64_t i) { JoinParts(plan, args, w, w.schedule.split_rows[i]); });
  stats.kernel_ms += watch.Lap();
}

// Behind the cache's mark, which says what it is laid for, the plans have their parts one after the other.
struct Cache {
  Arena arena;
  bool fits;  // what is in it is of use
};
Cache OpenCache(const std::vector<Plan>& plans, const sparge_run_args& args) {
  if (args.cache == nullptr || plans.front().direct()) return {Arena(), true};
  Cache cache{ArenaOf(args.cache), true};
  auto* const mark = cache.arena.Take<uint64_t>(1);
  cache.fits = std::exchange(*mark, CacheKind(plans)) == CacheKind(plans);
  return cache;
}

// body(plan, heads, workspace, decisions) for every plan that has heads to do.
template <class Body>
void ForEachPlan(const std::vector<Plan>& plans, const sparge_run_args& args, const Body& body) {
  Cache cache = OpenCache(plans, args);
  for (const Plan& plan : plans) {
    Arena arena = ArenaOf(args.workspace);
    const Decisions decisions = LayDecisions(plan, arena);  // in the same place for every plan
    Workspace w = LayWorkspace(plan, arena, cache.arena);
    if (!cache.fits) EmptyCache(plan, w.packed);
    HeadChoice heads{plan.heads.data(), plan.active.data()};
    if (plan.measures()) {
      TakeHeads(plans, plan, decisions);
      heads = {decisions.params, decisions.active};
    }
    if (std::all_of(heads.active, heads.active + plan.q_heads, [](uint8_t active) { return active == 0; })) continue;
    body(plan, heads, w, decisions);
  }
}

// A negative effort: what each head needs.
Sampling StartSampling(const Plan& plan, double effort) {
  return {plan.measures() ? plan.calibration->NextCall() : 0, effort};
}

}  // namespace

size_t WorkspaceSize(const std::vector<Plan>& plans) {
  size_t most = 0;
  for (const Plan& plan : plans) {
    Arena arena, cache;
    LayDecisions(plan, arena);
    LayWorkspace(plan, arena, cache);
    most = std::max(most, arena.used());
  }
  return most + Arena::kAlignment;  // the caller's memory need not be aligned
}

size_t CacheSize(const std::vector<Plan>& plans) {
  if (plans.front().cache_blocks == 0 || plans.front().direct()) return 0;
  Arena cache;
  cache.Take<uint64_t>(1);  // the mark
  for (const Plan& plan : plans) {
    Arena arena;
    LayWorkspace(plan, arena, cache);
  }
  return cache.used() + Arena::kAlignment;
}

void Attend(const std::vector<Plan>& plans, const sparge_run_args& args) {
  const Sampling sampling = StartSampling(plans.front(), -1);
  sparge_stats stats{};
  ClearResults(plans.front(), args);
  ForEachPlan(plans, args, [&](const Plan& plan, const HeadChoice& heads, Workspace& w, const Decisions& decisions) {
    AttendHeads(plans, plan, heads, args, w, decisions, sampling, stats);
    CountPass(plan, heads, args, w, stats);
  });
  WriteStats(plans.front(), args, stats);
}

void Predict(const std::vector<Plan>& plans, const sparge_run_args& args) {
  sparge_stats stats{};
  ClearResults(plans.front(), args);
  ForEachPlan(plans, args, [&](const Plan& plan, const HeadChoice& heads, Workspace& w, const Decisions& decisions) {
    Stopwatch watch;
    if (plan.predicts()) PackAll(plan, heads, args, /*with_values=*/false, w.packed);
    stats.pack_ms += watch.Lap();
    for (int64_t h = 0; plan.measures() && h < plan.q_heads; ++h) {  // as calibrated so far
      decisions.params[h] = plan.calibration->Setting(h).params;
      decisions.done[h] |= decisions.active[h];
    }
    PredictAll(plan, heads, args, w.packed, w.map);
    stats.predict_ms += watch.Lap();
    CountPass(plan, heads, args, w, stats);
  });
  WriteStats(plans.front(), args, stats);
}

void Calibrate(const std::vector<Plan>& plans, const sparge_run_args& args, double effort) {
  const Sampling sampling = StartSampling(plans.front(), effort);
  ForEachPlan(plans, args, [&](const Plan& plan, const HeadChoice& heads, Workspace& w, const Decisions& decisions) {
    if (!plan.measures()) return;
    PackAll(plan, heads, args, /*with_values=*/true, w.packed);
    Decide(plans, plan, args, w, sampling, decisions);
  });
}

}  // namespace sparge::impl

// Glances, parts of the keys, and their results joined.
#include "src/cpu/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "src/base/threads.h"
#include "src/cpu/attend_rows.h"
#include "src/cpu/glance.h"
#include "src/cpu/kernel/state.h"
#include "src/cpu/results.h"
#include "src/cpu/visible_tiles.h"
#include "src/select/block_map.h"
#include "src/select/select.h"

namespace sparge::impl {
namespace {

// Blocks of a part: so few that threads finish together, so many that joining parts costs little.
constexpr int64_t kPartBlocks = 8;
// More queries have larger parts, because each has its sums in every part.
constexpr int64_t kMostSums = 1024;
// Blocks that one task glances at, and how far ahead it asks for what it needs.
constexpr int64_t kGlances = 32;
constexpr int64_t kForeseen = 5;
// So many blocks of a head may wait for being packed; if there are more, all are packed at once.
constexpr int64_t kMostWaiting = 4;

// The keys in parts. Part 0 has the first block and the last ones, which mostly have the largest scores: beside them
// others can skip.
struct Parts {
  int64_t blocks, size, tail;

  explicit Parts(const Plan& plan)
      : blocks(plan.k_blocks),
        size(std::max(kPartBlocks, CeilDiv(plan.k_blocks * plan.q_tokens, kMostSums))),
        tail(std::max<int64_t>(1, blocks - size)) {}
  int64_t count() const { return 1 + CeilDiv(tail - 1, size); }
  // visit(block) in ascending order.
  template <class Visit>
  void ForEachBlock(int64_t part, const Visit& visit) const {
    if (part == 0) visit(0);
    const int64_t begin = part == 0 ? tail : 1 + (part - 1) * size;
    const int64_t end = part == 0 ? blocks : std::min(begin + size, tail);
    for (int64_t j = begin; j < end; ++j) visit(j);
  }
};

// One query of all heads that share keys; or, where that is more, all queries of a head. Slopes are a head's own.
bool OverHeads(const Plan& plan) {
  return plan.alibi_slopes.empty() && plan.q_tokens <= plan.heads_per_kv && plan.heads_per_kv <= kBlockQ;
}
int64_t RowsOfRun(const Plan& plan) { return OverHeads(plan) ? plan.heads_per_kv : plan.q_tokens; }
int64_t AllRows(const Plan& plan) { return plan.sequence_count() * plan.q_heads * plan.q_tokens; }

// Where a query of a head has its row.
int64_t RowOf(const Plan& plan, int64_t sequence, int64_t head, int64_t query) {
  const int64_t all_heads = sequence * plan.q_heads + head;
  if (!OverHeads(plan)) return all_heads * plan.q_tokens + query;
  const int64_t kv_heads = all_heads / plan.heads_per_kv;
  return (kv_heads * plan.q_tokens + query) * plan.heads_per_kv + head % plan.heads_per_kv;
}

struct Decoder {
  const Plan& plan;
  const HeadChoice& heads;
  const sparge_run_args& args;
  const Packed& packed;
  const DecodeMemory& memory;
  Parts parts;

  // visit(run) for the queries of a sequence and kv head.
  template <class Visit>
  void ForEachRun(int64_t sequence, int64_t kv_head, const Visit& visit) const {
    const bool over_heads = OverHeads(plan);
    const int64_t head = kv_head * plan.heads_per_kv;
    for (int64_t i = 0; i < (over_heads ? plan.q_tokens : plan.heads_per_kv); ++i) {
      const QueryRun run{sequence, over_heads ? head : head + i, over_heads ? i : 0, RowsOfRun(plan), over_heads};
      if (over_heads || heads.active[run.head]) visit(run);
    }
  }
  QueryRows At(const QueryRows& rows, int64_t lanes, const QueryRun& run) const {
    const int64_t row = RowOf(plan, run.sequence, run.head, run.query);
    return {rows.rows + row * lanes * kLaneBytes, rows.factor + row, rows.shift + row};
  }
  RowState StateOf(int64_t part, int64_t row) const {
    const int64_t at = part * AllRows(plan) + row;
    return {memory.o + at * plan.channels(), memory.m + at, memory.l + at};
  }
  PartCounts& CountsOf(int64_t part, int64_t kv_unit) const {
    return memory.counts[part * plan.sequence_count() * plan.kv_heads + kv_unit];
  }
  bool IsReady(int64_t sequence, int64_t kv_head, int64_t block) const {
    const int64_t task = plan.KeyBlock(kv_head, plan.sequences[sequence], block);
    return packed.cache.glance[task] == memory.glance[sequence * plan.k_blocks + block];
  }

  // Of the i-th key block of all sequences in the cache.
  int64_t Place(int64_t i) const { return i / plan.k_blocks * plan.cache_blocks + i % plan.k_blocks; }
  uint64_t PlaceOfKeys(int64_t sequence) const;
  uint64_t LookAt(int64_t sequence, int64_t block) const;
  void PackQueries(int32_t worker, int64_t kv_unit) const;
  bool IsSeen(int64_t sequence, int64_t kv_head, int64_t block, uint64_t* masked) const;
  float SkipOf(const QueryRun& run) const;
  void ChooseLeast(const QueryRun& run) const;
  bool KeepsAll(const QueryRun& run) const;
  KernelArgs ArgsOf(const QueryRun& run, const QueryRows& rows, int64_t lanes, const uint64_t* masked) const;
  void ComputePart(int32_t worker, int64_t part, int64_t kv_unit) const;
  void AddDirect(int32_t worker, const QueryRun& run, const uint64_t* masked, const int32_t* kept, int64_t count,
                 const RowState& to) const;
  void FinishHead(int64_t sequence, int64_t head) const;
  void Count(sparge_stats& stats) const;
};

// Where the keys and values of a sequence lie: others lie elsewhere, mostly.
uint64_t Decoder::PlaceOfKeys(int64_t sequence) const {
  const auto place = [&](const sparge_tensor& tensor) {
    const std::byte* data = SequenceData(plan, tensor, sequence, 0, 0);
    const auto strides = static_cast<uint64_t>(tensor.head_stride) << 32 ^ static_cast<uint64_t>(tensor.token_stride);
    return Mix(reinterpret_cast<uintptr_t>(data), strides);
  };
  return Mix(place(args.k), place(args.v));
}

// GlanceAt, or what it was: if there are just as many new keys as queries, these are theirs, and older ones change in
// longer runs only (a shifted context, another one that was loaded), which a few tokens show.
uint64_t Decoder::LookAt(int64_t sequence, int64_t block) const {
  const int64_t place = sequence * plan.cache_blocks + block;
  const int64_t before = packed.cache.keys_seen[sequence];
  const bool grown = plan.trusts_growth && plan.mask == SPARGE_MASK_NONE && before > 0 &&
                     before + plan.q_tokens == plan.kv_tokens &&
                     packed.cache.place_seen[sequence] == PlaceOfKeys(sequence);
  const uint64_t sample = SampleAt(plan, args, sequence, block);
  const bool same = std::exchange(packed.cache.sample[place], sample) == sample;
  if (grown && same && (block + 1) * kBlockK <= before) return packed.cache.seen[place];
  return GlanceAt(plan, args, sequence, block);
}

void Decoder::PackQueries(int32_t worker, int64_t kv_unit) const {
  const int64_t kv_head = kv_unit % plan.kv_heads;
  if (!heads.KvActive(plan, kv_head)) return;
  ForEachRun(kv_unit / plan.kv_heads, kv_head, [&](const QueryRun& run) {
    PackQueryRun(plan, args, packed, run, worker, At(memory.packed, plan.row_lanes(), run));
    PackDirectRun(plan, args, run, At(memory.direct, plan.dim_pad(), run));
  });
}

bool Decoder::IsSeen(int64_t sequence, int64_t kv_head, int64_t block, uint64_t* masked) const {
  const TileRows all{{kv_head * plan.heads_per_kv, sequence, 0}, 0, plan.q_tokens - 1};
  // Masks of several heads: what one hides another may see.
  const bool one_mask = plan.mask != SPARGE_MASK_NONE && args.mask.head_stride == 0;
  if (plan.mask != SPARGE_MASK_NONE && !one_mask) SetBit(masked, block);
  return IsVisible(plan, args, all, block, one_mask ? masked : nullptr);
}

// Rows that are judged together skip what none of them needs.
float Decoder::SkipOf(const QueryRun& run) const {
  double most = 0;
  for (int64_t h = run.head; h < run.head + (run.over_heads ? run.count : 1); ++h) {
    if (heads.active[h]) most = std::max(most, heads.params[h].pv_skip);
  }
  return static_cast<float>(most * kLog2e);
}

// The floor of prompts, on masses that are exact here: of the sums over all keys, part 0 knows a lower bound.
void Decoder::ChooseLeast(const QueryRun& run) const {
  const bool by_floor = plan.select == SPARGE_SELECT_AUTO || plan.select == SPARGE_SELECT_FLOOR;
  const int64_t row = RowOf(plan, run.sequence, run.head, run.query);
  for (int64_t r = 0; r < run.count; ++r) {
    const int64_t head = run.over_heads ? run.head + r : run.head;
    const double floor = by_floor && heads.params[head].tau < 1 ? MassFloor(heads.params[head].tau, plan.k_blocks) : 0;
    memory.least[row + r] = heads.active[head] ? static_cast<float>(floor) * StateOf(0, row).l[r]
                                               : std::numeric_limits<float>::infinity();  // its result is not wanted
  }
}

// Some row needs every tile.
bool Decoder::KeepsAll(const QueryRun& run) const {
  const float* const least = memory.least + RowOf(plan, run.sequence, run.head, run.query);
  return std::any_of(least, least + run.count, [](float x) { return x <= 0; });
}

KernelArgs Decoder::ArgsOf(const QueryRun& run, const QueryRows& rows, int64_t lanes, const uint64_t* masked) const {
  KernelArgs k{};
  k.query = {rows.rows, lanes, rows.factor, rows.shift, run.query, static_cast<int>(run.count), run.over_heads ? 0 : 1};
  k.rule = RuleOf(plan, run.sequence, run.head);
  k.rule.mask = MaskRow(plan, args.mask, run.sequence, run.head, run.query);
  k.rule.mask_stride = run.over_heads ? args.mask.head_stride : args.mask.query_stride;
  k.masked_tiles = plan.mask == SPARGE_MASK_NONE ? nullptr : masked;
  return k;
}

void Decoder::ComputePart(int32_t worker, int64_t part, int64_t kv_unit) const {
  const int64_t sequence = kv_unit / plan.kv_heads, kv_head = kv_unit % plan.kv_heads;
  PartCounts& counts = CountsOf(part, kv_unit);
  counts = {0, 0};
  if (!heads.KvActive(plan, kv_head)) return;
  const int64_t most = parts.size + 1;
  int32_t* const ready = memory.kept + int64_t{2} * worker * most;
  int32_t* const waiting = ready + most;
  int64_t ready_count = 0, waiting_count = 0;
  uint64_t* const masked = memory.masked + worker * CeilDiv(plan.k_blocks, 64);
  if (plan.mask != SPARGE_MASK_NONE) std::fill_n(masked, CeilDiv(plan.k_blocks, 64), uint64_t{0});
  parts.ForEachBlock(part, [&](int64_t block) {
    if (!IsSeen(sequence, kv_head, block, masked)) return;
    (IsReady(sequence, kv_head, block) ? ready[ready_count++] : waiting[waiting_count++]) = static_cast<int32_t>(block);
  });
  counts.tiles = ready_count + waiting_count;
  ForEachRun(sequence, kv_head, [&](const QueryRun& run) {
    KernelArgs k = ArgsOf(run, At(memory.packed, plan.row_lanes(), run), plan.row_lanes(), masked);
    const int64_t row = RowOf(plan, run.sequence, run.head, run.query);
    k.blocks = PackedBlocks(plan, packed, plan.KeyBlock(kv_head, plan.sequences[sequence], 0));
    k.kept = ready;
    k.kept_count = ready_count;
    k.skip = SkipOf(run);
    k.foresee = true;
    k.foresee_values = std::isinf(k.skip) && (part == 0 || KeepsAll(run));
    if (part > 0) {
      k.known = StateOf(0, row).m;
      k.least = memory.least + row;
    }
    k.state = StateOf(part, row);
    counts.skipped += plan.kernel().attend[plan.precision](k);
    if (waiting_count > 0) AddDirect(worker, run, masked, waiting, waiting_count, k.state);
    if (part == 0) ChooseLeast(run);
  });
}

// What is not packed, from the tensors. Its scores are not of centred keys, its sums not in units.
void Decoder::AddDirect(int32_t worker, const QueryRun& run, const uint64_t* masked, const int32_t* kept, int64_t count,
                        const RowState& to) const {
  KernelArgs k = ArgsOf(run, At(memory.direct, plan.dim_pad(), run), plan.dim_pad(), masked);
  const int64_t kv_head = run.head / plan.heads_per_kv;
  const float* const shift = At(memory.packed, plan.row_lanes(), run).shift;
  const int64_t channels = plan.channels();
  k.blocks.channels = channels;
  k.direct = TokensOf(plan, args, {run.head, run.sequence, 0});
  k.kept = kept;
  k.kept_count = count;
  k.skip = std::numeric_limits<float>::infinity();
  const int64_t at = worker * RowsOfRun(plan);
  k.state = {memory.direct_o + at * channels, memory.direct_m + at, memory.direct_l + at};
  plan.kernel().attend_direct(k);
  const auto inverse_unit = static_cast<float>(1.0 / packed.units[plan.KvUnit(run.sequence, kv_head)].v_unit);
  for (int64_t i = 0; i < run.count * channels; ++i) k.state.o[i] *= inverse_unit;
  for (int64_t r = 0; plan.softcap == 0 && r < run.count; ++r) {
    if (!std::isnan(shift[r])) k.state.m[r] -= shift[r];  // a query that is not finite: FinishRows
  }
  JoinStates(to, k.state, run.count, channels);
}

void Decoder::FinishHead(int64_t sequence, int64_t head) const {
  if (!heads.active[head]) return;
  for (int64_t query = 0; query < plan.q_tokens; ++query) {
    const int64_t row = RowOf(plan, sequence, head, query);
    for (int64_t p = 1; p < parts.count(); ++p) JoinStates(StateOf(0, row), StateOf(p, row), 1, plan.channels());
    FinishRows(plan, args, packed, {sequence, head, query, 1, memory.packed.shift + row}, StateOf(0, row));
  }
}

// Row groups count for the first active one of the heads that share keys: it may be judged together with the others.
void Decoder::Count(sparge_stats& stats) const {
  const int64_t group_rows = plan.kernel().group_rows;
  for (int64_t unit = 0; unit < plan.sequence_count() * plan.kv_heads; ++unit) {
    PartCounts sums{0, 0};
    for (int64_t p = 0; p < parts.count(); ++p) {
      sums.tiles += CountsOf(p, unit).tiles;
      sums.skipped += CountsOf(p, unit).skipped;
    }
    int64_t runs = 0;
    const int64_t sequence = unit / plan.kv_heads, first = unit % plan.kv_heads * plan.heads_per_kv;
    ForEachRun(sequence, unit % plan.kv_heads, [&](const QueryRun&) { ++runs; });
    int64_t groups = runs * CeilDiv(RowsOfRun(plan), group_rows);
    for (int64_t h = first; h < first + plan.heads_per_kv; ++h) {
      if (!heads.active[h]) continue;
      const sparge_head_stats head{sums.tiles, sums.tiles, sums.tiles * groups, sums.tiles * groups - sums.skipped};
      groups = sums.skipped = 0;
      AddStats(head, stats.total);
      if (args.head_stats != nullptr) AddStats(head, args.head_stats[plan.HeadPlace(sequence, h)]);
    }
  }
}

}  // namespace

DecodeMemory LayDecode(const Plan& plan, Arena& arena) {
  const int64_t workers = plan.machine.executor.workers;
  const int64_t rows = AllRows(plan);
  const Parts parts(plan);
  const auto queries = [&](int64_t lanes) {
    return QueryRows{arena.Take<std::byte>(rows * lanes * kLaneBytes), arena.Take<float>(rows),
                     arena.Take<float>(rows)};
  };
  DecodeMemory m{};
  m.packed = queries(plan.row_lanes());
  m.direct = queries(plan.dim_pad());
  m.glance = arena.Take<uint64_t>(plan.sequence_count() * plan.k_blocks);
  m.o = arena.Take<float>(parts.count() * rows * plan.channels());
  m.m = arena.Take<float>(parts.count() * rows);
  m.l = arena.Take<float>(parts.count() * rows);
  m.least = arena.Take<float>(rows);
  m.counts = arena.Take<PartCounts>(parts.count() * plan.sequence_count() * plan.kv_heads);
  m.direct_o = arena.Take<float>(workers * RowsOfRun(plan) * plan.channels());
  m.direct_m = arena.Take<float>(workers * RowsOfRun(plan));
  m.direct_l = arena.Take<float>(workers * RowsOfRun(plan));
  m.kept = arena.Take<int32_t>(workers * 2 * (parts.size + 1));
  m.masked = arena.Take<uint64_t>(plan.mask == SPARGE_MASK_NONE ? 0 : workers * CeilDiv(plan.k_blocks, 64));
  return m;
}

KeyBlockCounts RefreshCache(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args,
                            const Packed& packed, const DecodeMemory& memory) {
  const sparge_executor& executor = plan.machine.executor;
  const Decoder decoder{plan, heads, args, packed, memory, Parts(plan)};
  const int64_t all = plan.sequence_count() * plan.k_blocks;
  ForEach(executor, CeilDiv(all, kGlances), [&](int32_t, int64_t task) {
    for (int64_t i = task * kGlances; i < std::min((task + 1) * kGlances, all); ++i) {
      const int64_t ahead = i + kForeseen;
      if (ahead < all) ForeseeSample(plan, args, ahead / plan.k_blocks, ahead % plan.k_blocks);
      memory.glance[i] = decoder.LookAt(i / plan.k_blocks, i % plan.k_blocks);
    }
  });
  for (int64_t s = 0; s < plan.sequence_count(); ++s) {
    packed.cache.keys_seen[s] = plan.kv_tokens;
    packed.cache.place_seen[s] = decoder.PlaceOfKeys(s);
  }
  KeyBlockCounts counts{};
  bool repack = false;
  int64_t settled = 0;  // blocks that are not packed and have not changed since the last call
  for (int64_t unit = 0; unit < plan.sequence_count() * plan.kv_heads; ++unit) {
    const int64_t sequence = unit / plan.kv_heads, kv_head = unit % plan.kv_heads;
    if (!heads.KvActive(plan, kv_head)) continue;
    int64_t waiting = 0, ripe = 0;
    for (int64_t j = 0; j < plan.k_blocks; ++j) {
      const int64_t i = sequence * plan.k_blocks + j;
      if (decoder.IsReady(sequence, kv_head, j)) continue;
      ++waiting;
      ripe += packed.cache.seen[decoder.Place(i)] == memory.glance[i];
    }
    counts.all += plan.k_blocks;
    counts.reused += plan.k_blocks - waiting;
    settled += ripe;
    // Keys of two texts that take turns are never ripe, and packing them would only be a loss.
    const bool many = waiting > std::max(kMostWaiting, plan.k_blocks / 8) && 2 * ripe >= waiting;
    repack = repack || packed.cache.centred[unit] == 0 || many;
  }
  if (repack) {
    counts = PackAll(plan, heads, args, /*with_values=*/true, packed);
  } else if (settled > 0) {
    ForEach(executor, plan.kv_heads * all, [&](int32_t worker, int64_t i) {
      const int64_t kv_head = i / all, sequence = i % all / plan.k_blocks, block = i % plan.k_blocks;
      if (!heads.KvActive(plan, kv_head) || decoder.IsReady(sequence, kv_head, block)) return;
      if (packed.cache.seen[decoder.Place(i % all)] != memory.glance[i % all]) return;
      PackAnother(plan, heads, args, packed, worker, plan.KeyBlock(kv_head, plan.sequences[sequence], block));
    });
  }
  for (int64_t i = 0; i < all; ++i) packed.cache.seen[decoder.Place(i)] = memory.glance[i];
  return counts;
}

void DecodeHeads(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                 const DecodeMemory& memory, sparge_stats& stats) {
  const sparge_executor& executor = plan.machine.executor;
  const Decoder decoder{plan, heads, args, packed, memory, Parts(plan)};
  const int64_t units = plan.sequence_count() * plan.kv_heads;
  const int64_t count = decoder.parts.count();
  ForEach(executor, units, [&](int32_t worker, int64_t unit) {
    decoder.PackQueries(worker, unit);
    decoder.ComputePart(worker, 0, unit);
  });
  ForEach(executor, units * (count - 1),
          [&](int32_t worker, int64_t task) { decoder.ComputePart(worker, 1 + task / units, task % units); });
  ForEach(executor, plan.sequence_count() * plan.q_heads,
          [&](int32_t, int64_t i) { decoder.FinishHead(i / plan.q_heads, i % plan.q_heads); });
  decoder.Count(stats);
}

}  // namespace sparge::impl

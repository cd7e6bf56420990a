// Lays out the packed buffers and runs packing over all blocks and threads.
#include "src/cpu/pack.h"

#include <cmath>
#include <cstring>

#include "src/base/half.h"
#include "src/base/threads.h"
#include "src/cpu/codes.h"
#include "src/cpu/glance.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/parts.h"

namespace sparge::impl {
namespace {

// Blocks that come later may be somewhat larger than all before. Powers of two round nothing.
double WithRoom(double unit) { return unit < 0x1p60 ? 4 * unit : unit; }

bool SummarisesKeys(const Plan& plan) { return plan.predicts() && plan.predictor->summarises_keys; }

// All that the block functions share.
struct Packer {
  const Plan& plan;
  const HeadChoice& heads;
  const sparge_run_args& args;
  const Packed& packed;
  const PackOps& ops;
  bool with_values;

  float* Scratch(int32_t worker) const { return packed.scratch + worker * Packed::scratch_floats(plan); }
  TokenRows KeyRows(const BlockId& id, const sparge_tensor& tensor, int64_t dim) const {
    const Sequence& s = plan.sequences[id.sequence];
    return RowsOf(plan, tensor, id.sequence, id.head, s.k_begin + id.block * kBlockK, s.KeysIn(id.block), dim);
  }
  // Whether the key block at this place is one of this call.
  bool IsNeeded(const BlockId& id) const {
    return id.block < plan.sequences[id.sequence].k_blocks && heads.KvActive(plan, id.head);
  }
  bool IsStale(int64_t task) const { return packed.cache.stale == nullptr || packed.cache.stale[task] != 0; }
  // With plan.glances: what GlanceAtAll saw.
  uint64_t GlanceOf(const BlockId& id) const { return packed.cache.seen[id.sequence * plan.cache_blocks + id.block]; }
  bool MayKeepCentre(int64_t index) const;
  bool KeepsCentre(int64_t index) const;
  bool FindStale(const BlockId& id, int64_t task) const;
  void ForgetBlocks(int64_t first, const Sequence& s) const;
  void SurveyBlock(int32_t worker, int64_t task) const;
  void SurveyTokens(int32_t worker, const BlockId& id, int64_t task) const;
  void ChooseUnits(int32_t worker, int64_t index) const;
  void ChooseCentre(int32_t worker, int64_t index, int64_t tokens) const;
  void PackKeyBlock(int32_t worker, int64_t task) const;
  void PackQueryBlock(int32_t worker, int64_t task) const;
};

// Blocks are centred on the mean of the keys of an earlier call, until there are twice as many. Fewer: another text.
bool Packer::MayKeepCentre(int64_t index) const {
  if (packed.cache.centred == nullptr || !with_values) return false;
  const int64_t keys = plan.sequences[index / plan.kv_heads].k_count;
  const int64_t centred = packed.cache.centred[index];
  return centred <= keys && keys <= 2 * centred;
}

// Whether the cache has not got this block; it will after this call.
bool Packer::FindStale(const BlockId& id, int64_t task) const {
  const KeyCache& cache = packed.cache;
  if (cache.checksum == nullptr || !with_values) return true;
  if (plan.glances) {
    return cache.glance[task] != GlanceOf(id) || !MayKeepCentre(plan.KvUnit(id.sequence, id.head));
  }
  const uint64_t k = ops.checksum(KeyRows(id, args.k, plan.qk_dim));
  const uint64_t sum = ops.checksum(KeyRows(id, args.v, plan.v_dim)) ^ (k << 1 | k >> 63);
  const bool same = cache.checksum[task] == sum && MayKeepCentre(plan.KvUnit(id.sequence, id.head));
  cache.checksum[task] = sum;
  return !same;
}

// First pass: block means (kept where the summaries will be) and magnitudes.
void Packer::SurveyBlock(int32_t worker, int64_t task) const {
  const BlockId id = FindKeyBlock(plan, task);
  if (!IsNeeded(id) || args.key_survey != nullptr) return;
  const bool stale = FindStale(id, task);
  if (packed.cache.stale != nullptr) packed.cache.stale[task] = stale;
  if (stale) SurveyTokens(worker, id, task);
}

void Packer::SurveyTokens(int32_t worker, const BlockId& id, int64_t task) const {
  float* scratch = Scratch(worker);
  const Survey k =
      ops.survey(KeyRows(id, args.k, plan.qk_dim), plan.dim_pad(), packed.k.mean + task * plan.dim_pad(), scratch);
  packed.finite[task] = k.finite;
  packed.block_max[2 * task] = k.max_abs;
  packed.block_max[2 * task + 1] =
      with_values ? ops.survey(KeyRows(id, args.v, plan.v_dim), plan.channels(), nullptr, scratch).max_abs : 0.0f;
}

// Other units or another mean: no packed block is of use any more, also none beyond the keys of this call.
void Packer::ForgetBlocks(int64_t first, const Sequence& s) const {
  std::fill_n(packed.cache.stale + first, s.k_blocks, uint8_t{1});
  std::fill_n(packed.cache.checksum + first + s.k_blocks, plan.cache_blocks - s.k_blocks, uint64_t{0});
  std::fill_n(packed.cache.glance + first + s.k_blocks, plan.cache_blocks - s.k_blocks, uint64_t{0});
}

// Another text may have as many keys, and quite another mean: a good part of the blocks must be known.
bool Packer::KeepsCentre(int64_t index) const {
  if (!MayKeepCentre(index)) return false;
  const Sequence& s = plan.sequences[index / plan.kv_heads];
  const uint8_t* stale = packed.cache.stale + plan.KeyBlock(index % plan.kv_heads, s, 0);
  return 4 * std::count(stale, stale + s.k_blocks, uint8_t{0}) >= s.k_blocks;
}

// Units and mean of a sequence and kv head.
void Packer::ChooseUnits(int32_t worker, int64_t index) const {
  if (!heads.KvActive(plan, index % plan.kv_heads)) return;
  if (args.key_survey != nullptr) return TakeSurvey(plan, args, index, packed);
  const Sequence& s = plan.sequences[index / plan.kv_heads];
  const int64_t first = plan.KeyBlock(index % plan.kv_heads, s, 0);
  float k_max = 0, v_max = 0;
  int64_t tokens = 0;
  for (int64_t j = first; j < first + s.k_blocks; ++j) {
    k_max = std::max(k_max, packed.block_max[2 * j]);
    v_max = std::max(v_max, packed.block_max[2 * j + 1]);
    tokens += packed.finite[j];
  }
  KeyUnits needed{UnitFor(k_max), UnitFor(v_max)};
  const bool centre = tokens > 0 && k_max <= kMostCentred;
  KeyUnits& units = packed.units[index];
  if (centre && KeepsCentre(index)) {
    // Units somewhat larger than needed do no harm; smaller ones do, and then every block is packed in the new ones.
    if (needed.k_unit <= units.k_unit && needed.v_unit <= units.v_unit) return;
    units = {std::max(needed.k_unit, units.k_unit), std::max(needed.v_unit, units.v_unit)};
    ForgetBlocks(first, s);
    return;
  }
  if (packed.cache.centred != nullptr) needed = {WithRoom(needed.k_unit), WithRoom(needed.v_unit)};
  units = needed;
  ChooseCentre(worker, index, centre ? tokens : 0);
}

// The mean of the `tokens` finite keys; 0 of them: none.
void Packer::ChooseCentre(int32_t worker, int64_t index, int64_t tokens) const {
  const Sequence& s = plan.sequences[index / plan.kv_heads];
  const int64_t first = plan.KeyBlock(index % plan.kv_heads, s, 0);
  if (packed.cache.centred != nullptr) {
    for (int64_t j = first; j < first + s.k_blocks; ++j) {
      if (!IsStale(j)) SurveyTokens(worker, FindKeyBlock(plan, j), j);  // its mean gave way to its summary
    }
    ForgetBlocks(first, s);
    packed.cache.centred[index] = tokens > 0 && with_values ? s.k_count : 0;
  }
  float* mean = packed.key_mean + index * plan.dim_pad();
  for (int64_t d = 0; d < plan.dim_pad(); ++d) {
    double sum = 0;
    for (int64_t j = first; tokens > 0 && j < first + s.k_blocks; ++j) {
      sum += static_cast<double>(packed.k.mean[j * plan.dim_pad() + d]) * packed.finite[j];
    }
    mean[d] = tokens > 0 ? static_cast<float>(sum / static_cast<double>(tokens)) : 0.0f;
  }
}

void Packer::PackKeyBlock(int32_t worker, int64_t task) const {
  const BlockId id = FindKeyBlock(plan, task);
  if (!IsNeeded(id) || !IsStale(task)) return;
  if (TakesCodes(plan, args)) return TakeKeyCodes(plan, args, packed, id, task, with_values);
  const int64_t index = plan.KvUnit(id.sequence, id.head);
  const KeyUnits units = packed.units[index];
  const QuantGrid& grid = plan.grid();
  const bool integer = plan.precision != SPARGE_PRECISION_FP32;
  const int64_t starts = grid.Sums(plan.row_lanes()) * kBlockK;
  PackRowsArgs rows{};
  rows.tokens = KeyRows(id, args.k, plan.qk_dim);
  rows.dim_pad = plan.dim_pad();
  rows.precision = plan.precision;
  rows.centre = packed.key_mean + index * plan.dim_pad();
  rows.inverse_unit = static_cast<float>(1.0 / units.k_unit);
  rows.max = grid.k_max;
  rows.norm_max = grid.k_norm_max;
  rows.sum_lanes = grid.sum_lanes;
  rows.rotate = grid.rotate;
  rows.row_lanes = plan.row_lanes();
  rows.out = reinterpret_cast<int32_t*>(packed.keys) + task * plan.row_lanes() * kBlockK;
  rows.scale = integer ? packed.key_scale + task * kBlockK : nullptr;
  rows.start = grid.q_offset != 0 ? packed.key_start + task * starts : nullptr;
  rows.start_offset = grid.q_offset;
  rows.mean = SummarisesKeys(plan) ? packed.k.mean + task * plan.dim_pad() : nullptr;
  rows.pool_rows = kBlockK;
  rows.similarity = packed.k.similarity + task;
  rows.scratch = Scratch(worker);
  if (rows.tokens.count < kBlockK) {  // what pads the last block must be numbers, too
    std::fill_n(rows.out, plan.row_lanes() * kBlockK, 0);
    if (rows.scale != nullptr) std::fill_n(rows.scale, kBlockK, 0.0f);
    if (rows.start != nullptr) std::fill_n(rows.start, starts, 0);
  }
  uint64_t poison = ops.rows(rows);
  if (with_values) {
    PackValuesArgs values{};
    values.tokens = KeyRows(id, args.v, plan.v_dim);
    values.channels = plan.channels();
    values.precision = plan.precision;
    values.inverse_unit = static_cast<float>(1.0 / units.v_unit);
    values.max = grid.v_max;
    values.norm_max = grid.v_norm_max;
    values.fine_max = grid.fine_max;
    const int64_t lanes = kBlockK / PerLane(plan.precision) * plan.channels();
    values.out = reinterpret_cast<int32_t*>(packed.values) + task * lanes;
    values.scale = integer ? packed.value_scale + task * plan.channels() : nullptr;
    if (integer) {
      values.fine_out = reinterpret_cast<int32_t*>(packed.fine_values) + task * lanes;
      values.fine = packed.fine + task;
    }
    values.scratch = Scratch(worker);
    poison |= ops.values(values);
  }
  packed.poison[task] = poison;
  if (args.key_codes_out != nullptr) return LeaveKeyCodes(plan, args, packed, id, task);
  if (packed.cache.glance == nullptr || !with_values) return;
  if (plan.glances) packed.cache.checksum[task] = 0;  // nobody has summed up what is packed now
  packed.cache.glance[task] = plan.glances ? GlanceOf(id) : GlanceAt(plan, args, id.sequence, id.block);
}

// How queries of one sequence and head become rows of the kernel; tokens and places are the caller's to fill in.
PackRowsArgs QueryArgs(const Plan& plan, const Packed& packed, const BlockId& id) {
  const int64_t index = plan.KvUnit(id.sequence, id.head / plan.heads_per_kv);
  const QuantGrid& grid = plan.grid();
  PackRowsArgs rows{};
  rows.dim_pad = plan.dim_pad();
  rows.precision = plan.precision;
  rows.centre = packed.key_mean + index * plan.dim_pad();
  rows.max = grid.q_max;
  rows.norm_max = grid.q_norm_max;
  rows.sum_lanes = grid.sum_lanes;
  rows.offset = grid.q_offset;
  rows.rotate = grid.rotate;
  rows.is_query = true;
  rows.score_factor = plan.scale * kLog2e * packed.units[index].k_unit;
  if (grid.rotate) rows.score_factor /= static_cast<double>(RotationBlock(plan.qk_dim));
  rows.limit = kScoreLimit / (static_cast<double>(plan.qk_dim) * kStoredKeyMax);
  rows.row_lanes = plan.row_lanes();
  // Softmax does not see the shift; what is absolute does.
  const bool absolute = plan.softcap > 0 || !plan.sink_logits.empty();
  rows.shift_factor = absolute ? plan.scale * kLog2e : 0.0;
  return rows;
}

void Packer::PackQueryBlock(int32_t worker, int64_t task) const {
  const BlockId id = FindQueryBlock(plan, task);
  if (!heads.active[id.head]) return;
  if (args.pool_counts != nullptr) return TakePools(plan, args, id, worker, packed);
  const Sequence& s = plan.sequences[id.sequence];
  PackRowsArgs rows = QueryArgs(plan, packed, id);
  rows.tokens =
      RowsOf(plan, args.q, id.sequence, id.head, s.q_begin + id.block * kBlockQ, s.QueriesIn(id.block), plan.qk_dim);
  rows.out = reinterpret_cast<int32_t*>(packed.queries) + task * kBlockQ * plan.row_lanes();
  rows.scale = packed.q_factor + task * kBlockQ;
  rows.mean = plan.predicts() ? packed.q.mean + task * plan.predictor->pools * plan.dim_pad() : nullptr;
  rows.pool_rows = plan.predictor->pool_rows();
  rows.similarity = packed.q.similarity + task;
  const bool absolute = args.lse.data != nullptr || (plan.judges_rows() && IsAbsolute(args));
  if (absolute) rows.shift_factor = plan.scale * kLog2e;
  rows.shift = packed.q_shift + task * kBlockQ;
  rows.scratch = Scratch(worker);
  ops.rows(rows);
  if (packed.unlike == nullptr) return;
  ops.unlike({rows.tokens, rows.dim_pad, rows.mean, rows.pool_rows, rows.scratch}, packed.unlike[task]);
  if (packed.unlike[task].TooMany()) *rows.similarity = kNotAlike;
  if (args.pool_counts_out != nullptr) LeavePools(plan, args, packed, id, worker);
}

void LayKeys(const Plan& plan, Arena& arena, Packed& p) {
  const int64_t k_blocks = plan.kv_heads * plan.all_k_blocks;
  const int64_t heads = plan.sequence_count() * plan.kv_heads;
  const int64_t lane_rows = kBlockK / PerLane(plan.precision);
  const bool integer = plan.precision != SPARGE_PRECISION_FP32;
  if (plan.cache_blocks > 0) {
    p.cache = {arena.Take<int64_t>(heads),
               arena.Take<uint64_t>(k_blocks),
               arena.Take<uint8_t>(k_blocks),
               arena.Take<uint64_t>(k_blocks),
               arena.Take<uint64_t>(plan.sequence_count() * plan.cache_blocks),
               arena.Take<uint64_t>(plan.sequence_count() * plan.cache_blocks),
               arena.Take<int64_t>(plan.sequence_count()),
               arena.Take<uint64_t>(plan.sequence_count())};
  }
  p.units = arena.Take<KeyUnits>(heads);
  p.key_mean = arena.Take<float>(heads * plan.dim_pad());
  p.block_max = arena.Take<float>(2 * k_blocks);
  p.finite = arena.Take<int32_t>(k_blocks);
  p.k.mean = arena.Take<float>(k_blocks * plan.dim_pad());
  p.k.similarity = arena.Take<float>(k_blocks);
  p.keys = arena.Take<std::byte>(k_blocks * kBlockK * plan.row_lanes() * kLaneBytes);
  p.key_scale = arena.Take<float>(integer ? k_blocks * kBlockK : 0);
  p.key_start =
      arena.Take<int32_t>(plan.grid().q_offset != 0 ? k_blocks * plan.grid().Sums(plan.row_lanes()) * kBlockK : 0);
  p.poison = arena.Take<uint64_t>(k_blocks);
  p.values = arena.Take<std::byte>(k_blocks * lane_rows * plan.channels() * kLaneBytes);
  p.value_scale = arena.Take<float>(integer ? k_blocks * plan.channels() : 0);
  p.fine_values = arena.Take<std::byte>(integer ? k_blocks * lane_rows * plan.channels() * kLaneBytes : 0);
  p.fine = arena.Take<FineValues>(integer ? k_blocks : 0);
}

}  // namespace

int64_t Packed::scratch_floats(const Plan& plan) {
  return RoundUp(std::max(RowScratchFloats(plan.dim_pad()), ValueScratchFloats(plan.channels())),
                 Arena::kAlignment / sizeof(float));
}

Packed LayPacked(const Plan& plan, Arena& arena, Arena& cache) {
  const int64_t q_blocks = plan.q_heads * plan.all_q_blocks;
  Packed p{};
  LayKeys(plan, plan.cache_blocks > 0 ? cache : arena, p);
  p.q.mean = arena.Take<float>(plan.predicts() ? q_blocks * plan.predictor->pools * plan.dim_pad() : 0);
  p.q.similarity = arena.Take<float>(q_blocks);
  p.unlike = plan.judges_rows() ? arena.Take<UnlikeRows>(q_blocks) : nullptr;
  p.queries = arena.Take<std::byte>(q_blocks * kBlockQ * plan.row_lanes() * kLaneBytes);
  p.q_factor = arena.Take<float>(q_blocks * kBlockQ);
  p.q_shift = arena.Take<float>(q_blocks * kBlockQ);
  p.scratch = arena.Take<float>(plan.machine.executor.workers * Packed::scratch_floats(plan));
  return p;
}

double UnitFor(float max_abs) {
  if (max_abs == 0.0f) return 1.0;
  return std::ldexp(1.0, std::clamp(std::ilogb(max_abs), -100, 127));
}

void PackRowsOnly(const Plan& plan, const Packed& packed, const BlockId& id, const TokenRows& tokens, bool absolute,
                  int32_t worker, const QueryRows& out) {
  PackRowsArgs rows = QueryArgs(plan, packed, id);
  rows.tokens = tokens;
  rows.out = reinterpret_cast<int32_t*>(out.rows);
  rows.scale = out.factor;
  if (absolute) rows.shift_factor = plan.scale * kLog2e;
  rows.shift = out.shift;
  rows.scratch = packed.scratch + worker * Packed::scratch_floats(plan);
  plan.machine.ops.pack->rows(rows);
}

void CopyQuery(const Plan& plan, const Packed& packed, int64_t place, int64_t r, const QueryRows& to) {
  const int64_t bytes = plan.row_lanes() * kLaneBytes;
  std::memcpy(to.rows + r * bytes, packed.queries + place * bytes, static_cast<size_t>(bytes));
  to.factor[r] = packed.q_factor[place];
  to.shift[r] = packed.q_shift[place];
}

void PackPools(const Plan& plan, const Packed& packed, const BlockId& block, int64_t count, bool absolute,
               int32_t worker, const QueryRows& out) {
  const int64_t first =
      plan.QueryBlock(block.head, plan.sequences[block.sequence], block.block) * plan.predictor->pools;
  const float* means = packed.q.mean + first * plan.dim_pad();
  const TokenRows tokens{reinterpret_cast<const std::byte*>(means), SPARGE_F32, plan.dim_pad(), count, plan.qk_dim};
  PackRowsOnly(plan, packed, block, tokens, absolute, worker, out);
}

uint64_t CacheKind(const std::vector<Plan>& plans) {
  uint64_t kind = 0x7370617267654B31;  // not 0: that is an empty cache
  for (const Plan& plan : plans) {
    for (const int64_t part : {int64_t{plan.precision}, plan.sequence_count(), plan.kv_heads, plan.qk_dim, plan.v_dim,
                               plan.cache_blocks, int64_t{SummarisesKeys(plan)}}) {
      kind = Mix(kind, static_cast<uint64_t>(part));
    }
    for (const char* c = plan.machine.isa; *c != '\0'; ++c) kind = Mix(kind, static_cast<unsigned char>(*c));
  }
  return kind;
}

void EmptyCache(const Plan& plan, const Packed& packed) {
  std::fill_n(packed.cache.centred, plan.sequence_count() * plan.kv_heads, int64_t{0});
  ForgetSteps(plan, packed);
}

void ForgetSteps(const Plan& plan, const Packed& packed) {
  if (packed.cache.keys_seen != nullptr) std::fill_n(packed.cache.keys_seen, plan.sequence_count(), int64_t{0});
}

KeyBlockCounts PackAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, bool with_values,
                       const Packed& packed) {
  const Packer packer{plan, heads, args, packed, *plan.machine.ops.pack, with_values};
  ForgetSteps(plan, packed);
  if (plan.glances && with_values) GlanceAtAll(plan, args, packed.cache.seen);
  const sparge_executor& executor = plan.machine.executor;
  const int64_t k_blocks = plan.kv_heads * plan.all_k_blocks;
  ForEach(executor, k_blocks, [&](int32_t worker, int64_t task) { packer.SurveyBlock(worker, task); });
  ForEach(executor, plan.sequence_count() * plan.kv_heads,
          [&](int32_t worker, int64_t index) { packer.ChooseUnits(worker, index); });
  KeyBlockCounts counts{};
  for (int64_t task = 0; task < k_blocks; ++task) {
    const bool needed = packer.IsNeeded(FindKeyBlock(plan, task));
    counts.all += needed;
    counts.reused += needed && !packer.IsStale(task);
  }
  const int64_t q_blocks = args.key_codes_out == nullptr ? plan.q_heads * plan.all_q_blocks : 0;
  // Keys and queries in one loop: one wait less.
  ForEach(executor, k_blocks + q_blocks, [&](int32_t worker, int64_t task) {
    task < k_blocks ? packer.PackKeyBlock(worker, task) : packer.PackQueryBlock(worker, task - k_blocks);
  });
  return counts;
}

TokenRows QueryRun::Tokens(const Plan& plan, const sparge_run_args& args) const {
  return {TokenData(plan, args.q, plan.sequences[sequence].index, head, query), args.q.dtype,
          over_heads ? args.q.head_stride : args.q.token_stride, count, plan.qk_dim};
}

void PackQueryRun(const Plan& plan, const sparge_run_args& args, const Packed& packed, const QueryRun& run,
                  int32_t worker, const QueryRows& out) {
  PackRowsOnly(plan, packed, {run.head, run.sequence, 0}, run.Tokens(plan, args), /*absolute=*/true, worker, out);
}

void PackDirectRun(const Plan& plan, const sparge_run_args& args, const QueryRun& run, const QueryRows& out) {
  plan.machine.ops.pack->direct_rows({run.Tokens(plan, args), plan.dim_pad(), plan.scale * kLog2e,
                                      reinterpret_cast<float*>(out.rows), out.factor, out.shift});
}

bool PackAnother(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                 int32_t worker, int64_t task) {
  const Packer packer{plan, heads, args, packed, *plan.machine.ops.pack, /*with_values=*/true};
  const BlockId id = FindKeyBlock(plan, task);
  const KeyUnits& units = packed.units[plan.KvUnit(id.sequence, id.head)];
  packer.FindStale(id, task);
  packer.SurveyTokens(worker, id, task);
  packed.cache.stale[task] = 1;
  if (UnitFor(packed.block_max[2 * task]) > units.k_unit || UnitFor(packed.block_max[2 * task + 1]) > units.v_unit) {
    packed.cache.checksum[task] = 0;
    return false;
  }
  packer.PackKeyBlock(worker, task);
  return true;
}

KeyValueBlocks PackedBlocks(const Plan& plan, const Packed& packed, int64_t first) {
  const int64_t values = first * (kBlockK / PerLane(plan.precision)) * plan.channels() * kLaneBytes;
  return {packed.keys + first * kBlockK * plan.row_lanes() * kLaneBytes,
          packed.key_scale + first * kBlockK,
          packed.key_start + first * plan.grid().Sums(plan.row_lanes()) * kBlockK,
          packed.poison + first,
          packed.values + values,
          packed.value_scale + first * plan.channels(),
          packed.fine_values + values,
          packed.fine + first,
          plan.channels()};
}

DirectTokens TokensOf(const Plan& plan, const sparge_run_args& args, const BlockId& id) {
  const Sequence& s = plan.sequences[id.sequence];
  const int64_t kv_head = id.head / plan.heads_per_kv;
  return {RowsOf(plan, args.k, id.sequence, kv_head, s.k_begin, s.k_count, plan.qk_dim),
          RowsOf(plan, args.v, id.sequence, kv_head, s.k_begin, s.k_count, plan.v_dim)};
}

KernelArgs BlockArgs(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id) {
  const Sequence& s = plan.sequences[id.sequence];
  const int64_t row = plan.QueryBlock(id.head, s, id.block) * kBlockQ;
  const int64_t lanes = plan.direct() ? plan.dim_pad() : plan.row_lanes();
  KernelArgs k{};
  k.query = {
      packed.queries + row * lanes * kLaneBytes, lanes, packed.q_factor + row, packed.q_shift + row, id.block * kBlockQ,
      static_cast<int>(s.QueriesIn(id.block))};
  k.rule = RuleOf(plan, id.sequence, id.head);
  k.rule.mask = MaskRow(plan, args.mask, id.sequence, id.head, k.query.first);
  k.rule.mask_stride = args.mask.query_stride;
  if (plan.direct()) {
    k.blocks.channels = plan.channels();
    k.direct = TokensOf(plan, args, id);
  } else {
    k.blocks = PackedBlocks(plan, packed, plan.KeyBlock(id.head / plan.heads_per_kv, s, 0));
  }
  return k;
}

Packed LayDirect(const Plan& plan, Arena& arena) {
  const int64_t rows = plan.q_heads * plan.all_q_blocks * kBlockQ;
  Packed p{};
  p.units = arena.Take<KeyUnits>(plan.sequence_count() * plan.kv_heads);
  p.queries = arena.Take<std::byte>(rows * plan.dim_pad() * static_cast<int64_t>(sizeof(float)));
  p.q_factor = arena.Take<float>(rows);
  p.q_shift = arena.Take<float>(rows);
  return p;
}

void PackDirect(const Plan& plan, const sparge_run_args& args, const Packed& packed) {
  std::fill_n(packed.units, plan.sequence_count() * plan.kv_heads, KeyUnits{1.0, 1.0});
  for (int64_t task = 0; task < plan.q_heads * plan.all_q_blocks; ++task) {
    const BlockId id = FindQueryBlock(plan, task);
    const Sequence& s = plan.sequences[id.sequence];
    DirectRowsArgs rows{};
    rows.tokens = RowsOf(plan, args.q, id.sequence, id.head, s.q_begin, s.q_count, plan.qk_dim);
    rows.dim_pad = plan.dim_pad();
    rows.score_factor = plan.scale * kLog2e;
    rows.out = reinterpret_cast<float*>(packed.queries) + task * kBlockQ * plan.dim_pad();
    rows.factor = packed.q_factor + task * kBlockQ;
    rows.shift = packed.q_shift + task * kBlockQ;
    plan.machine.ops.pack->direct_rows(rows);
  }
}

}  // namespace sparge::impl

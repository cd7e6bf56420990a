// Stage 1: scores row by row, and hands the row to the rules of src/select.
#include "src/cpu/predict.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "src/base/threads.h"
#include "src/cpu/visible_tiles.h"

namespace sparge::impl {
namespace {

// Masses that are kept at once: so much memory, or one head if that takes more.
constexpr int64_t kStoreBytes = int64_t{16} << 20;

// One row of tiles at work; the arrays have one entry per key block.
struct Row : TileRows {
  int64_t index;     // Problem::QueryBlock
  uint64_t* kept;    // bits
  uint64_t* masked;  // bits or NULL
  bool* visible;
  int64_t eligible;
  double* score;   // of a tile: its mass, or the logarithm of that
  int32_t* order;  // scratch
};

// Rule "score" of the paper: what attention would give the mean query and the mean key, softcap and slope included.
void ScoreMeans(const Plan& plan, const Packed& packed, const Row& row) {
  const Sequence& s = plan.sequences[row.id.sequence];
  const int64_t kv_head = row.id.head / plan.heads_per_kv;
  const int64_t unit = plan.KvUnit(row.id.sequence, kv_head);
  const float* query = packed.q.mean + row.index * plan.dim_pad();
  const double to_score = plan.scale * packed.units[unit].k_unit;
  const SelectOps& ops = *plan.machine.ops.select;
  double shift = 0;
  if (plan.softcap > 0) ops.dots(query, packed.key_mean + unit * plan.dim_pad(), plan.dim_pad(), 1, &shift);
  shift *= plan.scale;
  // A position far from all keys stands for the nearest of them: what that takes from all distances does not matter.
  const double position =
      std::clamp(0.5 * static_cast<double>(row.first + row.last) + static_cast<double>(s.visible.offset), 0.0,
                 static_cast<double>(s.k_count - 1));
  const Range seen = BlocksOf(s.visible.KeysOfAny(row.first, row.last), kBlockK);
  ops.dots(query, packed.k.mean + plan.KeyBlock(kv_head, s, seen.begin) * plan.dim_pad(), plan.dim_pad(),
           seen.end - seen.begin, row.score + seen.begin);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    double score = to_score * row.score[j];
    if (plan.softcap > 0) score = plan.softcap * std::tanh((score + shift) / plan.softcap);
    if (!plan.alibi_slopes.empty()) {
      const double middle = static_cast<double>(j * kBlockK) + 0.5 * static_cast<double>(s.KeysIn(j) - 1);
      score -= static_cast<double>(plan.alibi_slopes[row.id.head]) * std::fabs(position - middle);
    }
    row.score[j] = score;
  }
}

// Rule "score". `i`: the row's place among those whose pools were judged together.
void ScoreTiles(const Plan& plan, const sparge_run_args& args, const Packed& packed, const Stage1& memory,
                int32_t worker, int64_t i, const Row& row) {
  if (plan.predictor->scores_are_logs) {
    ScoreMeans(plan, packed, row);
  } else {
    RowMasses(plan, args, packed, memory.pools, row.id, i, worker, row.visible, row.score);
  }
}

// A head that keeps all tiles needs no masses, unless somebody wants to look at them.
bool NeedsScores(const Plan& plan, const sparge_head_params& params, const sparge_run_args& args) {
  const bool looked_at = args.mass_out != nullptr || args.pool_lse_out != nullptr;
  return plan.predicts() && (plan.select == SPARGE_SELECT_TOPK || params.tau < 1 || looked_at);
}

// The tiles that the row sees: those that are visible here, or of all keys if these are a part.
int64_t SeenTiles(const Plan& plan, const Row& row) {
  if (!plan.is_part()) return row.eligible;
  Visible whole = plan.sequences[row.id.sequence].visible;
  whole.keys = plan.place.all_keys;
  whole.offset += plan.place.first_key;
  const Range blocks = BlocksOf(whole.KeysOfAny(row.first, row.last), kBlockK);
  return blocks.end - blocks.begin;
}

RowRule RuleFor(const Plan& plan, const sparge_head_params& params, const Packed& packed, const Row& row) {
  const Sequence& s = plan.sequences[row.id.sequence];
  const int64_t first_key_block = plan.KeyBlock(row.id.head / plan.heads_per_kv, s, 0);
  // The last queries of all are none of this part if so many come after it.
  const int64_t queries_after = plan.place.all_queries - plan.place.first_query - plan.q_tokens;
  const bool in_tail = row.last >= s.q_count + queries_after - plan.dense_tail;
  RowRule rule = ForcedRule(plan, row.id);
  rule.params = params;
  rule.query_alike = !in_tail && packed.q.similarity[row.index] > params.theta;
  rule.k_similarity = plan.predictor->summarises_keys ? packed.k.similarity + first_key_block : nullptr;
  rule.visible = SeenTiles(plan, row);
  rule.mass_from = plan.machine.ops.select->mass_from;
  return rule;
}

// Rules "select" and "force", for a row that has been scored if it needs that.
void SelectTiles(const Plan& plan, const sparge_head_params& params, const Packed& packed, const Row& row) {
  const RowScores scores{plan.sequences[row.id.sequence].k_blocks, row.visible,    row.eligible, row.score,
                         plan.predictor->scores_are_logs,          plan.is_part(), row.order};
  SelectRow(RuleFor(plan, params, packed, row), scores, row.kept);
}

// The predicted mass of each visible tile, for who wants to look at it.
void WriteMasses(const Plan& plan, const Row& row, float* out) {
  const bool logs = plan.predictor->scores_are_logs;
  const Sequence& s = plan.sequences[row.id.sequence];
  double top = 0, sum = logs ? 0 : 1;
  for (int64_t j = 0, seen = 0; logs && j < s.k_blocks; ++j) {
    if (row.visible[j]) top = std::max(seen++ == 0 ? row.score[j] : top, row.score[j]);
  }
  const auto mass = [&](int64_t j) {
    return !row.visible[j] ? 0.0 : logs ? std::exp(row.score[j] - top) : row.score[j];
  };
  for (int64_t j = 0; logs && j < s.k_blocks; ++j) sum += mass(j);
  for (int64_t j = 0; j < s.k_blocks; ++j) out[j] = static_cast<float>(sum > 0 ? mass(j) / sum : 0.0);
}

// For a plan that does not: all visible tiles, or those of the caller's map.
void CopyRow(const Plan& plan, const sparge_run_args& args, const Row& row) {
  const Sequence& s = plan.sequences[row.id.sequence];
  const uint8_t* map = nullptr;
  if (plan.select == SPARGE_SELECT_MAP) {
    map =
        args.map + s.index * args.map_batch_stride + row.id.head * args.map_head_stride + row.id.block * plan.k_blocks;
  }
  for (int64_t j = 0; j < s.k_blocks; ++j) {
    if (row.visible[j] && (map == nullptr || map[j] != 0)) SetBit(row.kept, j);
  }
}

int64_t ScratchBytes(const Plan& plan) {
  return RoundUp(plan.k_blocks * static_cast<int64_t>(sizeof(double) + sizeof(int32_t) + sizeof(bool)),
                 Arena::kAlignment);
}

// The row of the map, with scratch of the worker.
Row RowAt(const Plan& plan, const Stage1& memory, const BlockMap& map, int32_t worker, int64_t index) {
  Row row{};
  row.index = index;
  row.id = FindQueryBlock(plan, index);
  row.first = row.id.block * kBlockQ;
  row.last = row.first + plan.sequences[row.id.sequence].QueriesIn(row.id.block) - 1;
  row.kept = map.KeptRow(index);
  row.masked = map.MaskedRow(index);
  std::byte* scratch = memory.scratch + worker * ScratchBytes(plan);
  row.score = reinterpret_cast<double*>(scratch);
  row.order = reinterpret_cast<int32_t*>(row.score + plan.k_blocks);
  row.visible = reinterpret_cast<bool*>(row.order + plan.k_blocks);
  return row;
}

// The same with empty bits, and what it sees.
Row NewRow(const Plan& plan, const sparge_run_args& args, const Stage1& memory, const BlockMap& map, int32_t worker,
           int64_t index) {
  Row row = RowAt(plan, memory, map, worker, index);
  std::fill_n(row.kept, map.words, uint64_t{0});
  if (row.masked != nullptr) std::fill_n(row.masked, map.words, uint64_t{0});
  row.eligible = FindVisible(plan, args, row, row.visible, row.masked);
  return row;
}

void CountRow(const BlockMap& map, const Row& row) {
  map.eligible[row.index] = row.eligible;
  map.computed[row.index] = 0;
  for (int64_t w = 0; w < map.words; ++w) map.computed[row.index] += std::popcount(row.kept[w]);
}

void Save(const Plan& plan, const Row& row, float* to) {
  for (int64_t j = 0; j < plan.sequences[row.id.sequence].k_blocks; ++j) {
    to[j] = row.visible[j] ? static_cast<float>(row.score[j]) : MassStore::kHidden;
  }
}

void Load(const Plan& plan, const float* from, Row& row) {
  row.eligible = 0;
  for (int64_t j = 0; j < plan.sequences[row.id.sequence].k_blocks; ++j) {
    row.visible[j] = from[j] != MassStore::kHidden;
    row.score[j] = static_cast<double>(from[j]);
    row.eligible += row.visible[j];
  }
}

// take(worker, row, scored) for every row of the heads of a range that `wants(head)`, scored if `scores(head)`.
template <class Wants, class Scores, class Take>
void ForEachScoredRow(const Plan& plan, HeadRange range, const sparge_run_args& args, const Packed& packed,
                      const Stage1& memory, const BlockMap& map, const Wants& wants, const Scores& scores,
                      const Take& take) {
  const bool pools = plan.predicts() && !plan.predictor->scores_are_logs;
  const int64_t together = pools ? PooledBlocks(plan) : 1;
  const int64_t first_row = range.begin * plan.all_q_blocks;
  ForEach(plan.machine.executor, (range.end - range.begin) * plan.all_q_blocks, [&](int32_t worker, int64_t task) {
    const int64_t index = first_row + task;
    const BlockId id = FindQueryBlock(plan, index);
    if (!wants(id.head) || id.block % together != 0) return;  // else done with the first of its kind
    const int64_t blocks = std::min(together, plan.sequences[id.sequence].q_blocks - id.block);
    const bool scored = scores(id.head);
    if (pools && scored) PoolMasses(plan, args, packed, id, blocks, worker, memory.pools);
    for (int64_t i = 0; i < blocks; ++i) {
      const Row row = NewRow(plan, args, memory, map, worker, index + i);
      if (scored && row.eligible > 0) ScoreTiles(plan, args, packed, memory, worker, i, row);
      take(row, scored);
    }
  });
}

// Rows of heads that are not computed here have nothing to count.
void ClearCounts(const Plan& plan, HeadRange range, const uint8_t* active, const BlockMap& map) {
  for (int64_t h = range.begin; h < range.end; ++h) {
    if (active[h]) continue;
    std::fill_n(map.eligible + h * plan.all_q_blocks, plan.all_q_blocks, int64_t{0});
    std::fill_n(map.computed + h * plan.all_q_blocks, plan.all_q_blocks, int64_t{0});
  }
}

}  // namespace

Stage1 LayStage1(const Plan& plan, Arena& arena) {
  Stage1 memory{};
  memory.pools = LayPoolMemory(plan, arena);
  memory.scratch = arena.Take<std::byte>(plan.machine.executor.workers * ScratchBytes(plan));
  if (!plan.calibrates()) return memory;
  MassStore& store = memory.store;
  store.stride = plan.k_blocks;
  store.rows_per_head = plan.all_q_blocks;
  const int64_t floats_per_head = store.rows_per_head * store.stride;
  const int64_t fit = kStoreBytes / std::max<int64_t>(floats_per_head * static_cast<int64_t>(sizeof(float)), 1);
  store.heads = std::clamp<int64_t>(fit, 1, plan.q_heads);
  store.mass = arena.Take<float>(store.heads * floats_per_head);
  store.scored = arena.Take<uint8_t>(plan.q_heads);
  return memory;
}

void PredictAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                const Stage1& memory, const BlockMap& map) {
  const HeadRange all{0, plan.q_heads};
  ClearCounts(plan, all, heads.active, map);
  ForEachScoredRow(
      plan, all, args, packed, memory, map, [&](int64_t head) { return heads.active[head] != 0; },
      [&](int64_t head) { return NeedsScores(plan, heads.params[head], args); },
      [&](const Row& row, bool) {
        if (!plan.predicts()) {
          CopyRow(plan, args, row);
        } else if (row.eligible > 0) {
          if (args.mass_out != nullptr) WriteMasses(plan, row, args.mass_out + TileRow(plan, row.id));
          SelectTiles(plan, heads.params[row.id.head], packed, row);
        }
        CountRow(map, row);
      });
}

void ScoreHeads(const Plan& plan, HeadRange range, const sparge_run_args& args, const Packed& packed,
                const Stage1& memory, const BlockMap& map) {
  ForEachScoredRow(
      plan, range, args, packed, memory, map, [&](int64_t head) { return memory.store.scored[head] != 0; },
      [](int64_t) { return true; }, [&](const Row& row, bool) { Save(plan, row, memory.store.Row(row.index)); });
}

void SelectHeads(const Plan& plan, const HeadChoice& heads, HeadRange range, const sparge_run_args& args,
                 const Packed& packed, const Stage1& memory, const BlockMap& map) {
  ClearCounts(plan, range, heads.active, map);
  const int64_t first_row = range.begin * plan.all_q_blocks;
  ForEach(plan.machine.executor, (range.end - range.begin) * plan.all_q_blocks, [&](int32_t worker, int64_t task) {
    const int64_t index = first_row + task;
    const int64_t head = index / plan.all_q_blocks;
    if (!heads.active[head]) return;
    Row row = RowAt(plan, memory, map, worker, index);
    if (memory.store.scored[head]) {
      Load(plan, memory.store.Row(index), row);
    } else {
      row = NewRow(plan, args, memory, map, worker, index);
    }
    if (row.eligible > 0) SelectTiles(plan, heads.params[head], packed, row);
    CountRow(map, row);
  });
}

RowRule ForcedRule(const Plan& plan, const BlockId& id) {
  const Sequence& s = plan.sequences[id.sequence];
  const int64_t first = id.block * kBlockQ;
  RowRule rule{};
  rule.select = plan.calibrates() ? SPARGE_SELECT_FLOOR : plan.select;
  const int64_t before = rule.select == SPARGE_SELECT_FLOOR ? kNearKeys : 0;
  rule.diagonal = BlocksOf(s.visible.Diagonal(first, first + s.QueriesIn(id.block) - 1, before), kBlockK);
  rule.keep_sink = plan.keep_sink && plan.place.first_key == 0;
  return rule;
}

void WriteMap(const Plan& plan, const HeadChoice& heads, const BlockMap& map, uint8_t* out) {
  for (int64_t index = 0; index < plan.q_heads * plan.all_q_blocks; ++index) {
    const BlockId id = FindQueryBlock(plan, index);
    if (!heads.active[id.head]) continue;
    uint8_t* row = out + TileRow(plan, id);
    const uint64_t* kept = map.KeptRow(index);
    for (int64_t j = 0; j < plan.sequences[id.sequence].k_blocks; ++j) row[j] = TestBit(kept, j);
  }
}

}  // namespace sparge::impl

// Stage 1, rule by rule. In double throughout: it costs nothing here, and ties and sums come out as the rule says.
#include "src/cpu/predict.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/base/half.h"
#include "src/base/threads.h"
#include "src/cpu/select_ops.h"

namespace sparge::impl {
namespace {

// One row of tiles at work; the arrays have one entry per key block.
struct Row : BlockId {
  int64_t index;        // Plan::QueryBlock
  int64_t first, last;  // queries
  uint64_t* kept;       // bits
  uint64_t* masked;     // bits or NULL
  bool* visible;
  double* score;   // of a tile: its mass, or the logarithm of that
  bool logs;       // the latter
  int32_t* order;  // candidates
};

enum class MaskTile { kHidden, kPlain, kMixed };

// Reads the mask over the pairs of a tile that are visible by position.
template <class IsHidden, class IsPlain>
MaskTile ClassifyPairs(const Visible& visible, const Row& row, Range keys, const IsHidden& hidden,
                       const IsPlain& plain) {
  bool any_visible = false;
  bool all_plain = true;
  for (int64_t i = row.first; i <= row.last; ++i) {
    const Range seen = visible.KeysOf(i);
    for (int64_t j = std::max(seen.begin, keys.begin); j < std::min(seen.end, keys.end); ++j) {
      any_visible |= !hidden(i, j);
      all_plain &= plain(i, j);
    }
    if (any_visible && !all_plain) return MaskTile::kMixed;
  }
  return !any_visible ? MaskTile::kHidden : all_plain ? MaskTile::kPlain : MaskTile::kMixed;
}

// What the mask does to one tile.
MaskTile ClassifyTile(const Plan& plan, const sparge_run_args& args, const Row& row, Range keys) {
  const Visible& visible = plan.sequences[row.sequence].visible;
  const std::byte* base = MaskRow(plan, args.mask, row.sequence, row.head, 0);
  const int64_t stride = args.mask.query_stride;
  if (plan.mask == SPARGE_MASK_BOOL) {
    const auto* mask = reinterpret_cast<const uint8_t*>(base);
    return ClassifyPairs(
        visible, row, keys, [&](int64_t i, int64_t j) { return mask[i * stride + j] == 0; },
        [&](int64_t i, int64_t j) { return mask[i * stride + j] != 0; });
  }
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  const sparge_dtype dtype = plan.mask == SPARGE_MASK_ADD_F16 ? SPARGE_F16 : SPARGE_F32;
  return ClassifyPairs(
      visible, row, keys, [&](int64_t i, int64_t j) { return LoadElement(base, dtype, i * stride + j) == kMinusInf; },
      [&](int64_t i, int64_t j) { return LoadElement(base, dtype, i * stride + j) == 0.0f; });
}

// Rule "visible". Returns the number of eligible tiles.
int64_t FindVisible(const Plan& plan, const sparge_run_args& args, Row& row) {
  const Sequence& s = plan.sequences[row.sequence];
  const Range blocks = BlocksOf(s.visible.KeysOfAny(row.first, row.last), kBlockK);
  int64_t eligible = 0;
  for (int64_t j = 0; j < s.k_blocks; ++j) {
    row.visible[j] = j >= blocks.begin && j < blocks.end;
    if (row.visible[j] && row.masked != nullptr) {
      const MaskTile tile = ClassifyTile(plan, args, row, {j * kBlockK, (j + 1) * kBlockK});
      row.visible[j] = tile != MaskTile::kHidden;
      if (tile == MaskTile::kMixed) SetBit(row.masked, j);
    }
    eligible += row.visible[j];
  }
  return eligible;
}

// Rule "score" of the paper: what attention would give the mean query and the mean key, softcap and slope included.
void ScoreMeans(const Plan& plan, const Packed& packed, const Row& row) {
  const Sequence& s = plan.sequences[row.sequence];
  const int64_t kv_head = row.head / plan.heads_per_kv;
  const int64_t unit = row.sequence * plan.kv_heads + kv_head;
  const float* query = packed.q.mean + row.index * plan.dim_pad();
  const double to_score = plan.scale * packed.units[unit].k_unit;
  const PredictOps& ops = *PredictOpsFor(plan.runtime.isa);
  double shift = 0;
  if (plan.softcap > 0) ops.dots(query, packed.key_mean + unit * plan.dim_pad(), plan.dim_pad(), 1, &shift);
  shift *= plan.scale;
  const double position = 0.5 * static_cast<double>(row.first + row.last) + static_cast<double>(s.visible.offset);
  const Range seen = BlocksOf(s.visible.KeysOfAny(row.first, row.last), kBlockK);
  ops.dots(query, packed.k.mean + plan.KeyBlock(kv_head, s, seen.begin) * plan.dim_pad(), plan.dim_pad(),
           seen.end - seen.begin, row.score + seen.begin);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    double score = to_score * row.score[j];
    if (plan.softcap > 0) score = plan.softcap * std::tanh((score + shift) / plan.softcap);
    if (!plan.alibi_slopes.empty()) {
      const double middle = static_cast<double>(j * kBlockK) + 0.5 * static_cast<double>(s.KeysIn(j) - 1);
      score -= static_cast<double>(plan.alibi_slopes[row.head]) * std::fabs(position - middle);
    }
    row.score[j] = score;
  }
}

// Most probable first, ties by lower index.
auto ByRank(const Row& row) {
  return [score = row.score](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; };
}

// How many of the candidates hold the mass tau, at least 1; these come out first. row.score: their probabilities.
int64_t TakeMass(const Row& row, int64_t count, double tau) {
  // Halving finds where the mass is reached without sorting all: the tiles before `begin` are needed and hold `mass`,
  // those from `end` on are not.
  constexpr int64_t kFew = 32;
  int64_t begin = 0, end = count;
  double mass = 0;
  while (end - begin > kFew) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(row.order + begin, row.order + middle, row.order + end, ByRank(row));
    double half = mass;
    for (int64_t c = begin; c < middle; ++c) half += row.score[row.order[c]];
    if (half >= tau) {
      end = middle;
    } else {
      begin = middle;
      mass = half;
    }
  }
  std::sort(row.order + begin, row.order + end, ByRank(row));
  while (mass < tau && begin < end) mass += row.score[row.order[begin++]];
  return std::max<int64_t>(begin, 1);
}

// Puts the masses of the candidates side by side into row.score, such that they sum to 1. Returns the largest.
double GatherMasses(const Row& row, int64_t count) {
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t c = 0; c < count; ++c) top = std::max(top, row.score[row.order[c]]);
  if (!(top > 0) && !row.logs) {  // pooled queries that are all zeros or not finite tell nothing: all are alike
    std::fill_n(row.score, count, 1.0 / static_cast<double>(count));
    return row.score[0];
  }
  double sum = 0;
  for (int64_t c = 0; c < count; ++c) {  // c <= order[c], so nothing is overwritten that is still needed
    const double score = row.score[row.order[c]];
    row.score[c] = row.logs ? std::exp(score - top) : score;
    sum += row.score[c];
  }
  for (int64_t c = 0; c < count; ++c) row.score[c] /= sum;
  return (row.logs ? 1.0 : top) / sum;
}

// Keeps the smallest set of candidates that holds the mass tau. Which of two tiles is more probable cannot be foreseen,
// and branches on it cost more than all the rest; so a border is found first by adding up vectors: tiles from `high` on
// hold less than tau, tiles from `low` on hold it. Only those between have to be ranked.
void KeepMass(const PredictOps& ops, const Row& row, int64_t count, double tau) {
  const double largest = GatherMasses(row, count);
  // Tiles below a fair share of 1 - tau hold less than that together; the margin is for rounding.
  double low = std::min(0.999 * (1 - tau) / static_cast<double>(count), largest);
  double high = 2;
  constexpr int kSteps = 12;  // narrows a factor of 10^4 to 0.3 %
  for (int step = 0; step < kSteps; ++step) {
    const double middle = std::sqrt(low * high);
    (middle <= largest && ops.mass_from(row.score, count, middle) >= tau ? low : high) = middle;
  }
  double mass = 0;
  int64_t between = 0;
  for (int64_t c = 0; c < count; ++c) {  // without branches, too
    const double p = row.score[c];
    const int32_t tile = row.order[c];
    const bool sure = p >= high;
    row.kept[tile / 64] |= static_cast<uint64_t>(sure) << (tile % 64);
    mass += sure ? p : 0.0;
    row.score[between] = p;
    row.order[between] = tile;
    between += p >= low && !sure;
  }
  for (int64_t c = between - 1; c >= 0; --c) row.score[row.order[c]] = row.score[c];  // by tile again
  if (between == 0 || (mass >= tau && mass > 0)) return;
  const int64_t take = TakeMass(row, between, tau - mass);
  for (int64_t c = 0; c < take; ++c) SetBit(row.kept, row.order[c]);
}

// Keeps the candidates whose mass reaches the floor, and the best one in any case.
void KeepFloor(const Row& row, int64_t count, double floor) {
  const double least = std::min(floor, GatherMasses(row, count));
  for (int64_t c = 0; c < count; ++c) {
    const int32_t tile = row.order[c];
    row.kept[tile / 64] |= static_cast<uint64_t>(row.score[c] >= least) << (tile % 64);
  }
}

// Rule "select". Candidates are the visible tiles of self-similar key blocks.
void SelectTiles(const Plan& plan, const sparge_head_params& params, const Row& row, int64_t candidates,
                 int64_t eligible) {
  if (candidates == 0) return;
  if ((plan.select == SPARGE_SELECT_FLOOR || plan.measures()) && params.tau < 1) {
    return KeepFloor(row, candidates, MassFloor(params.tau, eligible));
  }
  if (plan.select == SPARGE_SELECT_CDF && params.tau < 1) {
    return KeepMass(*PredictOpsFor(plan.runtime.isa), row, candidates, params.tau);
  }
  int64_t take = candidates;
  if (plan.select == SPARGE_SELECT_TOPK) {
    const auto wanted = static_cast<int64_t>(std::ceil(params.topk * static_cast<double>(eligible)));
    take = std::clamp<int64_t>(wanted, 1, candidates);
    // Scores have the order of their probabilities, and which tiles come first needs no order among them.
    std::nth_element(row.order, row.order + take - 1, row.order + candidates, ByRank(row));
  }
  for (int64_t c = 0; c < take; ++c) SetBit(row.kept, row.order[c]);
}

// Rule "force" for what does not depend on similarity: diagonal and sink.
void ForceDiagonalAndSink(const Plan& plan, const Row& row) {
  const Visible& visible = plan.sequences[row.sequence].visible;
  const Range diagonal = BlocksOf(visible.Diagonal(row.first, row.last), kBlockK);
  for (int64_t j = diagonal.begin; j < diagonal.end; ++j) {
    if (row.visible[j]) SetBit(row.kept, j);
  }
  if (plan.keep_sink && row.visible[0]) SetBit(row.kept, 0);
}

// Rule "score". `i`: the row's place among those whose pools were measured together.
void ScoreTiles(const Plan& plan, const Packed& packed, const BlockMap& map, int32_t worker, int64_t i, Row& row) {
  row.logs = plan.predictor == SPARGE_PREDICT_PAPER;
  if (row.logs) {
    ScoreMeans(plan, packed, row);
  } else {
    PooledRow(plan, map.pooled, row, i, worker, row.visible, row.score);
  }
}

// A head that keeps all tiles needs no masses, unless somebody wants to look at them.
bool NeedsScores(const Plan& plan, const sparge_head_params& params, const sparge_run_args& args) {
  return plan.predicts() && (plan.select == SPARGE_SELECT_TOPK || params.tau < 1 || args.mass_out != nullptr);
}

// The rules together, for a plan that predicts and a row that has been scored if it needs that.
void PredictRow(const Plan& plan, const sparge_head_params& params, const Packed& packed, const Row& row,
                int64_t eligible) {
  const Sequence& s = plan.sequences[row.sequence];
  const bool means = plan.predictor == SPARGE_PREDICT_PAPER;
  const float* k_similarity = packed.k.similarity + plan.KeyBlock(row.head / plan.heads_per_kv, s, 0);
  const bool in_tail = row.last >= s.q_count - plan.dense_tail;
  const bool query_alike = !in_tail && packed.q.similarity[row.index] > params.theta;
  int64_t candidates = 0;
  for (int64_t j = 0; j < s.k_blocks; ++j) {
    if (!row.visible[j]) continue;
    const bool trusted = query_alike && (!means || k_similarity[j] > params.theta);
    if (trusted) row.order[candidates++] = static_cast<int32_t>(j);
    if (!trusted) SetBit(row.kept, j);  // a mean tells nothing about it: compute
  }
  SelectTiles(plan, params, row, candidates, eligible);
  ForceDiagonalAndSink(plan, row);
}

// The predicted share of each visible tile, for who wants to look at it.
void WriteMasses(const Plan& plan, const Row& row, float* out) {
  const Sequence& s = plan.sequences[row.sequence];
  double top = 0, sum = 0;
  for (int64_t j = 0; row.logs && j < s.k_blocks; ++j) {
    if (row.visible[j]) top = std::max(sum++ == 0 ? row.score[j] : top, row.score[j]);
  }
  const auto mass = [&](int64_t j) {
    return !row.visible[j] ? 0.0 : row.logs ? std::exp(row.score[j] - top) : row.score[j];
  };
  sum = 0;
  for (int64_t j = 0; j < s.k_blocks; ++j) sum += mass(j);
  for (int64_t j = 0; j < s.k_blocks; ++j) out[j] = static_cast<float>(sum > 0 ? mass(j) / sum : 0.0);
}

// For a plan that does not: all visible tiles, or those of the caller's map.
void CopyRow(const Plan& plan, const sparge_run_args& args, const Row& row) {
  const Sequence& s = plan.sequences[row.sequence];
  const uint8_t* map = nullptr;
  if (plan.select == SPARGE_SELECT_MAP) {
    map = args.map + row.sequence * args.map_batch_stride + row.head * args.map_head_stride + row.block * plan.k_blocks;
  }
  for (int64_t j = 0; j < s.k_blocks; ++j) {
    if (row.visible[j] && (map == nullptr || map[j] != 0)) SetBit(row.kept, j);
  }
}

int64_t ScratchBytes(const Plan& plan) {
  const int64_t bits = 2 * CeilDiv(plan.k_blocks, 64) * static_cast<int64_t>(sizeof(uint64_t));  // RankRow's own
  return RoundUp(bits + plan.k_blocks * static_cast<int64_t>(sizeof(double) + sizeof(int32_t) + sizeof(bool)),
                 Arena::kAlignment);
}

Row MakeRow(const Plan& plan, const BlockMap& map, int32_t worker, int64_t index) {
  Row row{};
  row.index = index;
  static_cast<BlockId&>(row) = FindQueryBlock(plan, index);
  const Sequence& s = plan.sequences[row.sequence];
  row.first = row.block * kBlockQ;
  row.last = row.first + s.QueriesIn(row.block) - 1;
  row.kept = map.kept + index * map.words;
  row.masked = map.masked == nullptr ? nullptr : map.masked + index * map.words;
  std::byte* scratch = map.scratch + worker * ScratchBytes(plan);
  row.score = reinterpret_cast<double*>(reinterpret_cast<uint64_t*>(scratch) + 2 * map.words);
  row.order = reinterpret_cast<int32_t*>(row.score + plan.k_blocks);
  row.visible = reinterpret_cast<bool*>(row.order + plan.k_blocks);
  return row;
}

}  // namespace

BlockMap LayBlockMap(const Plan& plan, Arena& arena) {
  const int64_t rows = plan.q_heads * plan.all_q_blocks;
  BlockMap map{};
  map.words = CeilDiv(plan.k_blocks, 64);
  map.kept = arena.Take<uint64_t>(rows * map.words);
  map.masked = plan.mask == SPARGE_MASK_NONE ? nullptr : arena.Take<uint64_t>(rows * map.words);
  map.eligible = arena.Take<int64_t>(rows);
  map.computed = arena.Take<int64_t>(rows);
  map.pooled = LayPooled(plan, arena);
  map.scratch = arena.Take<std::byte>(plan.runtime.executor.workers * ScratchBytes(plan));
  return map;
}

void PredictAll(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed,
                const BlockMap& map) {
  const bool pools = plan.predicts() && plan.predictor == SPARGE_PREDICT_KEYS;
  const int64_t together = pools ? PooledBlocks(plan) : 1;
  ForEach(plan.runtime.executor, plan.q_heads * plan.all_q_blocks, [&](int32_t worker, int64_t index) {
    const BlockId id = FindQueryBlock(plan, index);
    if (id.block % together != 0) return;  // done with the first of its kind
    const int64_t blocks = std::min(together, plan.sequences[id.sequence].q_blocks - id.block);
    const bool active = heads.active[id.head] != 0;
    const bool scored = NeedsScores(plan, heads.params[id.head], args);
    if (active && pools && scored) MeasurePools(plan, packed, id, blocks, worker, map.pooled);
    for (int64_t i = 0; i < blocks; ++i) {
      map.eligible[index + i] = map.computed[index + i] = 0;
      if (!active) continue;
      Row row = MakeRow(plan, map, worker, index + i);
      std::fill_n(row.kept, map.words, 0);
      if (row.masked != nullptr) std::fill_n(row.masked, map.words, 0);
      const int64_t eligible = FindVisible(plan, args, row);
      if (!plan.predicts()) {
        CopyRow(plan, args, row);
      } else if (eligible > 0) {
        if (scored) ScoreTiles(plan, packed, map, worker, i, row);
        if (args.mass_out != nullptr) WriteMasses(plan, row, args.mass_out + TileRow(plan, row));
        PredictRow(plan, heads.params[id.head], packed, row, eligible);
      }
      map.eligible[index + i] = eligible;
      for (int64_t w = 0; w < map.words; ++w) map.computed[index + i] += std::popcount(row.kept[w]);
    }
  });
}

RankedRow RankRow(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockMap& map,
                  int32_t worker, int64_t index) {
  Row row = MakeRow(plan, map, worker, index);
  // Two threads may look at the same row at once: its bits are the worker's own.
  row.kept = reinterpret_cast<uint64_t*>(map.scratch + worker * ScratchBytes(plan));
  if (row.masked != nullptr) row.masked = row.kept + map.words;
  std::fill_n(row.kept, 2 * map.words, 0);
  FindVisible(plan, args, row);
  MeasurePools(plan, packed, row, 1, worker, map.pooled);
  ScoreTiles(plan, packed, map, worker, 0, row);
  ForceDiagonalAndSink(plan, row);
  int64_t count = 0;
  for (int64_t j = 0; j < plan.sequences[row.sequence].k_blocks; ++j) {
    if (row.visible[j]) row.order[count++] = static_cast<int32_t>(j);
  }
  std::sort(row.order, row.order + count, ByRank(row));
  return {count, row.order, row.score, row.kept, row.masked};
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

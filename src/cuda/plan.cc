// A run on the GPU, top to bottom: clear, pack, score and select, attend. Nothing is allocated, nothing is waited for.
#include "src/cuda/plan.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "src/base/packing.h"
#include "src/base/status.h"
#include "src/select/select.h"
#include "src/select/unlike.h"

namespace sparge::impl {
namespace {

static_assert(cuda::kTileQ == kBlockQ && cuda::kTileK == kBlockK);
static_assert(cuda::kPools == kPredictKeys.pools && cuda::kOwnRows == UnlikeRows::kMostUnlike);
static_assert(sizeof(cuda::HeadStats) == sizeof(sparge_head_stats));

// Scores that are kept at once; rows of the map beyond are done after them.
constexpr int64_t kScoreBytes = int64_t{64} << 20;
constexpr int64_t kMostHeads = 65535;  // what a grid has in its second dimension

const char* PrecisionName(sparge_precision precision) {
  return precision == SPARGE_PRECISION_FP32 ? "fp32" : precision == SPARGE_PRECISION_INT16 ? "int16" : "int8";
}

cuda::Tensor TensorOf(const sparge_tensor& tensor) {
  return {tensor.data, tensor.batch_stride, tensor.head_stride, tensor.token_stride, RawEnum(tensor.dtype), 0};
}

CudaAddress AddressOf(const void* pointer) { return reinterpret_cast<CudaAddress>(pointer); }

}  // namespace

void RefuseForGpu(const std::vector<Problem>& problems) {
  const Problem& p = problems.front();
  // First: what it may choose among has precisions that are refused, too.
  SPARGE_REQUIRE(p.select != SPARGE_SELECT_AUTO,
                 "select=AUTO (target_l2, target_l1): a GPU does not calibrate yet; name what to select");
  for (const Problem& each : problems) {
    SPARGE_REQUIRE(each.precision == SPARGE_PRECISION_INT8, "precision=%s: a GPU computes int8 only",
                   PrecisionName(each.precision));
  }
  SPARGE_REQUIRE(p.mask == SPARGE_MASK_NONE, "mask=%d: a GPU takes no masks yet, only causal, query_offset and window",
                 static_cast<int>(p.mask));
  SPARGE_REQUIRE(p.alibi_slopes.empty(), "alibi_slopes: a GPU does not take them yet");
  SPARGE_REQUIRE(p.cache_blocks == 0, "cache_tokens: a GPU does not keep packed keys yet");
  SPARGE_REQUIRE(p.order.empty(), "grid: a GPU takes tokens in the order they lie in");
  SPARGE_REQUIRE(!p.is_part(), "all_keys=%" PRId64 ": a GPU takes whole calls only", p.place.all_keys);
  SPARGE_REQUIRE(p.place.all_queries == p.q_tokens, "all_queries=%" PRId64 ": a GPU takes whole calls only",
                 p.place.all_queries);
  SPARGE_REQUIRE(p.qk_dim <= cuda::kLargestDim && p.v_dim <= cuda::kLargestDim,
                 "qk_dim=%" PRId64 " v_dim=%" PRId64 ": a GPU takes up to %d yet", p.qk_dim, p.v_dim,
                 cuda::kLargestDim);
  SPARGE_REQUIRE(p.q_heads <= kMostHeads, "q_heads=%" PRId64 ": a GPU takes up to %" PRId64, p.q_heads, kMostHeads);
  SPARGE_REQUIRE(p.q_heads * p.all_q_blocks < INT32_MAX && p.kv_heads * p.all_k_blocks < INT32_MAX,
                 "q_heads=%" PRId64 ": a GPU takes up to 2^31 blocks of tokens in all heads", p.q_heads);
}

CudaPlan::CudaPlan(const Gpu& gpu, Problem problem)
    : gpu_(gpu),
      problem_(std::move(problem)),
      predictor_(PredictorFor(problem_.select, problem_.predictor)),
      size_(HeadSizeFor(std::max(problem_.qk_dim, problem_.v_dim))),
      tables_(MakeTables(gpu.driver(), gpu.context(), problem_)) {}

int64_t CudaPlan::RowsAtOnce() const {
  if (!Predicts()) return std::max<int64_t>(MapRows(), 1);
  const int64_t bytes = ScoreRows() * problem_.k_blocks * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(kScoreBytes / std::max<int64_t>(bytes, 1), 1, std::max<int64_t>(MapRows(), 1));
}

CudaPlan::Memory CudaPlan::Lay(Arena& arena) const {
  Memory m{};
  if (problem_.idle()) return m;
  const int64_t k_blocks = problem_.kv_heads * problem_.all_k_blocks;
  const int64_t units = problem_.sequence_count() * problem_.kv_heads;
  const int64_t dim = Dim(), rows = MapRows();
  m.block_mean = arena.Take<float>(k_blocks * dim);
  m.block_max = arena.Take<float>(k_blocks);
  m.value_max = arena.Take<float>(k_blocks * dim);
  m.finite = arena.Take<int32_t>(k_blocks);
  m.key_mean = arena.Take<float>(units * dim);
  m.units = arena.Take<cuda::KeyUnit>(units);
  m.value_inverse = arena.Take<float>(units * dim);
  m.value_step = arena.Take<float>(units * dim);
  m.value_unit = arena.Take<float>(units * dim);
  m.steps = arena.Take<uint8_t>(k_blocks * cuda::BlockStepBytes(Dim(), gpu_.fp8()));
  m.key_scale = arena.Take<float>(k_blocks * kBlockK);
  m.k_similarity = arena.Take<float>(k_blocks);
  m.queries = arena.Take<uint8_t>(rows * cuda::QueryBytes(Dim()));
  m.q_shift = arena.Take<float>(rows * kBlockQ);
  m.q_mean = arena.Take<float>(rows * predictor_.pools * dim);
  m.q_similarity = arena.Take<float>(rows);
  if (ScoresKeys()) {
    m.scored.rows = arena.Take<uint8_t>(rows * cuda::kScoredRows * dim);
    m.scored.factor = arena.Take<float>(rows * cuda::kScoredRows);
    m.scored.shift = arena.Take<float>(rows * cuda::kScoredRows);
    m.scored.own = arena.Take<int32_t>(rows);
  }
  m.scores = arena.Take<float>(Predicts() ? RowsAtOnce() * ScoreRows() * problem_.k_blocks : 0);
  m.kept = arena.Take<uint32_t>(rows * tables_.shape.kept_words);
  return m;
}

Needs CudaPlan::needs() const {
  Arena arena;
  Lay(arena);
  // The caller's memory need not be aligned.
  return {arena.used() == 0 ? 0 : arena.used() + Arena::kAlignment, 0};
}

CudaPlan::Call CudaPlan::Begin(const sparge_run_args& args, bool with_values) const {
  SPARGE_REQUIRE(args.stats == nullptr, "stats: on a GPU they would have to be waited for; head_stats has the tiles");
  SPARGE_REQUIRE(args.pv_out == nullptr, "pv_out: a GPU does not write it yet");
  const std::pair<const char*, const void*> parts[] = {
      {"pool_lse", args.pool_lse},       {"pool_lse_out", args.pool_lse_out},
      {"key_survey", args.key_survey},   {"key_survey_out", args.key_survey_out},
      {"pool_rows", args.pool_rows},     {"pool_rows_out", args.pool_rows_out},
      {"pool_counts", args.pool_counts}, {"pool_counts_out", args.pool_counts_out},
      {"key_codes", args.key_codes},     {"key_codes_out", args.key_codes_out},
      {"pool_codes", args.pool_codes},   {"pool_codes_out", args.pool_codes_out},
  };
  for (const auto& [name, given] : parts) {
    SPARGE_REQUIRE(given == nullptr, "%s: a GPU takes whole calls only", name);
  }
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.workspace));
  Arena arena(static_cast<std::byte*>(args.workspace) + (RoundUp(address, Arena::kAlignment) - address));
  return {args, static_cast<CudaStream>(args.stream), Lay(arena), with_values};
}

void CudaPlan::Launch(const Call& call, const Kernel& kernel, const void* params, int64_t grid_x, int64_t grid_y,
                      int threads, int shared_bytes) const {
  if (grid_x == 0 || grid_y == 0) return;
  void* parameters[] = {const_cast<void*>(params)};
  CheckCuda(gpu_.driver(),
            gpu_.driver().cuLaunchKernel(kernel.function, static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y),
                                         1, static_cast<unsigned>(threads), 1, 1, static_cast<unsigned>(shared_bytes),
                                         call.stream, parameters, nullptr),
            kernel.name);
}

// What kernels add to, or do not write all of, begins with zeros.
void CudaPlan::Clear(const Call& call) const {
  const auto clear = [&](const void* data, int64_t bytes) {
    if (data == nullptr || bytes == 0) return;
    CheckCuda(gpu_.driver(), gpu_.driver().cuMemsetD8Async(AddressOf(data), 0, static_cast<size_t>(bytes), call.stream),
              "clearing results");
  };
  clear(call.args.map_out, problem_.AllTiles());
  clear(call.args.mass_out, problem_.AllTiles() * static_cast<int64_t>(sizeof(float)));
  clear(call.args.head_stats, problem_.batch * problem_.q_heads * static_cast<int64_t>(sizeof(sparge_head_stats)));
}

void CudaPlan::WriteEmpty(const Call& call) const {
  const sparge_lse& lse = call.args.lse;
  const cuda::EmptyParams p{tables_.shape, tables_.empty,    TensorOf(call.args.o),
                            lse.data,      lse.batch_stride, lse.head_stride};
  Launch(call, gpu_.write_empty(), &p, tables_.empty_count, problem_.q_heads, cuda::kThreads, 0);
}

void CudaPlan::PackKeys(const Call& call) const {
  const Kernels& kernels = gpu_.kernels(size_);
  const Memory& m = call.memory;
  const auto rotation = static_cast<int32_t>(RotationBlock(problem_.qk_dim));
  const cuda::Tensor k = TensorOf(call.args.k);
  const cuda::Tensor v = call.with_values ? TensorOf(call.args.v) : cuda::Tensor{};
  cuda::SurveyParams survey{};
  survey.shape = tables_.shape;
  survey.k = k;
  survey.v = v;
  survey.scale = problem_.scale * kLog2e / rotation;
  survey.block_mean = m.block_mean;
  survey.block_max = m.block_max;
  survey.finite = m.finite;
  survey.value_max = m.value_max;
  survey.key_mean = m.key_mean;
  survey.units = m.units;
  survey.value_inverse = m.value_inverse;
  survey.value_step = m.value_step;
  survey.value_unit = m.value_unit;
  const int threads = cuda::PackThreads(Dim());
  Launch(call, kernels.survey, &survey, problem_.all_k_blocks, problem_.kv_heads, threads, 0);
  Launch(call, kernels.units, &survey, problem_.sequence_count(), problem_.kv_heads, threads, 0);
  cuda::PackKeysParams pack{};
  pack.shape = tables_.shape;
  pack.k = k;
  pack.v = v;
  pack.key_mean = m.key_mean;
  pack.units = m.units;
  pack.value_inverse = m.value_inverse;
  pack.value_step = m.value_step;
  pack.rotation = rotation;
  pack.summarises = Predicts() && predictor_.summarises_keys;
  pack.steps = m.steps;
  pack.key_scale = m.key_scale;
  pack.block_mean = m.block_mean;
  pack.similarity = m.k_similarity;
  Launch(call, kernels.pack_keys, &pack, problem_.all_k_blocks, problem_.kv_heads, threads, 0);
}

void CudaPlan::PackQueries(const Call& call) const {
  const Memory& m = call.memory;
  cuda::PackQueriesParams p{};
  p.shape = tables_.shape;
  p.q = TensorOf(call.args.q);
  p.key_mean = m.key_mean;
  p.units = m.units;
  p.rotation = static_cast<int32_t>(RotationBlock(problem_.qk_dim));
  p.pools = Predicts() ? static_cast<int32_t>(predictor_.pools) : 0;
  p.judges = Judges();
  p.scores_all = ScoresKeys();
  p.shift_factor = problem_.scale * kLog2e;
  p.factor_limit = kScoreLimit / (static_cast<double>(problem_.qk_dim) * kStoredKeyMax) / 127;
  p.queries = m.queries;
  p.q_shift = m.q_shift;
  p.mean = m.q_mean;
  p.similarity = m.q_similarity;
  p.scored = m.scored;
  Launch(call, gpu_.kernels(size_).pack_queries, &p, problem_.all_q_blocks, problem_.q_heads, cuda::PackThreads(Dim()),
         cuda::LaunchedPackBytes(Dim()));
}

// Scores and selects, as many rows of the map at once as there is room for scores.
void CudaPlan::Select(const Call& call) const {
  const Memory& m = call.memory;
  cuda::StageParams p{};
  p.shape = tables_.shape;
  p.heads = tables_.heads;
  p.mode = !Predicts() ? problem_.select == SPARGE_SELECT_MAP ? cuda::kMapTiles : cuda::kAllTiles
           : problem_.select == SPARGE_SELECT_TOPK  ? cuda::kByCount
           : problem_.select == SPARGE_SELECT_FLOOR ? cuda::kByFloor
                                                    : cuda::kByMass;
  p.logs = predictor_.scores_are_logs;
  p.keep_sink = problem_.keep_sink;
  p.near_keys = problem_.select == SPARGE_SELECT_FLOOR ? static_cast<int32_t>(kNearKeys) : 0;
  p.own_rows = Judges();
  p.softcap = static_cast<float>(problem_.softcap * kLog2e);
  p.mean_factor = problem_.scale * kLog2e;
  p.scored = m.scored;
  p.steps = m.steps;
  p.step_bytes = StepBytesOf();
  p.pool_window = cuda::kPoolRows - 1;
  p.key_scale = m.key_scale;
  p.q_mean = m.q_mean;
  p.q_similarity = m.q_similarity;
  p.k_mean = m.block_mean;
  p.k_similarity = Predicts() && predictor_.summarises_keys ? m.k_similarity : nullptr;
  p.key_mean = m.key_mean;
  p.units = m.units;
  p.scores = m.scores;
  p.score_rows = ScoreRows();
  p.map = problem_.select == SPARGE_SELECT_MAP ? call.args.map : nullptr;
  p.map_batch_stride = call.args.map_batch_stride;
  p.map_head_stride = call.args.map_head_stride;
  p.kept = m.kept;
  p.map_out = call.args.map_out;
  p.mass_out = call.args.mass_out;
  p.stats = reinterpret_cast<cuda::HeadStats*>(call.args.head_stats);
  const Kernels& kernels = gpu_.kernels(size_);
  for (int64_t row = 0; row < MapRows(); row += p.row_count) {
    p.first_row = static_cast<int32_t>(row);
    p.row_count = static_cast<int32_t>(std::min(RowsAtOnce(), MapRows() - row));
    if (ScoresKeys()) {
      // A warp has two rows. Few of them share the key blocks of a row.
      constexpr int64_t kRowsPerBlock = 2 * cuda::kThreads / 32, kWantedBlocks = 1024;
      const int64_t blocks = CeilDiv(p.row_count, kRowsPerBlock);
      const int64_t splits = std::clamp<int64_t>(kWantedBlocks / blocks, 1, CeilDiv(problem_.k_blocks, 8));
      Launch(call, kernels.score_keys, &p, blocks, splits, cuda::kThreads, 0);
    } else if (Predicts()) {
      Launch(call, kernels.score_means, &p, p.row_count, 1, cuda::kThreads, 0);
    }
    Launch(call, gpu_.select(), &p, p.row_count, 1, cuda::kThreads, 0);
  }
}

void CudaPlan::Attend(const Call& call) const {
  const Memory& m = call.memory;
  cuda::AttendParams p{};
  p.shape = tables_.shape;
  p.heads = tables_.heads;
  p.queries = m.queries;
  p.q_shift = m.q_shift;
  p.steps = m.steps;
  p.value_unit = m.value_unit;
  p.kept = m.kept;
  p.softcap = static_cast<float>(problem_.softcap * kLog2e);
  p.o = TensorOf(call.args.o);
  p.lse = call.args.lse.data;
  p.lse_batch_stride = call.args.lse.batch_stride;
  p.lse_head_stride = call.args.lse.head_stride;
  p.stats = reinterpret_cast<cuda::HeadStats*>(call.args.head_stats);
  Launch(call, gpu_.kernels(size_).attend, &p, problem_.all_q_blocks * cuda::ChannelParts(Dim()), problem_.q_heads,
         cuda::kThreads, cuda::LaunchedAttendBytes(Dim(), gpu_.fp8()));
}

void CudaPlan::Run(const sparge_run_args& args) const {
  const Call call = Begin(args, /*with_values=*/true);
  const CurrentContext current(gpu_.driver(), gpu_.context());
  Clear(call);
  WriteEmpty(call);
  if (problem_.idle()) return;
  PackKeys(call);
  PackQueries(call);
  Select(call);
  Attend(call);
}

void CudaPlan::Predict(const sparge_run_args& args) const {
  const Call call = Begin(args, /*with_values=*/false);
  const CurrentContext current(gpu_.driver(), gpu_.context());
  Clear(call);
  if (problem_.idle()) return;
  if (Predicts()) {
    PackKeys(call);
    PackQueries(call);
  }
  Select(call);
}

void CudaPlan::Calibrate(const sparge_run_args&, double) const {
  Fail(SPARGE_INVALID_ARGUMENT, "a GPU does not calibrate yet");
}

}  // namespace sparge::impl

// Orders of grid tokens: permutations, neighbours on the curve, and attention in that order.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

using Grid = std::array<int64_t, 3>;

constexpr sparge_order kOrders[] = {SPARGE_ORDER_HILBERT, SPARGE_ORDER_ROW_MAJOR, SPARGE_ORDER_TIME_MAJOR,
                                    SPARGE_ORDER_RANDOM};

int64_t Cells(const Grid& grid) { return grid[0] * grid[1] * grid[2]; }
uint64_t SeedFor(sparge_order order) { return order == SPARGE_ORDER_RANDOM ? 7 : 0; }
std::string Text(const Grid& g) {
  return std::to_string(g[0]) + " x " + std::to_string(g[1]) + " x " + std::to_string(g[2]);
}

Grid CellAt(const Grid& grid, int64_t raster) {
  return {raster / (grid[1] * grid[2]), raster / grid[2] % grid[1], raster % grid[2]};
}

bool IsPermutation(std::vector<int64_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != static_cast<int64_t>(i)) return false;
  }
  return true;
}

// Steps from one token to the next that do not lead to a neighbour.
int64_t Jumps(const Grid& grid, const std::vector<int64_t>& order) {
  int64_t jumps = 0;
  for (size_t i = 1; i < order.size(); ++i) {
    const Grid a = CellAt(grid, order[i - 1]);
    const Grid b = CellAt(grid, order[i]);
    jumps += std::abs(a[0] - b[0]) + std::abs(a[1] - b[1]) + std::abs(a[2] - b[2]) != 1;
  }
  return jumps;
}

// Mean squared distance of two tokens of the same key block.
double Spread(const Grid& grid, const std::vector<int64_t>& order) {
  double sum = 0, pairs = 0;
  for (size_t first = 0; first + SPARGE_BLOCK_K <= order.size(); first += SPARGE_BLOCK_K) {
    for (size_t i = first; i < first + SPARGE_BLOCK_K; ++i) {
      for (size_t j = first; j < i; ++j, ++pairs) {
        const Grid a = CellAt(grid, order[i]);
        const Grid b = CellAt(grid, order[j]);
        for (int d = 0; d < 3; ++d) sum += static_cast<double>((a[d] - b[d]) * (a[d] - b[d]));
      }
    }
  }
  return sum / pairs;
}

TEST(Permute, HilbertVisitsNeighboursForAllSides) {
  // A walk over neighbours changes colour, as on a chessboard, at every step. The curve is free to choose its last
  // corner, so that parity never forces a jump: there is none, whatever the sides.
  const int64_t most = Quick() ? 9 : 17;
  for (int64_t t = 1; t <= most; ++t) {
    for (int64_t h = 1; h <= most; ++h) {
      for (int64_t w = 1; w <= most; ++w) {
        const Grid grid = {t, h, w};
        const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, grid);
        ASSERT_EQ(static_cast<int64_t>(order.size()), Cells(grid)) << Text(grid);
        ASSERT_TRUE(IsPermutation(order)) << Text(grid);
        ASSERT_EQ(Jumps(grid, order), 0) << Text(grid);
        ASSERT_EQ(order[0], 0) << Text(grid);
      }
    }
  }
}

TEST(Permute, HilbertOfUnevenBoxes) {
  for (const Grid& grid : {Grid{1, 1, 1000}, Grid{1000, 1, 1}, Grid{1, 2, 999}, Grid{2, 999, 1}, Grid{1, 127, 95},
                           Grid{2, 63, 47}, Grid{21, 30, 52}, Grid{13, 45, 80}, Grid{97, 3, 2}, Grid{3, 101, 3}}) {
    const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, grid);
    EXPECT_TRUE(IsPermutation(order)) << Text(grid);
    EXPECT_EQ(Jumps(grid, order), 0) << Text(grid);
  }
}

TEST(Permute, HilbertIsTheClassicCurveOnPowersOfTwo) {
  // Every aligned run of 8^n tokens is a cube of side 2^n, and of 4^n tokens in the plane a square.
  const std::vector<int64_t> cube = TokenOrder(SPARGE_ORDER_HILBERT, {16, 16, 16});
  for (size_t first = 0; first < cube.size(); first += 64) {
    const Grid corner = CellAt({16, 16, 16}, cube[first]);
    for (size_t i = first; i < first + 64; ++i) {
      const Grid cell = CellAt({16, 16, 16}, cube[i]);
      for (int d = 0; d < 3; ++d) ASSERT_EQ(cell[d] / 4, corner[d] / 4) << i;
    }
  }
  const std::vector<int64_t> square = TokenOrder(SPARGE_ORDER_HILBERT, {1, 32, 32});
  for (size_t i = 0; i < square.size(); ++i) {
    const Grid corner = CellAt({1, 32, 32}, square[i / 64 * 64]);
    const Grid cell = CellAt({1, 32, 32}, square[i]);
    for (int d = 0; d < 3; ++d) ASSERT_EQ(cell[d] / 8, corner[d] / 8) << i;
  }
}

TEST(Permute, BlocksAreCompact) {
  // 64 cells of a cube have a mean squared distance of 7.6, of a square 21.3. A curve that is not aligned to its blocks
  // has about half as much again; rows are far above, unless they are about as short as the cube.
  for (const Grid& grid : {Grid{8, 16, 16}, Grid{6, 20, 28}, Grid{21, 30, 52}, Grid{13, 45, 80}, Grid{9, 15, 21}}) {
    const double hilbert = Spread(grid, TokenOrder(SPARGE_ORDER_HILBERT, grid));
    EXPECT_LT(hilbert, 1.5 * 7.62) << Text(grid);
    for (const sparge_order other : {SPARGE_ORDER_ROW_MAJOR, SPARGE_ORDER_TIME_MAJOR, SPARGE_ORDER_RANDOM}) {
      EXPECT_LT(2 * hilbert, Spread(grid, TokenOrder(other, grid, SeedFor(other)))) << Text(grid) << " " << other;
    }
  }
  for (const Grid& grid : {Grid{1, 48, 64}, Grid{1, 127, 95}, Grid{1, 33, 61}}) {
    const double hilbert = Spread(grid, TokenOrder(SPARGE_ORDER_HILBERT, grid));
    EXPECT_LT(hilbert, 1.5 * 21.34) << Text(grid);
    EXPECT_LT(10 * hilbert, Spread(grid, TokenOrder(SPARGE_ORDER_ROW_MAJOR, grid))) << Text(grid);
  }
}

TEST(Permute, OtherOrders) {
  const Grid grid = {3, 4, 5};
  for (const sparge_order order : kOrders) EXPECT_TRUE(IsPermutation(TokenOrder(order, grid, SeedFor(order)))) << order;
  const std::vector<int64_t> rows = TokenOrder(SPARGE_ORDER_ROW_MAJOR, grid);
  const std::vector<int64_t> time = TokenOrder(SPARGE_ORDER_TIME_MAJOR, grid);
  for (int64_t i = 0; i < Cells(grid); ++i) {
    EXPECT_EQ(rows[i], i);
    EXPECT_EQ(time[i], i % 3 * 20 + i / 3);
  }
  const std::vector<int64_t> once = TokenOrder(SPARGE_ORDER_RANDOM, grid, 1);
  EXPECT_EQ(once, TokenOrder(SPARGE_ORDER_RANDOM, grid, 1));
  EXPECT_NE(once, TokenOrder(SPARGE_ORDER_RANDOM, grid, 2));
  EXPECT_NE(once, rows);
}

TEST(Permute, BadOrders) {
  const int64_t good[3] = {1, 1, 1};
  int64_t out[1];
  const auto refused = [&](const char* text, sparge_order order, const int64_t* grid, uint64_t seed, int64_t* to) {
    EXPECT_EQ(sparge_token_order(order, grid, seed, to), SPARGE_INVALID_ARGUMENT) << text;
    EXPECT_NE(std::string(sparge_last_error()).find(text), std::string::npos) << sparge_last_error();
  };
  refused("order=4", static_cast<sparge_order>(4), good, 0, out);
  refused("order=-1", static_cast<sparge_order>(-1), good, 0, out);
  refused("grid is NULL", SPARGE_ORDER_HILBERT, nullptr, 0, out);
  refused("out is NULL", SPARGE_ORDER_HILBERT, good, 0, nullptr);
  refused("seed=3", SPARGE_ORDER_HILBERT, good, 3, out);
  const int64_t flat[3] = {4, 0, 4}, negative[3] = {-1, 1, 1}, huge[3] = {1, 1, int64_t{1} << 31},
                many[3] = {int64_t{1} << 30, int64_t{1} << 30, 16};
  refused("grid[1]=0", SPARGE_ORDER_HILBERT, flat, 0, out);
  refused("grid[0]=-1", SPARGE_ORDER_HILBERT, negative, 0, out);
  refused("grid[2]=2147483648", SPARGE_ORDER_HILBERT, huge, 0, out);
  refused("grid=1073741824,1073741824,16", SPARGE_ORDER_HILBERT, many, 0, out);
  EXPECT_THROW(TokenOrder(SPARGE_ORDER_HILBERT, {4, 0, 4}), Error);
  EXPECT_THROW(TokenOrder(SPARGE_ORDER_HILBERT, {0, -4, 4}), Error);
}

// ------------------------------------------------------------------ attention

struct GridCase {
  Grid grid;
  int64_t text;
  bool after;
};

// Where the i-th token of the blocks lies.
std::vector<int64_t> PlacesOf(const GridCase& c) {
  std::vector<int64_t> places(static_cast<size_t>(c.text + Cells(c.grid)));
  std::iota(places.begin(), places.end(), 0);
  if (places.size() <= SPARGE_BLOCK_K) return places;  // one key block: as they lie
  const int64_t first = c.after ? 0 : c.text;
  const std::vector<int64_t> order = TokenOrder(SPARGE_ORDER_HILBERT, c.grid);
  for (size_t i = 0; i < order.size(); ++i) places[static_cast<size_t>(first) + i] = first + order[i];
  return places;
}

// Tokens near one another in the grid are alike, so that stage 1 has something to skip.
void FillSmooth(const GridCase& c, TestTensor& tensor, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::array<float, 4>> waves(static_cast<size_t>(tensor.dim));
  for (auto& wave : waves) wave = {normal(random) / 3, normal(random) / 3, normal(random) / 3, 3 * normal(random)};
  const int64_t first = c.after ? 0 : c.text;
  tensor.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
    const float noise = 0.2f * normal(random);
    if (t < first || t >= first + Cells(c.grid)) return 3 * normal(random);
    const Grid cell = CellAt(c.grid, t - first);
    const auto& w = waves[static_cast<size_t>(d)];
    const float x = w[0] * static_cast<float>(cell[0]) + w[1] * static_cast<float>(cell[1]) +
                    w[2] * static_cast<float>(cell[2]) + w[3] + static_cast<float>(b + h);
    return 2 * std::cos(x) + noise;
  });
}

Problem GridProblem(const GridCase& c, const Case& given) {
  Case shape = given;
  shape.q_tokens = c.text + Cells(c.grid);
  Problem problem(shape);
  std::copy(c.grid.begin(), c.grid.end(), problem.desc.grid);
  problem.desc.text_tokens = c.text;
  problem.desc.text_after = c.after ? 1 : 0;
  return problem;
}

// The same problem with the tokens gathered by hand, and no grid.
Problem Gathered(const Problem& from, const std::vector<int64_t>& places) {
  Problem problem(from.shape);
  problem.desc = from.desc;
  std::fill_n(problem.desc.grid, 3, 0);
  problem.desc.text_tokens = problem.desc.text_after = 0;
  problem.map = from.map;
  problem.map_batch_stride = from.map_batch_stride;
  problem.map_head_stride = from.map_head_stride;
  const auto gather = [&](const TestTensor& tensor, TestTensor& to) {
    to.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return tensor.Get(b, h, places[t], d); });
  };
  gather(from.q, problem.q);
  gather(from.k, problem.k);
  gather(from.v, problem.v);
  return problem;
}

// `result` has the tokens where they lie, `by_hand` in the order of `places`.
void ExpectSameBits(const Result& result, const Result& by_hand, const std::vector<int64_t>& places) {
  const TestTensor& o = result.o;
  const auto tokens = static_cast<int64_t>(places.size());
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t h = 0; h < o.heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < o.dim; ++d) ASSERT_EQ(o.Get(b, h, places[t], d), by_hand.o.Get(b, h, t, d)) << t;
        const int64_t row = (b * o.heads + h) * tokens;
        ASSERT_EQ(result.lse[row + places[t]], by_hand.lse[row + t]) << t;
      }
    }
  }
  EXPECT_EQ(result.map, by_hand.map);
  EXPECT_EQ(result.stats.total.qk_computed, by_hand.stats.total.qk_computed);
  EXPECT_EQ(result.stats.total.pv_computed, by_hand.stats.total.pv_computed);
}

const GridCase kGridCases[] = {{{4, 8, 9}, 0, false}, {{3, 7, 11}, 30, false}, {{1, 17, 19}, 77, true},
                               {{5, 9, 6}, 1, true},  {{2, 2, 3}, 0, false},   {{1, 2, 3}, 5, true},
                               {{4, 4, 4}, 0, false}, {{5, 1, 13}, 0, false}};

TEST(Permute, DenseAttentionDoesNotDependOnTheOrder) {
  const Context context(2);
  for (const GridCase& c : kGridCases) {
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      SCOPED_TRACE(Text(c.grid) + " " + Name(precision));
      Problem problem = GridProblem(c, {.batch = 2, .q_heads = 2, .kv_heads = 1, .qk_dim = 40, .v_dim = 24});
      problem.desc.precision = precision;
      const Result with = RunProblem(context, problem);
      Problem raster = problem;
      std::fill_n(raster.desc.grid, 3, 0);
      raster.desc.text_tokens = raster.desc.text_after = 0;
      const Result reference = Reference(context, raster);
      EXPECT_LE(RelativeL1(with.o, reference.o), Tolerance(precision, SPARGE_F32, 40));
      // Without the way back, outputs would be those of other tokens.
      const Result without = RunProblem(context, raster);
      EXPECT_LE(RelativeL1(with.o, without.o), 2 * Tolerance(precision, SPARGE_F32, 40));
      // No score is off by more than five times its usual error, of which the tolerance is twice; in both runs.
      EXPECT_LE(MaxAbsDifference(with.lse, without.lse), 5 * Tolerance(precision, SPARGE_F32, 40));
    }
  }
}

TEST(Permute, SameBitsAsTokensGatheredByHand) {
  const Context context(2);
  for (const GridCase& c : kGridCases) {
    const std::vector<int64_t> places = PlacesOf(c);
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_CDF, SPARGE_SELECT_TOPK, SPARGE_SELECT_MAP}) {
        SCOPED_TRACE(Text(c.grid) + " " + Name(precision) + " select " + std::to_string(select));
        const Case shape{.batch = 2,
                         .q_heads = 2,
                         .kv_heads = 1,
                         .qk_dim = 24,
                         .v_dim = 40,
                         .k_type = SPARGE_F16,
                         .v_type = SPARGE_BF16,
                         .layout = Layout::kPrime};
        Problem problem = GridProblem(c, shape);
        if (select == SPARGE_SELECT_MAP) RandomMap(problem, 0.5, 3);
        problem.desc.select = select;
        problem.desc.precision = precision;
        problem.desc.params = {0.1, 0.7, 0.4, 6.0};
        const Problem by_hand = Gathered(problem, places);
        ExpectSameBits(RunProblem(context, problem), RunProblem(context, by_hand), places);
        EXPECT_EQ(Predict(context, problem).map, Predict(context, by_hand).map);
      }
    }
  }
}

TEST(Permute, SparseAttentionOnSmoothTokensSkipsMore) {
  const Context context(2);
  const GridCase c = {{6, 20, 28}, 50, false};
  Problem problem = GridProblem(c, {.q_heads = 1, .qk_dim = 64});
  FillSmooth(c, problem.q, 1);
  FillSmooth(c, problem.k, 1);
  FillSmooth(c, problem.v, 2);
  problem.desc.select = SPARGE_SELECT_CDF;
  problem.desc.params.tau = 0.95;
  const std::vector<int64_t> places = PlacesOf(c);
  const Result curve = RunProblem(context, problem);
  ExpectSameBits(curve, RunProblem(context, Gathered(problem, places)), places);
  Problem raster = problem;
  std::fill_n(raster.desc.grid, 3, 0);
  raster.desc.text_tokens = 0;
  const Result rows = RunProblem(context, raster);
  const Result dense = Reference(context, raster);
  EXPECT_LT(curve.stats.total.qk_computed, rows.stats.total.qk_computed);
  // 1 - tau of the mass may be missing, and as much again by renormalisation.
  EXPECT_LT(RelativeL1(curve.o, dense.o),
            2 * (1 - problem.desc.params.tau) + Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
}

TEST(Permute, ReferenceTakesMapsInTheOrderOfTheCurve) {
  const Context context(2);
  const GridCase c = {{5, 9, 11}, 20, true};
  Problem problem = GridProblem(c, {.batch = 1, .q_heads = 2, .qk_dim = 32});
  RandomMap(problem, 0.5, 5);
  problem.desc.precision = SPARGE_PRECISION_FP32;
  const Result run = RunProblem(context, problem);
  const Result reference = Reference(context, problem, problem.map);
  EXPECT_LE(RelativeL1(run.o, reference.o), Tolerance(SPARGE_PRECISION_FP32, SPARGE_F32, 32));
  EXPECT_LE(MaxAbsDifference(run.lse, reference.lse), 1e-5);
  // The same map in raster order is another set of pairs.
  Problem raster = problem;
  std::fill_n(raster.desc.grid, 3, 0);
  raster.desc.text_tokens = raster.desc.text_after = 0;
  EXPECT_GT(RelativeL1(Reference(context, raster, problem.map).o, reference.o), 0.1);
}

TEST(Permute, SinkLogitsSoftcapAndTokensThatAreNotFinite) {
  const Context context(2);
  const GridCase c = {{3, 10, 13}, 12, false};
  const std::vector<int64_t> places = PlacesOf(c);
  static const float sinks[] = {0.5f, -1.0f};
  Problem problem = GridProblem(c, {.q_heads = 2, .qk_dim = 32, .o_type = SPARGE_F16});
  problem.desc.sink_logits = sinks;
  problem.desc.softcap = 20;
  problem.desc.keep_sink = 1;
  problem.desc.select = SPARGE_SELECT_CDF;
  problem.desc.params.tau = 0.5;
  ExpectSameBits(RunProblem(context, problem), RunProblem(context, Gathered(problem, places)), places);
  // A query that is not finite spoils its own row, wherever its block stands.
  problem.q.Set(0, 1, 100, 3, kInf);
  const Result result = RunProblem(context, problem);
  for (int64_t t = 0; t < problem.shape.q_tokens; ++t) {
    EXPECT_EQ(std::isnan(result.o.Get(0, 1, t, 0)), t == 100) << t;
    EXPECT_FALSE(std::isnan(result.o.Get(0, 0, t, 0))) << t;
  }
}

TEST(Permute, BadGrids) {
  static const float slopes[] = {1.0f};
  static const int64_t offsets[] = {0, 30};
  struct Bad {
    const char* text;
    std::function<void(PlanDesc&)> spoil;
  };
  const Bad cases[] = {
      {"grid[0]=0", [](PlanDesc& d) { d.grid[0] = 0; }},
      {"grid[2]=-4", [](PlanDesc& d) { d.grid[2] = -4; }},
      {"has more than 2147483647 cells", [](PlanDesc& d) { d.grid[0] = d.grid[1] = d.grid[2] = 1 << 30; }},
      {"text_tokens=-1", [](PlanDesc& d) { d.text_tokens = -1; }},
      {"text_after=2", [](PlanDesc& d) { d.text_after = 2; }},
      {"grid=2,3,4 and text_tokens=7 make 31 tokens", [](PlanDesc& d) { d.text_tokens = 7; }},
      {"q_tokens=31 and kv_tokens=30", [](PlanDesc& d) { d.q_tokens = 31; }},
      {"q_tokens=30 and kv_tokens=29", [](PlanDesc& d) { d.kv_tokens = 29; }},
      {"text_tokens=6 has no effect without grid", [](PlanDesc& d) { std::fill_n(d.grid, 3, 0); }},
      {"text_after=1 has no effect without grid",
       [](PlanDesc& d) { std::fill_n(d.grid, 3, 0), d.text_tokens = 0, d.text_after = 1; }},
      {"causal=1 cannot be combined with grid", [](PlanDesc& d) { d.causal = 1; }},
      {"window=5 cannot be combined with grid", [](PlanDesc& d) { d.window = 5; }},
      {"mask=1 cannot be combined with grid", [](PlanDesc& d) { d.mask = SPARGE_MASK_BOOL; }},
      {"alibi_slopes cannot be combined with grid", [](PlanDesc& d) { d.alibi_slopes = slopes; }},
      {"q_offsets cannot be combined with grid", [](PlanDesc& d) { d.q_offsets = d.kv_offsets = offsets; }},
  };
  const Context context(1);
  for (const Bad& c : cases) {
    SCOPED_TRACE(c.text);
    PlanDesc desc = GridProblem({{2, 3, 4}, 6, false}, {.qk_dim = 8}).desc;
    c.spoil(desc);
    sparge_plan* plan = nullptr;
    EXPECT_EQ(sparge_plan_create(context.get(), &desc, &plan), SPARGE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sparge_last_error()).find(c.text), std::string::npos) << sparge_last_error();
  }
  // A caller that was compiled before there were grids.
  PlanDesc old = GridProblem({{2, 3, 4}, 6, false}, {.qk_dim = 8}).desc;
  old.struct_size = offsetof(sparge_plan_desc, grid);
  sparge_plan* plan = nullptr;
  EXPECT_EQ(sparge_plan_create(context.get(), &old, &plan), SPARGE_OK);
  sparge_plan_destroy(plan);
}

}  // namespace
}  // namespace sparge::testing

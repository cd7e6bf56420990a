// Rooms behind the ABI, one by one: conversions, visibility, packing layout and bounds, schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "src/base/arena.h"
#include "src/base/half.h"
#include "src/base/status.h"
#include "src/calibrate/calibration.h"
#include "src/cpu/instruction_sets.h"
#include "src/cpu/kernel/state.h"
#include "src/cpu/pack.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/predict.h"
#include "src/cpu/schedule.h"
#include "src/problem/order.h"

namespace sparge::impl {
namespace {

TEST(Half, RoundTripsAndRounding) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = FloatFromF16(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(FloatFromF16(F16FromFloat(value))));
    } else {
      ASSERT_EQ(F16FromFloat(value), half);
    }
    const float brain = FloatFromBf16(half);
    if (!std::isnan(brain)) {
      ASSERT_EQ(Bf16FromFloat(brain), half);
    }
  }
  EXPECT_EQ(F16FromFloat(1.0f + 0x1p-11f), 0x3C00) << "half way: to even";
  EXPECT_EQ(F16FromFloat(1.0f + 3 * 0x1p-11f), 0x3C02);
  EXPECT_EQ(F16FromFloat(65519.0f), 0x7BFF);
  EXPECT_EQ(F16FromFloat(65520.0f), 0x7C00);
  EXPECT_EQ(F16FromFloat(0x1p-25f), 0x0000);
  EXPECT_EQ(F16FromFloat(-0x1.8p-25f), 0x8001);
  EXPECT_TRUE(std::isnan(FloatFromBf16(Bf16FromFloat(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Visible, AgreesWithTheDefinition) {
  for (const bool causal : {false, true}) {
    for (const int64_t window : {0, 1, 5}) {
      for (const int64_t offset : {-7, 0, 3, 40}) {
        const Visible visible{20, offset, window, causal};
        for (int64_t i = 0; i < 30; ++i) {
          for (int64_t j = 0; j < 20; ++j) {
            const bool expected = (!causal || j <= i + offset) && (window == 0 || j > i + offset - window);
            const Range keys = visible.KeysOf(i);
            ASSERT_EQ(j >= keys.begin && j < keys.end, expected) << i << " " << j;
          }
        }
        for (int64_t first = 0; first < 25; first += 4) {
          for (int64_t j = 0; j < 20; ++j) {
            bool any = false, all = true;
            for (int64_t i = first; i < first + 4; ++i) {
              const Range keys = visible.KeysOf(i);
              const bool sees = j >= keys.begin && j < keys.end;
              any |= sees;
              all &= sees;
            }
            const Range some = visible.KeysOfAny(first, first + 3), every = visible.KeysOfAll(first, first + 3);
            ASSERT_EQ(j >= some.begin && j < some.end, any);
            ASSERT_EQ(j >= every.begin && j < every.end, all);
          }
        }
      }
    }
  }
}

// Packs `tokens` rows of noise as keys with the grid of an instruction set, and reads the integers back.
struct PackedRows {
  std::vector<int32_t> out;
  std::vector<float> scale;
  std::vector<int32_t> start;
  int64_t lanes, panel_lanes;
};

PackedRows PackNoise(const CpuOps& cpu, sparge_precision precision, const QuantGrid& grid, const std::vector<float>& x,
                     int64_t dim, bool rotate = false) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / dim;
  const PackOps& ops = *cpu.pack;
  PackedRows rows;
  rows.panel_lanes = cpu.kernel->panel_lanes;
  rows.lanes = CeilDiv(dim, PerLane(precision));
  rows.out.resize(static_cast<size_t>(rows.lanes * kBlockK));
  rows.scale.resize(kBlockK);
  rows.start.resize(static_cast<size_t>(grid.Sums(rows.lanes) * kBlockK));
  alignas(64) static float centre[SPARGE_MAX_HEAD_DIM] = {}, scratch[RowScratchFloats(SPARGE_MAX_HEAD_DIM)];
  PackRowsArgs args{};
  args.tokens = {reinterpret_cast<const std::byte*>(x.data()), SPARGE_F32, dim, tokens, dim};
  args.dim_pad = RoundUp(dim, kChannelAlign);
  args.precision = precision;
  args.centre = centre;
  args.inverse_unit = 1.0f;
  args.max = grid.k_max;
  args.norm_max = grid.k_norm_max;
  args.sum_lanes = grid.sum_lanes;
  args.rotate = rotate;
  args.out = rows.out.data();
  args.row_lanes = rows.lanes;
  args.scale = rows.scale.data();
  args.start = rows.start.data();
  args.start_offset = grid.q_offset;
  args.scratch = scratch;
  EXPECT_EQ(ops.rows(args), 0u);
  return rows;
}

// Number `d` of token `t` in the key layout [panel][lane][token of the panel][number].
int32_t NumberAt(const PackedRows& rows, sparge_precision precision, int64_t t, int64_t d) {
  const int per = PerLane(precision);
  const int64_t panel = t / rows.panel_lanes;
  const int64_t lane = (panel * rows.lanes + d / per) * rows.panel_lanes + t % rows.panel_lanes;
  const auto* bytes = reinterpret_cast<const char*>(rows.out.data() + lane);
  if (precision == SPARGE_PRECISION_INT8) return static_cast<int8_t>(bytes[d % per]);
  int16_t value;
  std::memcpy(&value, bytes + 2 * (d % per), 2);
  return value;
}

TEST(Pack, IntegersAreNearAndWithinTheirBounds) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const InstructionSet& isa : InstructionSets()) {
    if (!isa.runnable()) continue;
    for (const sparge_precision precision : {SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      const QuantGrid& grid = isa.ops().kernel->grid[precision];
      for (const int64_t dim : {1, 5, 64, 576}) {
        for (const int kind : {0, 1, 2}) {  // noise, all at +-max, tiny
          std::vector<float> x(static_cast<size_t>(kBlockK * dim));
          for (float& value : x) {
            value = kind == 0 ? normal(random) : (random() % 2 == 0 ? 1.0f : -1.0f) * (kind == 1 ? 3e38f : 1e-42f);
          }
          const PackedRows rows = PackNoise(isa.ops(), precision, grid, x, dim);
          for (int64_t t = 0; t < kBlockK; ++t) {
            // What one accumulator sums: the row, or both halves of the lanes of every 64 numbers.
            const int64_t sums = grid.Sums(rows.lanes);
            std::vector<double> norm2(static_cast<size_t>(2 * sums));
            std::vector<int64_t> sum(static_cast<size_t>(2 * sums));
            for (int64_t d = 0; d < dim; ++d) {
              const int32_t n = NumberAt(rows, precision, t, d);
              const auto at = static_cast<size_t>(grid.sum_lanes == 0 ? 0 : d / 64 * 2 + d % 4 / 2);
              norm2[at] += static_cast<double>(n) * n;
              sum[at] += n;
              ASSERT_LE(std::abs(n), grid.k_max);
              if (kind == 2) continue;  // the scale itself is denormal
              const double value = static_cast<double>(n) * rows.scale[t];
              ASSERT_NEAR(value / rows.scale[t], x[t * dim + d] / rows.scale[t], 0.51) << isa.name << " " << dim;
            }
            const double rounding = std::sqrt(grid.sum_lanes == 0 ? static_cast<double>(dim) : 32.0) / 2;
            for (const double n2 : norm2) {
              if (grid.k_norm_max > 0) {
                ASSERT_LE(std::sqrt(n2), grid.k_norm_max + rounding + 1e-3);
              }
            }
            for (int64_t i = 0; i < sums; ++i) {
              const int32_t start = rows.start[static_cast<size_t>(i * kBlockK + t)];
              const int64_t first = -grid.q_offset * sum[static_cast<size_t>(2 * i)];
              if (grid.sum_lanes == 0) {
                ASSERT_EQ(start, first);
              } else {
                ASSERT_EQ(static_cast<int16_t>(start), static_cast<int16_t>(first));
                ASSERT_EQ(static_cast<int16_t>(start >> 16),
                          static_cast<int16_t>(-grid.q_offset * sum[static_cast<size_t>(2 * i + 1)]));
              }
            }
          }
        }
      }
    }
  }
}

// Rotating both sides multiplies every dot product by the block, and nothing else.
TEST(Pack, RotationKeepsDotProducts) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const InstructionSet& isa : InstructionSets()) {
    if (!isa.runnable()) continue;
    QuantGrid grid = isa.ops().kernel->grid[SPARGE_PRECISION_INT8];
    ASSERT_TRUE(grid.rotate);
    for (const int64_t dim : {1, 3, 8, 40, 64, 72, 96, 256, 576}) {
      std::vector<float> x(static_cast<size_t>(kBlockK * dim));
      for (float& value : x) value = normal(random);
      const PackedRows rows = PackNoise(isa.ops(), SPARGE_PRECISION_INT8, grid, x, dim, /*rotate=*/true);
      for (int64_t t = 0; t + 1 < kBlockK; ++t) {
        double dot = 0, expected = 0, norm = 0;
        for (int64_t d = 0; d < rows.lanes * 4; ++d) {
          dot += static_cast<double>(NumberAt(rows, SPARGE_PRECISION_INT8, t, d)) *
                 NumberAt(rows, SPARGE_PRECISION_INT8, t + 1, d);
        }
        for (int64_t d = 0; d < dim; ++d) {
          expected += static_cast<double>(x[t * dim + d]) * x[(t + 1) * dim + d];
          norm += std::fabs(x[t * dim + d]) + std::fabs(x[(t + 1) * dim + d]);
        }
        dot *= static_cast<double>(rows.scale[t]) * rows.scale[t + 1] / static_cast<double>(RotationBlock(dim));
        // Half a step of 1/127 of the largest (at most 4) against every number of the other side; a bound on norms may
        // make the steps twice as coarse.
        const double step = (grid.k_norm_max > 0 ? 2.0 : 1.0) / 127;
        ASSERT_NEAR(dot, expected, 0.5 * 4.5 * step * norm) << isa.name << " " << dim;
      }
    }
  }
}

// Every bit of every token counts, and its place.
TEST(Pack, ChecksumsDiffer) {
  for (const InstructionSet& isa : InstructionSets()) {
    if (!isa.runnable()) continue;
    SCOPED_TRACE(isa.name);
    const PackOps& ops = *isa.ops().pack;
    for (const int64_t dim : {1, 8, 37, 64}) {
      constexpr int64_t kTokens = 11;  // four chains of two words, and a rest
      std::vector<uint16_t> data(kTokens * dim);
      std::mt19937 random(1);
      for (uint16_t& x : data) x = static_cast<uint16_t>(random());
      const TokenRows rows{reinterpret_cast<const std::byte*>(data.data()), SPARGE_F16, dim, kTokens, dim};
      std::set<uint64_t> sums = {ops.checksum(rows)};
      for (uint16_t& x : data) {
        for (int bit = 0; bit < 16; ++bit) {
          x ^= uint16_t(1 << bit);
          sums.insert(ops.checksum(rows));
          x ^= uint16_t(1 << bit);
        }
      }
      // Signs, that is highest bits, of two neighbours in one column: they must not cancel.
      for (int64_t t = 0; t + 4 < kTokens; ++t) {
        data[t * dim] ^= 0x8000, data[(t + 4) * dim] ^= 0x8000;
        sums.insert(ops.checksum(rows));
        data[t * dim] ^= 0x8000, data[(t + 4) * dim] ^= 0x8000;
      }
      // Two words of a lane whose changes would cancel in the last of its steps.
      for (int64_t t = 0; dim == 8 && t + 4 < kTokens; ++t) {
        data[t * dim + 1] ^= 0x8000, data[(t + 4) * dim + 1] ^= 0x8001;
        EXPECT_FALSE(sums.contains(ops.checksum(rows)));
        data[t * dim + 1] ^= 0x8000, data[(t + 4) * dim + 1] ^= 0x8001;
      }
      TokenRows other = rows;
      other.count = kTokens - 1;
      sums.insert(ops.checksum(other));
      other = rows;
      other.dtype = SPARGE_BF16;
      sums.insert(ops.checksum(other));
      EXPECT_EQ(sums.size(), size_t(1 + kTokens * dim * 16 + (kTokens - 4) + 2)) << dim;
      EXPECT_TRUE(sums.contains(ops.checksum(rows)));
    }
  }
}

// With four times the keys, old samples count a quarter; with fewer keys and then as many again, nothing is forgotten.
TEST(Calibration, SamplesWithFewerKeysCountLess) {
  // So loose a bound that differences between these calls are trifles.
  Calibration calibration(1, {SPARGE_MEASURE_L1, 0.2, 0.2}, 1.0, 0);
  const auto learn = [&](int64_t count, double keys, double error) {
    static uint64_t call = 0;
    Sample sample{};
    sample.call = call++;
    sample.keys = keys;
    RowResult result{};
    result.valid = true;
    result.similarity = 1;
    result.size = 1;
    result.tiles = 16;
    result.error.fill(static_cast<float>(error));
    result.error[0] = 0;
    result.kept.fill(8);
    result.kept[0] = 16;
    const std::vector<RowResult> rows(static_cast<size_t>(count), result);
    calibration.Learn(sample, rows);
    calibration.Decide(0, sample.call, Follow::kAnew);
  };
  const auto estimate = [&] {
    sparge_head_estimate out{};
    calibration.Describe(0, out);
    return out;
  };
  learn(160, 1000, 0.01);
  EXPECT_EQ(estimate().samples, 160);
  EXPECT_NEAR(estimate().error, 0.01, 1e-8);
  learn(40, 4000, 0.015);
  EXPECT_EQ(estimate().samples, 80);
  EXPECT_NEAR(estimate().error, 0.0125, 1e-8);  // floats
  learn(80, 1000, 0.015);
  learn(20, 4000, 0.015);
  EXPECT_EQ(estimate().samples, 180);
}

// 96 rows, of which only `skipping` are of blocks that are alike and leave a tile out at all.
sparge_head_estimate WithRowsThatSkip(int skipping) {
  Calibration calibration(1, {SPARGE_MEASURE_L2, 0.03, 0.03}, 1.0, 0);
  std::vector<RowResult> rows(96);
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool alike = static_cast<int>(i) < skipping;
    RowResult& row = rows[i];
    row.valid = true;
    row.similarity = alike ? 0.9f : 0.05f;
    row.size = 1;
    row.tiles = 100;
    row.kept.fill(10);
    row.error.fill(alike ? 1e-6f : 1.0f);  // theta leaves out what is bad
    row.kept[0] = 100;
    row.error[0] = 0;
  }
  const uint64_t call = calibration.NextCall();
  Sample sample{};
  sample.call = call;
  sample.count = static_cast<int64_t>(rows.size());
  sample.keys = 4096;
  calibration.Learn(sample, rows);
  calibration.Decide(0, call, Follow::kAnew);
  sparge_head_estimate estimate{};
  calibration.Describe(0, estimate);
  return estimate;
}

TEST(Calibration, AFewRowsThatSkipAreNotBelieved) {
  EXPECT_EQ(WithRowsThatSkip(12).state, SPARGE_HEAD_DENSE);
  const sparge_head_estimate believed = WithRowsThatSkip(60);
  EXPECT_EQ(believed.state, SPARGE_HEAD_SPARSE);
  EXPECT_GT(believed.params.theta, 0.05);
}

TEST(Kernel, GridsCannotOverflow) {
  for (const InstructionSet& isa : InstructionSets()) {
    const KernelOps& ops = *isa.ops().kernel;
    const QuantGrid& g8 = ops.grid[SPARGE_PRECISION_INT8];
    const QuantGrid& g16 = ops.grid[SPARGE_PRECISION_INT16];
    EXPECT_LT(576.0 * (g8.q_max + g8.q_offset) * g8.k_max + 576.0 * g8.q_offset * g8.k_max, 0x1p31);
    EXPECT_LT(64.0 * g8.p_max * g8.v_max, 0x1p31);
    EXPECT_LE(g8.q_max + g8.q_offset, 255);
    EXPECT_LE(g8.p_max, 255);
    EXPECT_LT(64.0 * g16.p_max * g16.v_max, 0x1p31);
    EXPECT_LT((g16.q_norm_max + 12.0) * (g16.k_norm_max + 12.0), 0x1p31);
    if (g8.sum_lanes != 0) {
      const double rounding = std::sqrt(32.0) / 2;
      EXPECT_EQ(g8.sum_lanes, 16);
      EXPECT_LT((g8.q_norm_max + rounding) * (g8.k_norm_max + rounding), 0x1p15);
      EXPECT_LT((g8.p_norm_max + rounding) * (g8.v_norm_max + rounding), 0x1p15);
      EXPECT_LT((g8.p_norm_max + rounding) * g8.fine_max * std::sqrt(32.0), 0x1p15);
    }
    // Two products of vpmaddubsw must fit int16 where q or p have seven bits.
    if (g8.q_offset == 64) {
      EXPECT_LE(2 * (g8.q_max + g8.q_offset) * g8.k_max, 32767);
      EXPECT_LE(2 * g8.p_max * g8.v_max, 32767);
    }
  }
}

// `first`, `all`: where the queries stand among all.
Plan SmallPlan(int64_t heads, int64_t queries, int64_t keys, int64_t first = 0, int64_t all = 0) {
  const InstructionSet& isa = ChooseInstructionSet(nullptr);
  sparge_plan_desc desc;
  sparge_plan_desc_init(&desc);
  desc.batch = 1;
  desc.q_heads = desc.kv_heads = heads;
  desc.q_tokens = queries;
  desc.kv_tokens = keys;
  desc.qk_dim = desc.v_dim = 16;
  const sparge_executor executor{sizeof(sparge_executor), nullptr, 1, nullptr};
  desc.first_query = first;
  desc.all_queries = all;
  return Plan(MakeProblems(desc, nullptr).front(), {executor, isa.name, isa.ops()});
}

// A schedule over a map with the given kept tiles per row.
std::vector<WorkItem> ScheduleOf(const Plan& plan, std::vector<int64_t> computed, std::vector<SplitRow>* split) {
  Arena size;
  LaySchedule(plan, size);
  std::vector<std::byte> memory(size.used() + 64);
  Arena arena(memory.data());
  Schedule schedule = LaySchedule(plan, arena);
  BlockMap map{};
  map.computed = computed.data();
  MakeSchedule(plan, {plan.heads.data(), plan.active.data()}, map, schedule);
  if (split != nullptr) split->assign(schedule.split_rows, schedule.split_rows + schedule.split_count);
  return {schedule.items, schedule.items + schedule.item_count};
}

TEST(Schedule, LargestFirstAndEveryTileOnce) {
  const Plan plan = SmallPlan(4, 128 * 8, 6400);
  std::vector<int64_t> computed;
  for (int i = 0; i < 32; ++i) computed.push_back(i * 37 % 100);
  std::vector<SplitRow> split;
  const std::vector<WorkItem> items = ScheduleOf(plan, computed, &split);
  std::vector<int64_t> seen(32);
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) {
      EXPECT_GE(items[i - 1].end - items[i - 1].begin, items[i].end - items[i].begin);
    }
    seen[items[i].row] += items[i].end - items[i].begin;
    // Rows 1 and 2 have 37 and 74 tiles and are among those that are split for the end.
    EXPECT_EQ(items[i].part >= 0, items[i].row == 1 || items[i].row == 2);
  }
  EXPECT_EQ(seen, computed);
  ASSERT_EQ(split.size(), 2u);
  EXPECT_EQ(split[0].parts, 2);
  EXPECT_EQ(split[1].parts, 4);
}

TEST(Schedule, FewLongRowsAreSplitWithoutGap) {
  const Plan plan = SmallPlan(1, 1, 64 * 100);
  std::vector<SplitRow> split;
  std::vector<WorkItem> items = ScheduleOf(plan, {100}, &split);
  ASSERT_EQ(split.size(), 1u);
  ASSERT_EQ(items.size(), static_cast<size_t>(split[0].parts));
  EXPECT_GT(items.size(), 3u);
  std::sort(items.begin(), items.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  int64_t next = 0;
  for (const WorkItem& item : items) {
    EXPECT_EQ(item.begin, next);
    EXPECT_GE(item.end - item.begin, kTilesPerPart);
    next = item.end;
  }
  EXPECT_EQ(next, 100);
  EXPECT_EQ(ScheduleOf(plan, {3}, &split).size(), 1u) << "short rows are not split";
}

// A row is split as in the whole, whichever part it is computed in: the same bits on one machine and on many.
TEST(Schedule, PartsSplitTheirRowsAsTheWholeDoes) {
  const int64_t blocks = 24, keys = 64 * 100;
  const auto parts_of = [&](const Plan& plan) {
    std::vector<int64_t> parts(static_cast<size_t>(plan.all_q_blocks), 1);
    std::vector<SplitRow> split;
    ScheduleOf(plan, std::vector<int64_t>(static_cast<size_t>(plan.all_q_blocks), 100), &split);
    for (const SplitRow& row : split) parts[row.row] = row.parts;
    return parts;
  };
  const std::vector<int64_t> whole = parts_of(SmallPlan(1, 128 * blocks, keys));
  EXPECT_GT(whole[0], 1);
  EXPECT_EQ(whole.back(), 1);
  std::vector<int64_t> joined;
  for (int64_t part = 0; part < 4; ++part) {
    const auto here = parts_of(SmallPlan(1, 128 * blocks / 4, keys, 128 * blocks / 4 * part, 128 * blocks));
    joined.insert(joined.end(), here.begin(), here.end());
  }
  EXPECT_EQ(joined, whole);
  EXPECT_NE(parts_of(SmallPlan(1, 128 * blocks / 4, keys)).back(), 1) << "by itself, so few rows are split";
}

TEST(State, JoiningEmptyStatesGivesNoNan) {
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  float o_a[2] = {0, 0}, m_a = kMinusInf, l_a = 0, o_b[2] = {3, 4}, m_b = 1.5f, l_b = 2;
  JoinStates({o_a, &m_a, &l_a}, {o_b, &m_b, &l_b}, 1, 2);
  EXPECT_EQ(m_a, 1.5f);
  EXPECT_EQ(l_a, 2.0f);
  EXPECT_EQ(o_a[1], 4.0f);
  m_a = m_b = kMinusInf;
  l_a = l_b = 0;
  JoinStates({o_a, &m_a, &l_a}, {o_b, &m_b, &l_b}, 1, 2);
  EXPECT_EQ(l_a, 0.0f);
  EXPECT_EQ(o_a[0], 0.0f);
  AddSink(3.0f, o_a, m_a, l_a, 2);
  EXPECT_EQ(l_a, 0.0f) << "a row that saw no key stays empty";
}

TEST(Curves, AreLaidOncePerGrid) {
  const auto desc = [](int64_t side, int64_t text, int32_t after) {
    sparge_plan_desc d{};
    d.grid[0] = d.grid[1] = d.grid[2] = side;
    d.text_tokens = text;
    d.text_after = after;
    d.q_tokens = d.kv_tokens = side * side * side + text;
    return d;
  };
  Curves curves;
  const TokenOrder first = curves.Get(desc(4, 10, 0));
  EXPECT_EQ(*first, *LayCurve(desc(4, 10, 0)));
  EXPECT_EQ(curves.Get(desc(4, 10, 0)), first);
  EXPECT_NE(*curves.Get(desc(4, 10, 1)), *first) << "text after the grid";
  EXPECT_EQ(curves.Get(desc(4, 11, 0))->size(), 75U);
  EXPECT_EQ(curves.Get(desc(5, 10, 0))->size(), 135U);
  EXPECT_EQ(curves.Get(desc(4, 10, 0)), first) << "still one of the last few";
  for (int64_t side = 6; side < 6 + static_cast<int64_t>(Curves::kMostKept); ++side) curves.Get(desc(side, 0, 0));
  EXPECT_NE(curves.Get(desc(4, 10, 0)), first);
  EXPECT_EQ((*first)[0], 0) << "whoever has it keeps it";
}

}  // namespace
}  // namespace sparge::impl

// `sparge bench` must notice a wrong result: its check on right outputs, and on outputs spoiled in every way that a
// broken kernel might.
#include "cli/bench_verify.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>

#include "cli/bench_data.h"
#include "cli/bench_run.h"

namespace sparge::cli {
namespace {

// A case that was run, and whose output can be spoiled.
class Bench {
 public:
  explicit Bench(const BenchCase& c)
      : c(c), inputs_(MakeInputs(c)), random_(MakeRandomMap(c)), o(static_cast<size_t>(c.heads * c.queries * c.dim)) {
    map.resize(static_cast<size_t>(c.heads * c.q_blocks() * c.k_blocks()));
    args_.q = ViewHeads(inputs_.q.data(), c.dtype, c.heads, c.queries, c.dim);
    args_.k = ViewHeads(inputs_.k.data(), c.dtype, c.kv_heads, c.tokens, c.dim);
    args_.v = ViewHeads(inputs_.v.data(), c.dtype, c.kv_heads, c.tokens, c.dim);
    args_.o = ViewHeads(o.data(), SPARGE_F32, c.heads, c.queries, c.dim);
    args_.map_out = map.data();
    if (!random_.empty()) args_.map = random_.data();
    args_.map_head_stride = c.q_blocks() * c.k_blocks();
    Plan(context_, DescribeCase(c)).Run(args_);
  }
  Verdict Verify() const { return VerifyCase(context_, c, args_, map); }
  float* Row(int64_t head, int64_t query) { return o.data() + (head * c.queries + query) * c.dim; }

  BenchCase c;

 private:
  Context context_{2};
  BenchInputs inputs_;
  std::vector<uint8_t> random_;
  RunArgs args_;

 public:
  std::vector<float> o;
  std::vector<uint8_t> map;
};

// All precisions, or with SPARGE_TEST_QUICK the default one: the reference is slow under emulators.
std::vector<sparge_precision> Precisions() {
  if (std::getenv("SPARGE_TEST_QUICK") != nullptr) return {SPARGE_PRECISION_INT8};
  return {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};
}

BenchCase Small(sparge_precision precision, BenchSelect select, bool causal) {
  BenchCase c;
  c.tokens = 300;
  c.queries = 260;  // three blocks, the last ragged; offset 40
  c.dim = 32;
  c.heads = 4;
  c.kv_heads = 2;
  c.causal = causal;
  c.precision = precision;
  c.select = select;
  c.share = select == BenchSelect::kCdf ? 0.98 : 0.5;
  c.data = select == BenchSelect::kCdf ? BenchData::kLocal : BenchData::kNoise;
  return c;
}

TEST(BenchVerify, RightResultsPass) {
  for (const sparge_precision precision : Precisions()) {
    for (const BenchSelect select :
         {BenchSelect::kDense, BenchSelect::kCdf, BenchSelect::kTopk, BenchSelect::kRandom}) {
      for (const bool causal : {false, true}) {
        const Bench bench(Small(precision, select, causal));
        const Verdict verdict = bench.Verify();
        EXPECT_TRUE(verdict.passed) << NameOf(precision) << " " << NameOf(select) << " causal " << causal << ": "
                                    << verdict.relative_l1 << ", worst row " << verdict.worst_row;
        EXPECT_EQ(verdict.rows_checked, 4 * 260);  // small: all of them
        EXPECT_GT(verdict.relative_l1, 0);
      }
    }
  }
}

TEST(BenchVerify, SpoiledResultsFail) {
  const struct {
    const char* what;
    std::function<void(Bench&)> spoil;
  } faults[] = {
      {"one row is zero", [](Bench& b) { std::fill_n(b.Row(1, 77), b.c.dim, 0.0f); }},
      {"one row is another's", [](Bench& b) { std::copy_n(b.Row(0, 5), b.c.dim, b.Row(0, 200)); }},
      {"the last row has the wrong sign",
       [](Bench& b) {
         for (int i = 0; i < 32; ++i) b.Row(3, 259)[i] *= -1;
       }},
      {"one number is not one", [](Bench& b) { *b.Row(2, 130) = std::numeric_limits<float>::quiet_NaN(); }},
      {"one number is infinite", [](Bench& b) { *b.Row(2, 130) = std::numeric_limits<float>::infinity(); }},
      {"all is 5 % too large",
       [](Bench& b) {
         for (float& x : b.o) x *= 1.05f;
       }},
      {"nothing was written", [](Bench& b) { std::memset(b.o.data(), 0xFF, b.o.size() * sizeof(float)); }},
      {"heads are swapped", [](Bench& b) { std::swap_ranges(b.Row(0, 0), b.Row(1, 0), b.Row(1, 0)); }},
      {"the map names a tile that was not computed", [](Bench& b) { std::fill(b.map.begin(), b.map.end(), 1); }},
  };
  for (const sparge_precision precision : Precisions()) {
    for (const auto& fault : faults) {
      Bench bench(Small(precision, BenchSelect::kRandom, true));
      fault.spoil(bench);
      EXPECT_FALSE(bench.Verify().passed) << NameOf(precision) << ": " << fault.what;
    }
  }
}

TEST(BenchVerify, CausalityIsChecked) {
  BenchCase c = Small(SPARGE_PRECISION_FP32, BenchSelect::kDense, false);
  Bench bench(c);
  bench.c.causal = true;  // a kernel that forgot it would give this
  EXPECT_FALSE(bench.Verify().passed);
}

TEST(BenchVerify, LargeCasesAreSampled) {
  BenchCase c = Small(SPARGE_PRECISION_FP32, BenchSelect::kDense, true);
  c.tokens = c.queries = 2100;
  c.dim = 64;
  Bench bench(c);
  const Verdict verdict = bench.Verify();
  EXPECT_TRUE(verdict.passed) << verdict.relative_l1;
  EXPECT_LT(verdict.rows_checked, verdict.rows);
  EXPECT_GE(verdict.rows_checked, 100);
  // The first and the last rows are always among them.
  for (const int64_t row : {int64_t{0}, 4 * c.queries - 1}) {
    const std::vector<float> right = bench.o;
    std::fill_n(bench.o.data() + row * c.dim, c.dim, 0.0f);
    EXPECT_FALSE(bench.Verify().passed) << row;
    bench.o = right;
  }
}

TEST(BenchVerify, BoundsAreTheContract) {
  BenchCase c = Small(SPARGE_PRECISION_INT8, BenchSelect::kDense, false);
  EXPECT_DOUBLE_EQ(ErrorBound(c), 3e-2);
  c.precision = SPARGE_PRECISION_INT16;
  EXPECT_DOUBLE_EQ(ErrorBound(c), 1e-3);
  c.precision = SPARGE_PRECISION_FP32;
  EXPECT_DOUBLE_EQ(ErrorBound(c), 1e-5);
  c.dtype = SPARGE_F16;
  EXPECT_DOUBLE_EQ(ErrorBound(c), 1e-5 + 0x1p-11);
  c.dtype = SPARGE_F32;
  c.pv_skip = 10;
  EXPECT_LT(ErrorBound(c), 1e-3);  // what tests/cli allows for this skip
}

TEST(BenchCase, CountsOperations) {
  BenchCase c = Small(SPARGE_PRECISION_FP32, BenchSelect::kRandom, true);
  double pairs = 0;
  for (int64_t i = 0; i < c.queries; ++i) pairs += static_cast<double>(i + 40 + 1);
  EXPECT_DOUBLE_EQ(DenseFlops(c), 4 * 32 * 4 * pairs);
  std::vector<uint8_t> map(60, 1);
  EXPECT_DOUBLE_EQ(MapFlops(c, map), DenseFlops(c));  // hidden tiles have no pairs
  std::fill(map.begin(), map.end(), 0);
  map[0] = 1;  // queries 0 to 127 see 41 to 168 keys, of the first block at most 64
  EXPECT_DOUBLE_EQ(MapFlops(c, map), 4 * 32 * (23 * (41 + 63) / 2.0 + (128 - 23) * 64));
}

TEST(BenchRun, MedianAndSpread) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(Spread({1, 2, 3, 4, 5}), (4.0 - 2.0) / 3.0);
}

TEST(BenchData, RandomMapKeepsItsShareOfVisibleTiles) {
  BenchCase c = Small(SPARGE_PRECISION_FP32, BenchSelect::kRandom, true);
  c.tokens = c.queries = 1280;
  c.share = 0.1;
  const std::vector<uint8_t> map = MakeRandomMap(c);
  for (int64_t row = 0; row < 4 * 10; ++row) {
    const int64_t visible = (row % 10 + 1) * 2;
    const uint8_t* tiles = map.data() + 20 * row;
    EXPECT_EQ(std::count(tiles, tiles + visible, 1), std::max<int64_t>(1, (visible + 5) / 10)) << row;
    EXPECT_EQ(std::count(tiles + visible, tiles + 20, 1), 0) << row;
  }
  EXPECT_EQ(map, MakeRandomMap(c));
  c.seed = 2;
  EXPECT_NE(map, MakeRandomMap(c));
}

}  // namespace
}  // namespace sparge::cli

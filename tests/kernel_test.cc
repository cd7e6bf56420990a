// Step 1 of 3: the kernels equal masked dense attention under the same map, on every instruction set and precision.
#include <algorithm>
#include <cstring>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr sparge_precision kPrecisions[] = {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};

// Runs the problem on every instruction set and precision against one reference.
void ExpectClose(Problem& problem, const std::string& what) {
  const Context reference_context(2);
  const Result expected = Reference(reference_context, problem, problem.map);
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    for (const sparge_precision precision : kPrecisions) {
      SCOPED_TRACE(what + " on " + isa + " " + Name(precision));
      problem.desc.precision = precision;
      const Result actual = RunProblem(context, problem);
      const double tolerance = Tolerance(precision, problem.shape.o_type, problem.shape.qk_dim);
      EXPECT_LE(RelativeL1(actual.o, expected.o), tolerance);
      // The log-sum-exp is a mean over scores: its error is below that of one score, which has deviation <= 1.
      EXPECT_LE(MaxAbsDifference(actual.lse, expected.lse), 4 * Tolerance(precision, SPARGE_F32, problem.shape.qk_dim));
    }
  }
}

std::string Describe(const Case& c) {
  return "Nq=" + std::to_string(c.q_tokens) + " Nk=" + std::to_string(c.kv_tokens) + " Dk=" + std::to_string(c.qk_dim) +
         " Dv=" + std::to_string(c.v_dim);
}

TEST(Kernel, EveryLengthAndHeadSize) {
  const std::vector<int64_t> lengths =
      Quick() ? std::vector<int64_t>{1, 65, 129} : std::vector<int64_t>{1, 63, 64, 65, 127, 129, 200, 1000};
  const std::vector<int64_t> sizes = Quick() ? std::vector<int64_t>{1, 40, 64, 576}
                                             : std::vector<int64_t>{1, 16, 40, 64, 72, 80, 96, 128, 192, 256, 576};
  uint32_t seed = 0;
  for (const int64_t dim : sizes) {
    for (const int64_t length : lengths) {
      // The full square of lengths and sizes is covered; keys differ from queries in every other case.
      Case c{.q_tokens = length, .kv_tokens = ++seed % 2 == 0 ? length : lengths[seed % lengths.size()], .qk_dim = dim};
      c.v_dim = seed % 3 == 0 ? sizes[seed % sizes.size()] : dim;
      // A mean over few outputs says little: one of them may happen to be near zero.
      c.q_heads = std::clamp<int64_t>(2048 / (c.q_tokens * c.v_dim), 1, 512);
      c.seed = seed;
      Problem problem(c);
      ExpectClose(problem, Describe(problem.shape));
    }
  }
}

TEST(Kernel, LongOddLength) {
  if (Quick()) GTEST_SKIP() << "long";
  Problem problem({.q_tokens = 4097, .qk_dim = 64, .seed = 4});
  problem.desc.causal = 1;
  RandomMap(problem, 0.4, 9);
  ExpectClose(problem, "4097 causal with a map");
}

TEST(Kernel, RandomMapsReallyDropTiles) {
  for (const double share : {0.1, 0.5}) {
    Problem problem({.batch = 2, .q_heads = 4, .kv_heads = 2, .q_tokens = 300, .kv_tokens = 500, .seed = 5});
    RandomMap(problem, share, 77);
    ExpectClose(problem, "map");
    const Context context(1);
    const Result run = RunProblem(context, problem);
    EXPECT_LT(run.stats.total.qk_computed, run.stats.total.qk_eligible);
    EXPECT_EQ(run.map, problem.map);
    // The comparison can fail: under another map the result is another one.
    const Result dense = Reference(context, problem);
    EXPECT_GT(RelativeL1(run.o, dense.o), 0.1);
  }
}

TEST(Kernel, CausalOffsetsAndWindows) {
  struct Position {
    int64_t queries, keys, offset, window;
  };
  const Position positions[] = {
      {200, 200, SPARGE_OFFSET_BOTTOM_RIGHT, 0},  // square
      {70, 300, SPARGE_OFFSET_BOTTOM_RIGHT, 0},   // chunked prefill
      {300, 70, SPARGE_OFFSET_BOTTOM_RIGHT, 0},   // more queries than keys: the first see nothing
      {200, 200, 0, 0},
      {200, 200, 37, 0},
      {200, 200, -50, 0},
      {150, 400, 100, 0},
      {200, 200, 1000, 0},                        // everything visible
      {200, 200, -1000, 0},                       // nothing visible
      {300, 300, SPARGE_OFFSET_BOTTOM_RIGHT, 1},  // the diagonal only
      {300, 300, SPARGE_OFFSET_BOTTOM_RIGHT, 64},
      {300, 300, SPARGE_OFFSET_BOTTOM_RIGHT, 100},
      {128, 400, 272, 33},
      {200, 200, 400, 130},  // a window that ends before the last keys
  };
  for (const Position& p : positions) {
    Problem problem({.q_heads = 2, .kv_heads = 1, .q_tokens = p.queries, .kv_tokens = p.keys, .seed = 6});
    problem.desc.causal = 1;
    problem.desc.query_offset = p.offset;
    problem.desc.window = p.window;
    ExpectClose(problem, "offset " + std::to_string(p.offset) + " window " + std::to_string(p.window));
  }
  Problem left_only({.q_tokens = 200, .seed = 7});
  left_only.desc.window = 40;
  ExpectClose(left_only, "window without causal");
}

TEST(Kernel, TypesAndLayoutsInAnyMix) {
  const sparge_dtype types[] = {SPARGE_F32, SPARGE_F16, SPARGE_BF16};
  uint32_t i = 0;
  for (const Layout layout : {Layout::kHeads, Layout::kTokens, Layout::kPrime}) {
    for (const sparge_dtype o_type : types) {
      ++i;
      Problem problem({.batch = 2,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .q_tokens = 131,
                       .kv_tokens = 97,
                       .qk_dim = 40,
                       .v_dim = 24,
                       .q_type = types[i % 3],
                       .k_type = types[(i / 3) % 3],
                       .v_type = types[(i + 1) % 3],
                       .o_type = o_type,
                       .layout = layout,
                       .seed = i});
      ExpectClose(problem, "types");
    }
  }
}

TEST(Kernel, NothingOutsideTheOutputIsWritten) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    Problem problem(
        {.batch = 2, .q_heads = 3, .q_tokens = 70, .qk_dim = 24, .o_type = SPARGE_F16, .layout = Layout::kPrime});
    const Result run = RunProblem(context, problem);
    const sparge_tensor view = run.o.view();
    const auto* bits = static_cast<const uint16_t*>(view.data);
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t t = 0; t < 70; ++t) {
        for (int64_t gap = 24; gap < view.token_stride; ++gap) {
          ASSERT_EQ(bits[h * view.head_stride + t * view.token_stride + gap], 0xFFFF);
        }
      }
    }
  }
}

// Additive and boolean masks, broadcast over batch and heads or not, with rows that see nothing.
TEST(Kernel, Masks) {
  for (const sparge_mask_type type : {SPARGE_MASK_BOOL, SPARGE_MASK_ADD_F32, SPARGE_MASK_ADD_F16}) {
    for (const bool per_head : {false, true}) {
      const int64_t nq = 150, nk = 230, heads = 2;
      Problem problem({.batch = 2, .q_heads = heads, .q_tokens = nq, .kv_tokens = nk, .seed = 8});
      problem.desc.mask = type;
      const int64_t planes = per_head ? 2 * heads : 1;
      const int64_t width = type == SPARGE_MASK_BOOL ? 1 : type == SPARGE_MASK_ADD_F16 ? 2 : 4;
      problem.mask_bytes.assign(static_cast<size_t>(planes * nq * nk * width), 0);
      std::mt19937 random(3);
      for (int64_t i = 0; i < planes * nq * nk; ++i) {
        const int64_t row = i / nk % nq;
        const int64_t key = i % nk;
        // Whole tiles hidden, whole tiles plain, a row that sees nothing, the rest mixed.
        const bool hidden = row == 5 || (key >= 64 && key < 128) || (key >= 128 && random() % 3 == 0);
        const float bias = hidden ? -kInf : key < 64 ? 0.0f : static_cast<float>(random() % 100) / 50.0f - 1.0f;
        uint8_t* at = problem.mask_bytes.data() + i * width;
        if (type == SPARGE_MASK_BOOL) *at = hidden ? 0 : 1;
        if (type == SPARGE_MASK_ADD_F32) std::memcpy(at, &bias, 4);
        const auto half = static_cast<uint16_t>(hidden ? 0xFC00 : bias == 0 ? 0 : 0x3800 + random() % 256);
        if (type == SPARGE_MASK_ADD_F16) std::memcpy(at, &half, 2);
      }
      problem.mask = {problem.mask_bytes.data(), per_head ? heads * nq * nk : 0, per_head ? nq * nk : 0, nk};
      ExpectClose(problem, "mask " + std::to_string(type));
      const Context context(1);
      const Result run = RunProblem(context, problem);
      EXPECT_EQ(run.lse[5], -kInf);
      EXPECT_EQ(run.o.Get(0, 0, 5, 3), 0.0f);
      EXPECT_EQ(run.map[1], 0) << "the second tile is hidden, hence not eligible";
      EXPECT_EQ(run.stats.total.qk_eligible, 2 * heads * 2 * 3);
    }
  }
}

TEST(Kernel, SoftcapSlopesAndSinks) {
  const float slopes[] = {0.5f, 0.0625f, 0.0f, 0.01f};
  const float sinks[] = {0.5f, -kInf, 3.0f, -2.0f};
  for (const int features : {1, 2, 4, 7}) {
    Problem problem({.q_heads = 4, .kv_heads = 2, .q_tokens = 140, .kv_tokens = 200, .seed = 9});
    // A common offset of the keys: centring must be undone where scores are absolute.
    problem.k.Fill(
        [old = problem.k](int64_t b, int64_t h, int64_t t, int64_t d) { return old.Get(b, h, t, d) + 0.5f; });
    problem.desc.causal = 1;
    if ((features & 1) != 0) problem.desc.softcap = 1.5;
    if ((features & 2) != 0) problem.desc.alibi_slopes = slopes;
    if ((features & 4) != 0) problem.desc.sink_logits = sinks;
    ExpectClose(problem, "features " + std::to_string(features));
    problem.desc.causal = 0;
    ExpectClose(problem, "features, not causal " + std::to_string(features));
  }
}

// Down to the smallest that is allowed: scores become alike, and the result the mean of the values.
TEST(Kernel, SmallSoftcaps) {
  for (const double softcap : {0.01, 1e-10, 1e-30, 1.2e-38}) {
    for (const int64_t queries : {3, 70}) {
      Problem problem({.q_heads = 2, .q_tokens = queries, .kv_tokens = 200, .seed = 12});
      problem.desc.softcap = softcap;
      problem.desc.scale = 1e4;
      ExpectClose(problem, "softcap " + std::to_string(softcap));
    }
  }
}

TEST(Kernel, ScaleIsHonoured) {
  for (const double scale : {0.05, -0.1}) {
    Problem problem({.q_tokens = 100, .seed = 10});
    problem.desc.scale = scale;
    ExpectClose(problem, "scale " + std::to_string(scale));
  }
}

TEST(Kernel, NegativeScale) {
  // The largest product then is the smallest score.
  Problem problem({.q_tokens = 200, .kv_tokens = 300, .seed = 12});
  problem.desc.scale = -0.125;
  ExpectClose(problem, "negative scale");
  problem.desc.causal = 1;
  ExpectClose(problem, "negative scale, causal");
}

TEST(Kernel, QueriesOfZerosBesideHiddenTiles) {
  // Rows 0..63 see nothing of the second tile, which others of their block see; they score 0 wherever they see.
  Problem problem({.q_tokens = 200, .seed = 13});
  problem.desc.causal = 1;
  for (int64_t t = 0; t < 200; t += 3) {
    for (int64_t d = 0; d < problem.shape.qk_dim; ++d) problem.q.Set(0, 0, t, d, 0.0f);
  }
  ExpectClose(problem, "queries of zeros");
}

TEST(Kernel, DecodeSplitsAlongTheKeys) {
  Problem problem({.q_heads = 2, .q_tokens = 1, .kv_tokens = Quick() ? 2500 : 9000, .seed = 11});
  problem.desc.causal = 1;
  ExpectClose(problem, "decode");
}

TEST(Kernel, EmptyProblems) {
  const Context context(2);
  for (const Case& c : {Case{.batch = 0}, Case{.q_tokens = 0}, Case{.q_tokens = 0, .kv_tokens = 0}}) {
    const Problem problem(c);
    EXPECT_EQ(RunProblem(context, problem).stats.total.qk_eligible, 0);
  }
  for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_CDF, SPARGE_SELECT_TOPK}) {
    Problem no_keys({.q_tokens = 130, .kv_tokens = 0});
    no_keys.desc.select = select;
    const Result run = RunProblem(context, no_keys);
    for (int64_t t = 0; t < 130; ++t) {
      EXPECT_EQ(run.lse[t], -kInf);
      EXPECT_EQ(run.o.Get(0, 0, t, 0), 0.0f);
    }
  }
}

}  // namespace
}  // namespace sparge::testing

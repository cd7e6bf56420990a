// Several ranks against one: the same tiles, and the same result. Runs under mpirun; every rank has all tensors and
// knows by itself what one rank would compute.
#include <sparge/sparge_mpi.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

int Rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int Ranks() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

void CheckMpi(sparge_status status) { ASSERT_EQ(status, SPARGE_OK) << sparge_mpi_last_error(); }

class Group {
 public:
  explicit Group(sparge_mpi_shard shard) {
    sparge_mpi_desc desc;
    sparge_mpi_desc_init(&desc);
    desc.shard = shard;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm_);
    CheckMpi(sparge_mpi_create(comm_, &desc, &group_));
  }
  ~Group() {
    sparge_mpi_destroy(group_);
    MPI_Comm_free(&comm_);
  }
  sparge_mpi* get() const { return group_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  sparge_mpi* group_ = nullptr;
};

struct What {
  const char* name;
  sparge_mpi_shard shard;
  int64_t q_tokens, kv_tokens;
  std::function<void(PlanDesc&)> change = [](PlanDesc&) {};
  sparge_dtype dtype = SPARGE_F32;
  Layout layout = Layout::kHeads;
};

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kDim = 64;

// Slow walks, so that tiles differ in mass, with a mean of the keys by which parts must not be judged, and with queries
// that are unlike their neighbours.
struct Walk {
  TestTensor q, k, v;

  explicit Walk(const What& what)
      : q(kBatch, kHeads, what.q_tokens, kDim, what.dtype, what.layout),
        k(kBatch, kKvHeads, what.kv_tokens, kDim, what.dtype, what.layout),
        v(kBatch, kKvHeads, what.kv_tokens, kDim, what.dtype, what.layout) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < kBatch * kHeads; ++row) {
      const int64_t b = row / kHeads, h = row % kHeads;
      std::vector<float> at(kDim);
      for (int64_t t = 0; t < std::max(what.q_tokens, what.kv_tokens); ++t) {
        for (int64_t d = 0; d < kDim; ++d) {
          at[d] = 0.995f * at[d] + 0.1f * normal(random);
          const bool unlike = t % 90 == 5;
          if (t < what.q_tokens) q.Set(b, h, t, d, unlike ? (d % 3 == 0 ? 9.0f : -4.0f) : 3 * at[d]);
          if (t < what.kv_tokens && h < kKvHeads) {
            k.Set(b, h, t, d, at[d] + 0.5f);
            v.Set(b, h, t, d, normal(random));
          }
        }
      }
    }
  }
};

PlanDesc DescOf(const What& what) {
  PlanDesc desc;
  desc.batch = kBatch;
  desc.q_heads = kHeads;
  desc.kv_heads = kKvHeads;
  desc.q_tokens = what.q_tokens;
  desc.kv_tokens = what.kv_tokens;
  desc.qk_dim = desc.v_dim = kDim;
  desc.select = SPARGE_SELECT_FLOOR;
  desc.params = {-1, 0.8, 1, SPARGE_PV_SKIP_OFF};
  what.change(desc);
  return desc;
}

// The tokens of this rank, and where each is in the whole.
std::vector<int64_t> OwnTokens(int64_t tokens, sparge_mpi_shard shard) {
  sparge_mpi_segment segments[2];
  const int32_t count = sparge_mpi_segments(tokens, Rank(), Ranks(), shard, segments);
  std::vector<int64_t> own;
  for (int32_t i = 0; i < count; ++i) {
    for (int64_t t = 0; t < segments[i].count; ++t) own.push_back(segments[i].first + t);
  }
  return own;
}

TestTensor Part(const TestTensor& whole, const std::vector<int64_t>& own, const What& what) {
  TestTensor part(whole.batch, whole.heads, static_cast<int64_t>(own.size()), whole.dim, what.dtype, what.layout);
  part.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return whole.Get(b, h, own[t], d); });
  return part;
}

struct Output {
  TestTensor o;
  std::vector<float> lse;
  std::vector<uint8_t> map;
  Stats stats;
  std::vector<sparge_head_stats> heads;
  sparge_mpi_stats mpi;

  Output(const What& what, int64_t queries)
      : o(kBatch, kHeads, queries, kDim, what.dtype, what.layout),
        lse(kBatch * kHeads * queries, kNan),
        map(kBatch * kHeads * ((queries + 127) / 128) * ((what.kv_tokens + 63) / 64), 7),
        heads(kBatch * kHeads) {
    sparge_mpi_stats_init(&mpi);
  }
  void Into(RunArgs& args) {
    args.o = o.view();
    args.lse = {lse.data(), kHeads * o.tokens, o.tokens};
    args.map_out = map.data();
    args.stats = &stats;
    args.head_stats = heads.data();
  }
};

sparge_status RunRanks(const Group& group, const Context& context, const What& what, const PlanDesc& desc,
                       const Walk& walk, Output& out) {
  const TestTensor q = Part(walk.q, OwnTokens(what.q_tokens, what.shard), what);
  const std::vector<int64_t> keys = OwnTokens(what.kv_tokens, what.shard);
  const TestTensor k = Part(walk.k, keys, what), v = Part(walk.v, keys, what);
  RunArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  out.Into(args);
  return sparge_mpi_run(group.get(), context.get(), &desc, &args, &out.mpi);
}

Output RunOne(const Context& context, const What& what, const PlanDesc& desc, const Walk& walk) {
  Output out(what, what.q_tokens);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  out.Into(args);
  Plan(context, desc).Run(args);
  return out;
}

// Tiles that all queries keep among the keys of a part that is judged by itself, and that they keep there by `map`.
std::pair<int64_t, int64_t> KeptByItself(const Context& context, const What& what, PlanDesc desc, const Walk& walk,
                                         const std::vector<uint8_t>& map) {
  const int64_t blocks = (what.kv_tokens + 63) / 64, rows = static_cast<int64_t>(map.size()) / blocks;
  desc.sink_logits = nullptr;
  desc.all_queries = desc.q_tokens;
  desc.all_keys = desc.kv_tokens;
  desc.kv_tokens = 512;
  desc.first_key = 256;
  Plan plan(context, desc);
  std::vector<double> sums(kBatch * kHeads * sparge_plan_pools(plan.get()));
  std::vector<uint8_t> part(rows * 8);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.k.data = static_cast<std::byte*>(args.k.data) + 256 * args.k.token_stride * (what.dtype == SPARGE_F32 ? 4 : 2);
  args.pool_lse_out = sums.data();
  args.map_out = part.data();
  plan.Predict(args);
  int64_t by_itself = 0, of_all = 0;
  for (int64_t row = 0; row < rows; ++row) {
    by_itself += std::count(part.begin() + row * 8, part.begin() + row * 8 + 8, 1);
    of_all += std::count(map.begin() + row * blocks + 4, map.begin() + row * blocks + 12, 1);
  }
  return {by_itself, of_all};
}

class Several : public ::testing::TestWithParam<What> {};

TEST_P(Several, RanksHaveTheTilesAndTheResultOfOne) {
  const What& what = GetParam();
  const Context context(1);
  const Walk walk(what);
  const Group group(what.shard);
  const std::vector<int64_t> own = OwnTokens(what.q_tokens, what.shard);
  const auto queries = static_cast<int64_t>(own.size());
  const int64_t blocks = (what.kv_tokens + 63) / 64, q_blocks = (queries + 127) / 128;
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT8}) {
    PlanDesc desc = DescOf(what);
    desc.precision = precision;
    const Output wanted = RunOne(context, what, desc, walk);
    Output found(what, queries);
    CheckMpi(RunRanks(group, context, what, desc, walk, found));
    int64_t kept = 0;
    double error = 0, size = 0, lse_error = 0;
    for (int64_t row = 0; row < kBatch * kHeads; ++row) {
      const int64_t b = row / kHeads, h = row % kHeads;
      for (int64_t i = 0; i < queries; ++i) {
        const auto its = found.map.begin() + (row * q_blocks + i / 128) * blocks;
        const auto of_one = wanted.map.begin() + (row * ((what.q_tokens + 127) / 128) + own[i] / 128) * blocks;
        if (i % 128 == 0) {
          ASSERT_TRUE(std::equal(its, its + blocks, of_one)) << "row " << row << ", query " << own[i];
          kept += std::count(its, its + blocks, 1);
        }
        for (int64_t d = 0; d < kDim; ++d) {
          error += std::fabs(found.o.Get(b, h, i, d) - wanted.o.Get(b, h, own[i], d));
          size += std::fabs(wanted.o.Get(b, h, own[i], d));
        }
        const float lse = found.lse[row * queries + i], its_lse = wanted.lse[row * what.q_tokens + own[i]];
        if (lse != its_lse) lse_error = std::max<double>(lse_error, std::fabs(lse - its_lse));
      }
    }
    // Scores and values are the same; int8 rounds a probability relative to the maximum that its part has seen, by half
    // a step of 1/255 of the largest, in the mean a quarter. Halves have 11 bits, and a sum that falls on either side
    // of their middle differs by one step of 2^-11, on average in few places.
    const bool exact = precision == SPARGE_PRECISION_FP32;
    EXPECT_LE(error, (exact ? (what.dtype == SPARGE_F32 ? 1e-6 : 1e-4) : 1e-2) * size);
    EXPECT_LT(lse_error, exact ? 1e-5 : 2e-2);
    EXPECT_EQ(found.stats.total.qk_computed, kept);
    int64_t by_heads = 0;
    for (const sparge_head_stats& head : found.heads) by_heads += head.qk_computed;
    EXPECT_EQ(by_heads, kept);
    EXPECT_EQ(found.mpi.parts, Ranks() - 1);
    EXPECT_EQ(found.mpi.bytes_sent > 0, Ranks() > 1);
    if (desc.select == SPARGE_SELECT_FLOOR) {
      EXPECT_LT(wanted.stats.total.qk_computed, 0.8 * static_cast<double>(wanted.stats.total.qk_eligible));
      const auto [by_itself, of_all] = KeptByItself(context, what, desc, walk, wanted.map);
      EXPECT_GT(by_itself, of_all);  // else a map of parts that choose by themselves would pass
    }
  }
}

const std::vector<float> kSlopes = {0.02f, 0.01f, 0.005f, 0.0f}, kSinks = {1.0f, -2.0f, 6.0f, 0.5f};

INSTANTIATE_TEST_SUITE_P(
    Asked, Several,
    ::testing::Values(
        What{"Full", SPARGE_MPI_CONTIGUOUS, 1500, 1500},
        What{"CausalZigzag", SPARGE_MPI_ZIGZAG, 2100, 2100, [](PlanDesc& d) { d.causal = 1; }},
        What{"CausalContiguous", SPARGE_MPI_CONTIGUOUS, 1500, 1500, [](PlanDesc& d) { d.causal = 1; }},
        What{"WindowZigzag", SPARGE_MPI_ZIGZAG, 2100, 2100, [](PlanDesc& d) { d.causal = 1, d.window = 700; }},
        What{"CrossHalves", SPARGE_MPI_CONTIGUOUS, 700, 1500, [](PlanDesc&) {}, SPARGE_F16, Layout::kTokens},
        What{"SlopesAndSinks", SPARGE_MPI_ZIGZAG, 1500, 1500,
             [](PlanDesc& d) {
               d.causal = 1;
               d.alibi_slopes = kSlopes.data();
               d.sink_logits = kSinks.data();
             }},
        What{"OffsetAndTail", SPARGE_MPI_ZIGZAG, 900, 1500,
             [](PlanDesc& d) { d.causal = 1, d.query_offset = 500, d.dense_tail = 100; }},
        What{"EveryTile", SPARGE_MPI_ZIGZAG, 1500, 1500,
             [](PlanDesc& d) { d.causal = 1, d.select = SPARGE_SELECT_ALL; }},
        What{"FewerBlocksThanRanks", SPARGE_MPI_ZIGZAG, 200, 200, [](PlanDesc& d) { d.select = SPARGE_SELECT_ALL; }},
        What{"FewQueries", SPARGE_MPI_CONTIGUOUS, 3, 1500, [](PlanDesc& d) { d.select = SPARGE_SELECT_ALL; }},
        What{"NoKeys", SPARGE_MPI_CONTIGUOUS, 300, 0, [](PlanDesc& d) { d.select = SPARGE_SELECT_ALL; }},
        What{"NoQueries", SPARGE_MPI_CONTIGUOUS, 0, 300, [](PlanDesc& d) { d.select = SPARGE_SELECT_ALL; }}),
    [](const auto& what) { return std::string(what.param.name); });

// Messages longer than one of MPI; each part is there before it is needed, at least now and then.
TEST(Messages, TravelMeanwhile) {
  const What what{"Long", SPARGE_MPI_CONTIGUOUS, 512, 20000, [](PlanDesc& d) { d.select = SPARGE_SELECT_ALL; }};
  const Context context(1);
  const Walk walk(what);
  const Group group(what.shard);
  const PlanDesc desc = DescOf(what);
  const Output wanted = RunOne(context, what, desc, walk);
  const std::vector<int64_t> own = OwnTokens(what.q_tokens, what.shard);
  int64_t in_time = 0;
  for (int i = 0; i < 8; ++i) {
    Output found(what, static_cast<int64_t>(own.size()));
    CheckMpi(RunRanks(group, context, what, desc, walk, found));
    in_time += found.mpi.parts_in_time;
    double error = 0, size = 0;
    found.o.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
      error += std::fabs(found.o.Get(b, h, t, d) - wanted.o.Get(b, h, own[t], d));
      size += std::fabs(wanted.o.Get(b, h, own[t], d));
      return 0.0f;
    });
    EXPECT_LE(error, 1e-2 * size);
  }
  EXPECT_EQ(in_time > 0, Ranks() > 1);
}

// Each rank gets the text of all others.
void ExpectOneText(const std::string& own, const std::string& wanted) {
  EXPECT_NE(own.find(wanted), std::string::npos) << own;
  std::vector<char> text(512), all(512 * Ranks());
  std::copy_n(own.data(), std::min<size_t>(own.size(), 511), text.data());
  MPI_Allgather(text.data(), 512, MPI_CHAR, all.data(), 512, MPI_CHAR, MPI_COMM_WORLD);
  for (int r = 0; r < Ranks(); ++r) EXPECT_STREQ(all.data() + 512 * r, own.c_str());
}

TEST(Refusals, AreTheSameOnAllRanksAndTheGroupGoesOn) {
  const What what{"Small", SPARGE_MPI_CONTIGUOUS, 600, 600};
  const Context context(1);
  const Walk walk(what);
  const Group group(what.shard);
  const int last = Ranks() - 1;
  const std::string who = "rank " + std::to_string(last);
  const auto expect = [&](const std::string& text, const std::function<void(PlanDesc&)>& change) {
    PlanDesc desc = DescOf(what);
    if (Rank() == last) change(desc);
    Output out(what, static_cast<int64_t>(OwnTokens(what.q_tokens, what.shard).size()));
    EXPECT_EQ(RunRanks(group, context, what, desc, walk, out), SPARGE_INVALID_ARGUMENT) << text;
    ExpectOneText(sparge_mpi_last_error(), text);
    EXPECT_EQ(sparge_mpi_lost_rank(group.get()), -1);
  };
  expect(who + ": select=4", [](PlanDesc& d) { d.select = SPARGE_SELECT_AUTO; });
  expect(who + ": select=1", [](PlanDesc& d) { d.select = SPARGE_SELECT_CDF; });
  expect(who + ": q_tokens=64", [](PlanDesc& d) { d.q_tokens = 64; });
  expect(who + ": mask", [](PlanDesc& d) { d.mask = SPARGE_MASK_BOOL; });
  expect(who + ": q_heads=3 is not a multiple", [](PlanDesc& d) { d.q_heads = 3; });
  if (Ranks() > 1) {
    const std::string here = " on " + who + " and ", there = " on rank 0";
    expect("causal is 1" + here + "0" + there, [](PlanDesc& d) { d.causal = 1; });
    expect("q_heads is 2" + here + "4" + there, [](PlanDesc& d) { d.q_heads = 2; });
    expect("kv_tokens is 599" + here + "600" + there, [](PlanDesc& d) { d.kv_tokens = 599; });
    expect("params.tau is 0.5" + here, [](PlanDesc& d) { d.params.tau = 0.5; });
    expect("sink_logits is array", [](PlanDesc& d) { d.sink_logits = kSinks.data(); });
  }
  Output out(what, static_cast<int64_t>(OwnTokens(what.q_tokens, what.shard).size()));
  EXPECT_EQ(RunRanks(group, context, what, DescOf(what), walk, out), SPARGE_OK) << sparge_mpi_last_error();
}

TEST(Refusals, OfArguments) {
  const What what{"Small", SPARGE_MPI_CONTIGUOUS, 600, 600};
  const Context context(1);
  const Walk walk(what);
  const Group group(what.shard);
  const auto expect = [&](const char* text, const std::function<void(RunArgs&)>& change) {
    const PlanDesc desc = DescOf(what);
    RunArgs args;
    args.q = walk.q.view();
    args.k = walk.k.view();
    args.v = walk.v.view();
    Output out(what, what.q_tokens);
    out.Into(args);
    change(args);
    EXPECT_EQ(sparge_mpi_run(group.get(), context.get(), &desc, &args, nullptr), SPARGE_INVALID_ARGUMENT);
    ExpectOneText(sparge_mpi_last_error(), text);
  };
  std::vector<double> sums(1);
  expect("rank 0: q.data is NULL", [](RunArgs& a) { a.q.data = nullptr; });
  expect("rank 0: o has strides", [](RunArgs& a) { a.o.token_stride = 1; });
  expect("rank 0: k.token_stride=-1", [](RunArgs& a) { a.k.token_stride = -1; });
  expect("rank 0: pool_lse", [&](RunArgs& a) { a.pool_lse = sums.data(); });
  expect("rank 0: workspace", [&](RunArgs& a) { a.workspace = sums.data(); });
  expect("rank 0: args.struct_size=1", [](RunArgs& a) { a.struct_size = 1; });
  EXPECT_EQ(sparge_mpi_run(nullptr, nullptr, nullptr, nullptr, nullptr), SPARGE_INVALID_ARGUMENT);
  sparge_mpi_desc desc;
  sparge_mpi_desc_init(&desc);
  desc.timeout_s = 0;
  sparge_mpi* none = nullptr;
  EXPECT_EQ(sparge_mpi_create(MPI_COMM_WORLD, &desc, &none), SPARGE_INVALID_ARGUMENT);
  EXPECT_STREQ(sparge_mpi_last_error(), "timeout_s=0 is outside 0..1e6");
  EXPECT_EQ(sparge_mpi_create(MPI_COMM_NULL, nullptr, &none), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

// Every token has one owner, whole blocks stay together, and zigzag gives as many causal tiles to each.
TEST(Segments, CoverTheSequence) {
  for (const sparge_mpi_shard shard : {SPARGE_MPI_CONTIGUOUS, SPARGE_MPI_ZIGZAG}) {
    for (const int64_t tokens : {0, 1, 128, 1000, 4096, 5003}) {
      for (const int32_t ranks : {1, 2, 3, 7}) {
        std::vector<int> owners(tokens, 0);
        for (int32_t r = 0; r < ranks; ++r) {
          sparge_mpi_segment segments[2];
          const int32_t count = sparge_mpi_segments(tokens, r, ranks, shard, segments);
          for (int32_t i = 0; i < count; ++i) {
            EXPECT_EQ(segments[i].first % 128, 0);
            for (int64_t t = 0; t < segments[i].count; ++t) ++owners[segments[i].first + t];
          }
        }
        EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), tokens);
      }
    }
  }
  sparge_mpi_segment segments[2];
  EXPECT_EQ(sparge_mpi_segments(1024, 1, 4, SPARGE_MPI_ZIGZAG, segments), 2);
  EXPECT_EQ(segments[0].first, 128);
  EXPECT_EQ(segments[1].first, 768);
  EXPECT_EQ(sparge_mpi_segments(1024, 4, 4, SPARGE_MPI_ZIGZAG, segments), -1);
}

}  // namespace
}  // namespace sparge::testing

int main(int count, char** values) {
  int level = 0;
  MPI_Init_thread(&count, &values, MPI_THREAD_FUNNELED, &level);
  ::testing::InitGoogleTest(&count, values);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}

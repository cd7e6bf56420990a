// The public contract: every bad argument is refused with a line that names it; merge; contexts; struct sizes.
#include <algorithm>
#include <cstring>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

// The call must fail with `status`, and the detail must contain `text`.
void ExpectFailure(sparge_status actual, sparge_status status, const std::string& text) {
  EXPECT_EQ(actual, status);
  EXPECT_NE(std::string(sparge_last_error()).find(text), std::string::npos) << sparge_last_error();
  EXPECT_EQ(std::string(sparge_last_error()).find('\n'), std::string::npos);
}

PlanDesc SmallDesc() {
  PlanDesc desc;
  desc.batch = 1;
  desc.q_heads = desc.kv_heads = 2;
  desc.q_tokens = desc.kv_tokens = 10;
  desc.qk_dim = desc.v_dim = 8;
  return desc;
}

struct BadDesc {
  const char* text;
  std::function<void(PlanDesc&)> spoil;
};

TEST(Api, BadPlans) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  static const int64_t falling[] = {0, 8, 4}, wrong_end[] = {0, 4, 9}, wrong_begin[] = {1, 4, 10}, good[] = {0, 4, 10};
  static const float slopes[] = {1.0f, kNan}, steep[] = {2e9f, 0.0f};
  static const float sinks[] = {1.0f, kInf};
  static const sparge_head_params heads[] = {{0.3, 0.9, 0.5, 10}, {0.3, 1.5, 0.5, 10}};
  const BadDesc cases[] = {
      {"batch=-1", [](PlanDesc& d) { d.batch = -1; }},
      {"q_heads=0", [](PlanDesc& d) { d.q_heads = 0; }},
      {"kv_heads=0", [](PlanDesc& d) { d.kv_heads = 0; }},
      {"q_heads=3 is not a multiple of kv_heads=2", [](PlanDesc& d) { d.q_heads = 3; }},
      {"q_tokens=-5", [](PlanDesc& d) { d.q_tokens = -5; }},
      {"kv_tokens=2147483648", [](PlanDesc& d) { d.kv_tokens = int64_t{1} << 31; }},
      {"qk_dim=0", [](PlanDesc& d) { d.qk_dim = 0; }},
      {"v_dim=577", [](PlanDesc& d) { d.v_dim = 577; }},
      {"2^46", [](PlanDesc& d) { d.batch = d.q_tokens = (int64_t{1} << 31) - 1; }},
      {"kv_offsets is missing", [](PlanDesc& d) { d.q_offsets = good; }},
      {"q_offsets[1]=8", [](PlanDesc& d) { d.batch = 2, d.q_offsets = falling, d.kv_offsets = good; }},
      {"q_offsets[2]=9", [](PlanDesc& d) { d.batch = 2, d.q_offsets = wrong_end, d.kv_offsets = good; }},
      {"kv_offsets[0]=1", [](PlanDesc& d) { d.batch = 2, d.q_offsets = good, d.kv_offsets = wrong_begin; }},
      {"scale=nan", [=](PlanDesc& d) { d.scale = nan; }},
      {"scale=inf", [=](PlanDesc& d) { d.scale = inf; }},
      {"softcap=-1", [](PlanDesc& d) { d.softcap = -1; }},
      {"softcap=1e-300 is neither 0 nor within 1.18e-38..1e9", [](PlanDesc& d) { d.softcap = 1e-300; }},
      {"softcap=1.1e-38", [](PlanDesc& d) { d.softcap = 1.1e-38; }},
      {"softcap=2e+09", [](PlanDesc& d) { d.softcap = 2e9; }},
      {"softcap=nan", [=](PlanDesc& d) { d.softcap = nan; }},
      {"causal=2", [](PlanDesc& d) { d.causal = 2; }},
      {"window=-3", [](PlanDesc& d) { d.window = -3; }},
      {"query_offset=5 has no effect", [](PlanDesc& d) { d.query_offset = 5; }},
      {"mask=9", [](PlanDesc& d) { d.mask = static_cast<sparge_mask_type>(9); }},
      {"alibi_slopes[1]=nan", [](PlanDesc& d) { d.alibi_slopes = slopes; }},
      {"alibi_slopes[0]=2e+09 is larger than 1e9", [](PlanDesc& d) { d.alibi_slopes = steep; }},
      {"sink_logits[1]=inf", [](PlanDesc& d) { d.sink_logits = sinks; }},
      {"precision=3", [](PlanDesc& d) { d.precision = static_cast<sparge_precision>(3); }},
      {"select=-1", [](PlanDesc& d) { d.select = static_cast<sparge_select>(-1); }},
      {"keep_sink=2", [](PlanDesc& d) { d.keep_sink = 2; }},
      {"dense_tail=-1", [](PlanDesc& d) { d.dense_tail = -1; }},
      {"dense_tail=5 is neither for a map",
       [](PlanDesc& d) {
         d.dense_tail = 5;
         d.select = SPARGE_SELECT_MAP;
       }},
      {"cache_tokens=-1", [](PlanDesc& d) { d.cache_tokens = -1; }},
      {"cache_tokens=1 is less than kv_tokens", [](PlanDesc& d) { d.cache_tokens = 1; }},
      {"cache_tokens=99 cannot be combined with q_offsets",
       [](PlanDesc& d) { d.batch = 2, d.q_offsets = good, d.kv_offsets = good, d.cache_tokens = 99; }},
      {"glance=2 is outside 0..1", [](PlanDesc& d) { d.cache_tokens = 99, d.glance = 2; }},
      {"glance=1 is for keys in a cache, but cache_tokens=0", [](PlanDesc& d) { d.glance = 1; }},
      {"least_effort=-0.5 is outside", [](PlanDesc& d) { d.least_effort = -0.5; }},
      {"least_effort=nan is outside", [=](PlanDesc& d) { d.least_effort = nan; }},
      {"least_effort=0.5 has no effect", [](PlanDesc& d) { d.least_effort = 0.5; }},
      {"tau=1.01", [](PlanDesc& d) { d.params.tau = 1.01; }},
      {"tau=-0.1", [](PlanDesc& d) { d.params.tau = -0.1; }},
      {"tau=nan", [=](PlanDesc& d) { d.params.tau = nan; }},
      {"topk=1.5", [](PlanDesc& d) { d.select = SPARGE_SELECT_TOPK, d.params.topk = 1.5; }},
      {"theta=nan", [=](PlanDesc& d) { d.params.theta = nan; }},
      {"pv_skip=-1", [](PlanDesc& d) { d.params.pv_skip = -1; }},
      {"pv_skip=nan", [=](PlanDesc& d) { d.params.pv_skip = nan; }},
      {"heads[1].tau=1.5", [](PlanDesc& d) { d.heads = heads; }},
      {"desc.struct_size=3 is not that of a header", [](PlanDesc& d) { d.struct_size = 3; }},
      {"desc.struct_size=18446744073709551615", [](PlanDesc& d) { d.struct_size = ~size_t{0}; }},
  };
  const Context context(1);
  for (const BadDesc& c : cases) {
    SCOPED_TRACE(c.text);
    PlanDesc desc = SmallDesc();
    c.spoil(desc);
    sparge_plan* plan = reinterpret_cast<sparge_plan*>(8);
    ExpectFailure(sparge_plan_create(context.get(), &desc, &plan), SPARGE_INVALID_ARGUMENT, c.text);
    EXPECT_EQ(plan, nullptr);
  }
  PlanDesc desc = SmallDesc();
  sparge_plan* plan = nullptr;
  ExpectFailure(sparge_plan_create(nullptr, &desc, &plan), SPARGE_INVALID_ARGUMENT, "context");
  ExpectFailure(sparge_plan_create(context.get(), nullptr, &plan), SPARGE_INVALID_ARGUMENT, "desc");
  ExpectFailure(sparge_plan_create(context.get(), &desc, nullptr), SPARGE_INVALID_ARGUMENT, "out");
}

struct BadArgs {
  const char* text;
  std::function<void(RunArgs&)> spoil;
};

TEST(Api, BadRuns) {
  const BadArgs cases[] = {
      {"q.data", [](RunArgs& a) { a.q.data = nullptr; }},
      {"k.data", [](RunArgs& a) { a.k.data = nullptr; }},
      {"v.data", [](RunArgs& a) { a.v.data = nullptr; }},
      {"o.data", [](RunArgs& a) { a.o.data = nullptr; }},
      {"q.dtype=5", [](RunArgs& a) { a.q.dtype = static_cast<sparge_dtype>(5); }},
      {"k.token_stride=-8", [](RunArgs& a) { a.k.token_stride = -8; }},
      {"v.head_stride=-1", [](RunArgs& a) { a.v.head_stride = -1; }},
      {"o.token_stride=7 makes rows of 8", [](RunArgs& a) { a.o.token_stride = 7; }},
      {"o.head_stride=0", [](RunArgs& a) { a.o.head_stride = 0; }},
      {"q has strides that reach", [](RunArgs& a) { a.q.token_stride = int64_t{1} << 60; }},
      {"aligned", [](RunArgs& a) { a.q.data = static_cast<char*>(a.q.data) + 1; }},
      {"mask.data is given", [](RunArgs& a) { a.mask.data = a.q.data; }},
      {"map is given", [](RunArgs& a) { a.map = static_cast<uint8_t*>(a.q.data); }},
      {"workspace is NULL", [](RunArgs& a) { a.workspace = nullptr; }},
      {"workspace_size=16 is less", [](RunArgs& a) { a.workspace_size = 16; }},
      {"cache is given", [](RunArgs& a) { a.cache = a.workspace; }},
      {"lse strides",
       [](RunArgs& a) {
         a.lse = {static_cast<float*>(a.o.data), -1, 0};
       }},
      {"args.struct_size=0 is not that of a header", [](RunArgs& a) { a.struct_size = 0; }},
  };
  const Context context(1);
  const PlanDesc desc = SmallDesc();
  Plan plan(context, desc);
  std::vector<float> data(2 * 10 * 8, 1.0f), out(2 * 10 * 8, -7.0f);
  std::vector<std::byte> workspace(plan.workspace_size());
  RunArgs good;
  good.q = good.k = good.v = ViewHeads(data.data(), SPARGE_F32, 2, 10, 8);
  good.o = ViewHeads(out.data(), SPARGE_F32, 2, 10, 8);
  good.workspace = workspace.data();
  good.workspace_size = workspace.size();
  for (const BadArgs& c : cases) {
    SCOPED_TRACE(c.text);
    RunArgs args = good;
    c.spoil(args);
    ExpectFailure(sparge_run(plan.get(), &args), SPARGE_INVALID_ARGUMENT, c.text);
    EXPECT_EQ(std::count(out.begin(), out.end(), -7.0f), 160) << "the output was touched";
  }
  ExpectFailure(sparge_run(nullptr, &good), SPARGE_INVALID_ARGUMENT, "plan");
  ExpectFailure(sparge_run(plan.get(), nullptr), SPARGE_INVALID_ARGUMENT, "args");
  EXPECT_EQ(sparge_run(plan.get(), &good), SPARGE_OK);
  EXPECT_NEAR(out[5], 1.0f, 1e-5f);
}

TEST(Api, PlanWithMapOrMaskNeedsIt) {
  const Context context(1);
  Problem p({.q_tokens = 10});
  p.desc.select = SPARGE_SELECT_MAP;
  Plan plan(context, p.desc);
  RunArgs args;
  args.q = args.k = args.v = args.o = p.q.view();
  EXPECT_THROW(plan.Run(args), Error);
  p.desc.select = SPARGE_SELECT_ALL;
  p.desc.mask = SPARGE_MASK_BOOL;
  Plan masked(context, p.desc);
  try {
    masked.Run(args);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), SPARGE_INVALID_ARGUMENT);
    EXPECT_STREQ(error.what(), "mask.data is NULL, but the plan has a mask");
  }
}

TEST(Api, BadContexts) {
  sparge_context* context = nullptr;
  sparge_context_desc desc;
  sparge_context_desc_init(&desc);
  desc.threads = -1;
  ExpectFailure(sparge_context_create(&desc, &context), SPARGE_INVALID_ARGUMENT, "threads=-1");
  desc.threads = 1;
  desc.isa = "mmx";
  ExpectFailure(sparge_context_create(&desc, &context), SPARGE_INVALID_ARGUMENT, "mmx");
  desc.isa = nullptr;
  sparge_executor executor{sizeof(sparge_executor), nullptr, 0, nullptr};
  desc.executor = &executor;
  ExpectFailure(sparge_context_create(&desc, &context), SPARGE_INVALID_ARGUMENT, "executor.workers=0");
  executor.workers = 2;
  ExpectFailure(sparge_context_create(&desc, &context), SPARGE_INVALID_ARGUMENT, "executor.run");
  EXPECT_EQ(context, nullptr);
  sparge_context_destroy(nullptr);
  sparge_plan_destroy(nullptr);
}

TEST(Api, TheForcedInstructionSetIsTheOneThatRuns) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(1, isa.c_str());
    EXPECT_EQ(context.isa(), isa);
    const Problem p({.q_tokens = 70});
    EXPECT_EQ(RunProblem(context, p).stats.isa, isa);
    ASSERT_EQ(setenv("SPARGE_ISA", isa.c_str(), 1), 0);
    EXPECT_EQ(Context(1).isa(), isa);
    unsetenv("SPARGE_ISA");
  }
  ASSERT_EQ(setenv("SPARGE_ISA", "pentium", 1), 0);
  EXPECT_THROW(Context(1), Error);
  unsetenv("SPARGE_ISA");
  // One that was compiled but that this machine lacks is another error than an unknown one.
  for (int32_t i = 0; i < sparge_isa_count(); ++i) {
    sparge_isa isa;
    sparge_isa_init(&isa);
    Check(sparge_isa_at(i, &isa));
    if (isa.runnable != 0) continue;
    try {
      const Context context(1, isa.name);
      FAIL() << isa.name;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), SPARGE_UNSUPPORTED_HARDWARE);
    }
  }
}

TEST(Api, UnalignedWorkspaceAndAnOlderHeader) {
  const Context context(2);
  const Problem p({.q_heads = 2, .q_tokens = 200, .seed = 3});
  const Result expected = RunProblem(context, p);
  PlanDesc desc = p.desc;
  // A caller with an older header has a shorter struct: what it lacks has its default.
  desc.struct_size = offsetof(sparge_plan_desc, heads);
  Plan plan(context, desc);
  std::vector<std::byte> workspace(plan.workspace_size() + 3);
  TestTensor o(1, 2, 200, 64);
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  args.o = o.view();
  args.workspace = workspace.data() + 3;
  args.workspace_size = workspace.size() - 3;
  plan.Run(args);
  EXPECT_EQ(RelativeL1(o, expected.o), 0.0);
}

TEST(Api, WorkspaceIsLinearInTokens) {
  const Context context(2);
  const auto size = [&](int64_t tokens) {
    PlanDesc desc;
    desc.batch = desc.q_heads = desc.kv_heads = 1;
    desc.q_tokens = desc.kv_tokens = tokens;
    desc.qk_dim = desc.v_dim = 128;
    desc.causal = 1;
    return static_cast<double>(Plan(context, desc).workspace_size());
  };
  // Per token bytes may not grow; the block map has one bit per 128 x 64 tile.
  const double map_bits = 131072.0 / 128 * 131072 / 64 / 8;
  EXPECT_LE(size(131072) - map_bits, 16.5 * size(8192));
  EXPECT_LE(size(131072), 0x1p30);
}

struct Partial {
  TestTensor o;
  std::vector<float> lse;
  sparge_partial view() { return {o.view(), {lse.data(), o.heads * o.tokens, o.tokens}}; }
};

TEST(Api, MergeJoinsSplitKeysExactly) {
  const Context context(2);
  Problem whole({.batch = 2, .q_heads = 2, .q_tokens = 90, .kv_tokens = 300, .seed = 12});
  whole.desc.precision = SPARGE_PRECISION_FP32;
  const Result expected = RunProblem(context, whole);
  Partial parts[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t first = i == 0 ? 0 : 110, count = i == 0 ? 110 : 190;
    Problem part({.batch = 2, .q_heads = 2, .q_tokens = 90, .kv_tokens = count});
    part.desc.precision = SPARGE_PRECISION_FP32;
    part.q = whole.q;
    part.k.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return whole.k.Get(b, h, first + t, d); });
    part.v.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return whole.v.Get(b, h, first + t, d); });
    Result result = RunProblem(context, part);
    parts[i] = {result.o, result.lse};
  }
  Partial joined{TestTensor(2, 2, 90, 64), std::vector<float>(360)};
  Partial swapped{TestTensor(2, 2, 90, 64), std::vector<float>(360)};
  sparge_partial a = parts[0].view(), b = parts[1].view(), ab = joined.view(), ba = swapped.view();
  ASSERT_EQ(sparge_merge(2, 2, 90, 64, &a, &b, &ab), SPARGE_OK);
  ASSERT_EQ(sparge_merge(2, 2, 90, 64, &b, &a, &ba), SPARGE_OK);
  EXPECT_LE(RelativeL1(joined.o, expected.o), 1e-6);
  EXPECT_LE(MaxAbsDifference(joined.lse, expected.lse), 2e-6);
  EXPECT_EQ(joined.o.bytes(), swapped.o.bytes());
  // The empty part is neutral, whatever its o holds; two empty parts are empty. In place.
  Partial empty{TestTensor(2, 2, 90, 64), std::vector<float>(360, -kInf)};
  empty.o.Fill([](int64_t, int64_t, int64_t, int64_t) { return kNan; });
  sparge_partial none = empty.view();
  ASSERT_EQ(sparge_merge(2, 2, 90, 64, &a, &none, &ab), SPARGE_OK);
  EXPECT_LE(RelativeL1(joined.o, parts[0].o), 0.0);
  ASSERT_EQ(sparge_merge(2, 2, 90, 64, &none, &none, &none), SPARGE_OK);
  EXPECT_EQ(empty.lse[17], -kInf);
  EXPECT_EQ(empty.o.Get(1, 1, 5, 5), 0.0f);
  ExpectFailure(sparge_merge(2, 2, 90, 64, nullptr, &b, &ab), SPARGE_INVALID_ARGUMENT, "a is NULL");
  ExpectFailure(sparge_merge(-1, 2, 90, 64, &a, &b, &ab), SPARGE_INVALID_ARGUMENT, "batch=-1");
}

TEST(Api, TextsForAllStatuses) {
  for (int status = SPARGE_OK; status <= SPARGE_RANK_LOST; ++status) {
    EXPECT_STRNE(sparge_status_text(static_cast<sparge_status>(status)), "unknown status");
  }
  EXPECT_STREQ(sparge_version(), "0.4.0");
}

}  // namespace
}  // namespace sparge::testing

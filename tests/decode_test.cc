// Few queries against packed keys: the same result as from the tensors, whatever happened to the keys in between.
#include <algorithm>
#include <functional>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr int64_t kRoom = 2048;

// Keys that grow from call to call, and the cache of their layer.
struct Steps {
  explicit Steps(const Context& context, Case shape = {}) : context(context), p(Complete(shape)) {
    p.desc.causal = 1;
    p.desc.select = SPARGE_SELECT_ALL;
    p.desc.cache_tokens = kRoom;
    p.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  }
  static Case Complete(Case shape) {
    if (shape.q_heads == 1) shape.q_heads = 6;
    if (shape.kv_heads == 0) shape.kv_heads = 2;
    shape.q_tokens = kRoom;
    shape.k_type = shape.v_type = SPARGE_F16;
    shape.layout = Layout::kTokens;
    shape.correlated = true;
    return shape;
  }

  // The last `queries` of `keys` tokens.
  Result Run(int64_t queries, int64_t keys, bool reference = false) {
    PlanDesc desc = p.desc;
    desc.q_tokens = queries;
    desc.kv_tokens = keys;
    desc.decode = !reference && queries <= SPARGE_FEW_QUERIES;
    if (reference) desc.cache_tokens = desc.glance = 0;
    Plan plan(context, desc);
    Result result;
    result.o = TestTensor(p.shape.batch, p.shape.q_heads, queries, p.shape.qk_dim);
    result.lse.resize(static_cast<size_t>(p.shape.batch * p.shape.q_heads * queries));
    result.head_stats.resize(static_cast<size_t>(p.shape.batch * p.shape.q_heads));
    RunArgs args;
    args.q = p.q.view();
    args.q.data = static_cast<float*>(args.q.data) + (keys - queries) * args.q.token_stride;
    args.k = p.k.view();
    args.v = p.v.view();
    args.o = result.o.view();
    args.mask = p.mask;
    args.lse = {result.lse.data(), p.shape.q_heads * queries, queries};
    if (reference) {
      plan.Reference(args);
      return result;
    }
    args.stats = &result.stats;
    args.head_stats = result.head_stats.data();
    memory.resize(std::max(memory.size(), sparge_plan_cache_size(plan.get())));
    args.cache = memory.data();
    args.cache_size = memory.size();
    plan.Run(args);
    return result;
  }
  // Runs and compares; returns the share of blocks that were taken as they were.
  double Check(int64_t queries, int64_t keys) {
    const Result result = Run(queries, keys);
    const Result expected = Run(queries, keys, /*reference=*/true);
    const double allowed = Tolerance(p.desc.precision, SPARGE_F32, p.shape.qk_dim);
    EXPECT_LE(RelativeL1(result.o, expected.o), allowed) << queries << " queries, " << keys << " keys";
    // An error of a score moves the logarithm of the sum by no more than that.
    EXPECT_LE(MaxAbsDifference(result.lse, expected.lse), 8 * allowed) << queries << " queries, " << keys << " keys";
    return static_cast<double>(result.stats.key_blocks_reused) / static_cast<double>(result.stats.key_blocks);
  }
  // `by`: what values are multiplied by.
  void Change(int64_t begin, int64_t end, float by) {
    for (TestTensor* tensor : {&p.k, &p.v}) {
      for (int64_t b = 0; b < tensor->batch; ++b) {
        for (int64_t h = 0; h < tensor->heads; ++h) {
          for (int64_t t = begin; t < end; ++t) {
            for (int64_t d = 0; d < tensor->dim; ++d) {
              tensor->Set(b, h, t, d, (tensor == &p.k ? -1 : by) * tensor->Get(b, h, t, (d + 1) % tensor->dim));
            }
          }
        }
      }
    }
  }

  const Context& context;
  Problem p;
  std::vector<uint8_t> memory;
};

TEST(Decode, StepsAfterAPrompt) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      SCOPED_TRACE(isa + Name(precision));
      Steps steps(context, {.batch = 2});
      steps.p.desc.precision = precision;
      steps.Check(600, 600);  // the prompt
      // Nine whole blocks are there; the tenth has grown.
      for (int64_t keys = 601; keys <= 640; keys += Quick() ? 13 : 1) EXPECT_EQ(steps.Check(1, keys), 0.9) << keys;
      EXPECT_EQ(steps.Check(1, 640), 0.9);  // complete, and unchanged: packed now
      EXPECT_EQ(steps.Check(1, 640), 1.0);
      EXPECT_EQ(steps.Check(1, 641), 10 / 11.0);
      // Many keys more: from the tensors once, then packed at once.
      steps.Check(1, 1500);
      steps.Check(1, 1500);
      EXPECT_EQ(steps.Check(1, 1500), 1.0);
    }
  }
}

TEST(Decode, AnyNumberOfQueriesAndHeads) {
  const Context context(2);
  const std::vector<int64_t> dims = Quick() ? std::vector<int64_t>{40} : std::vector<int64_t>{40, 64, 128};
  for (const int64_t queries : Quick() ? std::vector<int64_t>{1, 3, 33} : std::vector<int64_t>{1, 2, 3, 7, 33, 64}) {
    for (const auto& [q_heads, kv_heads] : {std::pair<int64_t, int64_t>{6, 2}, {3, 3}, {8, 1}}) {
      for (const int64_t dim : dims) {
        Steps steps(context, {.q_heads = q_heads, .kv_heads = kv_heads, .qk_dim = dim});
        SCOPED_TRACE(q_heads);
        steps.Check(128, 900);
        steps.Check(queries, 930);
        EXPECT_GT(steps.Check(queries, 930), 0.9);
      }
    }
  }
}

TEST(Decode, WithoutAPrompt) {
  const Context context(2);
  Steps steps(context);
  EXPECT_EQ(steps.Check(1, 1000), 0.0);
  EXPECT_EQ(steps.Check(1, 1000), 1.0);
  EXPECT_EQ(steps.Check(1, 1024), 15 / 16.0);
}

TEST(Decode, EveryChangeIsSeen) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    SCOPED_TRACE(isa);
    Steps steps(context);
    steps.Check(1024, 1024);
    EXPECT_EQ(steps.Check(1, 1024), 1.0);
    steps.Change(300, 301, -1);  // one token
    EXPECT_EQ(steps.Check(1, 1024), 15 / 16.0);
    EXPECT_EQ(steps.Check(1, 1024), 15 / 16.0);
    EXPECT_EQ(steps.Check(1, 1024), 1.0);
    steps.Change(64, 128, 40);  // beyond the units of the others: from the tensors, call after call
    for (int i = 0; i < 3; ++i) EXPECT_EQ(steps.Check(1, 1024), 15 / 16.0);
    steps.Change(0, 1024, 0.3f);                                       // a shifted context
    for (int i = 0; i < 2; ++i) EXPECT_LT(steps.Check(1, 1024), 1.0);  // once from the tensors, then packed
    EXPECT_EQ(steps.Check(1, 1024), 1.0);
    EXPECT_EQ(steps.Check(1, 700), 10 / 11.0);  // what came after it was removed
    // A prompt again takes what is there, and leaves what comes after it to the next.
    steps.Check(128, 1024);
    EXPECT_EQ(steps.Check(1, 1024), 1.0);
  }
}

// Keys that grow by the queries' own are looked at in few places: what a context shift or another context changes
// shows.
TEST(Decode, RunsOfChangesAreSeenWhileKeysGrow) {
  const Context context(2);
  Steps steps(context);
  steps.Check(128, 1024);
  EXPECT_EQ(steps.Check(1, 1025), 16 / 17.0);
  EXPECT_EQ(steps.Check(1, 1026), 16 / 17.0);
  steps.Change(200, 222, 1);  // 22 neighbours
  EXPECT_LT(steps.Check(1, 1027), 16 / 17.0);
  steps.Change(100, 1027, 1);
  for (int64_t keys = 1028; keys < 1030; ++keys) EXPECT_LT(steps.Check(1, keys), 0.5);
  EXPECT_EQ(steps.Check(1, 1030), 16 / 17.0);
  steps.Change(1029, 1030, -1);  // the last one, replaced
  EXPECT_EQ(steps.Check(1, 1030), 16 / 17.0);
  EXPECT_EQ(steps.Check(5, 1035), 16 / 17.0);  // drafts, three of which are refused
  steps.Change(1032, 1035, -1);
  EXPECT_EQ(steps.Check(5, 1037), 16 / 17.0);
  // Other keys that lie elsewhere are looked at as a whole, though there is just one more.
  Steps other(context);
  std::swap(other.memory, steps.memory);
  other.p.k.Set(0, 0, 700, 0, 3);
  other.Check(1, 1038);
}

// Two texts that take turns are read from the tensors, and nothing is packed for nothing.
TEST(Decode, TextsThatTakeTurns) {
  const Context context(2);
  Steps a(context), b(context, {.seed = 9});
  a.Check(1, 1000);
  for (int i = 0; i < 3; ++i) {
    std::swap(a.memory, b.memory);
    EXPECT_EQ(b.Check(1, 1001 + 2 * i), 0.0);
    std::swap(a.memory, b.memory);
    EXPECT_GT(a.Check(1, 1002 + 2 * i), 0.9);
  }
}

TEST(Decode, AQueryThatIsNotFinite) {
  const Context context(2);
  Steps steps(context);
  steps.p.desc.window = 8;
  steps.Run(128, 640);
  steps.p.q.Set(0, 2, 651, 5, kNan);
  const Result result = steps.Run(1, 652);  // all that it sees is in a block that is not packed
  for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(std::isnan(result.o.Get(0, h, 0, 0)), h == 2) << h;
}

TEST(Decode, MasksSlopesSinksAndCaps) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    SCOPED_TRACE(isa);
    const std::vector<float> slopes{0.5f, 0.1f, 0.02f, 0.3f, 0.01f, 0.7f}, sinks{1, -2, 0, 3, 2, 1};
    const std::vector<std::function<void(Steps&)>> rules{[](Steps& s) { s.p.desc.softcap = 2; },
                                                         [&](Steps& s) { s.p.desc.alibi_slopes = slopes.data(); },
                                                         [&](Steps& s) { s.p.desc.sink_logits = sinks.data(); },
                                                         [](Steps& s) { s.p.desc.window = 200; },
                                                         [](Steps& s) {  // holes: several sequences in one cache
                                                           s.p.desc.mask = SPARGE_MASK_BOOL;
                                                           s.p.mask_bytes.assign(kRoom * 4, 1);
                                                           for (size_t i = 0; i < s.p.mask_bytes.size(); ++i)
                                                             s.p.mask_bytes[i] = i % 3 != 0 && (i % kRoom) / 200 != 1;
                                                           s.p.mask = {s.p.mask_bytes.data(), 0, 0, kRoom};
                                                         },
                                                         [](Steps& s) {  // and one per head
                                                           s.p.desc.mask = SPARGE_MASK_BOOL;
                                                           s.p.mask_bytes.assign(kRoom * 8, 1);
                                                           for (size_t i = 0; i < s.p.mask_bytes.size(); ++i)
                                                             s.p.mask_bytes[i] = (i % kRoom) / 128 != i / kRoom;
                                                           s.p.mask = {s.p.mask_bytes.data(), 0, kRoom, kRoom};
                                                         }};
    for (size_t i = 0; i < rules.size(); ++i) {
      SCOPED_TRACE(i);
      Steps steps(context);
      rules[i](steps);
      steps.Check(1, 800);
      steps.Check(1, 801);
      steps.Check(3, 804);
      EXPECT_GT(steps.Check(1, 804), 0.9);
    }
  }
}

TEST(Decode, SkipsWhatCannotMatter) {
  const Context context(2);
  Steps steps(context);
  // Every query looks at the first key, others are far below it.
  for (int64_t h = 0; h < steps.p.k.heads; ++h) {
    for (int64_t d = 0; d < steps.p.k.dim; ++d) steps.p.k.Set(0, h, 0, d, 4);
  }
  for (int64_t h = 0; h < steps.p.q.heads; ++h) {
    for (int64_t t = 0; t < kRoom; ++t) {
      for (int64_t d = 0; d < steps.p.q.dim; ++d) steps.p.q.Set(0, h, t, d, 1 + steps.p.q.Get(0, h, t, d));
    }
  }
  steps.Run(1, 2000);
  const Result all = steps.Run(1, 2000);
  EXPECT_EQ(all.stats.total.pv_computed, all.stats.total.pv_eligible);
  steps.p.desc.params.pv_skip = 12;
  const Result some = steps.Run(1, 2000);
  EXPECT_EQ(some.stats.total.qk_computed, some.stats.total.qk_eligible);
  EXPECT_LT(some.stats.total.pv_computed, some.stats.total.pv_eligible / 2);
  // What is left out of 32 tiles of 64 keys: at most that many times e^-12.
  EXPECT_LE(RelativeL1(some.o, all.o), 2 * 2048 * std::exp(-12.0));
  sparge_head_stats sums{};
  for (const sparge_head_stats& head : some.head_stats) {
    sums.pv_computed += head.pv_computed;
    sums.qk_eligible += head.qk_eligible;
  }
  EXPECT_EQ(sums.pv_computed, some.stats.total.pv_computed);
  EXPECT_EQ(sums.qk_eligible, some.stats.total.qk_eligible);
  EXPECT_EQ(sums.qk_eligible, 6 * 32);
}

TEST(Decode, NotFiniteShowsWhereItIsSeen) {
  const Context context(2);
  Steps steps(context);
  steps.Run(128, 1024);
  steps.p.v.Set(0, 0, 100, 3, kInf);
  steps.p.k.Set(0, 0, 100, 0, 0.25f);  // so that it can be noticed
  for (int i = 0; i < 3; ++i) {
    const Result result = steps.Run(1, 1024);
    for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(std::isfinite(result.o.Get(0, h, 0, 3)), h >= 3) << h;
  }
}

TEST(Decode, TheSameBitsForAnyNumberOfThreads) {
  std::vector<std::vector<uint8_t>> results;
  for (const int threads : {1, 2, 3}) {
    const Context context(threads);
    Steps steps(context);
    steps.Run(128, 1500);
    steps.Run(5, 1505);
    results.push_back(steps.Run(1, 1506).o.bytes());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Decode, Refusals) {
  const Context context(1);
  const auto refused = [&](const std::function<void(PlanDesc&)>& change) -> std::string {
    PlanDesc desc;
    desc.q_heads = desc.kv_heads = 1;
    desc.q_tokens = 1;
    desc.kv_tokens = 100;
    desc.qk_dim = desc.v_dim = 64;
    desc.cache_tokens = 128;
    desc.decode = 1;
    change(desc);
    try {
      const Plan plan(context, desc);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refused([](PlanDesc&) {}), "");
  EXPECT_NE(refused([](PlanDesc& d) { d.decode = 3; }).find("decode=3"), std::string::npos);
  EXPECT_NE(refused([](PlanDesc& d) { d.cache_tokens = 0; }).find("cache_tokens=0"), std::string::npos);
  EXPECT_NE(refused([](PlanDesc& d) { d.q_tokens = 65; }).find("q_tokens=65"), std::string::npos);
  EXPECT_NE(refused([](PlanDesc& d) { d.select = SPARGE_SELECT_MAP; }).find("MAP"), std::string::npos);
  EXPECT_NE(refused([](PlanDesc& d) { d.all_keys = 200; }).find("all_keys=200"), std::string::npos);
}

// Prompts that glance and steps share what is packed; edits between them are seen by both.
TEST(Decode, PromptsThatGlance) {
  const Context context(2);
  Steps steps(context);
  steps.p.desc.glance = 1;
  steps.Check(640, 640);
  EXPECT_EQ(steps.Check(128, 768), 10 / 12.0);
  EXPECT_EQ(steps.Check(1, 768), 1.0);
  EXPECT_EQ(steps.Check(1, 769), 12 / 13.0);
  steps.Change(300, 301, -1);
  EXPECT_EQ(steps.Check(128, 897), 11 / 15.0);  // that block, the one that has grown, and two new ones
  EXPECT_EQ(steps.Check(1, 897), 1.0);
  steps.Change(640, 897, 1);  // a refused end, longer than a step may be
  EXPECT_EQ(steps.Check(128, 1000), 10 / 16.0);
  EXPECT_EQ(steps.Check(1, 1000), 1.0);
  for (int64_t keys = 1001; keys <= 1024; ++keys) steps.Check(1, keys);
  steps.Check(1, 1024);  // complete, and unchanged: packed now
  EXPECT_EQ(steps.Check(128, 1152), 16 / 18.0) << "what a step has packed serves the next prompt";
}

// Through a layer: the prompt in batches, then token by token.
// A layer that reads the last `queries` of `keys` tokens.
struct LayerSteps {
  TestTensor Run(int64_t queries, int64_t keys, uint32_t flags = 0, bool refused = false) {
    PlanDesc desc;
    desc.batch = 1;
    desc.q_heads = 6;
    desc.kv_heads = 2;
    desc.qk_dim = desc.v_dim = 64;
    desc.causal = 1;
    desc.q_tokens = queries;
    desc.kv_tokens = keys;
    TestTensor o(1, 6, queries, 64);
    RunArgs args;
    args.q = data.p.q.view();
    args.q.data = static_cast<float*>(args.q.data) + (keys - queries) * args.q.token_stride;
    args.k = data.p.k.view();
    args.v = data.p.v.view();
    args.o = o.view();
    if (refused) args.o.data = nullptr;
    layer.Run(context, desc, args, flags);
    return o;
  }
  double Error(int64_t queries, int64_t keys, uint32_t flags = 0) {
    return RelativeL1(Run(queries, keys, flags), data.Run(queries, keys, /*reference=*/true).o);
  }
  const Context context{2};
  Steps data{context};
  Layer layer{LayerDesc()};
};

TEST(Decode, ALayerKeepsItsKeysForTheAnswer) {
  LayerSteps steps;
  const auto run = [&](int64_t queries, int64_t keys) { return steps.Run(queries, keys); };
  Layer& layer = steps.layer;
  Steps& data = steps.data;
  for (int64_t keys = 256; keys <= 1024; keys += 256) run(256, keys);
  const int64_t before = layer.Totals().key_blocks_reused;
  for (int64_t keys = 1025; keys <= 1100; ++keys) {
    const TestTensor o = run(1, keys);
    ASSERT_LE(RelativeL1(o, data.Run(1, keys, /*reference=*/true).o), 0.03) << keys;
  }
  EXPECT_GE(layer.Totals().key_blocks_reused - before, 76 * 2 * 16 - 4);
}

// A prompt by itself, as long as the text before it, and different in one token that a step does not look at.
TEST(Decode, ALayerSeesThatAPromptCameInBetween) {
  LayerSteps steps;
  Problem& p = steps.data.p;
  for (int64_t keys = 256; keys <= 1024; keys += 256) steps.Run(256, keys);
  for (int64_t keys = 1025; keys <= 1030; ++keys) steps.Run(1, keys);
  // The next step attends to this token, and to little else.
  const int64_t token = 3 * SPARGE_BLOCK_K + 5, next = 1030;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t d = 0; d < 64; ++d) {
      p.k.Set(0, h, token, d, 8 * p.q.Get(0, 3 * h, next, d));
      p.v.Set(0, h, token, d, d % 2 == 0 ? 3.0f : -3.0f);
    }
  }
  steps.Run(1030, 1030);
  EXPECT_THROW(steps.Run(1, 1031, 0, /*refused=*/true), Error);  // looks at nothing, so the next one has to
  EXPECT_LE(steps.Error(1, 1031), 0.03);
}

// A change that no glance shows: the values of the first kv head alone.
TEST(Decode, ADenseCallMakesALayerForget) {
  LayerSteps steps;
  for (int64_t keys = 256; keys <= 1024; keys += 256) steps.Run(256, keys);
  for (int64_t keys = 1025; keys <= 1030; ++keys) steps.Run(1, keys);
  for (int64_t t = 0; t < 1000; ++t) {
    for (int64_t d = 0; d < 64; ++d) steps.data.p.v.Set(0, 0, t, d, 3.0f);
  }
  EXPECT_GT(steps.Error(1, 1031), 0.1) << "the change shows, or is not one";
  EXPECT_LE(steps.Error(1, 1032, SPARGE_LAYER_DENSE), 0.03);
  for (int64_t keys = 1033; keys <= 1036; ++keys) EXPECT_LE(steps.Error(1, keys), 0.03) << keys;
}

}  // namespace
}  // namespace sparge::testing

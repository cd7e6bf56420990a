// The cache of packed keys and values: used where they are the same, never where they are not.
#include <algorithm>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr int64_t kRoom = 2048;

// The first token gets the largest number of its head: units do not grow.
void PutLargestFirst(TestTensor& tensor) {
  for (int64_t b = 0; b < tensor.batch; ++b) {
    for (int64_t h = 0; h < tensor.heads; ++h) {
      float largest = 0;
      for (int64_t t = 0; t < tensor.tokens; ++t) {
        for (int64_t d = 0; d < tensor.dim; ++d) largest = std::max(largest, std::fabs(tensor.Get(b, h, t, d)));
      }
      tensor.Set(b, h, 0, 0, largest);
    }
  }
}

// A prompt and the cache of its layer.
struct Prompt {
  explicit Prompt(const Context& context, int64_t tokens, uint32_t seed = 1, int64_t dim = 64)
      : context(context),
        p({.batch = 2,
           .q_heads = 4,
           .kv_heads = 2,
           .q_tokens = tokens,
           .qk_dim = dim,
           .k_type = SPARGE_F16,
           .layout = Layout::kTokens,
           .seed = seed,
           .correlated = true}) {
    p.desc.causal = 1;
    p.desc.cache_tokens = kRoom;
    PutLargestFirst(p.k);
    PutLargestFirst(p.v);
  }

  // Queries [begin, end) against the keys before `end`.
  PlanDesc Describe(int64_t begin, int64_t end) const {
    PlanDesc desc = p.desc;
    desc.q_tokens = end - begin;
    desc.kv_tokens = end;
    return desc;
  }
  RunArgs Arguments(int64_t begin, int64_t end, Result& result) const {
    result.o = TestTensor(p.shape.batch, p.shape.q_heads, end - begin, p.shape.v_dim);
    RunArgs args;
    args.q = p.q.view();
    args.q.data = static_cast<float*>(args.q.data) + begin * args.q.token_stride;
    args.k = p.k.view();
    args.v = p.v.view();
    args.o = result.o.view();
    return args;
  }
  Result Run(int64_t begin, int64_t end) {
    Plan plan(context, Describe(begin, end));
    Result result;
    RunArgs args = Arguments(begin, end, result);
    args.stats = &result.stats;
    if (p.desc.cache_tokens > 0) {
      memory.resize(std::max(memory.size(), sparge_plan_cache_size(plan.get()) + 1));
      args.cache = memory.data() + 1;  // of any alignment
      args.cache_size = memory.size() - 1;
    }
    if (only_predict) {
      args.v = args.o = {};
      plan.Predict(args);
    } else {
      plan.Run(args);
    }
    return result;
  }
  Result Expected(int64_t begin, int64_t end) const {
    PlanDesc desc = Describe(begin, end);
    desc.cache_tokens = desc.glance = 0;
    const Plan plan(context, desc);
    Result result;
    plan.Reference(Arguments(begin, end, result));
    return result;
  }

  const Context& context;
  Problem p;
  std::vector<uint8_t> memory;
  bool only_predict = false;
};

// Blocks of all sequences and kv heads.
int64_t Blocks(int64_t keys) { return 2 * 2 * ((keys + 63) / 64); }

TEST(Cache, AnEmptyOneChangesNothing) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      SCOPED_TRACE(isa + Name(precision));
      Prompt with(context, 600), without(context, 600);
      with.p.desc.precision = without.p.desc.precision = precision;
      without.p.desc.cache_tokens = 0;
      const Result a = with.Run(300, 600);
      const Result b = without.Run(300, 600);
      EXPECT_EQ(a.o.bytes(), b.o.bytes());
      EXPECT_EQ(a.stats.key_blocks, Blocks(600));
      EXPECT_EQ(a.stats.key_blocks_reused, 0);
      EXPECT_EQ(b.stats.key_blocks, Blocks(600));
    }
  }
}

TEST(Cache, APromptInBatches) {
  constexpr int64_t kBatch = 96, kTokens = 576;
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      SCOPED_TRACE(isa + Name(precision));
      Prompt prompt(context, kTokens);
      prompt.p.desc.precision = precision;
      int64_t centred = 0;
      for (int64_t end = kBatch; end <= kTokens; end += kBatch) {
        const Result result = prompt.Run(end - kBatch, end);
        const bool anew = end > 2 * centred;
        // Whole blocks of the batches before; the one that has become longer is another one.
        EXPECT_EQ(result.stats.key_blocks_reused, anew ? 0 : 2 * 2 * ((end - kBatch) / 64)) << end;
        if (anew) centred = end;
        EXPECT_LE(RelativeL1(result.o, prompt.Expected(end - kBatch, end).o), Tolerance(precision, SPARGE_F32, 64))
            << end;
      }
      // The same batch again: everything is there.
      EXPECT_EQ(prompt.Run(kTokens - kBatch, kTokens).stats.key_blocks_reused, Blocks(kTokens));
      // Another prompt in the same place, shorter: nothing is.
      EXPECT_EQ(prompt.Run(0, 200).stats.key_blocks_reused, 0);
    }
  }
}

// Half of the keys and values, those around `token`, become others, so that their blocks are packed anew.
void Halve(const TestTensor& from, int64_t token, TestTensor& to) {
  const int64_t half = from.tokens / 2;
  to.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
    return t / half == token / half ? from.Get(b, h, t, d) / 2 : from.Get(b, h, t, d);
  });
}

// One number of one key or value, anywhere: the result is that of packing that half of the keys anew.
TEST(Cache, EveryChangeIsSeen) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
      const int64_t dim = precision == SPARGE_PRECISION_INT8 ? 64 : 37;
      for (const int64_t token : Quick() ? std::vector<int64_t>{130} : std::vector<int64_t>{0, 63, 130, 511}) {
        SCOPED_TRACE(isa + " " + Name(precision) + " " + std::to_string(token));
        Prompt prompt(context, 512, 3, dim), anew(context, 512, 3, dim);
        for (Prompt* each : {&prompt, &anew}) {
          each->p.desc.precision = precision;
          each->Run(256, 512);
        }
        const bool of_keys = token % 2 == 0;
        Halve(prompt.p.k, token, anew.p.k);
        EXPECT_EQ(anew.Run(256, 512).stats.key_blocks_reused, Blocks(512) / 2);
        anew.p.k.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return prompt.p.k.Get(b, h, t, d); });
        for (Prompt* each : {&prompt, &anew}) {
          TestTensor& tensor = of_keys ? each->p.k : each->p.v;
          tensor.Set(1, 1, token, dim - 1, tensor.Get(1, 1, token, dim - 1) / 2);
        }
        const Result expected = anew.Run(256, 512);
        const Result result = prompt.Run(256, 512);
        EXPECT_EQ(expected.stats.key_blocks_reused, Blocks(512) / 2);
        EXPECT_EQ(result.stats.key_blocks_reused, Blocks(512) - 1);
        EXPECT_EQ(result.o.bytes(), expected.o.bytes());
      }
    }
  }
}

// Tokens become others, in the tensors of all heads.
void Replace(Prompt& prompt, int64_t begin, int64_t end) {
  for (TestTensor* tensor : {&prompt.p.k, &prompt.p.v}) {
    for (int64_t b = 0; b < tensor->batch; ++b) {
      for (int64_t h = 0; h < tensor->heads; ++h) {
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t d = 0; d < tensor->dim; ++d) tensor->Set(b, h, t, d, 0.5f * tensor->Get(b, h, t, d) - 0.01f);
        }
      }
    }
  }
}

// With a glance, tokens that are others show as with checksums, with the same results.
TEST(Cache, AGlanceSeesOtherTokens) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    SCOPED_TRACE(isa);
    Prompt glancing(context, 1024, 13), summing(context, 1024, 13);
    glancing.p.desc.glance = 1;
    const auto same = [&](int64_t begin, int64_t end, int64_t reused) {
      const Result a = glancing.Run(begin, end), b = summing.Run(begin, end);
      EXPECT_EQ(a.stats.key_blocks_reused, b.stats.key_blocks_reused);
      EXPECT_EQ(a.stats.key_blocks_reused, reused);
      EXPECT_EQ(a.o.bytes(), b.o.bytes());
      return a;
    };
    same(0, 576, 0);
    same(576, 768, Blocks(576));
    same(768, 900, Blocks(768));
    same(900, 1024, Blocks(896));  // the block that has become longer is another one
    for (const int64_t token : Quick() ? std::vector<int64_t>{63} : std::vector<int64_t>{1, 63, 64, 500, 1023}) {
      for (Prompt* each : {&glancing, &summing}) Replace(*each, token, token + 1);
      same(896, 1024, Blocks(1024) - 4);
    }
    // Tokens 100 to 163 removed, as a shifted context has it: three quarters of the blocks are others, so all are.
    for (Prompt* each : {&glancing, &summing}) {
      for (TestTensor* tensor : {&each->p.k, &each->p.v}) {
        const TestTensor before = *tensor;
        tensor->Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
          return before.Get(b, h, t >= 100 && t < 960 ? t + 64 : t, d);
        });
      }
    }
    same(896, 1024, 0);
    same(896, 960, 0);  // the last ones removed: fewer keys than their mean is of
    for (Prompt* each : {&glancing, &summing}) Replace(*each, 960, 1024);
    const Result last = same(896, 1024, Blocks(960));
    EXPECT_LE(RelativeL1(last.o, glancing.Expected(896, 1024).o), Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
    glancing.p.desc.glance = 0;
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, 0) << "no checksums of what a glance has let in";
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, Blocks(1024));
    glancing.p.desc.glance = 1;
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, Blocks(1024)) << "a glance at what has checksums";
    // Values of the first head alone: the glance does not see them, and leaves it to checksums to do so.
    glancing.p.v.Set(1, 0, 70, 3, 9);
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, Blocks(1024));
    glancing.p.desc.glance = 0;
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, Blocks(1024) - 1);
    glancing.p.desc.glance = 1;
    glancing.p.v.Set(1, 1, 70, 3, 9);
    EXPECT_EQ(glancing.Run(896, 1024).stats.key_blocks_reused, Blocks(1024) - 2)
        << "values of the last head, seen for both";
  }
}

// Stage 1 alone takes no values, and so no glance at them.
TEST(Cache, PredictionsThatGlanceNeedNoValues) {
  const Context context(2);
  Prompt prompt(context, 512, 15);
  prompt.p.desc.select = SPARGE_SELECT_FLOOR;
  prompt.p.desc.params = {-1, 0.8, 1, SPARGE_PV_SKIP_OFF};
  prompt.only_predict = true;
  const Result summing = prompt.Run(256, 512);
  prompt.p.desc.glance = 1;
  const Result glancing = prompt.Run(256, 512);  // without v
  EXPECT_GT(glancing.stats.total.qk_computed, 0);
  EXPECT_EQ(glancing.stats.total.qk_computed, summing.stats.total.qk_computed);
}

// A change that a glance does not show, and a larger unit, for which all blocks are packed again, with that change in
// them; then it is undone. No block has the checksum of what had been packed before.
TEST(Cache, WhatAGlanceLetInHasNoChecksum) {
  const Context context(2);
  Prompt prompt(context, 1024, 16);
  TestTensor& v = prompt.p.v;
  const TestTensor before = v;
  const auto fill = [&](float more) {
    v.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
      if (t == 600) return 40 * before.Get(b, h, t, d);
      return before.Get(b, h, t, d) + (h == 0 ? more : 0.0f);
    });
  };
  prompt.Run(0, 512);
  fill(2);
  prompt.p.desc.glance = 1;
  prompt.Run(512, 640);
  fill(0);
  prompt.p.desc.glance = 0;
  const Result result = prompt.Run(512, 640);
  EXPECT_EQ(result.stats.key_blocks_reused, 0);
  EXPECT_LE(RelativeL1(result.o, prompt.Expected(512, 640).o), 2 * Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
}

TEST(Cache, AGlanceHasTheSameBitsForAnyNumberOfThreads) {
  std::vector<std::vector<uint8_t>> results;
  for (const int32_t threads : {1, 2, 3}) {
    const Context context(threads);
    Prompt prompt(context, 1024, 14);
    prompt.p.desc.glance = 1;
    prompt.Run(0, 576);
    Replace(prompt, 200, 300);
    results.push_back(prompt.Run(576, 1024).o.bytes());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// As many keys, but of another text with quite another mean: as with an empty cache.
TEST(Cache, AnotherText) {
  const Context context(2);
  Prompt prompt(context, 512, 10), fresh(context, 512, 11);
  const auto far = [&](int64_t b, int64_t h, int64_t t, int64_t d) { return fresh.p.k.Get(b, h, t, d) + 100.0f; };
  prompt.p.k.Fill(far);
  prompt.Run(256, 512);
  // A beginning that both have in common is not enough.
  prompt.p = fresh.p;
  prompt.p.k.Fill(
      [&](int64_t b, int64_t h, int64_t t, int64_t d) { return t < 64 ? far(b, h, t, d) : fresh.p.k.Get(b, h, t, d); });
  fresh.p.k = prompt.p.k;
  const Result result = prompt.Run(256, 512);
  EXPECT_EQ(result.stats.key_blocks_reused, 0);
  EXPECT_EQ(result.o.bytes(), fresh.Run(256, 512).o.bytes());
}

// The same prompt again, from its beginning: its later blocks are there, but centred on another mean.
TEST(Cache, TheSamePromptAgain) {
  const Context context(2);
  Prompt prompt(context, 1024, 9), fresh(context, 1024, 9);
  for (int64_t t = 512; t < 1024; ++t) {  // the mean moves
    for (int64_t d = 0; d < 64; ++d) {
      for (Prompt* each : {&prompt, &fresh}) each->p.k.Set(0, 0, t, d, each->p.k.Get(0, 0, t, d) + 3.0f);
    }
  }
  for (Prompt* each : {&prompt, &fresh}) PutLargestFirst(each->p.k);
  prompt.Run(0, 1024);
  for (Prompt* each : {&prompt, &fresh}) EXPECT_EQ(each->Run(0, 512).stats.key_blocks_reused, 0);
  const Result result = prompt.Run(512, 1024);
  EXPECT_EQ(result.stats.key_blocks_reused, Blocks(512));
  EXPECT_EQ(result.o.bytes(), fresh.Run(512, 1024).o.bytes());
}

// Much larger keys or values than so far, then not finite ones.
TEST(Cache, UnitsGrow) {
  const Context context(2);
  for (const bool of_keys : {true, false}) {
    Prompt prompt(context, 1024, 4);
    prompt.Run(0, 512);
    TestTensor& tensor = of_keys ? prompt.p.k : prompt.p.v;
    for (int64_t d = 0; d < 64; ++d) tensor.Set(0, 0, 600, d, tensor.Get(0, 0, 600, d) * 40);
    const Result grown = prompt.Run(512, 1024);
    EXPECT_EQ(grown.stats.key_blocks_reused, 3 * 512 / 64) << "all but those of the head that has grown";
    // A key of that size is the only one its readers see, and rounds as the others do.
    EXPECT_LE(RelativeL1(grown.o, prompt.Expected(512, 1024).o), 2 * Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
    tensor.Set(0, 0, 700, 3, kInf);
    const Result infinite = prompt.Run(512, 1024);
    EXPECT_EQ(infinite.stats.key_blocks_reused, Blocks(1024) - 1);
    EXPECT_TRUE(std::isfinite(infinite.o.Get(0, 0, 100, 0)));
    EXPECT_FALSE(std::isfinite(infinite.o.Get(0, 0, 700 - 512, 0)));
  }
}

TEST(Cache, OtherPlansEmptyIt) {
  const Context context(2);
  Prompt prompt(context, 512, 5), fresh(context, 512, 5);
  const std::vector<uint8_t> expected = fresh.Run(256, 512).o.bytes();
  prompt.Run(256, 512);
  prompt.p.desc.precision = SPARGE_PRECISION_INT16;
  EXPECT_EQ(prompt.Run(256, 512).stats.key_blocks_reused, 0);
  prompt.p.desc.precision = SPARGE_PRECISION_INT8;
  prompt.p.desc.cache_tokens = kRoom / 2;
  EXPECT_EQ(prompt.Run(256, 512).stats.key_blocks_reused, 0);
  prompt.p.desc.cache_tokens = kRoom;
  prompt.p.desc.select = SPARGE_SELECT_CDF;
  const Result before = prompt.Run(256, 512);
  prompt.only_predict = true;
  prompt.Run(256, 512);
  prompt.only_predict = false;
  const Result after = prompt.Run(256, 512);
  EXPECT_EQ(after.stats.key_blocks_reused, 0);
  EXPECT_EQ(after.o.bytes(), before.o.bytes());
  prompt.p.desc.select = SPARGE_SELECT_ALL;
  const Result result = prompt.Run(256, 512);
  EXPECT_EQ(result.o.bytes(), expected);
  // A single query takes keys as they lie, and leaves the cache as it is.
  prompt.Run(511, 512);
  EXPECT_EQ(prompt.Run(256, 512).stats.key_blocks_reused, Blocks(512));
  // Memory of another user.
  std::fill(prompt.memory.begin(), prompt.memory.end(), uint8_t{0xA5});
  EXPECT_EQ(prompt.Run(256, 512).o.bytes(), expected);
}

TEST(Cache, StageOneSeesTheSame) {
  const Context context(2);
  for (const sparge_predictor predictor : {SPARGE_PREDICT_PAPER, SPARGE_PREDICT_KEYS}) {
    Prompt prompt(context, 1024, 6), anew(context, 1024, 6);
    for (Prompt* each : {&prompt, &anew}) {
      each->p.desc.select = predictor == SPARGE_PREDICT_PAPER ? SPARGE_SELECT_CDF : SPARGE_SELECT_FLOOR;
      each->p.desc.predictor = predictor;
      each->p.desc.params = {-1.0, 0.6, 0.5, 10.0};
      each->Run(256, 768);
    }
    Halve(prompt.p.v, 0, anew.p.v);
    EXPECT_EQ(anew.Run(256, 768).stats.key_blocks_reused, Blocks(256));
    anew.p.v.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return prompt.p.v.Get(b, h, t, d); });
    const Result result = prompt.Run(768, 1024);
    const Result expected = anew.Run(768, 1024);
    EXPECT_EQ(result.stats.key_blocks_reused, Blocks(768));
    EXPECT_EQ(expected.stats.key_blocks_reused, Blocks(256));
    EXPECT_GT(result.stats.sparsity(), 0.1);
    EXPECT_EQ(result.stats.total.qk_computed, expected.stats.total.qk_computed);
    EXPECT_EQ(result.o.bytes(), expected.o.bytes());
  }
}

// Some heads in int8, some in int16, each precision with a part of the cache of its own.
TEST(Cache, MixedPrecisions) {
  const Context context(2);
  Prompt prompt(context, 1024, 12), fresh(context, 1024, 12);
  const sparge_precision mixed[] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT16,
                                    SPARGE_PRECISION_INT16};
  const sparge_precision others[] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT8,
                                     SPARGE_PRECISION_INT16};
  prompt.p.desc.head_precision = mixed;
  EXPECT_EQ(prompt.Run(0, 512).stats.key_blocks, Blocks(512) + Blocks(512) / 2);
  EXPECT_EQ(prompt.Run(512, 1024).stats.key_blocks_reused, Blocks(512) + Blocks(512) / 2);
  // The second kv head was not there in int8, and the first one is no longer there in int16.
  prompt.p.desc.head_precision = others;
  const Result result = prompt.Run(512, 1024);
  EXPECT_EQ(result.stats.key_blocks, Blocks(1024) + Blocks(1024) / 2);
  EXPECT_EQ(result.stats.key_blocks_reused, Blocks(1024));
  EXPECT_LE(RelativeL1(result.o, prompt.Expected(512, 1024).o), Tolerance(SPARGE_PRECISION_INT8, SPARGE_F32, 64));
}

// A calibration that moves its heads to int16.
TEST(Cache, AutomaticPlans) {
  for (const int32_t threads : {1, 3}) {
    const Context context(threads);
    Prompt prompt(context, 1024, 7), without(context, 1024, 7);
    CalibrationDesc bounds;
    bounds.q_heads = 4;
    bounds.round_l1 = 1e-5;  // less than int8 has
    Calibration one(bounds), two(bounds);
    for (Prompt* each : {&prompt, &without}) {
      each->p.desc.select = SPARGE_SELECT_AUTO;
      each->p.desc.calibration = (each == &prompt ? one : two).get();
      each->p.desc.least_effort = 0.5;
    }
    without.p.desc.cache_tokens = 0;
    prompt.Run(0, 512);
    without.Run(0, 512);
    EXPECT_EQ(one.Head(0).precision, SPARGE_PRECISION_INT16);
    const Result result = prompt.Run(512, 1024);
    EXPECT_EQ(result.stats.key_blocks, Blocks(1024));  // int16 only
    EXPECT_EQ(result.stats.key_blocks_reused, Blocks(512));
    EXPECT_LE(RelativeL2(result.o, without.Run(512, 1024).o),
              2 * 1.2 * BoundsOf(bounds).pv + Tolerance(SPARGE_PRECISION_INT16, SPARGE_F32, 64));
  }
}

TEST(Cache, MemoryIsChecked) {
  const Context context(1);
  Prompt prompt(context, 256);
  const Plan plan(context, prompt.Describe(0, 256));
  Result result;
  RunArgs args = prompt.Arguments(0, 256, result);
  std::vector<std::byte> workspace(plan.workspace_size());
  args.workspace = workspace.data();
  args.workspace_size = workspace.size();
  EXPECT_EQ(sparge_run(plan.get(), &args), SPARGE_INVALID_ARGUMENT);
  EXPECT_STREQ(sparge_last_error(), "cache is NULL, but the plan has one");
  std::vector<std::byte> memory(sparge_plan_cache_size(plan.get()));
  args.cache = memory.data();
  args.cache_size = 100;
  EXPECT_EQ(sparge_run(plan.get(), &args), SPARGE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparge_last_error()).find("cache_size=100 is less than the "), 0U);
  args.cache_size = memory.size();
  EXPECT_EQ(sparge_run(plan.get(), &args), SPARGE_OK);
}

TEST(Cache, LeastEffortIsSpent) {
  const Context context(2);
  const auto samples = [&](double effort) {
    Prompt prompt(context, 1024, 8);
    CalibrationDesc bounds;
    bounds.q_heads = 4;
    Calibration calibration(bounds);
    prompt.p.desc.select = SPARGE_SELECT_AUTO;
    prompt.p.desc.calibration = calibration.get();
    prompt.p.desc.least_effort = effort;
    prompt.Run(512, 1024);
    return calibration.Head(2).samples;
  };
  EXPECT_GE(samples(0.5), 4 * std::max<int64_t>(samples(0), 1));
}

}  // namespace
}  // namespace sparge::testing

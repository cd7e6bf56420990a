// Keys and pools that parts send each other as 8-bit integers: whoever takes them computes the bits of whoever left
// them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

// Neither the dims nor the channels are whole lanes or panels, the last block is not full, and some blocks need their
// second half of bits: a token that is much smaller than the others, a channel with a spike.
struct Walk {
  Problem p{Case{.batch = 2,
                 .q_heads = 4,
                 .kv_heads = 2,
                 .q_tokens = 330,
                 .kv_tokens = 300,
                 .qk_dim = 42,
                 .v_dim = 40,
                 .correlated = true}};

  explicit Walk(sparge_select select) {
    p.desc.select = select;
    p.desc.params = {-1, select == SPARGE_SELECT_FLOOR ? 0.7 : 1, 1, SPARGE_PV_SKIP_OFF};
    for (int64_t d = 0; d < 40; ++d) p.v.Set(0, 0, 3, d, 0.001f * p.v.Get(0, 0, 3, d));
    p.v.Set(1, 1, 140, 7, 1000.0f);
    p.k.Set(0, 1, 70, 5, kNan);
    p.v.Set(1, 0, 290, 39, kInf);
    for (int64_t t = 5; t < 330; t += 60) {  // queries that are pools of their own
      for (int64_t d = 0; d < 42; ++d) p.q.Set(t % 2, t % 4, t, d, (t + d) % 3 == 0 ? 9.0f : -4.0f);
    }
  }
};

struct Codes {
  std::vector<int8_t> keys, values, fine_values;
  std::vector<float> key_scales, value_scales;
  std::vector<uint8_t> fine;
  std::vector<uint64_t> not_finite;

  explicit Codes(const PlanDesc& d) {
    const int64_t tokens = d.batch * d.kv_heads * d.kv_tokens,
                  blocks = d.batch * d.kv_heads * ((d.kv_tokens + 63) / 64);
    keys.assign(tokens * ((d.qk_dim + 3) / 4 * 4), 99);
    values.assign(tokens * d.v_dim, 99);
    fine_values.assign(tokens * d.v_dim, 99);
    key_scales.assign(tokens, kNan);
    value_scales.assign(blocks * d.v_dim, kNan);
    fine.assign(blocks, 9);
    not_finite.assign(blocks, 9);
  }
  sparge_key_codes pointers() {
    return {keys.data(),        key_scales.data(), values.data(),    value_scales.data(),
            fine_values.data(), fine.data(),       not_finite.data()};
  }
};

RunArgs ArgsOf(const Problem& p, const std::vector<double>& survey) {
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  args.key_survey = survey.data();
  return args;
}

std::vector<double> SurveyOf(const Context& context, const Problem& p) {
  std::vector<double> survey(p.desc.batch * p.desc.kv_heads * (p.desc.qk_dim + 3));
  RunArgs args = ArgsOf(p, survey);
  args.key_survey = nullptr;
  args.key_survey_out = survey.data();
  Plan(context, p.desc).Predict(args);
  return survey;
}

Codes Leave(const Context& context, const Problem& p, const std::vector<double>& survey) {
  PlanDesc desc = p.desc;
  desc.select = SPARGE_SELECT_ALL;
  Codes codes(desc);
  const sparge_key_codes out = codes.pointers();
  RunArgs args = ArgsOf(p, survey);
  args.key_codes_out = &out;
  Plan(context, desc).Predict(args);
  return codes;
}

Result RunWith(const Context& context, const Problem& p, RunArgs args) {
  Plan plan(context, p.desc);
  const auto [q_blocks, k_blocks] = plan.map_shape();
  const int64_t rows = p.desc.batch * p.desc.q_heads;
  Result result;
  result.o = TestTensor(p.desc.batch, p.desc.q_heads, p.desc.q_tokens, p.desc.v_dim);
  result.lse.resize(rows * p.desc.q_tokens);
  result.map.resize(rows * q_blocks * k_blocks);
  args.o = result.o.view();
  args.lse = {result.lse.data(), p.desc.q_heads * p.desc.q_tokens, p.desc.q_tokens};
  args.map_out = result.map.data();
  plan.Run(args);
  return result;
}

// Bits, because some rows are NaN.
bool IsSame(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSameBits(const Result& a, const Result& b) {
  EXPECT_EQ(a.o.bytes(), b.o.bytes());
  EXPECT_TRUE(IsSame(a.lse, b.lse));
  EXPECT_EQ(a.map, b.map);
}

TEST(Codes, WhoTakesThemHasTheBitsOfWhoLeftThem) {
  for (const std::string& isa : RunnableIsas()) {
    for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_FLOOR}) {
      SCOPED_TRACE(isa);
      const Context context(2, isa.c_str());
      const Walk walk(select);
      const std::vector<double> survey = SurveyOf(context, walk.p);
      const Result wanted = RunWith(context, walk.p, ArgsOf(walk.p, survey));
      Codes codes = Leave(context, walk.p, survey);
      EXPECT_EQ(*std::max_element(codes.fine.begin(), codes.fine.end()), 2);
      EXPECT_EQ(*std::min_element(codes.fine.begin(), codes.fine.end()), 0);
      EXPECT_NE(std::count(codes.not_finite.begin(), codes.not_finite.end(), 0u), int64_t(codes.not_finite.size()));
      const sparge_key_codes taken = codes.pointers();
      RunArgs args = ArgsOf(walk.p, survey);
      args.k.data = args.v.data = nullptr;
      args.key_codes = &taken;
      ExpectSameBits(RunWith(context, walk.p, args), wanted);
      // The scales of another block are another result: nothing here is equal by chance.
      std::swap_ranges(codes.key_scales.begin(), codes.key_scales.begin() + 64, codes.key_scales.begin() + 64);
      EXPECT_FALSE(IsSame(RunWith(context, walk.p, args).lse, wanted.lse));
      std::swap_ranges(codes.key_scales.begin(), codes.key_scales.begin() + 64, codes.key_scales.begin() + 64);
      std::swap_ranges(codes.value_scales.begin(), codes.value_scales.begin() + 40, codes.value_scales.begin() + 40);
      EXPECT_NE(RunWith(context, walk.p, args).o.bytes(), wanted.o.bytes());
    }
  }
}

// Heads of other precisions take the tensors.
TEST(Codes, AreForInt8HeadsOnly) {
  const Context context(2);
  Walk walk(SPARGE_SELECT_FLOOR);
  const std::vector<double> survey = SurveyOf(context, walk.p);
  Codes codes = Leave(context, walk.p, survey);
  const sparge_precision precisions[] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32,
                                         SPARGE_PRECISION_INT8};
  walk.p.desc.head_precision = precisions;
  const Result wanted = RunWith(context, walk.p, ArgsOf(walk.p, survey));
  const sparge_key_codes taken = codes.pointers();
  RunArgs args = ArgsOf(walk.p, survey);
  args.key_codes = &taken;
  ExpectSameBits(RunWith(context, walk.p, args), wanted);
  args.k.data = nullptr;
  EXPECT_THROW(RunWith(context, walk.p, args), Error);
}

// Sums over the keys of pools that came as integers are those of the queries themselves.
TEST(Codes, PoolsAreThoseOfTheQueries) {
  for (const std::string& isa : RunnableIsas()) {
    SCOPED_TRACE(isa);
    const Context context(2, isa.c_str());
    const Walk walk(SPARGE_SELECT_FLOOR);
    const PlanDesc& desc = walk.p.desc;
    Plan plan(context, desc);
    const int64_t pools = desc.batch * desc.q_heads * sparge_plan_pools(plan.get());
    const std::vector<double> survey = SurveyOf(context, walk.p);
    std::vector<double> wanted(pools), found(pools), found_with_codes(pools);
    std::vector<int8_t> rows(pools * ((desc.qk_dim + 3) / 4 * 4));
    std::vector<float> factors(pools), shifts(pools);
    std::vector<int32_t> counts(desc.batch * desc.q_heads * 3);
    const sparge_pool_codes pool_codes{rows.data(), factors.data(), shifts.data()};
    RunArgs leave = ArgsOf(walk.p, survey);
    leave.pool_lse_out = wanted.data();
    leave.pool_codes_out = &pool_codes;
    leave.pool_counts_out = counts.data();
    plan.Predict(leave);
    EXPECT_GT(*std::max_element(counts.begin(), counts.end()), 0);
    RunArgs take = ArgsOf(walk.p, survey);
    take.q.data = nullptr;
    take.pool_codes = &pool_codes;
    take.pool_counts = counts.data();
    take.pool_lse_out = found.data();
    plan.Predict(take);
    EXPECT_EQ(found, wanted);
    Codes codes = Leave(context, walk.p, survey);
    const sparge_key_codes taken = codes.pointers();
    take.key_codes = &taken;
    take.k.data = nullptr;
    take.pool_lse_out = found_with_codes.data();
    plan.Predict(take);
    EXPECT_EQ(found_with_codes, wanted);
  }
}

TEST(Codes, WhatDoesNotFitIsRefused) {
  const Context context(1);
  const Walk walk(SPARGE_SELECT_FLOOR);
  const std::vector<double> survey = SurveyOf(context, walk.p);
  Codes arrays = Leave(context, walk.p, survey);
  sparge_key_codes codes = arrays.pointers();
  sparge_pool_codes pools{};
  std::vector<int32_t> counts(64);
  std::vector<double> sums(1 << 12);
  enum Verb { kRun, kPredict };
  const auto expect = [&](const char* text, Verb verb, const std::function<void(PlanDesc&, RunArgs&)>& change) {
    PlanDesc desc = walk.p.desc;
    RunArgs args = ArgsOf(walk.p, survey);
    TestTensor o(2, 4, 330, 40);
    args.o = o.view();
    change(desc, args);
    std::string found;
    try {
      Plan plan(context, desc);
      verb == kRun ? plan.Run(args) : plan.Predict(args);
    } catch (const Error& error) {
      found = error.what();
    }
    EXPECT_NE(found.find(text), std::string::npos) << text << " is not in: " << found;
  };
  const auto take = [&](RunArgs& a) { a.key_codes = &codes; };
  expect("key_codes is given, but key_survey is NULL", kRun,
         [&](PlanDesc&, RunArgs& a) { take(a), a.key_survey = nullptr; });
  expect("key_codes is given, but no head is int8", kRun,
         [&](PlanDesc& d, RunArgs& a) { take(a), d.precision = SPARGE_PRECISION_INT16; });
  expect("key_codes is given, but so few queries", kRun,
         [&](PlanDesc& d, RunArgs& a) { take(a), d.q_tokens = 4, d.select = SPARGE_SELECT_ALL; });
  expect("only those with select=FLOOR take codes", kRun,
         [&](PlanDesc& d, RunArgs& a) { take(a), d.select = SPARGE_SELECT_CDF; });
  expect("predictor=PAPER", kRun, [&](PlanDesc& d, RunArgs& a) { take(a), d.predictor = SPARGE_PREDICT_PAPER; });
  expect("key_codes_out is given, but only predict fills it", kRun,
         [&](PlanDesc&, RunArgs& a) { a.key_codes_out = &codes; });
  expect("key_codes_out is given: then predict fills it and nothing else", kPredict,
         [&](PlanDesc&, RunArgs& a) { a.key_codes_out = &codes, a.pool_lse_out = sums.data(); });
  expect("pool_codes has an array that is NULL", kPredict, [&](PlanDesc&, RunArgs& a) {
    a.pool_codes = &pools, a.pool_counts = counts.data(), a.pool_lse_out = sums.data();
  });
  expect("pool_counts is missing", kPredict, [&](PlanDesc&, RunArgs& a) { a.pool_codes = &pools; });
  expect("fine[1]=3 is above 2", kRun, [&](PlanDesc&, RunArgs& a) { take(a), codes.fine[1] = 3; });
  codes.keys = nullptr;
  expect("key_codes has an array that is NULL", kRun, [&](PlanDesc&, RunArgs& a) { take(a); });
}

}  // namespace
}  // namespace sparge::testing

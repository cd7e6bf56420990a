// Parts of a larger call: sums that leave and come, global positions, and results joined; as one call over all.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr int64_t kHeads = 2, kDim = 64;

// Slow walks, so that tiles differ in mass: some are skipped, and not by chance.
struct Walk {
  TestTensor q, k, v;

  Walk(int64_t queries, int64_t keys, uint32_t seed)
      : q(1, kHeads, queries, kDim), k(1, kHeads, keys, kDim), v(1, kHeads, keys, kDim) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t h = 0; h < kHeads; ++h) {
      std::vector<float> at(kDim);
      for (int64_t t = 0; t < keys; ++t) {
        for (int64_t d = 0; d < kDim; ++d) {
          at[d] = 0.995f * at[d] + 0.1f * normal(random);
          k.Set(0, h, t, d, at[d] + 0.5f);  // a mean: parts must not be judged by their own
          if (t < queries) q.Set(0, h, t, d, 3 * at[d] + 0.1f * normal(random));
          v.Set(0, h, t, d, normal(random));
        }
      }
    }
  }
};

// Tokens [first, first + count) of a (1, heads, tokens, dim) tensor.
sparge_tensor Slice(const TestTensor& tensor, int64_t first) {
  sparge_tensor view = tensor.view();
  view.data = static_cast<float*>(view.data) + first * view.token_stride;
  return view;
}

PlanDesc DescOf(int64_t queries, int64_t keys, bool causal, double tau) {
  PlanDesc desc;
  desc.batch = 1;
  desc.q_heads = desc.kv_heads = kHeads;
  desc.q_tokens = queries;
  desc.kv_tokens = keys;
  desc.qk_dim = desc.v_dim = kDim;
  desc.causal = causal;
  desc.select = SPARGE_SELECT_FLOOR;
  desc.params = {-1, tau, 1, SPARGE_PV_SKIP_OFF};
  return desc;
}

struct Result {
  TestTensor o;
  std::vector<float> lse;
  std::vector<uint8_t> map;
};

Result RunPart(const Context& context, const PlanDesc& desc, RunArgs args, const double* pool_lse) {
  Plan plan(context, desc);
  const auto [q_blocks, k_blocks] = plan.map_shape();
  Result result{TestTensor(1, kHeads, desc.q_tokens, kDim), std::vector<float>(kHeads * desc.q_tokens),
                std::vector<uint8_t>(kHeads * q_blocks * k_blocks)};
  args.o = result.o.view();
  args.lse = {result.lse.data(), 0, desc.q_tokens};
  args.map_out = result.map.data();
  args.pool_lse = pool_lse;
  plan.Run(args);
  return result;
}

double LogAddExp(double a, double b) {
  const double top = std::max(a, b);
  return top == -INFINITY ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

class Parts : public ::testing::TestWithParam<bool> {};

// Keys in three parts of different size: the same tiles as in one call, and the same result when joined.
TEST_P(Parts, OfTheKeysHaveTheMapOfTheWhole) {
  const bool causal = GetParam();
  const int64_t tokens = 1500;
  const Walk walk(tokens, tokens, 3);
  const Context context(2);
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT8}) {
    PlanDesc whole = DescOf(tokens, tokens, causal, 0.8);
    whole.precision = precision;
    RunArgs args;
    args.q = walk.q.view();
    args.k = walk.k.view();
    args.v = walk.v.view();
    const Result wanted = RunPart(context, whole, args, nullptr);
    const int64_t borders[] = {0, 512, 1088, tokens};
    std::vector<PlanDesc> descs;
    std::vector<double> sums;
    for (int part = 0; part < 3; ++part) {
      PlanDesc desc = whole;
      desc.first_key = borders[part];
      desc.kv_tokens = borders[part + 1] - borders[part];
      desc.all_queries = desc.all_keys = tokens;
      descs.push_back(desc);
      Plan plan(context, desc);
      std::vector<double> own(kHeads * sparge_plan_pools(plan.get()), 0.0);
      RunArgs part_args = args;
      part_args.k = Slice(walk.k, borders[part]);
      part_args.pool_lse_out = own.data();
      plan.Predict(part_args);
      if (part == 0) sums.assign(own.size(), -INFINITY);
      for (size_t i = 0; i < own.size(); ++i) sums[i] = LogAddExp(sums[i], own[i]);
    }
    std::vector<Result> results;
    int64_t kept = 0, differ = 0;
    const int64_t q_blocks = (tokens + 127) / 128, k_blocks = (tokens + 63) / 64;
    for (int part = 0; part < 3; ++part) {
      RunArgs part_args = args;
      part_args.k = Slice(walk.k, borders[part]);
      part_args.v = Slice(walk.v, borders[part]);
      results.push_back(RunPart(context, descs[part], part_args, sums.data()));
      const int64_t first = borders[part] / 64, blocks = (descs[part].kv_tokens + 63) / 64;
      for (int64_t row = 0; row < kHeads * q_blocks; ++row) {
        for (int64_t j = 0; j < blocks; ++j) {
          kept += wanted.map[row * k_blocks + first + j];
          differ += wanted.map[row * k_blocks + first + j] != results[part].map[row * blocks + j];
        }
      }
    }
    EXPECT_LT(kept, 0.8 * static_cast<double>(std::count(wanted.map.begin(), wanted.map.end(), 0) + kept));
    // Keys are centred on the mean of their part, so that int8 rounds differently: a tile at the floor may fall.
    EXPECT_LE(differ, precision == SPARGE_PRECISION_FP32 ? 0 : kept / 50);
    std::vector<sparge_partial> partials;
    for (Result& result : results) partials.push_back({result.o.view(), {result.lse.data(), 0, tokens}});
    TestTensor joined(1, kHeads, tokens, kDim);
    std::vector<float> lse(kHeads * tokens);
    const sparge_partial out{joined.view(), {lse.data(), 0, tokens}};
    Check(sparge_merge_parts(context.get(), 1, kHeads, tokens, kDim, partials.data(), 3, &out));
    double error = 0, size = 0, lse_error = 0;
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < kDim; ++d) {
          error += std::fabs(joined.Get(0, h, t, d) - wanted.o.Get(0, h, t, d));
          size += std::fabs(wanted.o.Get(0, h, t, d));
        }
        const double off = std::fabs(lse[h * tokens + t] - wanted.lse[h * tokens + t]);
        lse_error += off;
        if (precision == SPARGE_PRECISION_FP32) {
          EXPECT_LT(off, 1e-4);
        }
      }
    }
    // int8 of the whole and of the parts lie about 1.5 % from exact each; single rows differ by a tile at the floor.
    EXPECT_LT(lse_error / static_cast<double>(kHeads * tokens), 0.02);
    EXPECT_LT(error / size, precision == SPARGE_PRECISION_FP32 ? 1e-5 : 0.04);
  }
}

// Queries in parts: the same tiles, and the same bits.
TEST_P(Parts, OfTheQueriesHaveTheBitsOfTheWhole) {
  const bool causal = GetParam();
  const int64_t tokens = 4096;
  const Walk walk(tokens, tokens, 4);
  const Context context(2);
  PlanDesc whole = DescOf(tokens, tokens, causal, 0.8);
  whole.dense_tail = 200;
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  const Result wanted = RunPart(context, whole, args, nullptr);
  EXPECT_GT(std::count(wanted.map.begin(), wanted.map.end(), 0), 0);
  for (int64_t first = 0; first < tokens; first += 1024) {
    PlanDesc desc = whole;
    desc.q_tokens = 1024;
    desc.first_query = first;
    desc.all_queries = tokens;
    RunArgs part_args = args;
    part_args.q = Slice(walk.q, first);
    const Result part = RunPart(context, desc, part_args, nullptr);
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < 1024; ++t) {
        ASSERT_EQ(part.lse[h * 1024 + t], wanted.lse[h * tokens + first + t]) << h << " " << first + t;
        for (int64_t d = 0; d < kDim; ++d) {
          ASSERT_EQ(part.o.Get(0, h, t, d), wanted.o.Get(0, h, first + t, d)) << h << " " << first + t;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, Parts, ::testing::Bool(),
                         [](const auto& causal) { return causal.param ? "Causal" : "Full"; });

// What crosses between ranks: surveys of keys, pools of queries. With them, parts have the rounding and, bit for bit,
// the map of the whole, also in int8; and who has keys need not have queries.
class Across : public ::testing::TestWithParam<bool> {};

struct Pools {
  std::vector<float> rows;
  std::vector<int32_t> counts;
};

int64_t PoolsOf(const Context& context, const PlanDesc& desc) { return sparge_plan_pools(Plan(context, desc).get()); }

// Sums of finite keys and so on, of one part.
std::vector<double> SurveyOf(const Context& context, const PlanDesc& desc, const RunArgs& args) {
  std::vector<double> survey(kHeads * (kDim + 3), -1.0);
  RunArgs part = args;
  part.key_survey_out = survey.data();
  Plan(context, desc).Predict(part);
  return survey;
}

std::vector<double> Join(const std::vector<std::vector<double>>& surveys) {
  std::vector<double> all(kHeads * (kDim + 3), 0.0);
  for (const std::vector<double>& survey : surveys) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kDim + 3; ++i) {
        double& to = all[h * (kDim + 3) + i];
        const double from = survey[h * (kDim + 3) + i];
        to = i <= kDim ? to + from : std::max(to, from);
      }
    }
  }
  return all;
}

TEST_P(Across, PartsAreRoundedAndChosenAsTheWhole) {
  const bool causal = GetParam();
  const int64_t tokens = 1500;
  Walk walk(tokens, tokens, 7);
  for (int64_t t = 5; t < tokens; t += 90) {  // queries that are pools of their own
    for (int64_t d = 0; d < kDim; ++d) walk.q.Set(0, t % kHeads, t, d, (t + d) % 3 == 0 ? 9.0f : -4.0f);
  }
  const Context context(2);
  const int64_t borders[] = {0, 512, 1088, tokens};
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
    PlanDesc whole = DescOf(tokens, tokens, causal, 0.8);
    whole.precision = precision;
    RunArgs args;
    args.q = walk.q.view();
    args.k = walk.k.view();
    args.v = walk.v.view();
    const Result wanted = RunPart(context, whole, args, nullptr);
    std::vector<PlanDesc> descs;
    std::vector<RunArgs> parts;
    std::vector<std::vector<double>> surveys;
    for (int part = 0; part < 3; ++part) {
      PlanDesc desc = whole;
      desc.first_key = borders[part];
      desc.kv_tokens = borders[part + 1] - borders[part];
      desc.all_queries = desc.all_keys = tokens;
      descs.push_back(desc);
      parts.push_back(args);
      parts.back().k = Slice(walk.k, borders[part]);
      parts.back().v = Slice(walk.v, borders[part]);
      surveys.push_back(SurveyOf(context, desc, parts.back()));
    }
    const std::vector<double> survey = Join(surveys);
    EXPECT_EQ(survey[kDim], static_cast<double>(tokens));
    // The pools leave with whatever keys; then they meet all.
    const int64_t pools = PoolsOf(context, whole), q_blocks = (tokens + 127) / 128, k_blocks = (tokens + 63) / 64;
    Pools left{std::vector<float>(kHeads * pools * kDim, kNan), std::vector<int32_t>(kHeads * q_blocks, -1)};
    RunArgs leave = parts[1];
    leave.pool_rows_out = left.rows.data();
    leave.pool_counts_out = left.counts.data();
    Plan(context, descs[1]).Predict(leave);
    EXPECT_GT(*std::max_element(left.counts.begin(), left.counts.end()), 0);
    std::vector<double> sums(kHeads * pools, -INFINITY);
    for (int part = 0; part < 3; ++part) {
      std::vector<double> own(kHeads * pools, 0.0), from_queries(kHeads * pools, 0.0);
      RunArgs meet = parts[part];
      meet.key_survey = survey.data();
      meet.pool_lse_out = from_queries.data();
      Plan(context, descs[part]).Predict(meet);
      meet.q.data = nullptr;
      meet.pool_rows = left.rows.data();
      meet.pool_counts = left.counts.data();
      meet.pool_lse_out = own.data();
      Plan(context, descs[part]).Predict(meet);
      EXPECT_EQ(own, from_queries);
      for (size_t i = 0; i < own.size(); ++i) sums[i] = LogAddExp(sums[i], own[i]);
    }
    std::vector<Result> results;
    std::vector<sparge_partial> partials;
    int64_t kept = 0, differ = 0;
    for (int part = 0; part < 3; ++part) {
      parts[part].key_survey = survey.data();
      results.push_back(RunPart(context, descs[part], parts[part], sums.data()));
      const int64_t first = borders[part] / 64, blocks = (descs[part].kv_tokens + 63) / 64;
      for (int64_t row = 0; row < kHeads * q_blocks; ++row) {
        for (int64_t j = 0; j < blocks; ++j) {
          kept += wanted.map[row * k_blocks + first + j];
          differ += wanted.map[row * k_blocks + first + j] != results[part].map[row * blocks + j];
        }
      }
    }
    EXPECT_LT(kept, 0.8 * static_cast<double>(wanted.map.size()));
    EXPECT_EQ(differ, 0);
    for (Result& result : results) partials.push_back({result.o.view(), {result.lse.data(), 0, tokens}});
    TestTensor joined(1, kHeads, tokens, kDim);
    std::vector<float> lse(kHeads * tokens);
    const sparge_partial out{joined.view(), {lse.data(), 0, tokens}};
    Check(sparge_merge_parts(context.get(), 1, kHeads, tokens, kDim, partials.data(), 3, &out));
    double error = 0, size = 0;
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < kDim; ++d) {
          error += std::fabs(joined.Get(0, h, t, d) - wanted.o.Get(0, h, t, d));
          size += std::fabs(wanted.o.Get(0, h, t, d));
        }
      }
    }
    // Scores and values are the same; integers round a probability relative to the maximum that its part has seen, by
    // half a step of 1/255 (int8) or 1/65535 (int16) of the largest, in the mean a quarter.
    const double step = precision == SPARGE_PRECISION_INT8 ? 1e-2 : precision == SPARGE_PRECISION_INT16 ? 1e-4 : 1e-6;
    EXPECT_LT(error / size, step);
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, Across, ::testing::Bool(),
                         [](const auto& causal) { return causal.param ? "Causal" : "Full"; });

// What is said of `change`d arguments of a prediction, of 256 queries and keys and with everything that parts leave.
std::string Refused(const std::function<void(PlanDesc&, RunArgs&)>& change) {
  const int64_t tokens = 256;
  const Walk walk(tokens, tokens, 9);
  const Context context(1);
  PlanDesc desc = DescOf(tokens, tokens, false, 0.8);
  const int64_t pools = PoolsOf(context, desc);
  std::vector<double> survey(kHeads * (kDim + 3)), sums(kHeads * pools);
  std::vector<float> rows(kHeads * pools * kDim);
  std::vector<int32_t> counts(kHeads * 2);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  args.key_survey_out = survey.data();
  args.pool_lse_out = sums.data();
  args.pool_rows_out = rows.data();
  args.pool_counts_out = counts.data();
  change(desc, args);
  try {
    Plan(context, desc).Predict(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Part, ASurveyIsTheOnlyResult) {
  const std::string alone = "key_survey_out is given: then predict fills it and nothing else";
  EXPECT_NE(Refused([](PlanDesc&, RunArgs&) {}).find(alone), std::string::npos);
  const auto only = [](RunArgs& args) {
    args.pool_lse_out = nullptr;
    args.pool_rows_out = nullptr;
    args.pool_counts_out = nullptr;
  };
  EXPECT_EQ(Refused([&](PlanDesc&, RunArgs& args) { only(args); }), "");
  std::vector<uint8_t> map(kHeads * 2 * 4);
  EXPECT_NE(Refused([&](PlanDesc&, RunArgs& args) {
              only(args);
              args.map_out = map.data();
            }).find(alone),
            std::string::npos);
  EXPECT_NE(Refused([&](PlanDesc& desc, RunArgs& args) {
              only(args);
              desc.q_tokens = 0;
            }).find("no queries"),
            std::string::npos);
}

TEST(Part, CountsOfPoolsAreChecked) {
  std::vector<int32_t> counts(kHeads * 2, 0);
  std::vector<float> rows(kHeads * kDim * 1000);
  counts[3] = -7;
  const std::string said = Refused([&](PlanDesc&, RunArgs& args) {
    args.key_survey_out = nullptr;
    args.pool_rows_out = nullptr;
    args.pool_counts_out = nullptr;
    args.pool_rows = rows.data();
    args.pool_counts = counts.data();
  });
  EXPECT_NE(said.find("pool_counts[3]=-7 is negative"), std::string::npos) << said;
}

// Heads that share keys and differ in precision are plans of their own: their keys count once.
TEST(Part, ASurveyCountsKeysOnce) {
  const int64_t tokens = 256;
  const Walk walk(tokens, tokens, 10);
  const Context context(1);
  PlanDesc desc = DescOf(tokens, tokens, false, 0.8);
  desc.kv_heads = 1;
  const sparge_precision precisions[] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16};
  desc.head_precision = precisions;
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  std::vector<double> survey(kDim + 3, -1.0);
  args.key_survey_out = survey.data();
  Plan(context, desc).Predict(args);
  EXPECT_EQ(survey[kDim], static_cast<double>(tokens));
}

// A packed batch: of its second sequence, which has fewer queries, and its third, which has no keys, all counts are
// there.
TEST(Part, EveryBlockHasItsCount) {
  const Walk walk(400, 400, 11);
  const Context context(1);
  PlanDesc desc = DescOf(400, 400, false, 0.8);
  const int64_t q_offsets[] = {0, 256, 300, 400}, kv_offsets[] = {0, 300, 400, 400};
  desc.batch = 3;
  desc.q_offsets = q_offsets;
  desc.kv_offsets = kv_offsets;
  const int64_t blocks = 2, pools = PoolsOf(context, desc);
  std::vector<float> rows(3 * kHeads * pools * kDim, 0.0f);
  std::vector<int32_t> counts(3 * kHeads * blocks, -1);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.pool_rows_out = rows.data();
  args.pool_counts_out = counts.data();
  Plan(context, desc).Predict(args);
  EXPECT_GE(*std::min_element(counts.begin(), counts.end()), 0);
}

// A part with few queries of many is computed as those of the whole are: packed, in its precision.
TEST(Part, FewQueriesOfManyHaveTheBitsOfTheWhole) {
  const int64_t tokens = 1029;
  const Walk walk(tokens, tokens, 8);
  const Context context(1);
  PlanDesc whole = DescOf(tokens, tokens, true, 0.8);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  const Result wanted = RunPart(context, whole, args, nullptr);
  for (const bool dense : {false, true}) {
    PlanDesc desc = whole;
    if (dense) desc.select = SPARGE_SELECT_ALL;
    const Result all = dense ? RunPart(context, desc, args, nullptr) : wanted;
    desc.first_query = 1024;
    desc.q_tokens = 5;
    desc.all_queries = tokens;
    RunArgs part = args;
    part.q = Slice(walk.q, 1024);
    const Result found = RunPart(context, desc, part, nullptr);
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t t = 0; t < 5; ++t) {
        for (int64_t d = 0; d < kDim; ++d) ASSERT_EQ(found.o.Get(0, h, t, d), all.o.Get(0, h, 1024 + t, d));
      }
    }
  }
}

TEST(Part, ArraysThatDoNotFitAreRefused) {
  const Context context(1);
  const Walk walk(256, 256, 5);
  std::vector<double> sums(1 << 12);
  std::vector<float> rows(1 << 16);
  std::vector<int32_t> counts(64);
  const auto refusal = [&](bool run, const std::function<void(PlanDesc&, RunArgs&)>& change) {
    PlanDesc desc = DescOf(256, 256, true, 0.8);
    RunArgs args;
    args.q = walk.q.view();
    args.k = walk.k.view();
    args.v = walk.v.view();
    TestTensor o(1, kHeads, 256, kDim);
    args.o = o.view();
    change(desc, args);
    try {
      Plan plan(context, desc);
      run ? plan.Run(args) : plan.Predict(args);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](const char* text, bool run, const std::function<void(PlanDesc&, RunArgs&)>& change) {
    const std::string found = refusal(run, change);
    EXPECT_NE(found.find(text), std::string::npos) << text << " is not in: " << found;
  };
  expect("key_survey_out", true, [&](PlanDesc&, RunArgs& a) { a.key_survey_out = sums.data(); });
  expect("pool_counts is missing", false, [&](PlanDesc&, RunArgs& a) { a.pool_rows = rows.data(); });
  expect("pool_rows_out is missing", true, [&](PlanDesc&, RunArgs& a) { a.pool_counts_out = counts.data(); });
  expect("pool_rows is given", false, [&](PlanDesc&, RunArgs& a) {
    a.pool_rows = rows.data();
    a.pool_counts = counts.data();
  });
  expect("pool_rows is given", true, [&](PlanDesc&, RunArgs& a) {
    a.pool_rows = rows.data();
    a.pool_counts = counts.data();
    a.pool_lse_out = sums.data();
  });
  expect("pool_rows_out is given", true, [&](PlanDesc& d, RunArgs& a) {
    d.select = SPARGE_SELECT_ALL;
    a.pool_rows_out = rows.data();
    a.pool_counts_out = counts.data();
  });
  expect("pool_counts[0]=-1", false, [&](PlanDesc&, RunArgs& a) {
    counts[0] = -1;
    a.pool_rows = rows.data();
    a.pool_counts = counts.data();
    a.pool_lse_out = sums.data();
  });
  expect("key_survey is given", true, [&](PlanDesc& d, RunArgs& a) {
    d.cache_tokens = 256;
    a.key_survey = sums.data();
    std::vector<std::byte> cache(1 << 22);
    a.cache = cache.data();
    a.cache_size = cache.size();
  });
}

TEST(Part, WhatDoesNotFitIsRefused) {
  const Context context(1);
  const auto refusal = [&](const std::function<void(PlanDesc&)>& change) {
    PlanDesc desc = DescOf(256, 256, true, 0.8);
    change(desc);
    try {
      Plan plan(context, desc);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](PlanDesc& d) { d.all_keys = d.all_queries = 512; }), "");
  EXPECT_NE(refusal([](PlanDesc& d) { d.first_key = 64; }).find("first_key=64"), std::string::npos);
  EXPECT_NE(refusal([](PlanDesc& d) { d.first_key = 32, d.all_keys = 512; }).find("first_key=32"), std::string::npos);
  EXPECT_NE(refusal([](PlanDesc& d) { d.first_key = 320, d.all_keys = 512; }).find("first_key=320"), std::string::npos);
  EXPECT_NE(refusal([](PlanDesc& d) { d.first_query = 64, d.all_queries = 512; }).find("first_query=64"),
            std::string::npos);
  EXPECT_NE(refusal([](PlanDesc& d) { d.all_keys = 128; }).find("all_keys=128"), std::string::npos);
  for (const sparge_select select : {SPARGE_SELECT_CDF, SPARGE_SELECT_TOPK}) {
    const auto text = refusal([&](PlanDesc& d) { d.all_keys = 512, d.select = select; });
    EXPECT_NE(text.find("part of the keys"), std::string::npos) << text;
  }
  // A part that is run without the sums of the whole would be judged by itself.
  PlanDesc desc = DescOf(256, 256, true, 0.8);
  desc.all_keys = desc.all_queries = 512;
  const Walk walk(256, 256, 5);
  RunArgs args;
  args.q = walk.q.view();
  args.k = walk.k.view();
  args.v = walk.v.view();
  EXPECT_THROW(RunPart(context, desc, args, nullptr), Error);
}

// Any number of parts, on any number of threads; empty ones and NaN in rows that nobody wrote do no harm.
TEST(MergeParts, JoinsAnyNumber) {
  const int64_t heads = 3, tokens = 130, dim = 40;
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (const int64_t count : {1, 2, 3, 8}) {
    std::vector<TestTensor> o;
    std::vector<std::vector<float>> lse;
    for (int64_t p = 0; p < count; ++p) {
      o.emplace_back(1, heads, tokens, dim, p % 2 == 1 ? SPARGE_F16 : SPARGE_F32);
      lse.emplace_back(heads * tokens);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          const bool empty = (t + p) % 5 == 0;
          lse[p][h * tokens + t] = empty ? -kInf : 3 * normal(random);
          for (int64_t d = 0; d < dim; ++d) o[p].Set(0, h, t, d, empty ? kNan : normal(random));
        }
      }
    }
    std::vector<sparge_partial> parts;
    for (int64_t p = 0; p < count; ++p) parts.push_back({o[p].view(), {lse[p].data(), 0, tokens}});
    std::vector<TestTensor> joined;
    std::vector<std::vector<float>> sums;
    for (const int threads : {1, 2, 3}) {
      const Context context(threads);
      joined.emplace_back(1, heads, tokens, dim);
      sums.emplace_back(heads * tokens);
      const sparge_partial out{joined.back().view(), {sums.back().data(), 0, tokens}};
      Check(sparge_merge_parts(context.get(), 1, heads, tokens, dim, parts.data(), count, &out));
    }
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        double all = 0;
        std::vector<double> wanted(dim);
        for (int64_t p = 0; p < count; ++p) {
          const double weight = std::exp(static_cast<double>(lse[p][h * tokens + t]));
          all += weight;
          for (int64_t d = 0; d < dim && weight > 0; ++d) wanted[d] += weight * o[p].Get(0, h, t, d);
        }
        // A few roundings of numbers up to 4.
        for (int64_t d = 0; d < dim; ++d) {
          EXPECT_NEAR(joined[0].Get(0, h, t, d), all > 0 ? wanted[d] / all : 0.0, 4e-6);
          EXPECT_EQ(joined[1].Get(0, h, t, d), joined[0].Get(0, h, t, d));
          EXPECT_EQ(joined[2].Get(0, h, t, d), joined[0].Get(0, h, t, d));
        }
        if (all > 0) {
          EXPECT_NEAR(sums[0][h * tokens + t], std::log(all), 4e-6);
        } else {
          EXPECT_EQ(sums[0][h * tokens + t], -kInf);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sparge::testing

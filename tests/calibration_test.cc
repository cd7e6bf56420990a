// Error bounds instead of parameters: estimates against measured errors, choices that keep the bounds, saved state.
#include <algorithm>
#include <cmath>
#include <thread>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

CalibrationDesc Bounds(int64_t heads, double target_l1, double pv_l1) {
  CalibrationDesc desc;
  desc.q_heads = heads;
  desc.target_l1 = target_l1;
  desc.pv_l1 = pv_l1;
  return desc;
}

// Heads with structure, sharp enough that most tiles hold next to nothing.
Problem Structured(int64_t tokens, uint32_t seed, float sharp = 6.0f) {
  Problem p({.q_heads = 4, .kv_heads = 2, .q_tokens = tokens, .kv_tokens = tokens, .seed = seed, .correlated = true});
  p.q.Fill([old = p.q, sharp](int64_t b, int64_t h, int64_t t, int64_t d) { return sharp * old.Get(b, h, t, d); });
  return p;
}

Problem Automatic(Problem p, const Calibration& calibration) {
  p.desc.select = SPARGE_SELECT_AUTO;
  p.desc.calibration = calibration.get();
  return p;
}

RunArgs InputsOf(const Problem& p) {
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  args.mask = p.mask;
  return args;
}

void Calibrate(const Context& context, const Problem& automatic, double effort) {
  Plan(context, automatic.desc).Calibrate(InputsOf(automatic), effort);
}

double HeadL1(const TestTensor& a, const TestTensor& b, int64_t head) {
  double error = 0, size = 0;
  for (int64_t t = 0; t < b.tokens; ++t) {
    for (int64_t d = 0; d < b.dim; ++d) {
      error += std::fabs(a.Get(0, head, t, d) - b.Get(0, head, t, d));
      size += std::fabs(b.Get(0, head, t, d));
    }
  }
  return size > 0 ? error / size : error;
}

// A plan with what the calibration chose, spelled out.
Result RunChosen(const Context& context, Problem p, const Calibration& calibration, bool with_skip) {
  std::vector<sparge_head_params> heads;
  std::vector<sparge_precision> precision;
  for (int64_t h = 0; h < p.shape.q_heads; ++h) {
    const HeadEstimate head = calibration.Head(h);
    heads.push_back(head.params);
    precision.push_back(head.precision);
    if (!with_skip) heads.back().pv_skip = SPARGE_PV_SKIP_OFF;
  }
  p.desc.select = SPARGE_SELECT_FLOOR;
  p.desc.heads = heads.data();
  p.desc.head_precision = precision.data();
  return RunProblem(context, p);
}

Result RunDense(const Context& context, Problem p, sparge_precision precision) {
  p.desc.select = SPARGE_SELECT_ALL;
  p.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  p.desc.precision = precision;
  return RunProblem(context, p);
}

TEST(Calibration, EstimatesAreTheErrorsAndBoundsHold) {
  for (const std::string& isa : RunnableIsas()) {
    for (const int32_t causal : {0, 1}) {
      SCOPED_TRACE(isa + (causal != 0 ? " causal" : ""));
      const Context context(2, isa.c_str());
      Problem p = Structured(Quick() ? 1024 : 2048, 3);
      p.desc.causal = causal;
      Calibration calibration(Bounds(4, 0.05, 0.06));
      const Problem automatic = Automatic(p, calibration);
      for (int i = 0; i < 4; ++i) Calibrate(context, automatic, 1);  // tau, then lambda at a tau that stays
      const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
      const Result plain = RunChosen(context, p, calibration, false);
      const Result skipped = RunChosen(context, p, calibration, true);
      int sparse = 0, known = 0;
      for (int64_t h = 0; h < 4; ++h) {
        const HeadEstimate head = calibration.Head(h);
        sparse += head.state == SPARGE_HEAD_SPARSE;
        EXPECT_EQ(head.precision, SPARGE_PRECISION_INT8);
        // Six standard errors, and a hundredth for what sums of tiles and the kernel's recurrence round differently.
        EXPECT_NEAR(HeadL1(plain.o, dense, h), head.error, 6 * head.error_se + 0.01 * head.error + 1e-4)
            << "head " << h;
        // Rows of a sample drop a tile each by itself, and in a run a row group only together: that is less.
        EXPECT_LE(HeadL1(skipped.o, dense, h), head.pv_error + 6 * head.pv_error_se + 0.01 * head.pv_error + 1e-4);
        EXPECT_GE(HeadL1(skipped.o, dense, h), HeadL1(plain.o, dense, h) - 1e-3);
        // The estimate plus a standard error is within the bound, and the truth within three of the estimate.
        EXPECT_LE(HeadL1(plain.o, dense, h), 0.05 + 2 * head.error_se);
        EXPECT_LE(HeadL1(skipped.o, dense, h), 0.06 + 2 * head.pv_error_se);
        EXPECT_LT(head.error_se, 0.05 / 3) << "an estimate that says nothing";
        EXPECT_LE(HeadL1(skipped.o, dense, h), head.limit);
        known += head.known;
        if (head.known != 0) {
          EXPECT_LE(HeadL1(skipped.o, dense, h), SPARGE_KNOWN_WITHIN * head.pv_error);
        }
        const sparge_head_stats& stats = plain.head_stats[h];
        const double sparsity = 1 - static_cast<double>(stats.qk_computed) / static_cast<double>(stats.qk_eligible);
        EXPECT_NEAR(sparsity, head.sparsity, 0.05);
      }
      EXPECT_GE(sparse, 3) << "nothing was skipped: the test says nothing";
      EXPECT_GE(known, Quick() ? 0 : 1) << "so many rows, and still no error is known";
      EXPECT_GT(plain.stats.sparsity(), 0.1);
      EXPECT_LT(skipped.stats.total.pv_computed, plain.stats.total.pv_computed) << "no lambda was found";
    }
  }
}

TEST(Calibration, TighterBoundsKeepMore) {
  const Context context(2);
  const Problem p = Structured(1024, 4);
  double last = 1;
  for (const double bound : {0.2, 0.05, 0.01, 0.0}) {
    Calibration calibration(Bounds(4, bound, bound));
    const Problem automatic = Automatic(p, calibration);
    Calibrate(context, automatic, 1);
    const double sparsity = RunChosen(context, p, calibration, false).stats.sparsity();
    EXPECT_LT(sparsity, last) << bound;
    last = sparsity;
  }
  EXPECT_EQ(last, 0.0) << "no error allowed is dense";
}

TEST(Calibration, RunsCalibrateThemselvesAndSettle) {
  const Context context(2);
  // Some twenty samples a head: from rows as unlike as those of the other tests they would say little.
  const Problem p = Structured(2048, 5, 2.5f);
  Calibration calibration(Bounds(4, 0.05, 0.06));
  const Problem automatic = Automatic(p, calibration);
  EXPECT_EQ(calibration.Head(0).state, SPARGE_HEAD_UNKNOWN);
  Result result;
  for (int call = 0; call < (Quick() ? 8 : 24); ++call) result = RunProblem(context, automatic);
  EXPECT_GT(result.stats.sparsity(), 0.05);
  const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_NE(calibration.Head(h).state, SPARGE_HEAD_UNKNOWN);
    EXPECT_GE(calibration.Head(h).samples, 10) << "the least that a choice is made from";
    // As above: the estimate plus a standard error is within the bound, and the truth within three of the estimate.
    EXPECT_LE(HeadL1(result.o, dense, h), 0.06 + 2 * calibration.Head(h).pv_error_se) << "head " << h;
  }
}

TEST(Calibration, FollowsAChange) {
  const Context context(2);
  Calibration calibration(Bounds(4, 0.05, 0.05));
  const Problem sharp = Structured(1024, 6, 6.0f);
  const Problem flat = Structured(1024, 6, 0.3f);
  for (int i = 0; i < 4; ++i) Calibrate(context, Automatic(sharp, calibration), 1);
  const double before = calibration.Head(0).sparsity;
  for (int i = 0; i < (Quick() ? 10 : 40); ++i) Calibrate(context, Automatic(flat, calibration), 1);
  const TestTensor dense = RunDense(context, flat, SPARGE_PRECISION_INT8).o;
  const Result result = RunChosen(context, flat, calibration, true);
  for (int64_t h = 0; h < 4; ++h) EXPECT_LE(HeadL1(result.o, dense, h), 0.05 * 1.2);
  EXPECT_LT(calibration.Head(0).sparsity, before);
}

// Whatever was learned before: the first call on another input is within twice the bound, or dense; the second within
// 1.2 times. Values of mean 2 have far larger outputs than those of mean 0, and must not outvote them.
TEST(Calibration, AChangeIsNoticedInTheCallThatBringsIt) {
  const Context context(2);
  const double bound = 0.02, pv_bound = 0.025;
  const auto made = [](uint32_t seed, float sharp, float mean) {
    Problem p = Structured(2048, seed, sharp);
    p.desc.causal = 1;
    p.v.Fill([old = p.v, mean](int64_t b, int64_t h, int64_t t, int64_t d) { return mean + old.Get(b, h, t, d); });
    return p;
  };
  for (const int calls : Quick() ? std::vector<int>{4} : std::vector<int>{1, 4, 24}) {
    Calibration calibration(Bounds(4, bound, pv_bound));
    double skipped = 0;
    for (int call = 0; call < calls; ++call) {
      const Problem p = made(100 + static_cast<uint32_t>(call), 6.0f, 2.0f);
      skipped = RunProblem(context, Automatic(p, calibration)).stats.sparsity();
    }
    EXPECT_GT(skipped, 0.2) << "nothing was learned that could be wrong";
    for (int call = 0; call < 4; ++call) {
      const Problem p = made(200 + static_cast<uint32_t>(call), 1.0f, 0.0f);
      const Result result = RunProblem(context, Automatic(p, calibration));
      const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_LE(HeadL1(result.o, dense, h), (call == 0 ? 2.0 : 1.2) * pv_bound)
            << "after " << calls << " calls, call " << call << ", head " << h;
      }
    }
  }
}

// A few rows want one far key each, of a large value, in heads that are local otherwise: the mean of a pool hides them.
TEST(Calibration, NeedlesAreNotLost) {
  const Context context(2);
  const int64_t tokens = 2048;
  int heads = 0, beyond = 0;
  for (const int needles : Quick() ? std::vector<int>{5, 19} : std::vector<int>{1, 3, 5, 19}) {
    for (const bool together : {true, false}) {
      SCOPED_TRACE(std::to_string(needles) + (together ? " in one block" : " anywhere"));
      Problem p = Structured(tokens, 40 + static_cast<uint32_t>(needles));
      p.desc.causal = 1;
      p.q.Fill([&p, noise = p.q](int64_t b, int64_t h, int64_t t, int64_t d) {
        return 2.0f * p.k.Get(b, h / 2, t, d) + 0.05f * noise.Get(b, h, t, d);
      });
      for (int n = 0; n < needles; ++n) {
        const int64_t row = together ? 1664 + 6 * n : 1100 + 47 * n;
        const int64_t key = 70 + 41 * n;
        for (int64_t h = 0; h < 4; ++h) {
          double norm = 0;
          for (int64_t d = 0; d < p.shape.qk_dim; ++d) norm += std::pow(p.k.Get(0, h / 2, key, d), 2);
          // So strong that the key has a score of 60: beside it nothing has weight.
          const double gain = 60 * std::sqrt(static_cast<double>(p.shape.qk_dim)) / norm;
          for (int64_t d = 0; d < p.shape.qk_dim; ++d) {
            p.q.Set(0, h, row, d, static_cast<float>(gain) * p.k.Get(0, h / 2, key, d));
          }
        }
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t d = 0; d < p.shape.v_dim; ++d)
            p.v.Set(0, h, key, d, (together ? 100 : 8) * p.v.Get(0, h, key, d));
        }
      }
      Calibration calibration(Bounds(4, 0.02, 0.025));
      const Result result = RunProblem(context, Automatic(p, calibration));
      const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
      for (int64_t h = 0; h < 4; ++h, ++heads) {
        EXPECT_LE(HeadL1(result.o, dense, h), 3 * 0.025) << h;
        beyond += HeadL1(result.o, dense, h) > 1.2 * 0.025;
      }
      EXPECT_GT(result.stats.sparsity(), 0.1) << "everything was computed: the test says nothing";
    }
  }
  EXPECT_LE(beyond, (heads + 31) / 32);
}

TEST(Calibration, SameSeedSameChoiceWhateverTheThreads) {
  const Problem p = Structured(1024, 7);
  std::vector<std::byte> saved;
  for (const int threads : {1, 2, 3}) {
    const Context context(threads);
    Calibration calibration(Bounds(4, 0.03, 0.04));
    const Problem automatic = Automatic(p, calibration);
    for (int i = 0; i < 3; ++i) RunProblem(context, automatic);
    if (!saved.empty()) {
      EXPECT_TRUE(calibration.Save() == saved) << threads << " threads";
    }
    saved = calibration.Save();
  }
  CalibrationDesc other = Bounds(4, 0.03, 0.04);
  other.seed = 1;
  Calibration calibration(other);
  const Problem automatic = Automatic(p, calibration);
  for (int i = 0; i < 3; ++i) RunProblem(Context(2), automatic);
  EXPECT_FALSE(calibration.Save() == saved) << "the seed has no effect";
}

TEST(Calibration, SavedStateGoesOn) {
  const Context context(2);
  const Problem p = Structured(1024, 8);
  Calibration one(Bounds(4, 0.03, 0.04));
  Calibrate(context, Automatic(p, one), 0.5);
  Calibration two(one.Save());
  EXPECT_TRUE(one.Save() == two.Save());
  Calibrate(context, Automatic(p, one), 0.5);
  Calibrate(context, Automatic(p, two), 0.5);
  EXPECT_TRUE(one.Save() == two.Save());
  EXPECT_EQ(one.Head(2).params.tau, two.Head(2).params.tau);
}

TEST(Calibration, DamagedStateIsRefused) {
  const std::vector<std::byte> good = Calibration(Bounds(2, 0.03, 0.04)).Save();
  const auto refused = [](std::vector<std::byte> bytes) {
    sparge_calibration* calibration = nullptr;
    const sparge_status status = sparge_calibration_load(bytes.data(), bytes.size(), &calibration);
    EXPECT_EQ(calibration == nullptr, status != SPARGE_OK);
    sparge_calibration_destroy(calibration);
    return status == SPARGE_INVALID_ARGUMENT;
  };
  EXPECT_FALSE(refused(good));
  for (const size_t size : {size_t{0}, size_t{7}, size_t{47}, good.size() - 1}) {
    EXPECT_TRUE(refused({good.begin(), good.begin() + static_cast<int64_t>(size)})) << size;
  }
  for (const size_t at : {size_t{0}, size_t{8}, size_t{32}}) {  // magic, heads, grid
    std::vector<std::byte> bad = good;
    bad[at] ^= std::byte{0x40};
    EXPECT_TRUE(refused(bad)) << at;
  }
  std::vector<std::byte> bad = good;
  std::fill(bad.begin() + 64, bad.begin() + 72, std::byte{0xff});  // a NaN
  EXPECT_TRUE(refused(bad));
  bad = good;
  bad[good.size() - 8] = std::byte{99};  // a choice that is not on the grid
  EXPECT_TRUE(refused(bad));
}

TEST(Calibration, ARoughHeadGetsMoreBits) {
  const Context context(2);
  Problem p = Structured(1024, 9);
  CalibrationDesc desc = Bounds(4, 0.05, 0.06);
  desc.round_l1 = 1e-4;  // int8 cannot
  Calibration calibration(desc);
  const Problem automatic = Automatic(p, calibration);
  const Result first = RunProblem(context, automatic);
  EXPECT_EQ(calibration.Head(1).precision, SPARGE_PRECISION_INT16);
  EXPECT_GT(calibration.Head(1).round_l1, 1e-4);
  for (int i = 0; i < 3; ++i) RunProblem(context, automatic);
  const TestTensor exact = RunDense(context, p, SPARGE_PRECISION_FP32).o;
  for (int64_t h = 0; h < 4; ++h) {
    // Already the first call computes such a head again with more bits.
    EXPECT_LE(HeadL1(first.o, exact, h), 0.06) << h;
  }
  // With a bound that int8 keeps, nothing changes.
  Calibration loose(Bounds(4, 0.05, 0.06));
  RunProblem(context, Automatic(p, loose));
  EXPECT_EQ(loose.Head(1).precision, SPARGE_PRECISION_INT8);
  const TestTensor int8 = RunDense(context, p, SPARGE_PRECISION_INT8).o;
  double worst = 0;
  for (int64_t h = 0; h < 4; ++h) worst = std::max(worst, HeadL1(int8, exact, h));
  EXPECT_LT(loose.Head(1).round_l1, 2 * worst);
}

TEST(Calibration, MixedPrecisionIsEachHeadByItself) {
  const Context context(2);
  Problem p = Structured(700, 10);
  const sparge_precision precision[] = {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32,
                                        SPARGE_PRECISION_INT16};
  p.desc.head_precision = precision;
  p.desc.causal = 1;
  const Result mixed = RunProblem(context, p);
  sparge_head_stats sum{};
  for (const sparge_precision one : {SPARGE_PRECISION_INT8, SPARGE_PRECISION_INT16, SPARGE_PRECISION_FP32}) {
    Problem plain = p;
    plain.desc.head_precision = nullptr;
    plain.desc.precision = one;
    const Result result = RunProblem(context, plain);
    for (int64_t h = 0; h < 4; ++h) {
      if (precision[h] != one) continue;
      EXPECT_EQ(HeadL1(mixed.o, result.o, h), 0.0) << "head " << h;
      EXPECT_EQ(mixed.head_stats[h].qk_computed, result.head_stats[h].qk_computed);
      sum.qk_computed += result.head_stats[h].qk_computed;
    }
  }
  EXPECT_EQ(mixed.stats.total.qk_computed, sum.qk_computed);
}

TEST(Calibration, SeveralThreadsAtOnce) {
  const Context context(2);
  // Which thread comes first is left to chance, and so are the samples: rows that are alike, so that any of them will
  // do.
  const Problem p = Structured(768, 11, 1.5f);
  Calibration calibration(Bounds(4, 0.05, 0.06));
  const Problem automatic = Automatic(p, calibration);
  std::vector<std::thread> threads;
  std::vector<Result> results(3);
  for (Result& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 6; ++i) result = RunProblem(context, automatic);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
  for (const Result& result : results) {
    for (int64_t h = 0; h < 4; ++h) EXPECT_LE(HeadL1(result.o, dense, h), 0.06 * 1.2);
  }
}

TEST(Calibration, ZerosAndWhatIsNotFinite) {
  const Context context(2);
  Problem p = Structured(1024, 12);
  p.v.Fill([old = p.v](int64_t b, int64_t h, int64_t t, int64_t d) { return h == 0 ? 0 : old.Get(b, h, t, d); });
  p.k.Set(0, 1, 300, 5, kNan);  // heads 2 and 3 see it from everywhere
  Calibration calibration(Bounds(4, 0.05, 0.06));
  const Problem automatic = Automatic(p, calibration);
  Result result;
  for (int i = 0; i < 3; ++i) result = RunProblem(context, automatic);
  EXPECT_EQ(calibration.Head(0).error, 0.0);
  EXPECT_EQ(calibration.Head(3).state, SPARGE_HEAD_UNKNOWN) << "nothing can be measured: dense";
  for (int64_t t = 0; t < 1024; ++t) EXPECT_EQ(result.o.Get(0, 0, t, 0), 0.0f);
}

TEST(Calibration, MasksSinksAndFewQueries) {
  const Context context(2);
  Problem p = Structured(1024, 13);
  p.desc.mask = SPARGE_MASK_BOOL;
  for (int64_t i = 0; i < 1024; ++i) {
    for (int64_t j = 0; j < 1024; ++j) p.mask_bytes.push_back((i / 100 + j / 70) % 3 != 0 ? 1 : 0);
  }
  p.mask = {p.mask_bytes.data(), 0, 0, 1024};
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 8.0f};
  p.desc.sink_logits = sinks.data();
  Calibration calibration(Bounds(4, 0.05, 0.06));
  const Problem automatic = Automatic(p, calibration);
  for (int i = 0; i < 4; ++i) Calibrate(context, automatic, 1);
  const TestTensor dense = RunDense(context, p, SPARGE_PRECISION_INT8).o;
  const Result chosen = RunChosen(context, p, calibration, true);
  const Result unskipped = RunChosen(context, p, calibration, false);
  EXPECT_GT(chosen.stats.sparsity(), 0.1);
  for (int64_t h = 0; h < 4; ++h) {
    const HeadEstimate head = calibration.Head(h);
    EXPECT_NEAR(HeadL1(unskipped.o, dense, h), head.error, 6 * head.error_se + 0.01 * head.error + 1e-4) << h;
    EXPECT_LE(HeadL1(chosen.o, dense, h), head.pv_error + 6 * head.pv_error_se + 0.01 * head.pv_error + 1e-4) << h;
  }
  // One query goes straight to the tensors and needs no calibration.
  Problem one({.q_heads = 4, .kv_heads = 2, .q_tokens = 1, .kv_tokens = 700});
  const Problem decode = Automatic(one, calibration);
  EXPECT_LT(RelativeL1(RunProblem(context, decode).o, Reference(context, one).o), 1e-5);
}

TEST(Calibration, Refusals) {
  const auto text = [](CalibrationDesc desc) {
    sparge_calibration* calibration = nullptr;
    EXPECT_EQ(sparge_calibration_create(&desc, &calibration), SPARGE_INVALID_ARGUMENT);
    return std::string(sparge_last_error());
  };
  EXPECT_EQ(text(Bounds(0, 0.02, 0.02)), "q_heads=0 is outside 1..65536");
  EXPECT_EQ(text(Bounds(1, -0.5, 0.02)), "target_l1=-0.5 is not a number from 0 on");
  EXPECT_EQ(text(Bounds(1, 0.03, 0.02)), "pv_l1=0.02 is not a number from target_l1=0.03 on");
  Calibration calibration(Bounds(2, 0.02, 0.03));
  EXPECT_THROW(calibration.Head(2), Error);
  EXPECT_THROW(calibration.SetBounds(0, 0.2, 0.1), Error);
  const Context context(1);
  Problem p({.q_heads = 4, .kv_heads = 2});
  const auto plan_text = [&](const PlanDesc& desc) {
    sparge_plan* plan = nullptr;
    EXPECT_EQ(sparge_plan_create(context.get(), &desc, &plan), SPARGE_INVALID_ARGUMENT);
    return std::string(sparge_last_error());
  };
  EXPECT_EQ(plan_text(Automatic(p, calibration).desc), "q_heads=4 is not the 2 of the calibration");
  p.desc.select = SPARGE_SELECT_AUTO;
  EXPECT_EQ(plan_text(p.desc), "calibration is NULL, but select is AUTO");
  Calibration fits(Bounds(4, 0.02, 0.03));
  Problem automatic = Automatic(p, fits);
  automatic.desc.predictor = SPARGE_PREDICT_PAPER;
  EXPECT_EQ(plan_text(automatic.desc), "predictor=2 has no calibration; take 1 or the default");
  automatic = Automatic(p, fits);
  automatic.desc.select = SPARGE_SELECT_CDF;
  EXPECT_EQ(plan_text(automatic.desc), "calibration is given, but select is not AUTO");
  RunArgs args = InputsOf(p);
  EXPECT_THROW(Plan(context, Automatic(p, fits).desc).Calibrate(args, 0), Error);
  p.desc.select = SPARGE_SELECT_CDF;
  EXPECT_THROW(Plan(context, p.desc).Calibrate(args, 0.5), Error);
}

}  // namespace
}  // namespace sparge::testing

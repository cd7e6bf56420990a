// Numbers at the edge: no overflow, no saturation, no NaN for any finite input; what is not finite stays where it is.
#include <algorithm>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr sparge_precision kPrecisions[] = {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8};
using Value = std::function<float(int64_t token, int64_t dim)>;

// Every instruction set, precision, dense and sparse: `check` sees the result.
void ForAll(Problem& p, const std::function<void(const Result&, const Result&, sparge_precision)>& check) {
  for (const std::string& isa : RunnableIsas()) {
    const Context context(2, isa.c_str());
    p.desc.select = SPARGE_SELECT_ALL;
    const Result reference = Reference(context, p);
    for (const sparge_precision precision : kPrecisions) {
      for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_CDF}) {
        SCOPED_TRACE(isa + " " + Name(precision) + (select == SPARGE_SELECT_CDF ? " cdf" : " all"));
        p.desc.precision = precision;
        p.desc.select = select;
        check(RunProblem(context, p), reference, precision);
      }
    }
  }
}

Problem Filled(int64_t tokens, int64_t dim, sparge_dtype dtype, const Value& q, const Value& k, const Value& v) {
  Problem p({.q_tokens = tokens, .qk_dim = dim, .q_type = dtype, .k_type = dtype, .v_type = dtype});
  p.q.Fill([&](int64_t, int64_t, int64_t t, int64_t d) { return q(t, d); });
  p.k.Fill([&](int64_t, int64_t, int64_t t, int64_t d) { return k(t, d); });
  p.v.Fill([&](int64_t, int64_t, int64_t t, int64_t d) { return v(t, d); });
  return p;
}

TEST(Numerics, LargestMagnitudes) {
  for (const int64_t dim : {1, 64, 576}) {
    for (const float size : {1e30f, std::numeric_limits<float>::max()}) {
      const Value plus = [=](int64_t, int64_t) { return size; };
      const Value sign = [=](int64_t t, int64_t d) { return (t * 7 + d * 3) % 5 < 2 ? -size : size; };
      for (const Value& k : {plus, sign}) {
        Problem p = Filled(150, dim, SPARGE_F32, sign, k, plus);
        ForAll(p, [&](const Result& run, const Result&, sparge_precision) {
          ASSERT_TRUE(AllFinite(run.o));
          // All values are equal, so whatever the weights, that is the result.
          EXPECT_NEAR(run.o.Get(0, 0, 77, 0) / size, 1.0, 1e-3);
          EXPECT_NEAR(run.o.Get(0, 0, 149, dim - 1) / size, 1.0, 1e-3);
        });
      }
    }
  }
}

TEST(Numerics, HugeScoresAreOneHot) {
  // Scores of 1e60 do not exist in fp32; the best key must win all the same. Nor may it lose to the rounding of its own
  // score, which is 64 and more where scores are 1e9. Key t is the t'th unit vector.
  const int64_t n = 64;
  for (const float size : {1.234567e5f, 3.456789e7f, 1e30f}) {
    Problem p = Filled(
        n, 64, SPARGE_F32,
        [=](int64_t t, int64_t d) { return t == d ? size * (1 + 0.0123f * static_cast<float>(t)) : 0.0f; },
        [=](int64_t t, int64_t d) { return t == d ? size : 0.0f; },
        [](int64_t t, int64_t) { return static_cast<float>(t); });
    ForAll(p, [&](const Result& run, const Result&, sparge_precision) {
      for (int64_t t = 0; t < n; ++t) EXPECT_NEAR(run.o.Get(0, 0, t, 5), static_cast<float>(t), 0.3f);
    });
  }
}

TEST(Numerics, LargestHalves) {
  const Value sign = [](int64_t t, int64_t d) { return (t + d) % 2 == 0 ? 65504.0f : -65504.0f; };
  for (const sparge_dtype dtype : {SPARGE_F16, SPARGE_BF16}) {
    Problem p = Filled(130, 128, dtype, sign, sign, sign);
    ForAll(p, [&](const Result& run, const Result&, sparge_precision) { EXPECT_TRUE(AllFinite(run.o)); });
  }
}

TEST(Numerics, Denormals) {
  const Value tiny = [](int64_t t, int64_t d) { return 1e-41f * static_cast<float>((t * 5 + d) % 7 - 3); };
  const Value one = [](int64_t t, int64_t d) { return static_cast<float>((t + d) % 3); };
  {
    Problem p = Filled(100, 16, SPARGE_F32, tiny, tiny, one);  // all scores are 0: the plain mean
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision) {
      EXPECT_LE(RelativeL1(run.o, reference.o), 1e-2);
    });
  }
  {
    Problem p = Filled(100, 16, SPARGE_F32, one, one, [](int64_t t, int64_t) { return t % 2 == 0 ? 1e-39f : 3e-39f; });
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision) {
      // Half a step of the smallest denormal is 7e-46, of 2e-39: nothing.
      EXPECT_NEAR(run.o.Get(0, 0, 50, 3) / reference.o.Get(0, 0, 50, 3), 1.0, 1e-2);
    });
  }
  {
    // Tiny queries and huge keys have ordinary scores.
    Problem p = Filled(
        100, 16, SPARGE_F32, [](int64_t t, int64_t d) { return 1e-36f * static_cast<float>((t + d) % 5 - 2); },
        [](int64_t t, int64_t d) { return 1e36f * static_cast<float>((t * 3 + d) % 4 - 1); }, one);
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
      EXPECT_LE(RelativeL1(run.o, reference.o), precision == SPARGE_PRECISION_FP32 ? 1e-4 : 3e-2);
    });
  }
}

TEST(Numerics, ConstantRowsAndZeros) {
  const Value zero = [](int64_t, int64_t) { return 0.0f; };
  const Value constant = [](int64_t, int64_t) { return 3.0f; };
  const Value ramp = [](int64_t t, int64_t d) { return static_cast<float>(t % 10 + d); };
  for (const Value& q : {zero, constant}) {
    for (const Value& k : {zero, constant}) {
      Problem p = Filled(200, 40, SPARGE_F32, q, k, ramp);
      ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
        // Equal scores: equal weights, so that only the values are rounded, to half a step of max / v_max.
        EXPECT_LE(RelativeL1(run.o, reference.o), precision == SPARGE_PRECISION_FP32    ? 1e-5
                                                  : precision == SPARGE_PRECISION_INT16 ? 2e-4
                                                                                        : 5e-3);
      });
    }
  }
  Problem p = Filled(200, 40, SPARGE_F32, zero, zero, zero);
  ForAll(p, [&](const Result& run, const Result&, sparge_precision) { EXPECT_EQ(run.o.Get(0, 0, 7, 7), 0.0f); });
}

TEST(Numerics, OneSpikeInKeysOrQueries) {
  Problem p({.q_tokens = 300, .seed = 21});
  p.k.Set(0, 0, 100, 5, 1e4f);
  p.q.Set(0, 0, 200, 9, -1e4f);
  ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
    ASSERT_TRUE(AllFinite(run.o));
    // Scales are per token, so only the query of the spike, and its neighbours through the one key, are worse off.
    EXPECT_LE(RelativeL1(run.o, reference.o), precision == SPARGE_PRECISION_FP32    ? 1e-3
                                              : precision == SPARGE_PRECISION_INT16 ? 1e-2
                                                                                    : 5e-2);
  });
}

// The weak case of 8-bit PV: uniform weights, and one spike in every value channel.
TEST(Numerics, UniformWeightsWithValueSpikes) {
  const int64_t n = Quick() ? 1024 : 4096;
  for (const float spike : {20.0f, 100.0f, 1000.0f}) {
    Problem p({.q_tokens = 128, .kv_tokens = n, .seed = 22});
    p.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });
    std::mt19937 random(5);
    for (int64_t d = 0; d < 64; ++d) p.v.Set(0, 0, static_cast<int64_t>(random() % n), d, spike);
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
      EXPECT_LE(RelativeL1(run.o, reference.o), precision == SPARGE_PRECISION_INT8 ? 3e-2 : 1e-3) << spike;
    });
  }
}

// A channel 20 times as large as the others must not eat the bits of the others: that is what the rotation is for.
TEST(Numerics, OutlierChannels) {
  for (const int64_t dim : {64, 80, 128}) {
    for (const bool in_query : {false, true}) {
      Problem p({.q_tokens = 256, .kv_tokens = 512, .qk_dim = dim, .seed = 24});
      TestTensor& spoiled = in_query ? p.q : p.k;
      for (int64_t t = 0; t < spoiled.tokens; ++t) spoiled.Set(0, 0, t, 5, 20 * spoiled.Get(0, 0, t, 5));
      ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
        // Scores have a standard deviation of sqrt(1 + 400 / dim), up to 2.7, and errors grow with it.
        const double deviation = std::sqrt(1 + 400.0 / static_cast<double>(dim));
        if (precision == SPARGE_PRECISION_INT8) {
          EXPECT_LE(RelativeL1(run.o, reference.o), 3e-2 * deviation) << dim << (in_query ? " q" : " k");
        }
      });
    }
  }
}

// An attention sink: most weight on a key whose value is far smaller than those of its block.
TEST(Numerics, SinkWithATinyValue) {
  Problem p({.q_tokens = 256, .kv_tokens = 512, .seed = 25});
  p.q.Fill([old = p.q](int64_t b, int64_t h, int64_t t, int64_t d) { return d == 0 ? 8.0f : old.Get(b, h, t, d); });
  p.k.Fill([old = p.k](int64_t b, int64_t h, int64_t t, int64_t d) {
    return d == 0 ? (t == 0 ? 8.0f : 0.0f) : old.Get(b, h, t, d);
  });
  for (int64_t d = 0; d < 64; ++d) p.v.Set(0, 0, 0, d, p.v.Get(0, 0, 0, d) / 20);
  ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
    if (precision == SPARGE_PRECISION_INT8) {
      EXPECT_LE(RelativeL1(run.o, reference.o), 3e-2);
    }
  });
}

// The bound on integer sums, at the extremes of the grid: all numbers at +-max, of equal and of opposite sign.
TEST(Numerics, IntegerSumsAtTheirBounds) {
  for (const int64_t dim : {64, 128, 576}) {
    Problem p = Filled(
        128, dim, SPARGE_F32, [](int64_t t, int64_t) { return t % 2 == 0 ? 1.0f : -1.0f; },
        [](int64_t t, int64_t) { return t % 2 == 0 ? 1.0f : -1.0f; },
        [](int64_t t, int64_t d) { return t % 2 == 0 ? 1.0f : (d % 2 == 0 ? -1.0f : 1.0f); });
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
      EXPECT_LE(RelativeL1(run.o, reference.o), Tolerance(precision, SPARGE_F32, dim));
    });
    p.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });  // all probabilities at their maximum
    ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
      for (int64_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(run.o.Get(0, 0, 3, d), reference.o.Get(0, 0, 3, d),
                    precision == SPARGE_PRECISION_FP32 ? 1e-6 : 1e-4);
      }
    });
  }
}

TEST(Numerics, NotFiniteStaysWhereItIsSeen) {
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const int where : {0, 1, 2}) {  // q, k, v
      Problem clean({.q_tokens = 300, .seed = 23});
      clean.desc.causal = 1;
      TestTensor* tensors[] = {&clean.q, &clean.k, &clean.v};
      for (int64_t d = 0; d < 64; ++d) tensors[where]->Set(0, 0, 150, d, 0.0f);
      Problem p = clean;
      TestTensor copy = TestTensor(1, 1, 300, 64);
      copy.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return tensors[where]->Get(b, h, t, d); });
      copy.Set(0, 0, 150, 10, bad);
      (where == 0 ? p.q : where == 1 ? p.k : p.v) = copy;
      for (const std::string& isa : RunnableIsas()) {
        for (const sparge_precision precision : kPrecisions) {
          for (const sparge_select select : {SPARGE_SELECT_ALL, SPARGE_SELECT_CDF}) {
            SCOPED_TRACE(isa + " " + Name(precision) + " in tensor " + std::to_string(where));
            const Context context(2, isa.c_str());
            p.desc.precision = clean.desc.precision = precision;
            p.desc.select = clean.desc.select = select;
            const Result run = RunProblem(context, p);
            const Result expected = RunProblem(context, clean);
            for (int64_t t = 0; t < 300; ++t) {
              const bool sees = where == 0 ? t == 150 : t >= 150;
              if (sees) {
                EXPECT_TRUE(std::isnan(run.o.Get(0, 0, t, 3))) << t;
              } else {
                ASSERT_NEAR(run.o.Get(0, 0, t, 3), expected.o.Get(0, 0, t, 3), 4 * Tolerance(precision, SPARGE_F32, 64))
                    << t;
              }
            }
          }
        }
      }
    }
  }
}

// Few queries take keys and values from the tensors: row t sees the keys up to t + 145.
TEST(Numerics, FewQueriesSeeWhatIsNotFinite) {
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const int where : {0, 1, 2}) {  // q, k, v
      Problem clean({.q_tokens = 8, .kv_tokens = 300, .seed = 29});
      clean.desc.causal = 1;
      clean.desc.query_offset = 145;
      clean.desc.select = SPARGE_SELECT_ALL;
      Problem p = clean;
      TestTensor& spoiled = where == 0 ? p.q : where == 1 ? p.k : p.v;
      const TestTensor original = spoiled;
      spoiled = TestTensor(1, 1, where == 0 ? 8 : 300, 64);
      spoiled.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return original.Get(b, h, t, d); });
      spoiled.Set(0, 0, where == 0 ? 5 : 150, 10, bad);
      for (const std::string& isa : RunnableIsas()) {
        SCOPED_TRACE(isa + " in tensor " + std::to_string(where));
        const Context context(1, isa.c_str());
        const Result run = RunProblem(context, p);
        const Result expected = RunProblem(context, clean);
        for (int64_t t = 0; t < 8; ++t) {
          const bool sees = where == 0 ? t == 5 : t >= 5;
          if (sees) {
            EXPECT_TRUE(std::isnan(run.o.Get(0, 0, t, 10))) << t;
          } else {
            EXPECT_EQ(run.o.Get(0, 0, t, 10), expected.o.Get(0, 0, t, 10)) << t;
          }
        }
      }
    }
  }
}

TEST(Numerics, FewQueriesWithValuesOfAnySize) {
  for (const float size : {0x1p-115f, 0x1p-60f, 1.0f, 0x1p60f, 0x1p126f}) {
    Problem p({.q_tokens = 3, .kv_tokens = 500, .seed = 31});
    const TestTensor noise = p.v;
    p.v = TestTensor(1, 1, 500, 64);
    p.v.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) {
      return std::clamp(noise.Get(b, h, t, d), -3.9f, 3.9f) * 0.25f * size;
    });
    p.desc.select = SPARGE_SELECT_ALL;
    for (const std::string& isa : RunnableIsas()) {
      const Context context(1, isa.c_str());
      EXPECT_LE(RelativeL1(RunProblem(context, p).o, Reference(context, p).o), 1e-5) << isa << " " << size;
    }
    p.v.Fill([&](int64_t, int64_t, int64_t, int64_t) { return size; });  // the sum of all is beyond the largest float
    for (const std::string& isa : RunnableIsas()) {
      const Context context(1, isa.c_str());
      EXPECT_NEAR(RunProblem(context, p).o.Get(0, 0, 2, 63) / size, 1.0, 1e-5) << isa << " " << size;
    }
  }
}

TEST(Numerics, RowsOfAnySize) {
  for (const int64_t dim : {64, 256, 576}) {
    for (const int exponent : {-120, -61, -59, 30, 39, 41, 57, 59, 60, 61, 118}) {
      Problem p({.q_tokens = 130, .qk_dim = dim, .v_dim = 16, .seed = 37});
      const auto scaled = [](const TestTensor& from, int by) {
        TestTensor to(1, 1, from.tokens, from.dim);
        to.Fill([&](int64_t b, int64_t h, int64_t t, int64_t d) { return std::ldexp(from.Get(b, h, t, d), by); });
        return to;
      };
      p.q = scaled(p.q, exponent);
      p.k = scaled(p.k, -exponent);
      ForAll(p, [&](const Result& run, const Result& reference, sparge_precision precision) {
        if (p.desc.select == SPARGE_SELECT_CDF) return;
        EXPECT_LE(RelativeL1(run.o, reference.o), Tolerance(precision, SPARGE_F32, dim)) << dim << " " << exponent;
      });
      if (Quick() && exponent == 41) break;
    }
  }
}

}  // namespace
}  // namespace sparge::testing

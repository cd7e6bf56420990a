// Floating-point opcodes: exact where PTX says so, within the stated error where it is an approximation.
#include <bit>
#include <cmath>
#include <functional>
#include <random>

#include "tests/ptxrun/ptx_util.h"
#include "tools/ptxrun/number.h"

namespace ptxrun::testing {
namespace {

using Words = std::vector<uint32_t>;

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }
float F(uint32_t bits) { return std::bit_cast<float>(bits); }

Words Numbers(uint32_t seed, float largest = 100) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-largest, largest);
  Words words(32);
  for (uint32_t& word : words) word = Bits(uniform(random));
  const float extremes[] = {0.0f, -0.0f, 1.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3.4e38f};
  for (size_t i = 0; i < std::size(extremes); ++i) words[(i * 4 + seed) % 32] = Bits(extremes[i]);
  return words;
}

// %f0 is the result, of %f1, %f2 and %f3. NaNs count as alike.
void Check(const std::string& body, const std::function<float(float, float, float)>& expected) {
  SCOPED_TRACE(body);
  const Words a = Numbers(1), b = Numbers(2), c = Numbers(3);
  const Words results = Results(body + " mov.b32 %r0, %f0;", a, b, c);
  for (size_t i = 0; i < 32; ++i) {
    const float value = expected(F(a[i]), F(b[i]), F(c[i]));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(F(results[i]))) << i;
    } else {
      EXPECT_EQ(results[i], Bits(value)) << F(a[i]) << ", " << F(b[i]) << ", " << F(c[i]) << ": " << F(results[i])
                                         << ", not " << value;
    }
  }
}

TEST(Float, ExactOperations) {
  Check("add.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a + b; });
  Check("sub.rn.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a - b; });
  Check("mul.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a * b; });
  Check("fma.rn.f32 %f0, %f1, %f2, %f3;", [](float a, float b, float c) { return std::fma(a, b, c); });
  Check("div.rn.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a / b; });
  Check("sqrt.rn.f32 %f0, %f1;", [](float a, float, float) { return std::sqrt(a); });
  Check("neg.f32 %f0, %f1;", [](float a, float, float) { return -a; });
  Check("add.f32 %f0, %f1, 0f3FC00000;", [](float a, float, float) { return a + 1.5f; });
}

TEST(Float, FlushesAndSaturates) {
  const auto flush = [](float a) { return std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0f, a) : a; };
  Check("mul.ftz.f32 %f0, %f1, 0f3F800000;", [&](float a, float, float) { return flush(a); });
  Check("mul.sat.f32 %f0, %f1, 0f3F000000;",
        [](float a, float, float) { return a > 0 ? std::min(a / 2, 1.0f) : 0.0f; });
}

TEST(Float, ExtremesIgnoreNanUnlessTold) {
  Check("max.f32 %f0, %f1, %f2;", [](float a, float b, float) {
    return std::isnan(a) ? b : std::isnan(b) || a > b ? a : b;
  });
  Check("min.f32 %f0, %f1, %f2;", [](float a, float b, float) {
    return std::isnan(a) ? b : std::isnan(b) || a < b ? a : b;
  });
  Check("max.NaN.f32 %f0, %f1, %f2;",
        [](float a, float b, float) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); });
}

TEST(Float, ComparisonsWithNan) {
  const std::string choose = " selp.f32 %f0, 0f3F800000, 0f00000000, %q1;";
  Check("setp.lt.f32 %q1, %f1, %f2;" + choose, [](float a, float b, float) { return a < b ? 1.0f : 0.0f; });
  Check("setp.ne.f32 %q1, %f1, %f1;" + choose, [](float, float, float) { return 0.0f; });
  Check("setp.neu.f32 %q1, %f1, %f1;" + choose, [](float a, float, float) { return std::isnan(a) ? 1.0f : 0.0f; });
  Check("setp.geu.f32 %q1, %f1, %f2;" + choose, [](float a, float b, float) { return !(a < b) ? 1.0f : 0.0f; });
  Check("setp.nan.f32 %q1, %f1, %f2;" + choose,
        [](float a, float b, float) { return std::isnan(a) || std::isnan(b) ? 1.0f : 0.0f; });
}

TEST(Float, ConversionsToIntegersClamp) {
  const auto check = [](const std::string& opcode, const std::function<double(double)>& round, double low,
                        double high) {
    SCOPED_TRACE(opcode);
    const Words a = Numbers(5);
    const Words results = Results(opcode + " %r0, %f1;", a);
    for (size_t i = 0; i < 32; ++i) {
      const auto value = static_cast<double>(F(a[i]));
      const int64_t expected = std::isnan(value) ? 0 : static_cast<int64_t>(std::clamp(round(value), low, high));
      EXPECT_EQ(results[i], static_cast<uint32_t>(expected)) << value;
    }
  };
  check(
      "cvt.rni.s32.f32", [](double v) { return std::nearbyint(v); }, INT32_MIN, INT32_MAX);
  check(
      "cvt.rzi.s32.f32", [](double v) { return std::trunc(v); }, INT32_MIN, INT32_MAX);
  check(
      "cvt.rmi.s32.f32", [](double v) { return std::floor(v); }, INT32_MIN, INT32_MAX);
  check(
      "cvt.rzi.u32.f32", [](double v) { return std::trunc(v); }, 0, UINT32_MAX);
  check(
      "cvt.rni.sat.s8.f32", [](double v) { return std::nearbyint(v); }, -128, 127);
}

TEST(Float, RoundingToIntegersAndBack) {
  Check("cvt.rni.f32.f32 %f0, %f1;", [](float a, float, float) { return std::nearbyint(a); });
  Check("cvt.rpi.f32.f32 %f0, %f1;", [](float a, float, float) { return std::ceil(a); });
  Check("mov.b32 %r4, %f1; cvt.rn.f32.s32 %f0, %r4;",
        [](float a, float, float) { return static_cast<float>(static_cast<int32_t>(Bits(a))); });
  Check("cvt.f64.f32 %e1, %f1; cvt.rn.f32.f64 %f0, %e1;", [](float a, float, float) { return a; });
}

TEST(Half, NarrowingTakesTheFirstSourceForTheUpperHalf) {
  const Words a = Numbers(6, 70000), b = Numbers(7, 1e-5f);
  const Words f16 = Results("cvt.rn.f16x2.f32 %r0, %f1, %f2;", a, b);
  const Words bf16 = Results("cvt.rn.bf16x2.f32 %r0, %f1, %f2;", a, b);
  const Words e4m3 = Results("cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2; cvt.u32.u16 %r0, %h0;", a, b);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(f16[i], uint32_t{F16FromFloat(F(a[i]))} << 16 | F16FromFloat(F(b[i])));
    EXPECT_EQ(bf16[i], uint32_t{Bf16FromFloat(F(a[i]))} << 16 | Bf16FromFloat(F(b[i])));
    EXPECT_EQ(e4m3[i], uint32_t{E4m3::From(F(a[i]))} << 8 | E4m3::From(F(b[i])));
  }
}

// The table of the format (OCP 8-bit floating point): no infinity, one NaN per sign, largest 448.
TEST(Half, E4m3IsTheFormat) {
  EXPECT_EQ(E4m3::To(0x7E), 448.0f);
  EXPECT_EQ(E4m3::To(0x08), 0x1p-6f);
  EXPECT_EQ(E4m3::To(0x01), 0x1p-9f);
  EXPECT_EQ(E4m3::To(0x81), -0x1p-9f);
  EXPECT_TRUE(std::isnan(E4m3::To(0x7F)));
  EXPECT_EQ(E5m2::To(0x7B), 57344.0f);
  EXPECT_TRUE(std::isinf(E5m2::To(0x7C)));
  for (int bits = 0; bits < 0x7F; ++bits) {
    const float value = E4m3::To(static_cast<uint8_t>(bits));
    EXPECT_EQ(E4m3::From(value), bits);
    if (bits == 0x7E) break;
    // Half way to the next one goes to the even one, a little more goes up.
    const float half = (value + E4m3::To(static_cast<uint8_t>(bits + 1))) / 2;
    EXPECT_EQ(E4m3::From(half), bits % 2 == 0 ? bits : bits + 1);
    EXPECT_EQ(E4m3::From(std::nextafter(half, 1000.0f)), bits + 1);
  }
  EXPECT_EQ(E4m3::From(1e9f), 0x7E);
  EXPECT_EQ(E4m3::From(-INFINITY), 0xFE);
}

TEST(Half, Arithmetic) {
  const Words a = Numbers(8, 10), b = Numbers(9, 10), c = Numbers(10, 10);
  const std::string narrow = "cvt.rn.f16.f32 %h1, %f1; cvt.rn.f16.f32 %h2, %f2; cvt.rn.f16.f32 %h3, %f3; ";
  const Words sums = Results(narrow + "add.f16 %h0, %h1, %h2; cvt.u32.u16 %r0, %h0;", a, b, c);
  const Words fmas = Results(narrow + "fma.rn.f16 %h0, %h1, %h2, %h3; cvt.u32.u16 %r0, %h0;", a, b, c);
  for (size_t i = 0; i < 32; ++i) {
    const double x = FloatFromF16(F16FromFloat(F(a[i]))), y = FloatFromF16(F16FromFloat(F(b[i]))),
                 z = FloatFromF16(F16FromFloat(F(c[i])));
    const float sum = FloatFromF16(static_cast<uint16_t>(sums[i])), fma = FloatFromF16(static_cast<uint16_t>(fmas[i]));
    if (std::isnan(x + y))
      EXPECT_TRUE(std::isnan(sum));
    else
      EXPECT_EQ(sum, FloatFromF16(F16FromFloat(NarrowForRounding(x + y))));
    if (std::isnan(x * y + z))
      EXPECT_TRUE(std::isnan(fma));
    else
      EXPECT_EQ(fma, FloatFromF16(F16FromFloat(NarrowForRounding(x * y + z))));
  }
}

// Without a seed exact; with one within the error, and really wrong somewhere.
void CheckApproximation(const std::string& opcode, const std::function<double(double)>& exact, float low, float high) {
  SCOPED_TRACE(opcode);
  Words a(32);
  for (size_t i = 0; i < 32; ++i) a[i] = Bits(low + (high - low) * (static_cast<float>(i) + 0.37f) / 32);
  const Words right = Results(opcode + " %f0, %f1; mov.b32 %r0, %f0;", a);
  const Words wrong = Results(opcode + " %f0, %f1; mov.b32 %r0, %f0;", a, Words(32), Words(32), 7);
  int different = 0;
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(right[i], Bits(static_cast<float>(exact(static_cast<double>(F(a[i]))))));
    EXPECT_LE(std::abs(static_cast<int64_t>(wrong[i]) - static_cast<int64_t>(right[i])), 2);
    different += wrong[i] != right[i];
  }
  EXPECT_GT(different, 10);
}

TEST(Float, ApproximationsAreWrongByTwoUnits) {
  CheckApproximation(
      "ex2.approx.ftz.f32", [](double a) { return std::exp2(a); }, -20, 20);
  CheckApproximation(
      "rcp.approx.f32", [](double a) { return 1 / a; }, 0.1f, 100);
  CheckApproximation(
      "lg2.approx.f32", [](double a) { return std::log2(a); }, 3, 1000);
  CheckApproximation(
      "sqrt.approx.f32", [](double a) { return std::sqrt(a); }, 0.1f, 100);
  CheckApproximation(
      "rsqrt.approx.f32", [](double a) { return 1 / std::sqrt(a); }, 0.1f, 100);
}

}  // namespace
}  // namespace ptxrun::testing

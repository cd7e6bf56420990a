// Integer, logic, bit and predicate opcodes against plain C++, exactly, on random and on extreme operands.
#include <bit>
#include <functional>
#include <random>

#include "tests/ptxrun/ptx_util.h"

namespace ptxrun::testing {
namespace {

using Words = std::vector<uint32_t>;
using Expected = std::function<uint32_t(uint32_t a, uint32_t b, uint32_t c)>;

Words Operands(uint32_t seed) {
  std::mt19937 random(seed);
  Words words(32);
  for (uint32_t& word : words) word = random();
  const uint32_t extremes[] = {0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 33, 0x80, 0xFF};
  for (size_t i = 0; i < std::size(extremes); ++i) words[(i * 3 + seed) % 32] = extremes[i];
  return words;
}

// `body` leaves its result in %r0, from %r1, %r2 and %r3.
void Check(const std::string& body, const Expected& expected) {
  SCOPED_TRACE(body);
  const Words a = Operands(1), b = Operands(2), c = Operands(3);
  const Words results = Results(body, a, b, c);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(results[i], expected(a[i], b[i], c[i])) << "of " << a[i] << ", " << b[i] << ", " << c[i];
  }
}

int32_t S(uint32_t value) { return static_cast<int32_t>(value); }
uint32_t U(int64_t value) { return static_cast<uint32_t>(value); }

TEST(Integer, Sums) {
  Check("add.s32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return a + b; });
  Check("sub.u32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return a - b; });
  Check("add.s32 %r0, %r1, -7;", [](auto a, auto, auto) { return a - 7; });
  Check("add.sat.s32 %r0, %r1, %r2;",
        [](auto a, auto b, auto) { return U(std::clamp<int64_t>(int64_t{S(a)} + S(b), INT32_MIN, INT32_MAX)); });
  Check("neg.s32 %r0, %r1;", [](auto a, auto, auto) { return 0 - a; });
  Check("abs.s32 %r0, %r1;", [](auto a, auto, auto) { return S(a) < 0 ? 0 - a : a; });
  Check("min.s32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return S(a) < S(b) ? a : b; });
  Check("max.u32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return a > b ? a : b; });
  Check("cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; add.s16 %h0, %h1, %h2; cvt.u32.u16 %r0, %h0;",
        [](auto a, auto b, auto) { return (a + b) & 0xFFFF; });
}

TEST(Integer, Products) {
  Check("mul.lo.s32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return a * b; });
  Check("mul.hi.u32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); });
  Check("mul.hi.s32 %r0, %r1, %r2;",
        [](auto a, auto b, auto) { return static_cast<uint32_t>(int64_t{S(a)} * S(b) >> 32); });
  Check("mad.lo.s32 %r0, %r1, %r2, %r3;", [](auto a, auto b, auto c) { return a * b + c; });
  Check("mul.wide.s32 %d5, %r1, %r2; shr.u64 %d5, %d5, 16; cvt.u32.u64 %r0, %d5;", [](auto a, auto b, auto) {
    return U(static_cast<int64_t>(static_cast<uint64_t>(int64_t{S(a)} * S(b)) >> 16));
  });
  Check("cvt.u64.u32 %d5, %r3; mad.wide.u32 %d5, %r1, %r2, %d5; mov.b64 {%r5, %r0}, %d5;",
        [](auto a, auto b, auto c) { return static_cast<uint32_t>((uint64_t{a} * b + c) >> 32); });
  Check("or.b32 %r4, %r2, 3; div.s32 %r0, %r1, %r4;", [](auto a, auto b, auto) { return U(int64_t{S(a)} / S(b | 3)); });
  Check("or.b32 %r4, %r2, 3; rem.u32 %r0, %r1, %r4;", [](auto a, auto b, auto) { return a % (b | 3); });
  Check("dp4a.s32.s32 %r0, %r1, %r2, %r3;", [](auto a, auto b, auto c) {
    for (int i = 0; i < 32; i += 8) c += U(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
    return c;
  });
  Check("dp4a.u32.u32 %r0, %r1, %r2, %r3;", [](auto a, auto b, auto c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
  });
}

TEST(Integer, Logic) {
  Check("and.b32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return a & b; });
  Check("xor.b32 %r0, %r1, 0xFF;", [](auto a, auto, auto) { return a ^ 0xFF; });
  Check("not.b32 %r0, %r1;", [](auto a, auto, auto) { return ~a; });
  Check("lop3.b32 %r0, %r1, %r2, %r3, 0xE8;", [](auto a, auto b, auto c) { return (a & b) | (a & c) | (b & c); });
  Check("lop3.b32 %r0, %r1, %r2, %r3, 0x1E;", [](auto a, auto b, auto c) { return a ^ (b | c); });
  Check("prmt.b32 %r0, %r1, %r2, 0x7210;", [](auto a, auto b, auto) { return (a & 0xFFFFFF) | (b & 0xFF000000); });
  Check("prmt.b32 %r0, %r1, 0, 0x9910;", [](auto a, auto, auto) { return U(static_cast<int16_t>(a)); });
}

TEST(Integer, Shifts) {
  Check("shl.b32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return b > 31 ? 0 : a << b; });
  Check("shr.u32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return b > 31 ? 0 : a >> b; });
  Check("shr.s32 %r0, %r1, %r2;", [](auto a, auto b, auto) { return U(S(a) >> std::min(b, 31u)); });
  Check("shf.l.wrap.b32 %r0, %r1, %r2, %r3;",
        [](auto a, auto b, auto c) { return c % 32 == 0 ? b : b << c % 32 | a >> (32 - c % 32); });
  Check("shf.r.clamp.b32 %r0, %r1, %r2, %r3;", [](auto a, auto b, auto c) {
    return c == 0 ? a : c > 31 ? b : a >> c | b << (32 - c);
  });
  Check("bfe.u32 %r0, %r1, 5, 9;", [](auto a, auto, auto) { return a >> 5 & 511; });
  Check("bfe.s32 %r0, %r1, 8, 8;", [](auto a, auto, auto) { return U(static_cast<int8_t>(a >> 8)); });
  Check("bfi.b32 %r0, %r1, %r2, 4, 8;", [](auto a, auto b, auto) { return (b & ~0xFF0u) | (a & 0xFF) << 4; });
}

TEST(Integer, Bits) {
  Check("popc.b32 %r0, %r1;", [](auto a, auto, auto) { return U(std::popcount(a)); });
  Check("clz.b32 %r0, %r1;", [](auto a, auto, auto) { return U(std::countl_zero(a)); });
  Check("brev.b32 %r0, %r1;", [](auto a, auto, auto) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1) << (31 - i);
    return reversed;
  });
  Check("bfind.u32 %r0, %r1;", [](auto a, auto, auto) { return a == 0 ? ~0u : 31 - U(std::countl_zero(a)); });
  Check("mov.b64 %d5, {%r1, %r2}; popc.b64 %r0, %d5;",
        [](auto a, auto b, auto) { return U(std::popcount(a) + std::popcount(b)); });
  Check("mov.b32 {%h1, %h2}, %r1; mov.b32 %r0, {%h2, %h1};", [](auto a, auto, auto) { return a << 16 | a >> 16; });
}

TEST(Integer, Conversions) {
  Check("cvt.s32.s8 %r0, %r1;", [](auto a, auto, auto) { return U(static_cast<int8_t>(a)); });
  Check("cvt.u32.u8 %r0, %r1;", [](auto a, auto, auto) { return a & 255; });
  Check("cvt.sat.s8.s32 %r0, %r1;", [](auto a, auto, auto) { return U(std::clamp(S(a), -128, 127)); });
  Check("cvt.s64.s32 %d5, %r1; shr.s64 %d5, %d5, 4; cvt.u32.u64 %r0, %d5;",
        [](auto a, auto, auto) { return U(int64_t{S(a)} >> 4); });
  Check("cvt.pack.sat.s8.s32.b32 %r0, %r1, %r2, %r3;", [](auto a, auto b, auto c) {
    return c << 16 | (U(std::clamp(S(a), -128, 127)) & 255) << 8 | (U(std::clamp(S(b), -128, 127)) & 255);
  });
}

TEST(Predicate, ComparisonsAndChoices) {
  const std::string choose = " selp.b32 %r0, %r1, %r2, %q1;";
  Check("setp.lt.s32 %q1, %r1, %r2;" + choose, [](auto a, auto b, auto) { return S(a) < S(b) ? a : b; });
  Check("setp.hs.u32 %q1, %r1, %r2;" + choose, [](auto a, auto b, auto) { return a >= b ? a : b; });
  Check("setp.gt.u32 %q2, %r3, 100; setp.eq.and.s32 %q1, %r1, %r1, !%q2;" + choose,
        [](auto a, auto b, auto c) { return c <= 100 ? a : b; });
  Check("setp.lt.s32 %q2|%q1, %r1, 0;" + choose, [](auto a, auto b, auto) { return S(a) >= 0 ? a : b; });
  Check("setp.lt.s32 %q2, %r1, 0; setp.lt.s32 %q3, %r2, 0; xor.pred %q1, %q2, %q3;" + choose,
        [](auto a, auto b, auto) { return (S(a) < 0) != (S(b) < 0) ? a : b; });
  Check("setp.lt.s32 %q1, %r1, 0; mov.u32 %r0, 1; @%q1 mov.u32 %r0, 2; @!%q1 add.s32 %r0, %r0, 5;",
        [](auto a, auto, auto) { return S(a) < 0 ? 2u : 6u; });
}

}  // namespace
}  // namespace ptxrun::testing

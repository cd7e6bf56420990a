// Lanes together: shuffles, votes, divergence, matrix products, barriers and atomics.
#include <cmath>
#include <random>

#include "tests/ptxrun/ptx_util.h"
#include "tools/ptxrun/number.h"

namespace ptxrun::testing {
namespace {

using Words = std::vector<uint32_t>;

Words Lanes() {
  Words lanes(32);
  for (uint32_t i = 0; i < 32; ++i) lanes[i] = 100 + i;
  return lanes;
}

TEST(Lanes, Shuffles) {
  const Words a = Lanes();
  const Words butterfly = Results("shfl.sync.bfly.b32 %r0, %r1, 5, 31, -1;", a);
  const Words up = Results("shfl.sync.up.b32 %r4|%q1, %r1, 3, 0, -1; selp.b32 %r0, %r4, 7, %q1;", a);
  const Words down = Results("shfl.sync.down.b32 %r4|%q1, %r1, 3, 31, -1; selp.b32 %r0, %r4, 7, %q1;", a);
  const Words index = Results("shfl.sync.idx.b32 %r0, %r1, 9, 31, -1;", a);
  // Segments of 8 lanes: 32 - 8 in the mask, the last of each as the bound.
  const Words segments = Results("shfl.sync.idx.b32 %r0, %r1, 2, 0x181F, -1;", a);
  for (uint32_t i = 0; i < 32; ++i) {
    EXPECT_EQ(butterfly[i], 100 + (i ^ 5));
    EXPECT_EQ(up[i], i < 3 ? 7 : 100 + i - 3);
    EXPECT_EQ(down[i], i + 3 > 31 ? 7 : 100 + i + 3);
    EXPECT_EQ(index[i], 109u);
    EXPECT_EQ(segments[i], 100 + i / 8 * 8 + 2);
  }
}

TEST(Lanes, VotesMatchesAndReductions) {
  const Words a = Lanes();
  const auto all = [&](const std::string& body, uint32_t expected) {
    SCOPED_TRACE(body);
    EXPECT_EQ(Results(body, a), Words(32, expected));
  };
  all("setp.gt.u32 %q1, %r1, 130; vote.sync.ballot.b32 %r0, %q1, -1;", 0x80000000);
  all("setp.gt.u32 %q1, %r1, 130; vote.sync.any.pred %q2, %q1, -1; selp.b32 %r0, 1, 0, %q2;", 1);
  all("setp.gt.u32 %q1, %r1, 130; vote.sync.all.pred %q2, %q1, -1; selp.b32 %r0, 1, 0, %q2;", 0);
  all("setp.gt.u32 %q1, %r1, 130; vote.sync.all.pred %q2, !%q1, -1; selp.b32 %r0, 1, 0, %q2;", 0);
  all("and.b32 %r4, %r1, 0; vote.sync.uni.pred %q2, %q1, -1; activemask.b32 %r0;", 0xFFFFFFFF);
  all("redux.sync.add.s32 %r0, %r1, -1;", 32 * 100 + 496);
  all("redux.sync.max.u32 %r0, %r1, -1;", 131);
  const Words matches = Results("and.b32 %r4, %r1, 3; match.any.sync.b32 %r0, %r4, -1;", a);
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(matches[i], 0x11111111u << i % 4);
}

TEST(Lanes, PartAndMeetAgain) {
  // Each lane goes round as often as its number says; then all of them vote.
  const Words rounds = Results(
      "mov.u32 %r0, 0; sub.u32 %r4, %r1, 100;\n"
      "LOOP: setp.ge.u32 %q1, %r0, %r4; @%q1 bra DONE; add.u32 %r0, %r0, 1; bra LOOP;\n"
      "DONE: redux.sync.add.u32 %r5, %r0, -1; mad.lo.u32 %r0, %r5, 1000, %r0;",
      Lanes());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(rounds[i], 496000 + i);
}

TEST(Lanes, WaitForTheirMembers) {
  // The upper half comes to the shuffle by another way, later.
  const Words values = Results(
      "setp.lt.u32 %q1, %lane, 16; mov.u32 %r4, 0; @%q1 bra MEET; add.u32 %r4, %r1, 1000;\n"
      "MEET: shfl.sync.bfly.b32 %r0, %r4, 16, 31, -1;",
      Lanes());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(values[i], i < 16 ? 1116 + i : 0);
}

TEST(Lanes, LabelsAndRegistersOfABlockAreItsOwn) {
  const Words values = Results(
      "mov.u32 %r0, 1; { .reg .b32 %r0; mov.u32 %r0, 50; bra IN; mov.u32 %r1, 0; IN: add.u32 %r1, %r1, %r0; }\n"
      "{ .reg .pred %z; bra IN; IN: setp.ne.u32 %z, %r0, 1; @%z mov.u32 %r1, 0; } mov.u32 %r0, %r1;",
      Lanes());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(values[i], 150 + i);
}

TEST(Lanes, BranchesByTable) {
  const Words values = Results(
      "and.b32 %r4, %lane, 3;\nT: .branchtargets A, B, B, C;\nbrx.idx %r4, T;\n"
      "A: mov.u32 %r0, 1; bra E; B: mov.u32 %r0, 2; bra E; C: mov.u32 %r0, 3;\nE:",
      Lanes());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(values[i], i % 4 == 0 ? 1u : i % 4 == 3 ? 3u : 2u);
}

// A 16 x K, B K x 8 and C 16 x 8 of random numbers; packs fragments as PTX says: g = lane / 4, t = lane % 4.
template <typename T>
struct Product {
  Product(int depth, std::function<T(std::mt19937&)> number) : k(depth), a(16 * depth), b(8 * depth) {
    std::mt19937 random(3);
    for (T& value : a) value = number(random);
    for (T& value : b) value = number(random);
  }
  static constexpr int kPerWord = 4 / sizeof(T);
  // Word r of a lane of A (or of B).
  uint32_t WordA(int lane, int r) const {
    return Word(a, lane / 4 + 8 * (r & 1), kPerWord * (lane % 4) + 4 * kPerWord * (r >> 1));
  }
  uint32_t WordB(int lane, int r) const { return Word(b, lane / 4, kPerWord * (lane % 4) + 4 * kPerWord * r); }
  uint32_t Word(const std::vector<T>& matrix, int row, int first) const {
    uint32_t word = 0;
    for (int i = 0; i < kPerWord; ++i)
      word |=
          static_cast<uint32_t>(static_cast<std::make_unsigned_t<T>>(matrix[static_cast<size_t>(row * k + first + i)]))
          << 8 * sizeof(T) * static_cast<size_t>(i);
    return word;
  }
  int k;
  std::vector<T> a, b;  // rows of A, columns of B
};

// Runs `opcode` on the product's fragments and C = row * 8 + column, with `fraction_bits`; gives D, lane by lane.
template <typename T>
Words Multiply(const Product<T>& product, const std::string& opcode, bool is_float, int fraction_bits = 23) {
  const int in_a = 16 * product.k / 32 / Product<T>::kPerWord, in_b = in_a / 2;
  std::string body, a, b;
  Machine machine;
  machine.options.fp8_fraction_bits = fraction_bits;
  machine.Room(512);
  Words words;
  for (int r = 0; r < in_a + in_b; ++r) {
    for (int lane = 0; lane < 32; ++lane)
      words.push_back(r < in_a ? product.WordA(lane, r) : product.WordB(lane, r - in_a));
    const std::string name = "%r" + std::to_string(10 + r);
    body += "ld.global.u32 " + name + ", [%d1+" + std::to_string(128 * r) + "];\n";
    std::string& list = r < in_a ? a : b;
    list += (list.empty() ? "" : ", ") + name;
  }
  machine.In(words);
  body =
      "add.u64 %d1, %p1, %at4; shl.b64 %d0, %at4, 2; add.u64 %d0, %d0, %p0;\n" + body +
      "shr.u32 %r4, %lane, 2; shl.b32 %r4, %r4, 3; and.b32 %r5, %lane, 3; shl.b32 %r5, %r5, 1; add.u32 %r0, %r4, %r5;\n"
      "add.u32 %r1, %r0, 1; add.u32 %r2, %r0, 64; add.u32 %r3, %r0, 65;\n";
  for (int i = 0; is_float && i < 4; ++i) {
    const std::string n = std::to_string(i);
    body += "cvt.rn.f32.u32 %f" + n + ", %r" + n + "; mov.b32 %r" + n + ", %f" + n + ";\n";
  }
  body += opcode + " {%r0, %r1, %r2, %r3}, {" + a + "}, {" + b +
          "}, {%r0, %r1, %r2, %r3};\nst.global.v4.u32 [%d0], {%r0, %r1, %r2, %r3};";
  machine.Run(KernelText(2, body));
  return machine.Out<uint32_t>(0, 128);
}

int RowOf(int i) { return i / 4 / 4 + 8 * (i % 4 / 2); }
int ColumnOf(int i) { return 2 * (i / 4 % 4) + i % 2; }

TEST(Matrix, IntegersAreExact) {
  const Product<int8_t> product(
      32, [](std::mt19937& random) { return static_cast<int8_t>(random() % 4 == 0 ? -128 : random()); });
  const Words d = Multiply(product, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", false);
  for (int i = 0; i < 128; ++i) {
    int32_t sum = RowOf(i) * 8 + ColumnOf(i);
    for (int k = 0; k < 32; ++k)
      sum += product.a[static_cast<size_t>(RowOf(i) * 32 + k)] * product.b[static_cast<size_t>(ColumnOf(i) * 32 + k)];
    EXPECT_EQ(static_cast<int32_t>(d[static_cast<size_t>(i)]), sum) << i;
  }
}

// Numbers with few bits, so that every sum is exact.
TEST(Matrix, HalvesAreExactWhereSumsFit) {
  const Product<uint16_t> product(16, [](std::mt19937& random) {
    return F16FromFloat(static_cast<float>(static_cast<int>(random() % 65) - 32) / 8);
  });
  const Words d = Multiply(product, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", true);
  for (int i = 0; i < 128; ++i) {
    float sum = static_cast<float>(RowOf(i) * 8 + ColumnOf(i));
    for (int k = 0; k < 16; ++k)
      sum += FloatFromF16(product.a[static_cast<size_t>(RowOf(i) * 16 + k)]) *
             FloatFromF16(product.b[static_cast<size_t>(ColumnOf(i) * 16 + k)]);
    EXPECT_EQ(std::bit_cast<float>(d[static_cast<size_t>(i)]), sum) << i;
  }
}

TEST(Matrix, EightBitFloats) {
  const Product<uint8_t> product(32, [](std::mt19937& random) {
    return E4m3::From(static_cast<float>(static_cast<int>(random() % 31) - 15) / 4);
  });
  const std::string opcode = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32";
  const Words d = Multiply(product, opcode, true);
  const Words cut = Multiply(product, opcode, true, 3);
  int different = 0;
  for (int i = 0; i < 128; ++i) {
    float sum = static_cast<float>(RowOf(i) * 8 + ColumnOf(i));
    for (int k = 0; k < 32; ++k)
      sum += E4m3::To(product.a[static_cast<size_t>(RowOf(i) * 32 + k)]) *
             E4m3::To(product.b[static_cast<size_t>(ColumnOf(i) * 32 + k)]);
    const float value = std::bit_cast<float>(d[static_cast<size_t>(i)]),
                shorter = std::bit_cast<float>(cut[static_cast<size_t>(i)]);
    EXPECT_EQ(value, sum) << i;
    EXPECT_LE(std::fabs(shorter), std::fabs(value));
    EXPECT_GE(std::fabs(shorter), std::fabs(value) * (1 - 0x1p-3f));
    different += shorter != value;
  }
  EXPECT_GT(different, 50);
}

// Lane l brings the address of row l % 8 of matrix l / 8; the value of an element is 8 * row + column of its matrix +
// 64 per matrix.
TEST(Matrix, LoadsFromSharedMemory) {
  for (const bool transposed : {false, true}) {
    Machine machine;
    machine.Room(512);
    const std::string text =
        "mul.lo.u32 %r1, %lane, 16; mul.lo.u32 %r2, %lane, 8; mov.u32 %r3, s; add.u32 %r3, %r3, %r1;\n"
        "mul.lo.u32 %r4, %r2, 65537; add.u32 %r4, %r4, 65536; st.shared.u32 [%r3], %r4; add.u32 %r4, %r4, 131074; "
        "st.shared.u32 [%r3+4], %r4;\n"
        "add.u32 %r4, %r4, 131074; st.shared.u32 [%r3+8], %r4; add.u32 %r4, %r4, 131074; st.shared.u32 [%r3+12], %r4; "
        "bar.warp.sync -1;\n"
        "ldmatrix.sync.aligned.m8n8.x4" +
        std::string(transposed ? ".trans" : "") +
        ".shared.b16 {%r10, %r11, %r12, %r13}, [%r3];\n"
        "shl.b64 %d0, %at4, 2; add.u64 %d0, %d0, %p0; st.global.v4.u32 [%d0], {%r10, %r11, %r12, %r13};";
    machine.Run(KernelText(1, text, 80, ".shared .align 16 .b8 s[512];\n"));
    const Words d = machine.Out<uint32_t>(0, 128);
    for (uint32_t i = 0; i < 128; ++i) {
      const uint32_t matrix = i % 4, g = i / 4 / 4, t = 2 * (i / 4 % 4);
      const uint32_t low = 64 * matrix + (transposed ? 8 * t + g : 8 * g + t), high = low + (transposed ? 8 : 1);
      EXPECT_EQ(d[i], high << 16 | low) << i;
    }
  }
}

TEST(Block, BarriersOrderWarpsAndReduce) {
  Machine machine;
  machine.shape.block[0] = 128;
  machine.Room(512);
  machine.Run(KernelText(
      1,
      "shl.b32 %r1, %lane, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; st.shared.u32 [%r3], %lane; bar.sync 0;\n"
      "xor.b32 %r4, %r1, 508; add.u32 %r4, %r4, %r2; ld.shared.u32 %r5, [%r4]; setp.gt.u32 %q1, %lane, 99; "
      "bar.red.popc.u32 %r6, 0, %q1;\n"
      "mad.lo.u32 %r5, %r6, 1000, %r5; add.u64 %d0, %p0, %at4; st.global.u32 [%d0], %r5;",
      80, ".shared .align 4 .b8 s[512];\n"));
  const Words d = machine.Out<uint32_t>(0, 128);
  for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(d[i], 28000 + (i ^ 127));
}

TEST(Block, Atomics) {
  for (const uint32_t seed : {0u, 1u}) {  // blocks in order, and not
    Machine machine;
    machine.options.seed = seed;
    machine.options.threads = seed == 0 ? 1 : 2;
    machine.shape.block[0] = 64;
    machine.shape.grid[0] = 3;
    machine.In(Words{0, 0, 5}).In(std::vector<uint64_t>{1});
    machine.Run(KernelText(
        2,
        "red.global.add.u32 [%p0], 1; atom.global.max.u32 %r1, [%p0+4], %lane; mov.u32 %r2, 5; mov.u32 %r3, 9;\n"
        "atom.global.cas.b32 %r4, [%p0+8], %r2, %r3; mov.u64 %d1, 3; red.global.add.u64 [%p1], %d1;\n"
        "mov.u32 %r5, s; setp.eq.u32 %q1, %lane, 0; @%q1 st.shared.u32 [%r5], 0; bar.sync 0; atom.shared.add.u32 %r6, "
        "[%r5], %lane;",
        80, ".shared .align 4 .b8 s[4];\n"));
    EXPECT_EQ(machine.Out<uint32_t>(0, 3), (Words{192, 63, 9}));
    EXPECT_EQ(machine.Out<uint64_t>(1, 1)[0], 1 + 3u * 192);
  }
}

TEST(Block, LocalMemoryAndGenericAddresses) {
  Machine machine;
  machine.Room(128);
  machine.Run(KernelText(1,
                         ".local .align 8 .b8 depot[16]; mov.b64 %d1, depot; cvta.local.u64 %d2, %d1; st.local.u32 "
                         "[%d1+4], %lane; ld.u32 %r1, [%d2+4];\n"
                         "mov.u32 %r2, s; cvt.u64.u32 %d3, %r2; cvta.shared.u64 %d3, %d3; add.u64 %d3, %d3, %at4; "
                         "st.u32 [%d3], %r1; ld.volatile.shared.u32 %r4, [s+124];\n"
                         "ld.s8 %r3, [%d3]; add.u32 %r3, %r3, %r4; add.u64 %d0, %p0, %at4; st.u32 [%d0], %r3;",
                         80, ".shared .align 4 .b8 s[128];\n"));
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(machine.Out<uint32_t>(0, 32)[i], i + 31);
}

}  // namespace
}  // namespace ptxrun::testing

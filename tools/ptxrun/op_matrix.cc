// ldmatrix and mma. Products of the inputs fit into a float; sums of 8-bit integers do, too. Of floats, sums are
// rounded after every product, in the order of k: hardware sums in an order that it does not tell.
#include <algorithm>
#include <cmath>

#include "tools/ptxrun/access.h"
#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/number.h"

namespace ptxrun {
namespace {

// How a 32-bit register of a fragment holds numbers: kCount of them, lowest bits first.
struct S8 {
  static constexpr int kCount = 4;
  static float Of(uint32_t word, int i) { return static_cast<float>(static_cast<int8_t>(word >> 8 * i)); }
};
struct U8 {
  static constexpr int kCount = 4;
  static float Of(uint32_t word, int i) { return static_cast<float>(static_cast<uint8_t>(word >> 8 * i)); }
};
template <typename Float>
struct Fp8 {
  static constexpr int kCount = 4;
  static float Of(uint32_t word, int i) { return Float::To(static_cast<uint8_t>(word >> 8 * i)); }
};
struct F16 {
  static constexpr int kCount = 2;
  // FloatFromF16 without branches, for vectors.
  static float Of(uint32_t word, int i) {
    const uint32_t half = word >> 16 * i;
    const uint32_t rest = (half & 0x7FFF) << 13;
    const auto scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
    return std::bit_cast<float>((half & 0x8000) << 16 | (rest >= 0x0F800000 ? rest | 0x7F800000 : scaled));
  }
};
struct Bf16 {
  static constexpr int kCount = 2;
  static float Of(uint32_t word, int i) { return std::bit_cast<float>(word >> 16 * i << 16); }
};

constexpr int kM = 16, kN = 8;

template <typename A, typename B, int kK>
struct Fragments {
  static constexpr int kInA = kM * kK / 32 / A::kCount, kInB = kN * kK / 32 / B::kCount;
  float a[kM][kK], b[kK][kN];

  // Lane 4g + t: rows g and g + 8 of A, column g of B; numbers that follow each other along k.
  void Gather(const Warp& warp, const uint32_t* rows_a, const uint32_t* rows_b) {
    constexpr int kCount = A::kCount;
    for (int r = 0; r < kInA; ++r) {
      const uint32_t* words = warp.Row<uint32_t>(rows_a[r]);
      for (int i = 0; i < kCount; ++i) {
        float values[kLanes];
        for (uint32_t lane = 0; lane < kLanes; ++lane) values[lane] = A::Of(words[lane], i);
        for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
          a[lane / 4 + 8 * (r & 1)][kCount * (lane % 4) + i + 4 * kCount * (r >> 1)] = values[lane];
        }
      }
    }
    for (int r = 0; r < kInB; ++r) {
      const uint32_t* words = warp.Row<uint32_t>(rows_b[r]);
      for (int i = 0; i < kCount; ++i) {
        float values[kLanes];
        for (uint32_t lane = 0; lane < kLanes; ++lane) values[lane] = B::Of(words[lane], i);
        for (int lane = 0; lane < static_cast<int>(kLanes); ++lane)
          b[kCount * (lane % 4) + i + 4 * kCount * r][lane / 4] = values[lane];
      }
    }
  }

  void MultiplyAdd(float (&sums)[kM][kN]) const {
    for (int m = 0; m < kM; ++m) {
      for (int k = 0; k < kK; ++k) {
        for (int n = 0; n < kN; ++n) sums[m][n] = std::fma(a[m][k], b[k][n], sums[m][n]);
      }
    }
  }
};

// Number i of 4 in C and D: row g + 8 (i / 2), column 2t + i % 2.
int RowOf(uint32_t lane, int i) { return static_cast<int>(lane / 4) + 8 * (i >> 1); }
int ColumnOf(uint32_t lane, int i) { return static_cast<int>(2 * (lane % 4)) + (i & 1); }

void NeedAll(uint32_t lanes) {
  if (lanes != kAll) throw Fault("not all 32 lanes take part");
}

// op[0..3]: D; then A, B and C.
template <typename A, typename B, int kK>
void IntegerMma(Warp& warp, const Instr& instr, uint32_t lanes) {
  using F = Fragments<A, B, kK>;
  NeedAll(lanes);
  F fragments;
  float sums[kM][kN] = {};
  fragments.Gather(warp, &instr.op[4], &instr.op[4 + F::kInA]);
  fragments.MultiplyAdd(sums);
  const bool saturate = instr.imm[0] != 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t* c = warp.Row<uint32_t>(instr.op[static_cast<size_t>(4 + F::kInA + F::kInB + i)]);
    uint32_t* d = warp.Row<uint32_t>(instr.op[static_cast<size_t>(i)]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const int64_t sum = static_cast<int32_t>(c[lane]) + static_cast<int64_t>(sums[RowOf(lane, i)][ColumnOf(lane, i)]);
      d[lane] = static_cast<uint32_t>(saturate ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
    }
  }
}

// Toward zero, to `bits` of fraction.
float Truncated(float value, int bits) {
  if (bits >= 23 || !std::isfinite(value)) return value;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & ~0u << (23 - bits));
}

// Accumulators are floats, or pairs of f16 (kHalf), which are then two registers of C and D.
template <typename A, typename B, int kK, bool kHalf>
void FloatMma(Warp& warp, const Instr& instr, uint32_t lanes) {
  using F = Fragments<A, B, kK>;
  NeedAll(lanes);
  constexpr int kRegisters = kHalf ? 2 : 4;
  F fragments;
  float sums[kM][kN];
  for (int i = 0; i < 4; ++i) {
    const uint32_t* c =
        warp.Row<uint32_t>(instr.op[static_cast<size_t>(kRegisters + F::kInA + F::kInB + (kHalf ? i / 2 : i))]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      sums[RowOf(lane, i)][ColumnOf(lane, i)] = kHalf ? F16::Of(c[lane], i & 1) : std::bit_cast<float>(c[lane]);
    }
  }
  fragments.Gather(warp, &instr.op[kRegisters], &instr.op[kRegisters + F::kInA]);
  fragments.MultiplyAdd(sums);
  const int bits = A::kCount == 4 ? warp.block.options.fp8_fraction_bits : 23;
  for (int i = 0; i < 4; i += kHalf ? 2 : 1) {
    uint32_t* d = warp.Row<uint32_t>(instr.op[static_cast<size_t>(kHalf ? i / 2 : i)]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float low = Truncated(sums[RowOf(lane, i)][ColumnOf(lane, i)], bits);
      d[lane] = kHalf ? static_cast<uint32_t>(F16FromFloat(sums[RowOf(lane, i)][ColumnOf(lane, i + 1)])) << 16 |
                            F16FromFloat(low)
                      : std::bit_cast<uint32_t>(low);
    }
  }
}

// Rows of the registers of operand n, of which there must be `count`.
void TakeFragment(Builder& builder, size_t n, size_t count, size_t* at) {
  const std::vector<std::string> parts = builder.Parts(n);
  if (parts.size() != count) builder.Fail("registers of operand " + std::to_string(n));
  for (const std::string& part : parts)
    builder.instr.op[(*at)++] = n == 0 ? builder.Out(part, Type::kU32) : builder.In(part, Type::kU32);
}

template <typename A, typename B, int kK>
Handler TakeMma(Builder& builder, Type accumulator) {
  using F = Fragments<A, B, kK>;
  const bool is_half = accumulator == Type::kF16, is_integer = accumulator == Type::kS32;
  const size_t c = is_half ? 2 : 4;
  size_t at = 0;
  TakeFragment(builder, 0, c, &at);
  TakeFragment(builder, 1, static_cast<size_t>(F::kInA), &at);
  TakeFragment(builder, 2, static_cast<size_t>(F::kInB), &at);
  TakeFragment(builder, 3, c, &at);
  constexpr bool kOfIntegers = std::is_same_v<A, S8> || std::is_same_v<A, U8>;
  if constexpr (kOfIntegers) {
    return is_integer ? &IntegerMma<A, B, kK> : nullptr;
  } else {
    return is_half ? &FloatMma<A, B, kK, true> : accumulator == Type::kF32 ? &FloatMma<A, B, kK, false> : nullptr;
  }
}

void BuildMma(Builder& builder) {
  if (!builder.Take("sync") || !builder.Take("aligned") || !builder.Take("row") || !builder.Take("col"))
    builder.Fail("layout");
  const std::string shape = builder.TakeOneOf({"m16n8k8", "m16n8k16", "m16n8k32"});
  builder.Take("kind::f8f6f4");
  builder.instr.imm[0] = builder.Take("satfinite") ? 1 : 0;
  const Type d = builder.TakeType(), a = builder.TakeType(), b = builder.TakeType(), c = builder.TakeType();
  if (c != d) builder.Fail("accumulators of two types");
  if (builder.instr.imm[0] != 0 && d != Type::kS32) builder.Fail(".satfinite");
  builder.instr.flow = Flow::kWhole;
  Handler handler = nullptr;
  if (shape == "m16n8k32") {
    if (a == Type::kS8 && b == Type::kS8) handler = TakeMma<S8, S8, 32>(builder, d);
    if (a == Type::kU8 && b == Type::kU8) handler = TakeMma<U8, U8, 32>(builder, d);
    if (a == Type::kU8 && b == Type::kS8) handler = TakeMma<U8, S8, 32>(builder, d);
    if (a == Type::kS8 && b == Type::kU8) handler = TakeMma<S8, U8, 32>(builder, d);
    if (a == Type::kE4m3 && b == Type::kE4m3) handler = TakeMma<Fp8<E4m3>, Fp8<E4m3>, 32>(builder, d);
    if (a == Type::kE5m2 && b == Type::kE5m2) handler = TakeMma<Fp8<E5m2>, Fp8<E5m2>, 32>(builder, d);
  } else if (shape == "m16n8k16") {
    if (a == Type::kF16 && b == Type::kF16) handler = TakeMma<F16, F16, 16>(builder, d);
    if (a == Type::kBf16 && b == Type::kBf16 && d == Type::kF32) handler = TakeMma<Bf16, Bf16, 16>(builder, d);
    if (a == Type::kS8 && b == Type::kS8) handler = TakeMma<S8, S8, 16>(builder, d);
  } else if (shape == "m16n8k8") {
    if (a == Type::kF16 && b == Type::kF16) handler = TakeMma<F16, F16, 8>(builder, d);
    if (a == Type::kBf16 && b == Type::kBf16 && d == Type::kF32) handler = TakeMma<Bf16, Bf16, 8>(builder, d);
  }
  builder.Finish(handler);
}

// Lane l brings the address of row l % 8 of matrix l / 8; imm[2]: matrices.
template <bool kTransposed>
void LoadMatrices(Warp& warp, const Instr& instr, uint32_t lanes) {
  NeedAll(lanes);
  const auto count = static_cast<uint32_t>(instr.imm[2]);
  uint64_t offsets[kLanes] = {};
  const uint16_t* rows[kLanes] = {};
  ForCheckedLanes(count == 4 ? kAll : (1u << 8 * count) - 1, [&](uint32_t lane) {
    offsets[lane] = AddressAt(warp, instr, lane);
    rows[lane] =
        reinterpret_cast<const uint16_t*>(Locate<Where::kShared>(warp, instr, lane, offsets[lane], 16, Access::kRead));
  });
  for (uint32_t matrix = 0; matrix < count; ++matrix) {
    uint32_t* d = warp.Row<uint32_t>(instr.op[matrix]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t g = lane / 4, t = 2 * (lane % 4);
      const uint32_t low = kTransposed ? rows[8 * matrix + t][g] : rows[8 * matrix + g][t];
      const uint32_t high = kTransposed ? rows[8 * matrix + t + 1][g] : rows[8 * matrix + g][t + 1];
      d[lane] = high << 16 | low;
    }
  }
  CountBanks(warp, instr, offsets, 8 * count, lanes, 16);
}

void BuildLoadMatrices(Builder& builder) {
  if (!builder.Take("sync") || !builder.Take("aligned") || !builder.Take("m8n8")) builder.Fail("shape");
  const std::string number = builder.TakeOneOf({"x1", "x2", "x4"});
  const bool transposed = builder.Take("trans");
  if (builder.TakeOneOf({"shared", "shared::cta"}).empty()) builder.Fail("only from shared memory");
  if (builder.TakeType() != Type::kU16 || number.empty()) builder.Fail("only b16");
  const size_t count = static_cast<size_t>(number[1] - '0');
  size_t at = 0;
  TakeFragment(builder, 0, count, &at);
  TakeAddress(builder, 1);
  builder.instr.imm[2] = static_cast<int64_t>(count);
  builder.instr.flow = Flow::kWhole;
  builder.Finish(transposed ? &LoadMatrices<true> : &LoadMatrices<false>);
}

}  // namespace

void AddMatrixOpcodes(Opcodes& opcodes) {
  opcodes["mma"] = &BuildMma;
  opcodes["ldmatrix"] = &BuildLoadMatrices;
}

}  // namespace ptxrun

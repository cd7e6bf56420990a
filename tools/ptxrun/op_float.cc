// float and double.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/number.h"

namespace ptxrun {
namespace {

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return a + b;
  }
};
struct Sub {
  template <typename T>
  static T Of(T a, T b) {
    return a - b;
  }
};
struct Mul {
  template <typename T>
  static T Of(T a, T b) {
    return a * b;
  }
};
struct Div {
  template <typename T>
  static T Of(T a, T b) {
    return a / b;
  }
};
struct Fma {
  template <typename T>
  static T Of(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
// The number, if one is none; -0 is less than +0.
struct Min {
  template <typename T>
  static T Of(T a, T b) {
    if (a == b) return std::signbit(a) ? a : b;
    return a < b || std::isnan(b) ? a : b;
  }
};
struct Max {
  template <typename T>
  static T Of(T a, T b) {
    if (a == b) return std::signbit(a) ? b : a;
    return a > b || std::isnan(b) ? a : b;
  }
};
template <typename Op>
struct WithNan {
  template <typename T>
  static T Of(T a, T b) {
    return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : Op::Of(a, b);
  }
};
struct Neg {
  template <typename T>
  static T Of(T a) {
    return -a;
  }
};
struct Abs {
  template <typename T>
  static T Of(T a) {
    return std::fabs(a);
  }
};
struct Sqrt {
  template <typename T>
  static T Of(T a) {
    return std::sqrt(a);
  }
};
struct Rcp {
  template <typename T>
  static T Of(T a) {
    return T{1} / a;
  }
};
struct CopySign {
  template <typename T>
  static T Of(T a, T b) {
    return std::copysign(b, a);
  }
};

// .ftz: subnormal numbers count as zero, before and after.
template <typename Op>
struct Flushed {
  template <typename... T>
  static float Of(T... inputs) {
    return Flush(Op::Of(Flush(inputs)...));
  }
};
// .sat: within [0, 1], NaN becomes 0.
template <typename Op>
struct Saturated {
  template <typename... T>
  static float Of(T... inputs) {
    const float value = Op::Of(inputs...);
    return value > 0 ? std::min(value, 1.0f) : 0.0f;
  }
};

// Float handlers with the modifiers .ftz and .sat, double without.
template <typename Op, size_t kInputs, typename T>
constexpr Handler OfArity() {
  if constexpr (kInputs == 1)
    return kUnary<Op, T>;
  else if constexpr (kInputs == 2)
    return kBinary<Op, T>;
  else
    return kTernary<Op, T>;
}

template <typename Op, size_t kInputs>
void BuildExact(Builder& builder) {
  builder.Take("rn");  // other roundings are left as unknown modifiers
  const bool flush = builder.Take("ftz"), saturate = builder.Take("sat");
  const Type type = builder.TakeType();
  TakeOperands(builder, type, kInputs);
  if (type == Type::kF64) {
    if (flush || saturate) builder.Fail("modifiers of f64");
    return builder.Finish(OfArity<Op, kInputs, double>());
  }
  if (flush && saturate) return builder.Finish(OfArity<Saturated<Flushed<Op>>, kInputs, float>());
  if (flush) return builder.Finish(OfArity<Flushed<Op>, kInputs, float>());
  if (saturate) return builder.Finish(OfArity<Saturated<Op>, kInputs, float>());
  builder.Finish(OfArity<Op, kInputs, float>());
}

template <typename Op>
void BuildExtreme(Builder& builder) {
  if (!builder.Take("NaN")) return BuildExact<Op, 2>(builder);
  BuildExact<WithNan<Op>, 2>(builder);
}

// What is approximated: the exact value, and how wrong the hardware may be.
struct Ex2 {
  static float Of(float a, uint32_t seed) {
    if (a == 0) return 1;
    return Jitter(static_cast<float>(std::exp2(static_cast<double>(a))), seed, std::bit_cast<uint32_t>(a));
  }
};
struct Lg2 {
  static float Of(float a, uint32_t seed) {
    const double exact = std::log2(static_cast<double>(a));
    const uint32_t input = std::bit_cast<uint32_t>(a);
    if (seed != 0 && a > 0.5f && a < 2.0f)
      return static_cast<float>(exact + 0x1p-22 * Noise(seed, input));  // absolute near 1
    return Jitter(static_cast<float>(exact), seed, input);
  }
};
struct RcpApprox {
  static float Of(float a, uint32_t seed) {
    return Jitter(static_cast<float>(1.0 / static_cast<double>(a)), seed, std::bit_cast<uint32_t>(a));
  }
};
struct SqrtApprox {
  static float Of(float a, uint32_t seed) { return Jitter(std::sqrt(a), seed, std::bit_cast<uint32_t>(a)); }
};
struct RsqrtApprox {
  static float Of(float a, uint32_t seed) {
    return Jitter(static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))), seed, std::bit_cast<uint32_t>(a));
  }
};
struct Tanh {
  static float Of(float a, uint32_t seed) {
    const double noise = seed == 0 ? 0 : 0x1p-11 * Noise(seed, std::bit_cast<uint32_t>(a));
    return static_cast<float>(std::tanh(static_cast<double>(a)) * (1 + noise));
  }
};
struct Sin {
  static float Of(float a, uint32_t seed) {
    const double noise = seed == 0 ? 0 : 0x1p-21 * Noise(seed, std::bit_cast<uint32_t>(a));
    return static_cast<float>(std::sin(static_cast<double>(a)) + noise);
  }
};
struct Cos {
  static float Of(float a, uint32_t seed) {
    const double noise = seed == 0 ? 0 : 0x1p-21 * Noise(seed, std::bit_cast<uint32_t>(a));
    return static_cast<float>(std::cos(static_cast<double>(a)) + noise);
  }
};

template <typename Op>
void Approximate(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<float>(instr.op[0]);
  const uint32_t* a = warp.Row<float>(instr.op[1]);
  const uint32_t seed = warp.block.options.seed;
  const bool flush = instr.imm[0] != 0;
  ForLanes(lanes, [&](uint32_t lane) {
    const auto input = std::bit_cast<float>(a[lane]);
    const float value = Op::Of(flush ? Flush(input) : input, seed);
    d[lane] = std::bit_cast<uint32_t>(flush ? Flush(value) : value);
  });
}

void ApproximateDiv(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<float>(instr.op[0]);
  const uint32_t* a = warp.Row<float>(instr.op[1]);
  const uint32_t* b = warp.Row<float>(instr.op[2]);
  const bool flush = instr.imm[0] != 0;
  ForLanes(lanes, [&](uint32_t lane) {
    auto x = std::bit_cast<float>(a[lane]), y = std::bit_cast<float>(b[lane]);
    if (flush) x = Flush(x), y = Flush(y);
    const float value = Jitter(x / y, warp.block.options.seed, a[lane] * 31 + b[lane]);
    d[lane] = std::bit_cast<uint32_t>(flush ? Flush(value) : value);
  });
}

template <typename Op>
void BuildApproximate(Builder& builder) {
  if (!builder.Take("approx")) builder.Fail("only .approx is modelled");
  builder.instr.imm[0] = builder.Take("ftz") ? 1 : 0;
  if (builder.TakeType() != Type::kF32) builder.Fail("only f32 is modelled");
  TakeOperands(builder, Type::kF32, 1);
  builder.Finish(&Approximate<Op>);
}

// Exact with .rn, else approximate.
template <typename Exact, typename Approximation>
void BuildEither(Builder& builder) {
  if (!builder.Take("rn")) return BuildApproximate<Approximation>(builder);
  BuildExact<Exact, 1>(builder);
}

void BuildDiv(Builder& builder) {
  const bool approximate = builder.Take("approx"), full = builder.Take("full");
  if (!approximate && !full) return BuildExact<Div, 2>(builder);
  builder.instr.imm[0] = builder.Take("ftz") ? 1 : 0;
  if (builder.TakeType() != Type::kF32) builder.Fail("only f32 is approximate");
  TakeOperands(builder, Type::kF32, 2);
  builder.Finish(&ApproximateDiv);
}

}  // namespace

void AddFloatOpcodes(Opcodes& opcodes) {
  opcodes["add/f"] = &BuildExact<Add, 2>;
  opcodes["sub/f"] = &BuildExact<Sub, 2>;
  opcodes["mul/f"] = &BuildExact<Mul, 2>;
  opcodes["fma/f"] = &BuildExact<Fma, 3>;
  opcodes["mad/f"] = &BuildExact<Fma, 3>;
  opcodes["div/f"] = &BuildDiv;
  opcodes["min/f"] = &BuildExtreme<Min>;
  opcodes["max/f"] = &BuildExtreme<Max>;
  opcodes["neg/f"] = &BuildExact<Neg, 1>;
  opcodes["abs/f"] = &BuildExact<Abs, 1>;
  opcodes["copysign/f"] = &BuildExact<CopySign, 2>;
  opcodes["sqrt/f"] = &BuildEither<Sqrt, SqrtApprox>;
  opcodes["rcp/f"] = &BuildEither<Rcp, RcpApprox>;
  opcodes["rsqrt/f"] = &BuildApproximate<RsqrtApprox>;
  opcodes["ex2/f"] = &BuildApproximate<Ex2>;
  opcodes["lg2/f"] = &BuildApproximate<Lg2>;
  opcodes["tanh/f"] = &BuildApproximate<Tanh>;
  opcodes["sin/f"] = &BuildApproximate<Sin>;
  opcodes["cos/f"] = &BuildApproximate<Cos>;
}

}  // namespace ptxrun

// Arithmetic of f16 and bf16, single and in pairs. Sums and products of two halves that are rounded to float and then
// to a half are as if rounded once, because a float has more than twice as many bits; fma is rounded from double with
// care.
#include <cmath>
#include <limits>

#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/number.h"

namespace ptxrun {
namespace {

struct F16 {
  static float To(uint16_t bits) { return FloatFromF16(bits); }
  static uint16_t From(float value) { return F16FromFloat(value); }
};
struct Bf16 {
  static float To(uint16_t bits) { return FloatFromBf16(bits); }
  static uint16_t From(float value) { return Bf16FromFloat(value); }
};

struct Add {
  static float Of(float a, float b) { return a + b; }
};
struct Sub {
  static float Of(float a, float b) { return a - b; }
};
struct Mul {
  static float Of(float a, float b) { return a * b; }
};
struct Fma {
  static float Of(float a, float b, float c) {
    return NarrowForRounding(std::fma(static_cast<double>(a), static_cast<double>(b), static_cast<double>(c)));
  }
};
struct Min {
  static float Of(float a, float b) { return std::fmin(a, b); }
};
struct Max {
  static float Of(float a, float b) { return std::fmax(a, b); }
};
struct Neg {
  static float Of(float a) { return -a; }
};
struct Abs {
  static float Of(float a) { return std::fabs(a); }
};
struct Ex2 {
  static float Of(float a) { return std::exp2(a); }
};
struct Tanh {
  static float Of(float a) { return std::tanh(a); }
};

template <typename Half, typename Op>
struct Single {
  template <typename... T>
  static uint16_t Of(T... inputs) {
    return Half::From(Op::Of(Half::To(inputs)...));
  }
};
template <typename Half, typename Op>
struct Pair {
  template <typename... T>
  static uint32_t Of(T... inputs) {
    const uint32_t low = Half::From(Op::Of(Half::To(static_cast<uint16_t>(inputs))...));
    const uint32_t high = Half::From(Op::Of(Half::To(static_cast<uint16_t>(inputs >> 16))...));
    return high << 16 | low;
  }
};

template <typename Op, typename T, size_t kInputs>
constexpr Handler OfArity() {
  if constexpr (kInputs == 1)
    return kUnary<Op, T>;
  else if constexpr (kInputs == 2)
    return kBinary<Op, T>;
  else
    return kTernary<Op, T>;
}

template <typename Op, size_t kInputs>
void Build(Builder& builder) {
  builder.Take("rn");
  builder.Take("approx");
  const Type type = builder.TakeType();
  TakeOperands(builder, BitsOf(type) == 16 ? Type::kU16 : Type::kU32, kInputs);
  switch (type) {
    case Type::kF16:
      return builder.Finish(OfArity<Single<F16, Op>, uint16_t, kInputs>());
    case Type::kBf16:
      return builder.Finish(OfArity<Single<Bf16, Op>, uint16_t, kInputs>());
    case Type::kF16x2:
      return builder.Finish(OfArity<Pair<F16, Op>, uint32_t, kInputs>());
    case Type::kBf16x2:
      return builder.Finish(OfArity<Pair<Bf16, Op>, uint32_t, kInputs>());
    default:
      return builder.Fail("type");
  }
}

}  // namespace

void AddHalfOpcodes(Opcodes& opcodes) {
  opcodes["add/h"] = &Build<Add, 2>;
  opcodes["sub/h"] = &Build<Sub, 2>;
  opcodes["mul/h"] = &Build<Mul, 2>;
  opcodes["fma/h"] = &Build<Fma, 3>;
  opcodes["min/h"] = &Build<Min, 2>;
  opcodes["max/h"] = &Build<Max, 2>;
  opcodes["neg/h"] = &Build<Neg, 1>;
  opcodes["abs/h"] = &Build<Abs, 1>;
  opcodes["ex2/h"] = &Build<Ex2, 1>;
  opcodes["tanh/h"] = &Build<Tanh, 1>;
}

}  // namespace ptxrun

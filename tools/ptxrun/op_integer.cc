// Integer arithmetic. Results wrap, as two's complement does; so sums and products are computed unsigned.
#include <algorithm>
#include <limits>

#include "tools/ptxrun/elementwise.h"

namespace ptxrun {
namespace {

template <typename T>
using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

// 16-bit operands would be promoted to signed int.
template <typename T>
uint64_t U(T value) {
  return static_cast<uint64_t>(value);
}

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(U(a) + U(b));
  }
};
struct Sub {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(U(a) - U(b));
  }
};
struct MulLow {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(U(a) * U(b));
  }
};
struct MulHigh {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>((Wide<T>{a} * Wide<T>{b}) >> (8 * sizeof(T)));
  }
};
struct MulWide {
  template <typename T>
  static Wide<T> Of(T a, T b) {
    return static_cast<Wide<T>>(Wide<T>{a} * Wide<T>{b});
  }
};
struct MadLow {
  template <typename T>
  static T Of(T a, T b, T c) {
    return static_cast<T>(U(a) * U(b) + U(c));
  }
};
struct MadHigh {
  template <typename T>
  static T Of(T a, T b, T c) {
    return Add::Of(MulHigh::Of(a, b), c);
  }
};
struct MadWide {
  template <typename T>
  static Wide<T> Of(T a, T b, Wide<T> c) {
    return static_cast<Wide<T>>(U(MulWide::Of(a, b)) + U(c));
  }
};
struct Mul24 {
  template <typename T>
  static T Of(T a, T b) {
    return MulLow::Of<T>(static_cast<T>(Cut(a)), static_cast<T>(Cut(b)));
  }
  static int32_t Cut(int32_t a) { return static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8; }
  static uint32_t Cut(uint32_t a) { return a & 0xFFFFFF; }
};
// Division by zero gives an unspecified value; all ones shows.
struct Div {
  template <typename T>
  static T Of(T a, T b) {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub::Of(T{0}, a);
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <typename T>
  static T Of(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <typename T>
  static T Of(T a, T b) {
    return std::min(a, b);
  }
};
struct Max {
  template <typename T>
  static T Of(T a, T b) {
    return std::max(a, b);
  }
};
struct Neg {
  template <typename T>
  static T Of(T a) {
    return Sub::Of(T{0}, a);
  }
};
struct Abs {
  template <typename T>
  static T Of(T a) {
    return a < 0 ? Neg::Of(a) : a;
  }
};
struct AddSaturated {
  static int32_t Of(int32_t a, int32_t b) { return Clamp(int64_t{a} + b); }
  static int32_t Clamp(int64_t value) {
    return static_cast<int32_t>(
        std::clamp<int64_t>(value, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
  }
};
struct SubSaturated {
  static int32_t Of(int32_t a, int32_t b) { return AddSaturated::Clamp(int64_t{a} - b); }
};
struct Sad {
  template <typename T>
  static T Of(T a, T b, T c) {
    return Add::Of(c, a < b ? Sub::Of(b, a) : Sub::Of(a, b));
  }
};

// dp4a: four products of bytes; A, B: type of a byte.
template <typename A, typename B>
struct Dot4 {
  static int32_t Of(uint32_t a, uint32_t b, int32_t c) {
    for (int i = 0; i < 4; ++i) c += static_cast<A>(a >> 8 * i) * static_cast<B>(b >> 8 * i);
    return c;
  }
};
// dp2a: two products of a half word with a byte; kFirst: byte with which b begins.
template <typename A, typename B, int kFirst>
struct Dot2 {
  static int32_t Of(uint32_t a, uint32_t b, int32_t c) {
    for (int i = 0; i < 2; ++i) c += static_cast<A>(a >> 16 * i) * static_cast<B>(b >> 8 * (i + kFirst));
    return c;
  }
};

template <typename Op>
void BuildUnary(Builder& builder) {
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 1);
  builder.Finish(ForInteger(type, []<typename T>() { return kUnary<Op, T>; }));
}

template <typename Op>
void BuildBinary(Builder& builder) {
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 2);
  builder.Finish(ForInteger(type, []<typename T>() { return kBinary<Op, T>; }));
}

// `Saturated`: what .sat selects, for s32 only.
template <typename Op, typename Saturated>
void BuildSum(Builder& builder) {
  if (!builder.Take("sat")) return BuildBinary<Op>(builder);
  if (builder.TakeType() != Type::kS32) builder.Fail(".sat is for s32");
  TakeOperands(builder, Type::kS32, 2);
  builder.Finish(kBinary<Saturated, int32_t>);
}

Type Doubled(Builder& builder, Type type) {
  switch (type) {
    case Type::kU16:
      return Type::kU32;
    case Type::kS16:
      return Type::kS32;
    case Type::kU32:
      return Type::kU64;
    case Type::kS32:
      return Type::kS64;
    default:
      builder.Fail("no .wide of this type");
  }
}

template <typename F>
Handler ForNarrow(Type type, F f) {
  return ForType<Type::kU16, Type::kS16, Type::kU32, Type::kS32>(type, f);
}

void BuildDot4(Builder& builder) {
  const Type a = builder.TakeType(), b = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, Type::kS32);
  for (size_t i = 1; i <= 3; ++i) builder.instr.op[i] = builder.In(i, Type::kU32);
  const auto choose = [&]<typename A>() -> Handler {
    if (b == Type::kS32) return &Ternary<Dot4<A, int8_t>, int32_t, uint32_t, uint32_t, int32_t>;
    return &Ternary<Dot4<A, uint8_t>, int32_t, uint32_t, uint32_t, int32_t>;
  };
  builder.Finish(a == Type::kS32 ? choose.operator()<int8_t>() : choose.operator()<uint8_t>());
}

void BuildDot2(Builder& builder) {
  const bool high = builder.TakeOneOf({"lo", "hi"}) == "hi";
  const Type a = builder.TakeType(), b = builder.TakeType();
  if (a != Type::kS32 || b != Type::kS32) builder.Fail("dp2a is modelled for s32.s32");
  builder.instr.op[0] = builder.Out(0, Type::kS32);
  for (size_t i = 1; i <= 3; ++i) builder.instr.op[i] = builder.In(i, Type::kU32);
  builder.Finish(high ? &Ternary<Dot2<int16_t, int8_t, 2>, int32_t, uint32_t, uint32_t, int32_t>
                      : &Ternary<Dot2<int16_t, int8_t, 0>, int32_t, uint32_t, uint32_t, int32_t>);
}

void BuildMul(Builder& builder) {
  const std::string part = builder.TakeOneOf({"lo", "hi", "wide"});
  const Type type = builder.TakeType();
  if (part != "wide") {
    TakeOperands(builder, type, 2);
    builder.Finish(
        ForInteger(type, [&]<typename T>() { return part == "hi" ? kBinary<MulHigh, T> : kBinary<MulLow, T>; }));
    return;
  }
  builder.instr.op[0] = builder.Out(0, Doubled(builder, type));
  for (size_t i = 1; i <= 2; ++i) builder.instr.op[i] = builder.In(i, type);
  builder.Finish(ForNarrow(type, []<typename T>() -> Handler { return &Binary<MulWide, Wide<T>, T, T>; }));
}

void BuildMad(Builder& builder) {
  const std::string part = builder.TakeOneOf({"lo", "hi", "wide"});
  const Type type = builder.TakeType();
  if (part != "wide") {
    TakeOperands(builder, type, 3);
    builder.Finish(
        ForInteger(type, [&]<typename T>() { return part == "hi" ? kTernary<MadHigh, T> : kTernary<MadLow, T>; }));
    return;
  }
  builder.instr.op[0] = builder.Out(0, Doubled(builder, type));
  for (size_t i = 1; i <= 2; ++i) builder.instr.op[i] = builder.In(i, type);
  builder.instr.op[3] = builder.In(3, Doubled(builder, type));
  builder.Finish(ForNarrow(type, []<typename T>() -> Handler { return &Ternary<MadWide, Wide<T>, T, T, Wide<T>>; }));
}

void BuildMul24(Builder& builder) {
  if (!builder.Take("lo")) builder.Fail("mul24 is modelled with .lo");
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 2);
  builder.Finish(ForType<Type::kU32, Type::kS32>(type, []<typename T>() { return kBinary<Mul24, T>; }));
}

void BuildSad(Builder& builder) {
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 3);
  builder.Finish(ForInteger(type, []<typename T>() { return kTernary<Sad, T>; }));
}

}  // namespace

void AddIntegerOpcodes(Opcodes& opcodes) {
  opcodes["add/i"] = &BuildSum<Add, AddSaturated>;
  opcodes["sub/i"] = &BuildSum<Sub, SubSaturated>;
  opcodes["mul/i"] = &BuildMul;
  opcodes["mad/i"] = &BuildMad;
  opcodes["mul24/i"] = &BuildMul24;
  opcodes["sad/i"] = &BuildSad;
  opcodes["div/i"] = &BuildBinary<Div>;
  opcodes["rem/i"] = &BuildBinary<Rem>;
  opcodes["min/i"] = &BuildBinary<Min>;
  opcodes["max/i"] = &BuildBinary<Max>;
  opcodes["neg/i"] = &BuildUnary<Neg>;
  opcodes["abs/i"] = &BuildUnary<Abs>;
  opcodes["dp4a/i"] = &BuildDot4;
  opcodes["dp2a/i"] = &BuildDot2;
}

}  // namespace ptxrun

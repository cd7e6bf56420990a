// cvt. A conversion goes in two steps, each exact in what it can hold: from the source to an integer of 64 bits or to a
// double, and from there to the target.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/number.h"

namespace ptxrun {
namespace {

struct Conversion {
  Type to = Type::kNone, from = Type::kNone;
  std::string rounding;  // rn, rz, rm, rp, or with i: to an integer
  bool saturate = false, finite = false, flush = false, relu = false;
};

bool IsFloat(Type type) {
  return type == Type::kF16 || type == Type::kBf16 || type == Type::kF32 || type == Type::kF64;
}

enum Rounding : int64_t { kNearest, kZero, kDown, kUp };
constexpr int64_t kSaturate = 1, kFlush = 2, kRelu = 4, kToInteger = 8;

double Rounded(double value, int64_t rounding) {
  switch (rounding) {
    case kZero:
      return std::trunc(value);
    case kDown:
      return std::floor(value);
    case kUp:
      return std::ceil(value);
    default:
      return std::nearbyint(value);
  }
}

// Limits of the integer type D, as doubles that are not beyond them.
template <typename D>
D ClampedTo(double value) {
  if (std::isnan(value)) return sizeof(D) == 8 ? static_cast<D>(uint64_t{1} << 63) : D{0};
  if (value <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (value >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(value);
}

// From a float type, as double, through a loader L.
template <typename S>
double Load(Element<S> element) {
  return static_cast<double>(FromElement<S>(element));
}
struct FromF16 {
  using S = uint16_t;
  static double Of(uint32_t e) { return static_cast<double>(FloatFromF16(static_cast<uint16_t>(e))); }
};
struct FromBf16 {
  using S = uint16_t;
  static double Of(uint32_t e) { return static_cast<double>(FloatFromBf16(static_cast<uint16_t>(e))); }
};
struct FromF32 {
  using S = float;
  static double Of(uint32_t e) { return Load<float>(e); }
};
struct FromF64 {
  using S = double;
  static double Of(uint64_t e) { return Load<double>(e); }
};

struct ToF16 {
  using D = uint16_t;
  static uint32_t Of(double v) { return F16FromFloat(NarrowForRounding(v)); }
};
struct ToBf16 {
  using D = uint16_t;
  static uint32_t Of(double v) { return Bf16FromFloat(NarrowForRounding(v)); }
};
struct ToF32 {
  using D = float;
  static uint32_t Of(double v) { return ToElement(static_cast<float>(v)); }
};
struct ToF64 {
  using D = double;
  static uint64_t Of(double v) { return ToElement(v); }
};

template <typename From, typename To>
void FloatToFloat(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<typename To::D>(instr.op[0]);
  const auto* a = warp.Row<typename From::S>(instr.op[1]);
  const int64_t extra = instr.imm[1];
  ForLanes(lanes, [&](uint32_t lane) {
    double value = From::Of(a[lane]);
    if ((extra & kFlush) != 0) value = static_cast<double>(Flush(static_cast<float>(value)));
    if ((extra & kToInteger) != 0) value = Rounded(value, instr.imm[0]);
    if ((extra & kSaturate) != 0) value = value > 0 ? std::min(value, 1.0) : 0.0;
    if ((extra & kRelu) != 0) value = value < 0 ? 0.0 : value;
    d[lane] = To::Of(value);
  });
}

template <typename From, typename D>
void FloatToInteger(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<D>(instr.op[0]);
  const auto* a = warp.Row<typename From::S>(instr.op[1]);
  ForLanes(lanes, [&](uint32_t lane) {
    double value = From::Of(a[lane]);
    if ((instr.imm[1] & kFlush) != 0) value = static_cast<double>(Flush(static_cast<float>(value)));
    d[lane] = ToElement<D>(ClampedTo<D>(Rounded(value, instr.imm[0])));
  });
}

template <typename S, typename D>
void IntegerToInteger(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<D>(instr.op[0]);
  const auto* a = warp.Row<S>(instr.op[1]);
  const bool saturate = (instr.imm[1] & kSaturate) != 0;
  ForLanes(lanes, [&](uint32_t lane) {
    const S value = FromElement<S>(a[lane]);
    auto result = static_cast<D>(value);
    if (saturate) {
      const auto wide = static_cast<__int128>(value);
      result = static_cast<D>(std::clamp<__int128>(wide, std::numeric_limits<D>::min(), std::numeric_limits<D>::max()));
    }
    d[lane] = ToElement<D>(result);
  });
}

template <typename S, typename To>
void IntegerToFloat(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<typename To::D>(instr.op[0]);
  const auto* a = warp.Row<S>(instr.op[1]);
  ForLanes(lanes, [&](uint32_t lane) {
    const S value = FromElement<S>(a[lane]);
    if constexpr (std::is_same_v<To, ToF32>) {
      d[lane] = ToElement(static_cast<float>(value));  // directly: 64 bits do not fit into a double
    } else {
      d[lane] = To::Of(static_cast<double>(value));
    }
  });
}

template <typename F>
Handler ForAnyInteger(Type type, F f) {
  return ForType<Type::kU8, Type::kS8, Type::kU16, Type::kS16, Type::kU32, Type::kS32, Type::kU64, Type::kS64>(type, f);
}

template <typename F>
Handler ForSource(Type type, F f) {
  switch (type) {
    case Type::kF16:
      return f.template operator()<FromF16>();
    case Type::kBf16:
      return f.template operator()<FromBf16>();
    case Type::kF32:
      return f.template operator()<FromF32>();
    case Type::kF64:
      return f.template operator()<FromF64>();
    default:
      return nullptr;
  }
}

template <typename F>
Handler ForTarget(Type type, F f) {
  switch (type) {
    case Type::kF16:
      return f.template operator()<ToF16>();
    case Type::kBf16:
      return f.template operator()<ToBf16>();
    case Type::kF32:
      return f.template operator()<ToF32>();
    case Type::kF64:
      return f.template operator()<ToF64>();
    default:
      return nullptr;
  }
}

// Rounding matters where the target cannot hold the source; only to nearest is modelled there.
void CheckRounding(Builder& builder, const Conversion& c) {
  const bool to_integer = c.rounding.size() == 3;
  if (!IsFloat(c.to) && IsFloat(c.from) && !to_integer) builder.Fail("no rounding to an integer");
  if (IsFloat(c.to) && !IsFloat(c.from) && c.rounding != "rn") builder.Fail("rounding is not modelled");
  const bool narrows =
      IsFloat(c.to) && IsFloat(c.from) && (BitsOf(c.to) < BitsOf(c.from) || (BitsOf(c.to) == 16 && c.to != c.from));
  if (narrows && c.rounding != "rn") builder.Fail("rounding is not modelled");
  if ((c.relu && !IsFloat(c.to)) || c.finite) builder.Fail("modifier");
  builder.instr.imm[0] = c.rounding.empty()     ? kNearest
                         : c.rounding[1] == 'z' ? kZero
                         : c.rounding[1] == 'm' ? kDown
                         : c.rounding[1] == 'p' ? kUp
                                                : kNearest;
  builder.instr.imm[1] =
      (c.saturate ? kSaturate : 0) | (c.flush ? kFlush : 0) | (c.relu ? kRelu : 0) | (to_integer ? kToInteger : 0);
}

Handler HandlerOf(const Conversion& c) {
  if (IsFloat(c.from) && IsFloat(c.to)) {
    return ForSource(c.from, [&]<typename From>() {
      return ForTarget(c.to, []<typename To>() -> Handler { return &FloatToFloat<From, To>; });
    });
  }
  if (IsFloat(c.from)) {
    return ForSource(c.from, [&]<typename From>() {
      return ForAnyInteger(c.to, []<typename D>() -> Handler { return &FloatToInteger<From, D>; });
    });
  }
  return ForAnyInteger(c.from, [&]<typename S>() -> Handler {
    if (IsFloat(c.to)) return ForTarget(c.to, []<typename To>() -> Handler { return &IntegerToFloat<S, To>; });
    return ForAnyInteger(c.to, []<typename D>() -> Handler { return &IntegerToInteger<S, D>; });
  });
}

// Two floats, a for the upper half.
template <typename To>
struct Pack2 {
  static uint32_t Of(float a, float b) {
    return static_cast<uint32_t>(To::From(a)) << 8 * sizeof(To::From(a)) | To::From(b);
  }
};
template <typename To>
struct Pack2Relu {
  static uint32_t Of(float a, float b) { return Pack2<To>::Of(a < 0 ? 0 : a, b < 0 ? 0 : b); }
};
struct HalfF16 {
  static uint16_t From(float v) { return F16FromFloat(v); }
  static float To(uint32_t v) { return FloatFromF16(static_cast<uint16_t>(v)); }
};
struct HalfBf16 {
  static uint16_t From(float v) { return Bf16FromFloat(v); }
};

template <typename To>
struct NarrowPair {
  static uint32_t Of(uint32_t a) { return Pack2<To>::Of(HalfF16::To(a >> 16), HalfF16::To(a)); }
};
template <typename From>
struct WidenPair {
  static uint32_t Of(uint32_t a) {
    return Pack2<HalfF16>::Of(From::To(static_cast<uint8_t>(a >> 8)), From::To(static_cast<uint8_t>(a)));
  }
};

void BuildPair(Builder& builder, const Conversion& c) {
  const bool is_fp8 = c.to == Type::kE4m3x2 || c.to == Type::kE5m2x2;
  if (c.rounding != "rn" || c.flush || c.saturate || c.finite != is_fp8) builder.Fail("rounding is not modelled");
  builder.instr.op[0] = builder.Out(0, c.to);
  if (c.from == Type::kF32) {
    builder.instr.op[1] = builder.In(1, Type::kF32);
    builder.instr.op[2] = builder.In(2, Type::kF32);
    switch (c.to) {
      case Type::kF16x2:
        return builder.Finish(c.relu ? &Binary<Pack2Relu<HalfF16>, uint32_t, float, float>
                                     : &Binary<Pack2<HalfF16>, uint32_t, float, float>);
      case Type::kBf16x2:
        return builder.Finish(c.relu ? &Binary<Pack2Relu<HalfBf16>, uint32_t, float, float>
                                     : &Binary<Pack2<HalfBf16>, uint32_t, float, float>);
      case Type::kE4m3x2:
        return builder.Finish(c.relu ? &Binary<Pack2Relu<E4m3>, uint32_t, float, float>
                                     : &Binary<Pack2<E4m3>, uint32_t, float, float>);
      default:
        return builder.Finish(c.relu ? &Binary<Pack2Relu<E5m2>, uint32_t, float, float>
                                     : &Binary<Pack2<E5m2>, uint32_t, float, float>);
    }
  }
  if (c.relu) builder.Fail(".relu is not modelled here");
  builder.instr.op[1] = builder.In(1, c.from);
  if (c.from == Type::kF16x2 && is_fp8) {
    return builder.Finish(c.to == Type::kE4m3x2 ? &Unary<NarrowPair<E4m3>, uint32_t, uint32_t>
                                                : &Unary<NarrowPair<E5m2>, uint32_t, uint32_t>);
  }
  if (c.to == Type::kF16x2 && (c.from == Type::kE4m3x2 || c.from == Type::kE5m2x2)) {
    return builder.Finish(c.from == Type::kE4m3x2 ? &Unary<WidenPair<E4m3>, uint32_t, uint32_t>
                                                  : &Unary<WidenPair<E5m2>, uint32_t, uint32_t>);
  }
  builder.Fail("not modelled for these types");
}

// cvt.pack.sat.T.s32{.b32} d, a, b{, c}: b in the lowest bits, a above it, then what c has there.
template <typename T>
struct PackIntegers {
  static uint32_t Of(int32_t a, int32_t b, uint32_t c) {
    using Unsigned = std::make_unsigned_t<T>;
    const uint32_t low = static_cast<Unsigned>(Clamp(b)), high = static_cast<Unsigned>(Clamp(a));
    const uint32_t both = high << 8 * sizeof(T) | low;
    return sizeof(T) == 2 ? both : c << 16 | both;
  }
  static T Clamp(int32_t v) {
    return static_cast<T>(std::clamp<int32_t>(v, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
  }
};

void BuildPackIntegers(Builder& builder) {
  if (!builder.Take("sat")) builder.Fail("cvt.pack without .sat");
  const Type to = builder.TakeType();
  if (builder.TakeType() != Type::kS32) builder.Fail("cvt.pack is of s32");
  if (BitsOf(to) == 8 && builder.TakeType() != Type::kU32) builder.Fail("cvt.pack to bytes needs b32");
  builder.instr.op[0] = builder.Out(0, Type::kU32);
  for (size_t i = 1; i <= 2; ++i) builder.instr.op[i] = builder.In(i, Type::kS32);
  builder.instr.op[3] = builder.In(BitsOf(to) == 8 ? 3 : 2, Type::kU32);
  builder.Finish(ForType<Type::kU8, Type::kS8, Type::kU16, Type::kS16>(
      to, []<typename T>() -> Handler { return &Ternary<PackIntegers<T>, uint32_t, int32_t, int32_t, uint32_t>; }));
}

void Build(Builder& builder) {
  if (builder.Take("pack")) return BuildPackIntegers(builder);
  Conversion c;
  c.rounding = builder.TakeOneOf({"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"});
  c.flush = builder.Take("ftz");
  c.saturate = builder.Take("sat");
  c.finite = builder.Take("satfinite");
  c.relu = builder.Take("relu");
  c.to = builder.TakeType();
  c.from = builder.TakeType();
  const auto is_pair = [](Type t) {
    return t == Type::kF16x2 || t == Type::kBf16x2 || t == Type::kE4m3x2 || t == Type::kE5m2x2;
  };
  if (is_pair(c.to) || is_pair(c.from)) return BuildPair(builder, c);
  CheckRounding(builder, c);
  builder.instr.op[0] = builder.Out(0, c.to);
  builder.instr.op[1] = builder.In(1, c.from);
  builder.Finish(HandlerOf(c));
}

}  // namespace

void AddConvertOpcodes(Opcodes& opcodes) { opcodes["cvt"] = &Build; }

}  // namespace ptxrun

// Instructions whose lanes do not know each other: d = Op(a, b, c) for values of C++ types.
#ifndef SPARGE_TOOLS_PTXRUN_ELEMENTWISE_H_
#define SPARGE_TOOLS_PTXRUN_ELEMENTWISE_H_

#include "tools/ptxrun/decode.h"
#include "tools/ptxrun/warp.h"

namespace ptxrun {

template <typename Op, typename D, typename A>
void Unary(Warp& warp, const Instr& instr, uint32_t lanes) {
  Element<D>* d = warp.Row<D>(instr.op[0]);
  const Element<A>* a = warp.Row<A>(instr.op[1]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = ToElement<D>(Op::Of(FromElement<A>(a[lane]))); });
}

template <typename Op, typename D, typename A, typename B>
void Binary(Warp& warp, const Instr& instr, uint32_t lanes) {
  Element<D>* d = warp.Row<D>(instr.op[0]);
  const Element<A>* a = warp.Row<A>(instr.op[1]);
  const Element<B>* b = warp.Row<B>(instr.op[2]);
  ForLanes(lanes,
           [&](uint32_t lane) { d[lane] = ToElement<D>(Op::Of(FromElement<A>(a[lane]), FromElement<B>(b[lane]))); });
}

template <typename Op, typename D, typename A, typename B, typename C>
void Ternary(Warp& warp, const Instr& instr, uint32_t lanes) {
  Element<D>* d = warp.Row<D>(instr.op[0]);
  const Element<A>* a = warp.Row<A>(instr.op[1]);
  const Element<B>* b = warp.Row<B>(instr.op[2]);
  const Element<C>* c = warp.Row<C>(instr.op[3]);
  ForLanes(lanes, [&](uint32_t lane) {
    d[lane] = ToElement<D>(Op::Of(FromElement<A>(a[lane]), FromElement<B>(b[lane]), FromElement<C>(c[lane])));
  });
}

// The C++ type of a Type.
template <Type kType>
struct CppType;
template <>
struct CppType<Type::kU8> {
  using type = uint8_t;
};
template <>
struct CppType<Type::kU16> {
  using type = uint16_t;
};
template <>
struct CppType<Type::kU32> {
  using type = uint32_t;
};
template <>
struct CppType<Type::kU64> {
  using type = uint64_t;
};
template <>
struct CppType<Type::kS8> {
  using type = int8_t;
};
template <>
struct CppType<Type::kS16> {
  using type = int16_t;
};
template <>
struct CppType<Type::kS32> {
  using type = int32_t;
};
template <>
struct CppType<Type::kS64> {
  using type = int64_t;
};
template <>
struct CppType<Type::kF32> {
  using type = float;
};
template <>
struct CppType<Type::kF64> {
  using type = double;
};

// f with the C++ type of `type`, for the types of the list; nullptr if it is none of them.
template <Type... kList, typename F>
Handler ForType(Type type, F f) {
  Handler handler = nullptr;
  ((type == kList ? void(handler = f.template operator()<typename CppType<kList>::type>()) : void()), ...);
  return handler;
}
template <typename F>
Handler ForInteger(Type type, F f) {
  return ForType<Type::kU16, Type::kS16, Type::kU32, Type::kS32, Type::kU64, Type::kS64>(type, f);
}
template <typename F>
Handler ForUnsigned(Type type, F f) {
  return ForType<Type::kU16, Type::kU32, Type::kU64>(type, f);
}
template <typename F>
Handler ForFloat(Type type, F f) {
  return ForType<Type::kF32, Type::kF64>(type, f);
}

template <typename Op, typename T>
constexpr Handler kUnary = &Unary<Op, T, T>;
template <typename Op, typename T>
constexpr Handler kBinary = &Binary<Op, T, T, T>;
template <typename Op, typename T>
constexpr Handler kTernary = &Ternary<Op, T, T, T, T>;

// Takes d and `inputs` operands of one type.
inline void TakeOperands(Builder& builder, Type type, size_t inputs) {
  builder.instr.op[0] = builder.Out(0, type);
  for (size_t i = 1; i <= inputs; ++i) builder.instr.op[i] = builder.In(i, type);
  if (builder.count() != inputs + 1) builder.Fail("number of operands");
}

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_ELEMENTWISE_H_

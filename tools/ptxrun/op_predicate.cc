// Comparisons, and choices by a predicate.
#include <cmath>

#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/number.h"

namespace ptxrun {
namespace {

// Of floats, comparisons with a NaN are false, except ne and those that end in u (unordered).
struct Eq {
  template <typename T>
  static bool Of(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <typename T>
  static bool Of(T a, T b) {
    return !(a == b) && !(a != a) && !(b != b);
  }
};
struct Lt {
  template <typename T>
  static bool Of(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <typename T>
  static bool Of(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <typename T>
  static bool Of(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <typename T>
  static bool Of(T a, T b) {
    return a >= b;
  }
};
template <typename Op>
struct Unordered {
  template <typename T>
  static bool Of(T a, T b) {
    return a != a || b != b || Op::Of(a, b);
  }
};
struct Num {
  template <typename T>
  static bool Of(T a, T b) {
    return a == a && b == b;
  }
};
struct Nan {
  template <typename T>
  static bool Of(T a, T b) {
    return a != a || b != b;
  }
};

enum Combine : int64_t { kNoCombine, kAnd, kOr, kXor };

// How values of a register become what is compared.
template <typename T>
struct Plain {
  using S = T;
  static T Of(Element<T> e) { return FromElement<T>(e); }
};
struct Flushing {
  using S = float;
  static float Of(uint32_t e) { return Flush(std::bit_cast<float>(e)); }
};
struct OfF16 {
  using S = uint16_t;
  static float Of(uint32_t e) { return FloatFromF16(static_cast<uint16_t>(e)); }
};
struct OfBf16 {
  using S = uint16_t;
  static float Of(uint32_t e) { return FloatFromBf16(static_cast<uint16_t>(e)); }
};

template <typename Op, typename Load>
uint32_t Compared(const Warp& warp, const Instr& instr) {
  const auto* a = warp.Row<typename Load::S>(instr.op[2]);
  const auto* b = warp.Row<typename Load::S>(instr.op[3]);
  uint32_t result = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    result |= static_cast<uint32_t>(Op::Of(Load::Of(a[lane]), Load::Of(b[lane]))) << lane;
  return result;
}

template <typename Op, typename Load>
void SetPredicate(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t result = Compared<Op, Load>(warp, instr);
  uint32_t opposite = ~result;
  if (instr.imm[0] != kNoCombine) {
    const uint32_t other = warp.predicates[instr.op[4]] ^ static_cast<uint32_t>(instr.imm[1]);
    const auto combine = [&](uint32_t bits) {
      return instr.imm[0] == kAnd ? bits & other : instr.imm[0] == kOr ? bits | other : bits ^ other;
    };
    result = combine(result);
    opposite = combine(opposite);
  }
  uint32_t& p = warp.predicates[instr.op[0]];
  p = (p & ~lanes) | (result & lanes);
  if (instr.op[1] != kNone) {
    uint32_t& q = warp.predicates[instr.op[1]];
    q = (q & ~lanes) | (opposite & lanes);
  }
}

// set: all ones or 1.0f.
template <typename Op, typename Load>
void SetRegister(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  const uint32_t result = Compared<Op, Load>(warp, instr);
  ForLanes(lanes,
           [&](uint32_t lane) { d[lane] = (result >> lane & 1) != 0 ? static_cast<uint32_t>(instr.imm[2]) : 0; });
}

template <typename Op, typename Load, bool kIsSet>
Handler Picked() {
  if constexpr (kIsSet)
    return &SetRegister<Op, Load>;
  else
    return &SetPredicate<Op, Load>;
}

template <typename Op, bool kIsSet>
Handler ForComparedType(Type type, bool flush) {
  if (flush) return type == Type::kF32 ? Picked<Op, Flushing, kIsSet>() : nullptr;
  if (type == Type::kF16) return Picked<Op, OfF16, kIsSet>();
  if (type == Type::kBf16) return Picked<Op, OfBf16, kIsSet>();
  return ForType<Type::kU16, Type::kS16, Type::kU32, Type::kS32, Type::kU64, Type::kS64, Type::kF32, Type::kF64>(
      type, []<typename T>() { return Picked<Op, Plain<T>, kIsSet>(); });
}

template <bool kIsSet>
Handler Comparison(const std::string& name, Type type, bool flush) {
  if (name == "eq") return ForComparedType<Eq, kIsSet>(type, flush);
  if (name == "ne") return ForComparedType<Ne, kIsSet>(type, flush);
  // lo, ls, hi, hs: unsigned, as the type says anyway
  if (name == "lt" || name == "lo") return ForComparedType<Lt, kIsSet>(type, flush);
  if (name == "le" || name == "ls") return ForComparedType<Le, kIsSet>(type, flush);
  if (name == "gt" || name == "hi") return ForComparedType<Gt, kIsSet>(type, flush);
  if (name == "ge" || name == "hs") return ForComparedType<Ge, kIsSet>(type, flush);
  if (name == "equ") return ForComparedType<Unordered<Eq>, kIsSet>(type, flush);
  if (name == "neu") return ForComparedType<Unordered<Ne>, kIsSet>(type, flush);
  if (name == "ltu") return ForComparedType<Unordered<Lt>, kIsSet>(type, flush);
  if (name == "leu") return ForComparedType<Unordered<Le>, kIsSet>(type, flush);
  if (name == "gtu") return ForComparedType<Unordered<Gt>, kIsSet>(type, flush);
  if (name == "geu") return ForComparedType<Unordered<Ge>, kIsSet>(type, flush);
  if (name == "num") return ForComparedType<Num, kIsSet>(type, flush);
  if (name == "nan") return ForComparedType<Nan, kIsSet>(type, flush);
  return nullptr;
}

std::string TakeComparison(Builder& builder) {
  return builder.TakeOneOf({"eq", "ne", "lt", "lo", "le", "ls", "gt", "hi", "ge", "hs", "equ", "neu", "ltu", "leu",
                            "gtu", "geu", "num", "nan"});
}

void BuildSetp(Builder& builder) {
  const std::string comparison = TakeComparison(builder);
  const std::string combine = builder.TakeOneOf({"and", "or", "xor"});
  const bool flush = builder.Take("ftz");
  const Type type = builder.TakeType();
  std::string second;
  builder.instr.op[0] = builder.PredicateOut(builder.Split(0, &second));
  if (!second.empty()) builder.instr.op[1] = builder.PredicateOut(second);
  builder.instr.op[2] = builder.In(1, type);
  builder.instr.op[3] = builder.In(2, type);
  builder.instr.imm[0] = combine.empty() ? kNoCombine : combine == "and" ? kAnd : combine == "or" ? kOr : kXor;
  if (!combine.empty()) {
    bool negated = false;
    builder.instr.op[4] = builder.PredicateIn(builder.operand(3), &negated);
    builder.instr.imm[1] = negated ? 0xFFFFFFFF : 0;
  }
  builder.Finish(Comparison<false>(comparison, type, flush));
}

void BuildSet(Builder& builder) {
  const std::string comparison = TakeComparison(builder);
  const bool flush = builder.Take("ftz");
  const Type to = builder.TakeType(), type = builder.TakeType();
  if (BitsOf(to) != 32) builder.Fail("set is modelled to 32 bits");
  builder.instr.op[0] = builder.Out(0, to);
  builder.instr.op[2] = builder.In(1, type);
  builder.instr.op[3] = builder.In(2, type);
  builder.instr.imm[2] = to == Type::kF32 ? 0x3F800000 : 0xFFFFFFFF;
  builder.Finish(Comparison<true>(comparison, type, flush));
}

template <typename T>
void Select(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<T>(instr.op[0]);
  const auto* a = warp.Row<T>(instr.op[1]);
  const auto* b = warp.Row<T>(instr.op[2]);
  const uint32_t p = warp.predicates[instr.op[3]] ^ static_cast<uint32_t>(instr.imm[0]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = (p >> lane & 1) != 0 ? a[lane] : b[lane]; });
}

void SelectPredicate(Warp& warp, const Instr& instr, uint32_t lanes) {
  const uint32_t p = warp.predicates[instr.op[3]] ^ static_cast<uint32_t>(instr.imm[0]);
  const uint32_t a = warp.predicates[instr.op[1]], b = warp.predicates[instr.op[2]];
  uint32_t& d = warp.predicates[instr.op[0]];
  d = (d & ~lanes) | (((p & a) | (~p & b)) & lanes);
}

void BuildSelect(Builder& builder) {
  const Type type = builder.TakeType();
  bool negated = false;
  if (type == Type::kPred) {
    builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
    for (size_t i = 1; i <= 2; ++i) {
      builder.instr.op[i] = builder.PredicateIn(builder.operand(i), &negated);
      if (negated) builder.Fail("selp.pred of a negated predicate is not modelled");
    }
  } else {
    builder.instr.op[0] = builder.Out(0, type);
    for (size_t i = 1; i <= 2; ++i) builder.instr.op[i] = builder.In(i, type);
  }
  builder.instr.op[3] = builder.PredicateIn(builder.operand(3), &negated);
  builder.instr.imm[0] = negated ? 0xFFFFFFFF : 0;
  builder.Finish(type == Type::kPred ? &SelectPredicate : BitsOf(type) == 64 ? &Select<uint64_t> : &Select<uint32_t>);
}

// slct: a where c >= 0 (or is -0), else b.
template <typename C>
struct ChooseBySign {
  static uint32_t Of(uint32_t a, uint32_t b, C c) { return c >= 0 ? a : b; }
};

void BuildChooseBySign(Builder& builder) {
  const Type type = builder.TakeType(), by = builder.TakeType();
  if (BitsOf(type) != 32) builder.Fail("slct is modelled for 32 bits");
  TakeOperands(builder, type, 3);
  builder.Finish(by == Type::kS32   ? &Ternary<ChooseBySign<int32_t>, uint32_t, uint32_t, uint32_t, int32_t>
                 : by == Type::kF32 ? &Ternary<ChooseBySign<float>, uint32_t, uint32_t, uint32_t, float>
                                    : nullptr);
}

struct Finite {
  static bool Of(float a) { return std::isfinite(a); }
};
struct Infinite {
  static bool Of(float a) { return std::isinf(a); }
};
struct Number {
  static bool Of(float a) { return !std::isnan(a); }
};
struct NotANumber {
  static bool Of(float a) { return std::isnan(a); }
};
struct Normal {
  static bool Of(float a) { return std::isnormal(a); }
};
struct Subnormal {
  static bool Of(float a) { return std::fpclassify(a) == FP_SUBNORMAL; }
};

template <typename Op>
void Test(Warp& warp, const Instr& instr, uint32_t lanes) {
  const uint32_t* a = warp.Row<float>(instr.op[1]);
  uint32_t result = 0;
  ForLanes(lanes,
           [&](uint32_t lane) { result |= static_cast<uint32_t>(Op::Of(std::bit_cast<float>(a[lane]))) << lane; });
  uint32_t& d = warp.predicates[instr.op[0]];
  d = (d & ~lanes) | result;
}

void BuildTest(Builder& builder) {
  const std::string test = builder.TakeOneOf({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  if (builder.TakeType() != Type::kF32) builder.Fail("testp is modelled for f32");
  builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
  builder.instr.op[1] = builder.In(1, Type::kF32);
  builder.Finish(test == "finite"       ? &Test<Finite>
                 : test == "infinite"   ? &Test<Infinite>
                 : test == "number"     ? &Test<Number>
                 : test == "notanumber" ? &Test<NotANumber>
                 : test == "normal"     ? &Test<Normal>
                 : test == "subnormal"  ? &Test<Subnormal>
                                        : nullptr);
}

}  // namespace

void AddPredicateOpcodes(Opcodes& opcodes) {
  opcodes["setp"] = &BuildSetp;
  opcodes["set"] = &BuildSet;
  opcodes["selp"] = &BuildSelect;
  opcodes["slct"] = &BuildChooseBySign;
  opcodes["testp"] = &BuildTest;
}

}  // namespace ptxrun

// Logic and bits.
#include <algorithm>
#include <bit>

#include "tools/ptxrun/elementwise.h"

namespace ptxrun {
namespace {

struct And {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Not {
  template <typename T>
  static T Of(T a) {
    return static_cast<T>(~a);
  }
};
struct Cnot {
  template <typename T>
  static T Of(T a) {
    return a == 0 ? 1 : 0;
  }
};

// Shifts by more than the width leave nothing, or the sign.
struct ShiftLeft {
  template <typename T>
  static T Of(T a, uint32_t n) {
    return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<uint64_t>(a) << n);
  }
};
struct ShiftRight {
  template <typename T>
  static T Of(T a, uint32_t n) {
    const uint32_t last = 8 * sizeof(T) - 1;
    if (n > last) return std::is_signed_v<T> ? static_cast<T>(a >> last) : T{0};
    return static_cast<T>(a >> n);
  }
};

struct PopCount {
  template <typename T>
  static uint32_t Of(T a) {
    return static_cast<uint32_t>(std::popcount(a));
  }
};
struct LeadingZeros {
  template <typename T>
  static uint32_t Of(T a) {
    return static_cast<uint32_t>(std::countl_zero(a));
  }
};
struct Reverse {
  template <typename T>
  static T Of(T a) {
    T reversed = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) reversed |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
    return reversed;
  }
};
// Place of the highest bit that is not the sign.
struct FindHighest {
  template <typename T>
  static uint32_t Of(T a) {
    auto bits = static_cast<std::make_unsigned_t<T>>(a);
    if (std::is_signed_v<T> && a < 0) bits = ~bits;
    return bits == 0 ? ~0u : static_cast<uint32_t>(8 * sizeof(T) - 1) - static_cast<uint32_t>(std::countl_zero(bits));
  }
};
struct FindHighestShift {
  template <typename T>
  static uint32_t Of(T a) {
    const uint32_t place = FindHighest::Of(a);
    return place == ~0u ? place : static_cast<uint32_t>(8 * sizeof(T) - 1) - place;
  }
};

struct Extract {
  template <typename T>
  static T Of(T a, uint32_t place, uint32_t length) {
    constexpr uint32_t kBits = 8 * sizeof(T);
    place &= 0xFF;
    length &= 0xFF;
    if (length == 0) return 0;
    const bool sign = std::is_signed_v<T> && (a >> std::min(place + length - 1, kBits - 1) & 1) != 0;
    T result = 0;
    for (uint32_t i = 0; i < kBits; ++i) {
      const bool bit = i < length && place + i < kBits ? (a >> (place + i) & 1) != 0 : sign;
      result |= static_cast<T>(T{bit} << i);
    }
    return result;
  }
};

struct FunnelLeft {
  static uint32_t Of(uint32_t low, uint32_t high, uint32_t n) {
    return static_cast<uint32_t>((Join(low, high) << n) >> 32);
  }
  static uint64_t Join(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }
};
struct FunnelRight {
  static uint32_t Of(uint32_t low, uint32_t high, uint32_t n) {
    return static_cast<uint32_t>(FunnelLeft::Join(low, high) >> n);
  }
};
template <typename Op>
struct Wrapped {
  static uint32_t Of(uint32_t a, uint32_t b, uint32_t n) { return Op::Of(a, b, n & 31); }
};
template <typename Op>
struct Clamped {
  static uint32_t Of(uint32_t a, uint32_t b, uint32_t n) { return Op::Of(a, b, std::min(n, 32u)); }
};

// Bytes of b:a by the nibbles of a selector; the highest bit of a nibble spreads the sign of the byte.
struct Permute {
  static uint32_t Of(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = FunnelLeft::Join(a, b);
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibble = selector >> 4 * i & 15;
      uint32_t byte = static_cast<uint32_t>(both >> 8 * (nibble & 7)) & 0xFF;
      if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
      result |= byte << 8 * i;
    }
    return result;
  }
};

void Lop3(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  const uint32_t* a = warp.Row<uint32_t>(instr.op[1]);
  const uint32_t* b = warp.Row<uint32_t>(instr.op[2]);
  const uint32_t* c = warp.Row<uint32_t>(instr.op[3]);
  // One bit of the table per combination of a, b and c, as a mask of all bits.
  uint32_t table[8];
  for (int i = 0; i < 8; ++i) table[i] = (instr.imm[0] >> i & 1) != 0 ? ~0u : 0;
  ForLanes(lanes, [&](uint32_t lane) {
    const uint32_t x = a[lane], y = b[lane], z = c[lane];
    d[lane] = (~x & ~y & ~z & table[0]) | (~x & ~y & z & table[1]) | (~x & y & ~z & table[2]) |
              (~x & y & z & table[3]) | (x & ~y & ~z & table[4]) | (x & ~y & z & table[5]) | (x & y & ~z & table[6]) |
              (x & y & z & table[7]);
  });
}

void Insert(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  const uint32_t* a = warp.Row<uint32_t>(instr.op[1]);
  const uint32_t* b = warp.Row<uint32_t>(instr.op[2]);
  const uint32_t* place = warp.Row<uint32_t>(instr.op[3]);
  const uint32_t* length = warp.Row<uint32_t>(instr.op[4]);
  ForLanes(lanes, [&](uint32_t lane) {
    const uint32_t at = place[lane] & 0xFF, count = length[lane] & 0xFF;
    const uint64_t mask = at > 31 ? 0 : ((uint64_t{1} << std::min(count, 32u)) - 1) << at;
    d[lane] = static_cast<uint32_t>((b[lane] & ~mask) | (uint64_t{a[lane]} << std::min(at, 32u) & mask));
  });
}

// Of predicates: whole masks.
template <typename Op, bool kUnaryOp>
void OfPredicates(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t& d = warp.predicates[instr.op[0]];
  const uint32_t a = warp.predicates[instr.op[1]] ^ static_cast<uint32_t>(instr.imm[0]);
  uint32_t result = 0;
  if constexpr (kUnaryOp) {
    result = Op::Of(a);
  } else {
    result = Op::Of(a, warp.predicates[instr.op[2]] ^ static_cast<uint32_t>(instr.imm[1]));
  }
  d = (d & ~lanes) | (result & lanes);
}

template <typename Op>
void BuildLogic(Builder& builder) {
  const Type type = builder.TakeType();
  if (type != Type::kPred) {
    TakeOperands(builder, type, 2);
    builder.Finish(ForUnsigned(type, []<typename T>() { return kBinary<Op, T>; }));
    return;
  }
  builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
  for (size_t i = 1; i <= 2; ++i) {
    bool negated = false;
    builder.instr.op[i] = builder.PredicateIn(builder.operand(i), &negated);
    builder.instr.imm[i - 1] = negated ? 0xFFFFFFFF : 0;
  }
  builder.Finish(&OfPredicates<Op, false>);
}

void BuildNot(Builder& builder) {
  const Type type = builder.TakeType();
  if (type != Type::kPred) {
    TakeOperands(builder, type, 1);
    builder.Finish(ForUnsigned(type, []<typename T>() { return kUnary<Not, T>; }));
    return;
  }
  bool negated = false;
  builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
  builder.instr.op[1] = builder.PredicateIn(builder.operand(1), &negated);
  builder.instr.imm[0] = negated ? 0xFFFFFFFF : 0;
  builder.Finish(&OfPredicates<Not, true>);
}

void BuildCnot(Builder& builder) {
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 1);
  builder.Finish(ForUnsigned(type, []<typename T>() { return kUnary<Cnot, T>; }));
}

template <typename Op>
void BuildShift(Builder& builder) {
  const Type type = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, type);
  builder.instr.op[1] = builder.In(1, type);
  builder.instr.op[2] = builder.In(2, Type::kU32);
  builder.Finish(ForInteger(type, []<typename T>() -> Handler { return &Binary<Op, T, T, uint32_t>; }));
}

template <typename Op>
void BuildCount(Builder& builder) {
  const Type type = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, Type::kU32);
  builder.instr.op[1] = builder.In(1, type);
  builder.Finish(
      ForType<Type::kU32, Type::kU64>(type, []<typename T>() -> Handler { return &Unary<Op, uint32_t, T>; }));
}

void BuildFindHighest(Builder& builder) {
  const bool shift = builder.Take("shiftamt");
  const Type type = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, Type::kU32);
  builder.instr.op[1] = builder.In(1, type);
  builder.Finish(ForType<Type::kU32, Type::kS32, Type::kU64, Type::kS64>(type, [&]<typename T>() -> Handler {
    return shift ? &Unary<FindHighestShift, uint32_t, T> : &Unary<FindHighest, uint32_t, T>;
  }));
}

void BuildReverse(Builder& builder) {
  const Type type = builder.TakeType();
  TakeOperands(builder, type, 1);
  builder.Finish(ForType<Type::kU32, Type::kU64>(type, []<typename T>() { return kUnary<Reverse, T>; }));
}

void BuildExtract(Builder& builder) {
  const Type type = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, type);
  builder.instr.op[1] = builder.In(1, type);
  builder.instr.op[2] = builder.In(2, Type::kU32);
  builder.instr.op[3] = builder.In(3, Type::kU32);
  builder.Finish(ForType<Type::kU32, Type::kS32, Type::kU64, Type::kS64>(
      type, []<typename T>() -> Handler { return &Ternary<Extract, T, T, uint32_t, uint32_t>; }));
}

void BuildInsert(Builder& builder) {
  if (builder.TakeType() != Type::kU32) builder.Fail("bfi is modelled for b32");
  TakeOperands(builder, Type::kU32, 4);
  builder.Finish(&Insert);
}

void BuildFunnel(Builder& builder) {
  const bool left = builder.Take("l");
  if (!left && !builder.Take("r")) builder.Fail("neither .l nor .r");
  const bool wrap = builder.Take("wrap");
  if (!wrap && !builder.Take("clamp")) builder.Fail("neither .wrap nor .clamp");
  if (builder.TakeType() != Type::kU32) builder.Fail("shf is for b32");
  TakeOperands(builder, Type::kU32, 3);
  const Handler in_left = wrap ? kTernary<Wrapped<FunnelLeft>, uint32_t> : kTernary<Clamped<FunnelLeft>, uint32_t>;
  const Handler in_right = wrap ? kTernary<Wrapped<FunnelRight>, uint32_t> : kTernary<Clamped<FunnelRight>, uint32_t>;
  builder.Finish(left ? in_left : in_right);
}

void BuildPermute(Builder& builder) {
  if (builder.TakeType() != Type::kU32) builder.Fail("prmt is for b32");
  TakeOperands(builder, Type::kU32, 3);
  builder.Finish(kTernary<Permute, uint32_t>);
}

void BuildLop3(Builder& builder) {
  if (builder.TakeType() != Type::kU32) builder.Fail("lop3 is for b32");
  builder.instr.op[0] = builder.Out(0, Type::kU32);
  for (size_t i = 1; i <= 3; ++i) builder.instr.op[i] = builder.In(i, Type::kU32);
  builder.instr.imm[0] = builder.Immediate(4);
  builder.Finish(&Lop3);
}

}  // namespace

void AddBitOpcodes(Opcodes& opcodes) {
  opcodes["and"] = &BuildLogic<And>;
  opcodes["or"] = &BuildLogic<Or>;
  opcodes["xor"] = &BuildLogic<Xor>;
  opcodes["not"] = &BuildNot;
  opcodes["cnot"] = &BuildCnot;
  opcodes["shl"] = &BuildShift<ShiftLeft>;
  opcodes["shr"] = &BuildShift<ShiftRight>;
  opcodes["popc"] = &BuildCount<PopCount>;
  opcodes["clz"] = &BuildCount<LeadingZeros>;
  opcodes["bfind"] = &BuildFindHighest;
  opcodes["brev"] = &BuildReverse;
  opcodes["bfe"] = &BuildExtract;
  opcodes["bfi"] = &BuildInsert;
  opcodes["shf"] = &BuildFunnel;
  opcodes["prmt"] = &BuildPermute;
  opcodes["lop3"] = &BuildLop3;
}

}  // namespace ptxrun

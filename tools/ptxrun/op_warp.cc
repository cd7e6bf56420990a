// Lanes that exchange values.
#include <algorithm>

#include "tools/ptxrun/elementwise.h"
#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

enum Mode : int64_t { kUp, kDown, kButterfly, kIndex };

// d|p, a, b, c: `c` holds the last lane of a segment (clamp) and the mask of segments.
template <Mode kMode>
void Shuffle(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t source[kLanes];
  std::copy_n(warp.Row<uint32_t>(instr.op[1]), kLanes, source);
  const uint32_t* b = warp.Row<uint32_t>(instr.op[2]);
  const uint32_t* c = warp.Row<uint32_t>(instr.op[3]);
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  uint32_t inside = 0;
  ForLanes(lanes, [&](uint32_t lane) {
    const uint32_t shift = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    const int32_t last = static_cast<int32_t>((lane & segment) | (clamp & ~segment));
    const int32_t first = static_cast<int32_t>(lane & segment);
    int32_t from = 0;
    bool ok = false;
    if (kMode == kUp) {
      from = static_cast<int32_t>(lane) - static_cast<int32_t>(shift);
      ok = from >= last;
    } else {
      from = static_cast<int32_t>(kMode == kDown        ? lane + shift
                                  : kMode == kButterfly ? lane ^ shift
                                                        : static_cast<uint32_t>(first) | (shift & ~segment));
      ok = from <= last;
    }
    if (!ok) from = static_cast<int32_t>(lane);
    if ((lanes >> from & 1) == 0)
      throw Fault("lane " + std::to_string(lane) + " reads lane " + std::to_string(from) + ", which takes no part");
    d[lane] = source[from];
    inside |= static_cast<uint32_t>(ok) << lane;
  });
  if (instr.op[4] != kNone) {
    uint32_t& p = warp.predicates[instr.op[4]];
    p = (p & ~lanes) | inside;
  }
}

void BuildShuffle(Builder& builder) {
  if (!builder.Take("sync")) builder.Fail("only .sync is modelled");
  const std::string mode = builder.TakeOneOf({"up", "down", "bfly", "idx"});
  if (builder.TakeType() != Type::kU32) builder.Fail("shfl is of b32");
  std::string second;
  builder.instr.op[0] = builder.Out(builder.Split(0, &second), Type::kU32);
  if (!second.empty()) builder.instr.op[4] = builder.PredicateOut(second);
  for (size_t i = 1; i <= 3; ++i) builder.instr.op[i] = builder.In(i, Type::kU32);
  builder.instr.members = builder.In(4, Type::kU32);
  builder.instr.flow = Flow::kMembers;
  builder.Finish(mode == "up"     ? &Shuffle<kUp>
                 : mode == "down" ? &Shuffle<kDown>
                 : mode == "bfly" ? &Shuffle<kButterfly>
                 : mode == "idx"  ? &Shuffle<kIndex>
                                  : nullptr);
}

enum Vote : int64_t { kAny, kEvery, kUniform, kBallot };

void VoteOf(Warp& warp, const Instr& instr, uint32_t lanes) {
  const uint32_t yes = (warp.predicates[instr.op[1]] ^ static_cast<uint32_t>(instr.imm[1])) & lanes;
  if (instr.imm[0] == kBallot) {
    uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
    return ForLanes(lanes, [&](uint32_t lane) { d[lane] = yes; });
  }
  const bool result = instr.imm[0] == kAny     ? yes != 0
                      : instr.imm[0] == kEvery ? yes == lanes
                                               : yes == 0 || yes == lanes;
  uint32_t& d = warp.predicates[instr.op[0]];
  d = result ? d | lanes : d & ~lanes;
}

void BuildVote(Builder& builder) {
  if (!builder.Take("sync")) builder.Fail("only .sync is modelled");
  const std::string mode = builder.TakeOneOf({"any", "all", "uni", "ballot"});
  const Type type = builder.TakeType();
  if (mode.empty() || (mode == "ballot") != (type == Type::kU32)) builder.Fail("kind of vote");
  builder.instr.imm[0] = mode == "any" ? kAny : mode == "all" ? kEvery : mode == "uni" ? kUniform : kBallot;
  builder.instr.op[0] = mode == "ballot" ? builder.Out(0, Type::kU32) : builder.PredicateOut(builder.operand(0));
  bool negated = false;
  builder.instr.op[1] = builder.PredicateIn(builder.operand(1), &negated);
  builder.instr.imm[1] = negated ? 0xFFFFFFFF : 0;
  builder.instr.members = builder.In(2, Type::kU32);
  builder.instr.flow = Flow::kMembers;
  builder.Finish(&VoteOf);
}

template <typename T>
uint32_t SameAs(const Warp& warp, const Instr& instr, uint32_t lanes, uint32_t lane) {
  const auto* a = warp.Row<T>(instr.op[1]);
  uint32_t same = 0;
  ForLanes(lanes, [&](uint32_t other) { same |= static_cast<uint32_t>(a[other] == a[lane]) << other; });
  return same;
}

template <typename T>
void MatchAny(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t result[kLanes];
  ForLanes(lanes, [&](uint32_t lane) { result[lane] = SameAs<T>(warp, instr, lanes, lane); });
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = result[lane]; });
}

template <typename T>
void MatchAll(Warp& warp, const Instr& instr, uint32_t lanes) {
  const bool all = SameAs<T>(warp, instr, lanes, static_cast<uint32_t>(std::countr_zero(lanes))) == lanes;
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = all ? lanes : 0; });
  if (instr.op[4] != kNone) {
    uint32_t& p = warp.predicates[instr.op[4]];
    p = all ? p | lanes : p & ~lanes;
  }
}

void BuildMatch(Builder& builder) {
  if (!builder.Take("sync")) builder.Fail("only .sync is modelled");
  const std::string mode = builder.TakeOneOf({"any", "all"});
  const Type type = builder.TakeType();
  std::string second;
  builder.instr.op[0] = builder.Out(builder.Split(0, &second), Type::kU32);
  if (!second.empty()) builder.instr.op[4] = builder.PredicateOut(second);
  builder.instr.op[1] = builder.In(1, type);
  builder.instr.members = builder.In(2, Type::kU32);
  builder.instr.flow = Flow::kMembers;
  builder.Finish(ForType<Type::kU32, Type::kU64>(type, [&]<typename T>() -> Handler {
    return mode == "any" ? &MatchAny<T> : mode == "all" ? &MatchAll<T> : nullptr;
  }));
}

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
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
struct And {
  template <typename T>
  static T Of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static T Of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static T Of(T a, T b) {
    return a ^ b;
  }
};

template <typename Op, typename T>
void Reduce(Warp& warp, const Instr& instr, uint32_t lanes) {
  const uint32_t* a = warp.Row<T>(instr.op[1]);
  const auto first = static_cast<uint32_t>(std::countr_zero(lanes));
  T result = FromElement<T>(a[first]);
  ForLanes(lanes & ~(1u << first), [&](uint32_t lane) { result = Op::Of(result, FromElement<T>(a[lane])); });
  uint32_t* d = warp.Row<T>(instr.op[0]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = ToElement<T>(result); });
}

void BuildReduce(Builder& builder) {
  if (!builder.Take("sync")) builder.Fail("only .sync is modelled");
  const std::string name = builder.TakeOneOf({"add", "min", "max", "and", "or", "xor"});
  const Type type = builder.TakeType();
  builder.instr.op[0] = builder.Out(0, type);
  builder.instr.op[1] = builder.In(1, type);
  builder.instr.members = builder.In(2, Type::kU32);
  builder.instr.flow = Flow::kMembers;
  builder.Finish(ForType<Type::kU32, Type::kS32>(type, [&]<typename T>() -> Handler {
    if (name == "add") return &Reduce<Add, T>;
    if (name == "min") return &Reduce<Min, T>;
    if (name == "max") return &Reduce<Max, T>;
    if (name == "and") return &Reduce<And, T>;
    if (name == "or") return &Reduce<Or, T>;
    return name == "xor" ? &Reduce<Xor, T> : nullptr;
  }));
}

void ActiveLanes(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t* d = warp.Row<uint32_t>(instr.op[0]);
  ForLanes(lanes, [&](uint32_t lane) { d[lane] = lanes; });
}

void BuildActive(Builder& builder) {
  if (builder.TakeType() != Type::kU32) builder.Fail("activemask is of b32");
  builder.instr.op[0] = builder.Out(0, Type::kU32);
  builder.Finish(&ActiveLanes);
}

}  // namespace

void AddWarpOpcodes(Opcodes& opcodes) {
  opcodes["shfl"] = &BuildShuffle;
  opcodes["vote"] = &BuildVote;
  opcodes["match"] = &BuildMatch;
  opcodes["redux"] = &BuildReduce;
  opcodes["activemask"] = &BuildActive;
}

}  // namespace ptxrun

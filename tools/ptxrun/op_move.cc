// mov in its forms, and cvta, which changes the space of an address.
#include "tools/ptxrun/elementwise.h"

namespace ptxrun {
namespace {

struct Same {
  template <typename T>
  static T Of(T a) {
    return a;
  }
};

void MovePredicate(Warp& warp, const Instr& instr, uint32_t lanes) {
  uint32_t& d = warp.predicates[instr.op[0]];
  const uint32_t a = instr.op[1] == kNone ? static_cast<uint32_t>(instr.imm[0]) : warp.predicates[instr.op[1]];
  d = (d & ~lanes) | (a & lanes);
}

// {a, b, ...} of kPart bits to one register, first part lowest, and back.
template <typename Whole, int kPart>
void Join(Warp& warp, const Instr& instr, uint32_t lanes) {
  auto* d = warp.Row<Whole>(instr.op[0]);
  ForLanes(lanes, [&](uint32_t lane) {
    uint64_t whole = 0;
    for (int i = 0; i < static_cast<int>(8 * sizeof(Whole)) / kPart; ++i) {
      const uint64_t part = warp.Row<uint32_t>(instr.op[static_cast<size_t>(1 + i)])[lane];
      whole |= (part & ((uint64_t{1} << kPart) - 1)) << kPart * i;
    }
    d[lane] = static_cast<Element<Whole>>(whole);
  });
}

template <typename Whole, int kPart>
void Split(Warp& warp, const Instr& instr, uint32_t lanes) {
  const auto* a = warp.Row<Whole>(instr.op[0]);
  for (int i = 0; i < static_cast<int>(8 * sizeof(Whole)) / kPart; ++i) {
    uint32_t* d = warp.Row<uint32_t>(instr.op[static_cast<size_t>(1 + i)]);
    ForLanes(lanes, [&](uint32_t lane) {
      d[lane] = static_cast<uint32_t>(a[lane] >> kPart * i & ((uint64_t{1} << kPart) - 1));
    });
  }
}

template <template <typename, int> class Pick>
Handler ForShape(int whole, size_t parts) {
  if (whole == 64 && parts == 2) return Pick<uint64_t, 32>::kHandler;
  if (whole == 64 && parts == 4) return Pick<uint64_t, 16>::kHandler;
  if (whole == 32 && parts == 2) return Pick<uint32_t, 16>::kHandler;
  if (whole == 32 && parts == 4) return Pick<uint32_t, 8>::kHandler;
  if (whole == 16 && parts == 2) return Pick<uint16_t, 8>::kHandler;
  return nullptr;
}
template <typename Whole, int kPart>
struct PickJoin {
  static constexpr Handler kHandler = &Join<Whole, kPart>;
};
template <typename Whole, int kPart>
struct PickSplit {
  static constexpr Handler kHandler = &Split<Whole, kPart>;
};

void BuildMove(Builder& builder) {
  const Type type = builder.TakeType();
  if (type == Type::kPred) {
    builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
    bool negated = false;
    if (builder.IsImmediate(1))
      builder.instr.imm[0] = builder.Immediate(1) != 0 ? 0xFFFFFFFF : 0;
    else
      builder.instr.op[1] = builder.PredicateIn(builder.operand(1), &negated);
    return builder.Finish(negated ? nullptr : &MovePredicate);
  }
  const std::vector<std::string> to = builder.Parts(0), from = builder.Parts(1);
  const bool joins = from.size() > 1;
  if (to.size() == 1 && !joins) {
    TakeOperands(builder, type, 1);
    return builder.Finish(BitsOf(type) == 64 ? kUnary<Same, uint64_t> : kUnary<Same, uint32_t>);
  }
  if (to.size() > 1 && joins) builder.Fail("vector to vector");
  const std::vector<std::string>& parts = joins ? from : to;
  const Type part = BitsOf(type) == 64 && parts.size() == 2 ? Type::kU32 : Type::kU16;
  builder.instr.op[0] = joins ? builder.Out(0, type) : builder.In(1, type);
  for (size_t i = 0; i < parts.size(); ++i)
    builder.instr.op[1 + i] = joins ? builder.In(parts[i], part) : builder.Out(parts[i], part);
  builder.Finish(joins ? ForShape<PickJoin>(BitsOf(type), parts.size())
                       : ForShape<PickSplit>(BitsOf(type), parts.size()));
}

// Generic addresses lie in windows; those of global memory are the same.
struct FromGeneric {
  template <typename T>
  static T Of(T a) {
    return a & 0xFFFFFFFF;
  }
};
struct SharedToGeneric {
  template <typename T>
  static T Of(T a) {
    return a + kSharedWindow;
  }
};
struct LocalToGeneric {
  template <typename T>
  static T Of(T a) {
    return a + kLocalWindow;
  }
};

void BuildConvertAddress(Builder& builder) {
  const bool to = builder.Take("to");
  const std::string space = builder.TakeOneOf({"global", "shared", "shared::cta", "local", "const", "param"});
  if (builder.TakeType() != Type::kU64) builder.Fail("cvta is for u64");
  TakeOperands(builder, Type::kU64, 1);
  const bool is_shared = space.starts_with("shared"), is_local = space == "local";
  if (space.empty() || space == "param") builder.Fail("space is not modelled");
  if (!is_shared && !is_local) return builder.Finish(kUnary<Same, uint64_t>);
  if (to) return builder.Finish(kUnary<FromGeneric, uint64_t>);
  builder.Finish(is_shared ? kUnary<SharedToGeneric, uint64_t> : kUnary<LocalToGeneric, uint64_t>);
}

}  // namespace

void AddMoveOpcodes(Opcodes& opcodes) {
  opcodes["mov"] = &BuildMove;
  opcodes["cvta"] = &BuildConvertAddress;
}

}  // namespace ptxrun

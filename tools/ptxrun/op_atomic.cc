// atom and red, lane after lane.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "tools/ptxrun/access.h"
#include "tools/ptxrun/elementwise.h"

namespace ptxrun {
namespace {

struct Add {
  template <typename T>
  static T Of(T old, T b) {
    return static_cast<T>(old + b);
  }
};
struct Min {
  template <typename T>
  static T Of(T old, T b) {
    return std::min(old, b);
  }
};
struct Max {
  template <typename T>
  static T Of(T old, T b) {
    return std::max(old, b);
  }
};
struct And {
  template <typename T>
  static T Of(T old, T b) {
    return old & b;
  }
};
struct Or {
  template <typename T>
  static T Of(T old, T b) {
    return old | b;
  }
};
struct Xor {
  template <typename T>
  static T Of(T old, T b) {
    return old ^ b;
  }
};
struct Exchange {
  template <typename T>
  static T Of(T, T b) {
    return b;
  }
};
struct Increase {
  template <typename T>
  static T Of(T old, T b) {
    return old >= b ? T{0} : old + 1;
  }
};
struct Decrease {
  template <typename T>
  static T Of(T old, T b) {
    return old == 0 || old > b ? b : old - 1;
  }
};

std::mutex& Lock() {
  static std::mutex mutex;
  return mutex;
}

// op[0]: the old value, or kNone (red); op[1]: b.
template <Where kWhere, typename Op, typename T>
void Change(Warp& warp, const Instr& instr, uint32_t lanes) {
  const std::lock_guard lock(Lock());
  ForCheckedLanes(lanes, [&](uint32_t lane) {
    uint8_t* at = Locate<kWhere>(warp, instr, lane, AddressAt(warp, instr, lane), sizeof(T), Access::kAtomic);
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T changed = Op::Of(old, FromElement<T>(warp.Row<T>(instr.op[1])[lane]));
    std::memcpy(at, &changed, sizeof(T));
    if (instr.op[0] != kNone) warp.Row<T>(instr.op[0])[lane] = ToElement<T>(old);
  });
}

template <Where kWhere, typename T>
void CompareAndSwap(Warp& warp, const Instr& instr, uint32_t lanes) {
  const std::lock_guard lock(Lock());
  ForCheckedLanes(lanes, [&](uint32_t lane) {
    uint8_t* at = Locate<kWhere>(warp, instr, lane, AddressAt(warp, instr, lane), sizeof(T), Access::kAtomic);
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T wanted = FromElement<T>(warp.Row<T>(instr.op[1])[lane]),
            next = FromElement<T>(warp.Row<T>(instr.op[2])[lane]);
    if (old == wanted) std::memcpy(at, &next, sizeof(T));
    warp.Row<T>(instr.op[0])[lane] = ToElement<T>(old);
  });
}

template <typename Op, typename T>
Handler ForWhere(Where where) {
  if (where == Where::kGlobal) return &Change<Where::kGlobal, Op, T>;
  if (where == Where::kShared) return &Change<Where::kShared, Op, T>;
  return where == Where::kGeneric ? &Change<Where::kGeneric, Op, T> : nullptr;
}

template <typename T>
Handler ForSwap(Where where) {
  if (where == Where::kGlobal) return &CompareAndSwap<Where::kGlobal, T>;
  if (where == Where::kShared) return &CompareAndSwap<Where::kShared, T>;
  return where == Where::kGeneric ? &CompareAndSwap<Where::kGeneric, T> : nullptr;
}

template <typename Op>
Handler ForWords(Type type, Where where) {
  return ForType<Type::kU32, Type::kS32, Type::kU64, Type::kS64>(type,
                                                                 [&]<typename T>() { return ForWhere<Op, T>(where); });
}

Handler HandlerOf(const std::string& operation, Type type, Where where) {
  if (operation == "add") {
    if (type == Type::kF32) return ForWhere<Add, float>(where);
    if (type == Type::kF64) return ForWhere<Add, double>(where);
    return ForWords<Add>(type, where);
  }
  if (operation == "min") return ForWords<Min>(type, where);
  if (operation == "max") return ForWords<Max>(type, where);
  if (operation == "and") return ForWords<And>(type, where);
  if (operation == "or") return ForWords<Or>(type, where);
  if (operation == "xor") return ForWords<Xor>(type, where);
  if (operation == "exch") return ForWords<Exchange>(type, where);
  if (operation == "inc") return type == Type::kU32 ? ForWhere<Increase, uint32_t>(where) : nullptr;
  if (operation == "dec") return type == Type::kU32 ? ForWhere<Decrease, uint32_t>(where) : nullptr;
  return nullptr;
}

template <bool kReturns>
void Build(Builder& builder) {
  const size_t address = kReturns ? 1 : 0;
  const Where where = TakeWhere(builder, address);
  TakeHints(builder);
  const std::string operation =
      builder.TakeOneOf({"add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas"});
  const Type type = builder.TakeType();
  if (kReturns) builder.instr.op[0] = builder.Out(0, type);
  TakeAddress(builder, address);
  builder.instr.op[1] = builder.In(address + 1, type);
  if (operation == "cas") {
    builder.instr.op[2] = builder.In(address + 2, type);
    return builder.Finish(ForType<Type::kU32, Type::kU64>(type, [&]<typename T>() { return ForSwap<T>(where); }));
  }
  builder.Finish(HandlerOf(operation, type, where));
}

}  // namespace

void AddAtomicOpcodes(Opcodes& opcodes) {
  opcodes["atom"] = &Build<true>;
  opcodes["red"] = &Build<false>;
}

}  // namespace ptxrun

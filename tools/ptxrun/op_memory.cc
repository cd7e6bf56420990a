// Loads and stores, and what orders them.
#include <cstring>

#include "tools/ptxrun/access.h"
#include "tools/ptxrun/elementwise.h"

namespace ptxrun {
namespace {

// imm[2]: how many elements; their rows are op[0], op[1], ... of type R, which may be wider than T, that of the memory.
template <Where kWhere, typename T, typename R>
void Load(Warp& warp, const Instr& instr, uint32_t lanes) {
  const auto count = static_cast<uint32_t>(instr.imm[2]);
  uint64_t offsets[kLanes] = {};
  ForCheckedLanes(lanes, [&](uint32_t lane) {
    const uint64_t address = offsets[lane] = AddressAt(warp, instr, lane);
    const uint8_t* from = Locate<kWhere>(warp, instr, lane, address, count * sizeof(T), Access::kRead);
    for (uint32_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      warp.Row<R>(instr.op[i])[lane] = ToElement<R>(static_cast<R>(value));
    }
  });
  if (kWhere == Where::kShared) CountBanks(warp, instr, offsets, kLanes, lanes, count * sizeof(T));
}

template <Where kWhere, typename T, typename R>
void Store(Warp& warp, const Instr& instr, uint32_t lanes) {
  const auto count = static_cast<uint32_t>(instr.imm[2]);
  uint64_t offsets[kLanes] = {};
  ForCheckedLanes(lanes, [&](uint32_t lane) {
    const uint64_t address = offsets[lane] = AddressAt(warp, instr, lane);
    uint8_t* to = Locate<kWhere>(warp, instr, lane, address, count * sizeof(T), Access::kWrite);
    for (uint32_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(FromElement<R>(warp.Row<R>(instr.op[i])[lane]));
      std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    }
  });
  if (kWhere == Where::kShared) CountBanks(warp, instr, offsets, kLanes, lanes, count * sizeof(T));
}

template <bool kIsLoad, typename T, typename R>
Handler ForWhere(Where where) {
  switch (where) {
    case Where::kGlobal:
      return kIsLoad ? &Load<Where::kGlobal, T, R> : &Store<Where::kGlobal, T, R>;
    case Where::kShared:
      return kIsLoad ? &Load<Where::kShared, T, R> : &Store<Where::kShared, T, R>;
    case Where::kLocal:
      return kIsLoad ? &Load<Where::kLocal, T, R> : &Store<Where::kLocal, T, R>;
    case Where::kParam:
      return kIsLoad ? &Load<Where::kParam, T, R> : nullptr;
    case Where::kGeneric:
      return kIsLoad ? &Load<Where::kGeneric, T, R> : &Store<Where::kGeneric, T, R>;
  }
  return nullptr;
}

// Floats move as bits; of integers it matters whether they have a sign only where they are extended.
Type AsInteger(Type type) {
  if (type == Type::kS8 || type == Type::kS16 || type == Type::kS32) return type;
  return BitsOf(type) == 8 ? Type::kU8 : BitsOf(type) == 16 ? Type::kU16 : BitsOf(type) == 64 ? Type::kU64 : Type::kU32;
}

template <bool kIsLoad>
void Build(Builder& builder) {
  const size_t data = kIsLoad ? 0 : 1, address = kIsLoad ? 1 : 0;
  const Where where = TakeWhere(builder, address);
  TakeHints(builder);
  const std::string vector = builder.TakeOneOf({"v2", "v4", "v8"});
  const Type type = AsInteger(builder.TakeType());
  const std::vector<std::string> parts = builder.Parts(data);
  if (parts.size() != (vector.empty() ? 1 : static_cast<size_t>(vector[1] - '0'))) builder.Fail("size of the vector");
  const bool is_wide = BitsOf(type) == 64 || builder.RegisterBits(parts[0]) == 64;
  const Type in_register = is_wide ? Type::kU64 : type;
  for (size_t i = 0; i < parts.size(); ++i) {
    builder.instr.op[i] = kIsLoad ? builder.Out(parts[i], in_register) : builder.In(parts[i], in_register);
  }
  TakeAddress(builder, address);
  builder.instr.imm[2] = static_cast<int64_t>(parts.size());
  NoteGranule(builder, where, BitsOf(type) / 8 * builder.instr.imm[2]);
  builder.Finish(ForType<Type::kU8, Type::kS8, Type::kU16, Type::kS16, Type::kU32, Type::kS32, Type::kU64>(
      type, [&]<typename T>() {
        using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
        return is_wide ? ForWhere<kIsLoad, T, Wide>(where) : ForWhere<kIsLoad, T, T>(where);
      }));
}

void Nothing(Warp&, const Instr&, uint32_t) {}

// Blocks run one after the other here, or meet at atomics only: a fence has nothing to do.
void BuildFence(Builder& builder) {
  builder.TakeOneOf({"gl", "cta", "sys", "gpu"});
  builder.TakeOneOf({"acq_rel", "sc"});
  builder.Finish(&Nothing);
}

void BuildPrefetch(Builder& builder) {
  builder.Take("global");
  if (builder.TakeOneOf({"L1", "L2"}).empty()) builder.Fail("which cache");
  builder.Finish(&Nothing);
}

template <uint64_t kWindow>
void IsInWindow(Warp& warp, const Instr& instr, uint32_t lanes) {
  const uint64_t* a = warp.Row<uint64_t>(instr.op[1]);
  uint32_t& d = warp.predicates[instr.op[0]];
  ForLanes(lanes, [&](uint32_t lane) {
    const bool inside = kWindow != 0 ? a[lane] - kWindow < kWindowBytes : a[lane] - kSharedWindow >= 2 * kWindowBytes;
    d = (d & ~(1u << lane)) | static_cast<uint32_t>(inside) << lane;
  });
}

void BuildIsSpace(Builder& builder) {
  const std::string space = builder.TakeOneOf({"global", "shared", "local"});
  builder.instr.op[0] = builder.PredicateOut(builder.operand(0));
  builder.instr.op[1] = builder.In(1, Type::kU64);
  builder.Finish(space == "global"   ? &IsInWindow<0>
                 : space == "shared" ? &IsInWindow<kSharedWindow>
                 : space == "local"  ? &IsInWindow<kLocalWindow>
                                     : nullptr);
}

}  // namespace

void AddMemoryOpcodes(Opcodes& opcodes) {
  opcodes["ld"] = &Build<true>;
  opcodes["ldu"] = &Build<true>;
  opcodes["st"] = &Build<false>;
  opcodes["membar"] = &BuildFence;
  opcodes["fence"] = &BuildFence;
  opcodes["prefetch"] = &BuildPrefetch;
  opcodes["isspacep"] = &BuildIsSpace;
}

}  // namespace ptxrun

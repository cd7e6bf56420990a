// cp.async: data arrive when their group is waited for, and not before.
#include <cstring>

#include "tools/ptxrun/access.h"

namespace ptxrun {
namespace {

// op[0], imm[2]: target and its offset, in shared memory; the source is the address operand; imm[3]: bytes.
// op[1]: how many bytes of them are read, the rest become zero; kNone: all. op[2]: predicate that the source is
// ignored.
void Start(Warp& warp, const Instr& instr, uint32_t lanes) {
  const auto bytes = static_cast<uint32_t>(instr.imm[3]);
  const bool is_wide = instr.op[3] != 0;
  ForCheckedLanes(lanes, [&](uint32_t lane) {
    Copy copy{
        .target = AddressAt(warp, instr, lane, 0, instr.imm[2], is_wide), .bytes = bytes, .data = {}, .defined = {}};
    uint32_t read = instr.op[1] == kNone ? bytes : warp.Row<uint32_t>(instr.op[1])[lane];
    if (read > bytes) throw Fault("cp.async of " + std::to_string(bytes) + " bytes reads " + std::to_string(read));
    if (instr.op[2] != kNone && (warp.predicates[instr.op[2]] >> lane & 1) != 0) read = 0;
    std::memset(copy.defined, 1, sizeof(copy.defined));
    if (read != 0) {
      const uint64_t address = AddressAt(warp, instr, lane);
      if (address % bytes != 0)
        throw Fault("the source of a cp.async of " + std::to_string(bytes) + " bytes is not aligned to them");
      for (uint32_t i = 0; i < read; i += read - i >= 4 ? 4 : 1) {  // `read` need not be a power of two
        const uint8_t* defined = nullptr;
        const uint32_t part = read - i >= 4 ? 4 : 1;
        const uint8_t* data = LocateSource(warp, instr, address + i, part, &defined);
        std::memcpy(copy.data + i, data, part);
        std::memcpy(copy.defined + i, defined, part);
      }
    }
    warp.block.shared.StartCopy(copy.target, bytes, warp.index);
    warp.groups.back().push_back(copy);
  });
}

void Commit(Warp& warp, const Instr&, uint32_t) { warp.groups.emplace_back(); }

// imm[0]: how many of the youngest groups may stay under way.
void Wait(Warp& warp, const Instr& instr, uint32_t) {
  while (warp.groups.size() - 1 > static_cast<size_t>(instr.imm[0])) {
    for (const Copy& copy : warp.groups.front()) {
      warp.block.shared.FinishCopy(copy.target, copy.bytes, warp.index, copy.data, copy.defined);
    }
    warp.groups.pop_front();
  }
}

void WaitAll(Warp& warp, const Instr& instr, uint32_t lanes) {
  warp.groups.emplace_back();
  Wait(warp, instr, lanes);
}

void BuildStart(Builder& builder) {
  builder.TakeOneOf({"ca", "cg"});
  if (builder.TakeOneOf({"shared", "shared::cta"}).empty() || !builder.Take("global"))
    builder.Fail("only from global to shared memory");
  builder.TakeOneOf({"L2::64B", "L2::128B", "L2::256B"});
  const Builder::Address target = builder.AddressOf(0);
  builder.instr.op[0] = target.row;
  builder.instr.op[3] = target.is_wide ? 1 : 0;
  builder.instr.imm[2] = target.offset;
  TakeAddress(builder, 1);
  builder.instr.imm[3] = builder.Immediate(2);
  if (builder.instr.imm[3] != 4 && builder.instr.imm[3] != 8 && builder.instr.imm[3] != 16) builder.Fail("size");
  if (builder.count() > 3) {
    if (builder.RegisterBits(builder.operand(3)) == 1) {
      bool negated = false;
      builder.instr.op[2] = builder.PredicateIn(builder.operand(3), &negated);
    } else {
      builder.instr.op[1] = builder.In(3, Type::kU32);
    }
  }
  builder.Finish(&Start);
}

void Build(Builder& builder) {
  if (!builder.Take("async")) builder.Fail("only cp.async is modelled");
  builder.instr.flow = Flow::kWhole;  // groups are counted per warp
  if (builder.Take("commit_group")) return builder.Finish(&Commit);
  if (builder.Take("wait_all")) return builder.Finish(&WaitAll);
  if (builder.Take("wait_group")) {
    builder.instr.imm[0] = builder.Immediate(0);
    return builder.Finish(&Wait);
  }
  builder.instr.flow = Flow::kPlain;
  BuildStart(builder);
}

}  // namespace

void AddCopyOpcodes(Opcodes& opcodes) { opcodes["cp"] = &Build; }

}  // namespace ptxrun

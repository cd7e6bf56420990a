// Branches, ends and barriers.
#include "tools/ptxrun/decode.h"
#include "tools/ptxrun/fault.h"
#include "tools/ptxrun/warp.h"

namespace ptxrun {
namespace {

void BuildBranch(Builder& builder) {
  builder.Take("uni");
  builder.instr.flow = Flow::kBranch;
  builder.BranchTo(builder.operand(0));
}

void BuildTableBranch(Builder& builder) {
  builder.Take("uni");
  if (!builder.Take("idx")) builder.Fail("only brx.idx is modelled");
  builder.instr.flow = Flow::kTable;
  builder.instr.op[0] = builder.In(0, Type::kU32);
  builder.BranchByTable(builder.operand(1));
}

void BuildExit(Builder& builder) {
  builder.Take("uni");
  builder.instr.flow = Flow::kExit;
}

void Trap(Warp&, const Instr&, uint32_t) { throw Fault("trap"); }
void Nothing(Warp&, const Instr&, uint32_t) {}

void BuildTrap(Builder& builder) { builder.Finish(&Trap); }

// What the lanes bring to bar.red. imm[2]: the predicate is negated.
void Bring(Warp& warp, const Instr& instr, uint32_t lanes) {
  warp.barrier_value = (warp.predicates[instr.op[1]] ^ static_cast<uint32_t>(instr.imm[2])) & lanes;
}

// imm[0]: number of the barrier; imm[1]: 0 popc, 1 and, 2 or.
void BuildBarrier(Builder& builder) {
  builder.Take("cta");
  builder.Take("aligned");
  if (builder.Take("warp")) {
    if (!builder.Take("sync")) builder.Fail("only bar.warp.sync");
    builder.instr.flow = Flow::kMembers;
    builder.instr.members = builder.In(0, Type::kU32);
    return builder.Finish(&Nothing);
  }
  builder.instr.flow = Flow::kBarrier;
  if (builder.Take("sync")) {
    if (builder.count() != 1) builder.Fail("a barrier of a part of the block is not modelled");
    builder.instr.imm[0] = builder.Immediate(0);
    return;
  }
  if (!builder.Take("red")) builder.Fail("this kind of barrier is not modelled");
  const std::string operation = builder.TakeOneOf({"popc", "and", "or"});
  const Type type = builder.TakeType();
  if (operation.empty() || (operation == "popc") != (type == Type::kU32) || builder.count() != 3)
    builder.Fail("kind of reduction");
  builder.instr.op[0] = operation == "popc" ? builder.Out(0, Type::kU32) : builder.PredicateOut(builder.operand(0));
  builder.instr.imm[0] = builder.Immediate(1);
  builder.instr.imm[1] = operation == "popc" ? 0 : operation == "and" ? 1 : 2;
  bool negated = false;
  builder.instr.op[1] = builder.PredicateIn(builder.operand(2), &negated);
  builder.instr.imm[2] = negated ? 0xFFFFFFFF : 0;
  builder.Finish(&Bring);
}

}  // namespace

void AddControlOpcodes(Opcodes& opcodes) {
  opcodes["bra"] = &BuildBranch;
  opcodes["brx"] = &BuildTableBranch;
  opcodes["ret"] = &BuildExit;
  opcodes["exit"] = &BuildExit;
  opcodes["trap"] = &BuildTrap;
  opcodes["bar"] = &BuildBarrier;
  opcodes["barrier"] = &BuildBarrier;
}

}  // namespace ptxrun

#include "tools/ptxrun/access.h"

#include <algorithm>
#include <cstdio>

namespace ptxrun {
namespace {

std::string Hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

uint8_t* LocateGlobal(Warp& warp, const Instr& instr, uint64_t address, uint32_t size, Allocation** at) {
  Allocation*& hint = warp.hints[static_cast<size_t>(&instr - warp.block.program.code.data())];
  if (hint == nullptr || address - hint->base >= hint->size || size > hint->size - (address - hint->base)) {
    hint = &warp.block.memory.Need(address, size);
  }
  if (address % size != 0) {
    throw Fault(std::to_string(size) + " bytes of global memory at " + Hex(address) + ", offset " +
                std::to_string(address - hint->base) + " of an allocation, are not aligned to their size");
  }
  *at = hint;
  return hint->bytes.get() + (address - hint->base);
}

uint8_t* CheckedGlobal(Warp& warp, const Instr& instr, uint64_t address, uint32_t size, Access access) {
  Allocation* allocation = nullptr;
  uint8_t* bytes = LocateGlobal(warp, instr, address, size, &allocation);
  uint8_t* defined = allocation->defined.get() + (address - allocation->base);
  if (access != Access::kWrite && !warp.block.options.may_be_undefined &&
      std::find(defined, defined + size, 0) != defined + size) {
    throw Fault(std::to_string(size) + " bytes of global memory at offset " +
                std::to_string(address - allocation->base) + " of an allocation of " +
                std::to_string(allocation->size) + " bytes are read, but nothing wrote them");
  }
  if (access != Access::kRead) std::fill_n(defined, size, uint8_t{1});
  return bytes;
}

uint8_t* CheckedLocal(Warp& warp, uint32_t lane, uint64_t address, uint32_t size, Access access) {
  const uint64_t bytes = warp.block.program.local_bytes;
  if (address > bytes || size > bytes - address || address % size != 0) {
    throw Fault(std::to_string(size) + " bytes of local memory at offset " + std::to_string(address) + " of " +
                std::to_string(bytes));
  }
  const uint64_t place = lane * bytes + address;
  uint8_t* defined = warp.local_defined.data() + place;
  if (access == Access::kRead && !warp.block.options.may_be_undefined &&
      std::find(defined, defined + size, 0) != defined + size) {
    throw Fault(std::to_string(size) + " bytes of local memory at offset " + std::to_string(address) +
                " are read, but nothing wrote them");
  }
  if (access != Access::kRead) std::fill_n(defined, size, uint8_t{1});
  return warp.local.data() + place;
}

uint8_t* CheckedParam(Warp& warp, uint64_t address, uint32_t size, Access access) {
  if (access != Access::kRead) throw Fault("parameters are written");
  if (address > warp.block.program.param_bytes || size > warp.block.program.param_bytes - address ||
      address % size != 0) {
    throw Fault(std::to_string(size) + " bytes of parameters at offset " + std::to_string(address) + " of " +
                std::to_string(warp.block.program.param_bytes));
  }
  return const_cast<uint8_t*>(warp.block.params.data() + address);
}

}  // namespace

template <Where kWhere>
uint8_t* Locate(Warp& warp, const Instr& instr, uint32_t lane, uint64_t address, uint32_t size, Access access) {
  switch (kWhere) {
    case Where::kGlobal:
      return CheckedGlobal(warp, instr, address, size, access);
    case Where::kShared:
      return warp.block.shared.Touch(address, size, size, warp.index, access, warp.block.options.may_be_undefined);
    case Where::kLocal:
      return CheckedLocal(warp, lane, address, size, access);
    case Where::kParam:
      return CheckedParam(warp, address, size, access);
    case Where::kGeneric:
      break;
  }
  if (address - kSharedWindow < kWindowBytes)
    return Locate<Where::kShared>(warp, instr, lane, address - kSharedWindow, size, access);
  if (address - kLocalWindow < kWindowBytes)
    return Locate<Where::kLocal>(warp, instr, lane, address - kLocalWindow, size, access);
  return Locate<Where::kGlobal>(warp, instr, lane, address, size, access);
}
template uint8_t* Locate<Where::kGlobal>(Warp&, const Instr&, uint32_t, uint64_t, uint32_t, Access);
template uint8_t* Locate<Where::kShared>(Warp&, const Instr&, uint32_t, uint64_t, uint32_t, Access);
template uint8_t* Locate<Where::kLocal>(Warp&, const Instr&, uint32_t, uint64_t, uint32_t, Access);
template uint8_t* Locate<Where::kParam>(Warp&, const Instr&, uint32_t, uint64_t, uint32_t, Access);
template uint8_t* Locate<Where::kGeneric>(Warp&, const Instr&, uint32_t, uint64_t, uint32_t, Access);

const uint8_t* LocateSource(Warp& warp, const Instr& instr, uint64_t address, uint32_t size, const uint8_t** defined) {
  Allocation* allocation = nullptr;
  const uint8_t* bytes = LocateGlobal(warp, instr, address, size, &allocation);
  *defined = allocation->defined.get() + (address - allocation->base);
  return bytes;
}

void TakeAddress(Builder& builder, size_t operand) {
  const Builder::Address address = builder.AddressOf(operand);
  builder.instr.op[kAddressRow] = address.row;
  builder.instr.imm[0] = address.offset;
  builder.instr.imm[1] = address.is_wide ? 1 : 0;
}

Where TakeWhere(Builder& builder, size_t operand) {
  const std::string space =
      builder.TakeOneOf({"global", "const", "shared", "shared::cta", "local", "param", "param::entry"});
  if (space.empty()) {
    const Builder::Address address = builder.AddressOf(operand);
    if (!address.is_variable) return Where::kGeneric;
    builder.Fail("a variable without its space");
  }
  if (space == "local") return Where::kLocal;
  if (space.starts_with("param")) return Where::kParam;
  return space.starts_with("shared") ? Where::kShared : Where::kGlobal;
}

void TakeHints(Builder& builder) {
  builder.TakeOneOf({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel"});
  builder.TakeOneOf({"cta", "gpu", "sys", "cluster"});
  builder.TakeOneOf({"ca", "cg", "cs", "cv", "lu", "wb", "wt"});
  builder.Take("nc");
  builder.TakeOneOf(
      {"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
  builder.TakeOneOf({"L2::64B", "L2::128B", "L2::256B"});
}

void NoteGranule(Builder& builder, Where where, int64_t bytes) {
  if (where != Where::kShared && where != Where::kGeneric) return;
  uint32_t& granule = builder.program().shared_granule;
  granule = std::min(granule, static_cast<uint32_t>(std::min<int64_t>(bytes, 4)));
}

void CountBanks(Warp& warp, const Instr& instr, const uint64_t* offsets, uint32_t count, uint32_t lanes,
                uint32_t size) {
  if (!warp.block.options.count_banks) return;
  const BankCost cost = CountPasses(offsets, count, lanes, size);
  warp.block.statistics.bank_passes += cost.passes;
  warp.block.statistics.least_passes += cost.least;
  if (cost.passes > cost.least) warp.block.statistics.conflicts_per_line[instr.line] += cost.passes - cost.least;
}

}  // namespace ptxrun

// Where the lanes of an instruction read and write: every access to a memory goes through here and is checked.
#ifndef SPARGE_TOOLS_PTXRUN_ACCESS_H_
#define SPARGE_TOOLS_PTXRUN_ACCESS_H_

#include <string>

#include "tools/ptxrun/decode.h"
#include "tools/ptxrun/fault.h"
#include "tools/ptxrun/warp.h"

namespace ptxrun {

// Space of an instruction; without one the address says it (generic).
enum class Where : uint8_t { kGlobal, kShared, kLocal, kParam, kGeneric };

// Rows of an address operand in an instruction: kAddressRow, and what TakeAddress puts into imm[0] and imm[1].
inline constexpr size_t kAddressRow = 19;
void TakeAddress(Builder& builder, size_t operand);
// .global, .shared, ...; without one the kind of a named variable, else generic.
Where TakeWhere(Builder& builder, size_t operand);
// Caching, ordering and scope: nothing that changes results here.
void TakeHints(Builder& builder);
// The kernel touches `bytes` of shared memory at once: races are judged at least that finely.
void NoteGranule(Builder& builder, Where where, int64_t bytes);

inline uint64_t AddressAt(const Warp& warp, const Instr& instr, uint32_t lane, size_t row = kAddressRow,
                          int64_t offset = 0, bool is_wide = true) {
  if (row == kAddressRow) {
    offset = instr.imm[0];
    is_wide = instr.imm[1] != 0;
  }
  // 32-bit addresses wrap in 32 bits.
  if (is_wide) return warp.Row<uint64_t>(instr.op[row])[lane] + static_cast<uint64_t>(offset);
  return static_cast<uint32_t>(warp.Row<uint32_t>(instr.op[row])[lane] + static_cast<uint32_t>(offset));
}

// Checks and notes an access of `lane` to `size` bytes. Throws Fault.
template <Where kWhere>
uint8_t* Locate(Warp& warp, const Instr& instr, uint32_t lane, uint64_t address, uint32_t size, Access access);
// Global memory that is read, with which of its bytes are defined: for copies, which take both along.
const uint8_t* LocateSource(Warp& warp, const Instr& instr, uint64_t address, uint32_t size, const uint8_t** defined);

// f(lane) for all lanes, so that a fault names the lane.
template <typename F>
void ForCheckedLanes(uint32_t lanes, F f) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(lanes));
    try {
      f(lane);
    } catch (const Fault& fault) {
      throw Fault("lane " + std::to_string(lane) + ": " + fault.what());
    }
  }
}

// Passes over the banks for an access of `size` bytes by `lanes`, `count` of which are asked at most.
void CountBanks(Warp& warp, const Instr& instr, const uint64_t* offsets, uint32_t count, uint32_t lanes, uint32_t size);

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_ACCESS_H_

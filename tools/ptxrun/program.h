// A kernel made ready to run: instructions with resolved operands, and the layout of registers and shared memory.
//
// Every operand is a row of 32 lanes in the register file of a warp. Constants and special registers (%tid.x) have
// rows, too, which are filled before a block runs; so an instruction only ever reads rows. A row of 64-bit values takes
// two. Predicates are bit masks of a warp, in a file of their own.
#ifndef SPARGE_TOOLS_PTXRUN_PROGRAM_H_
#define SPARGE_TOOLS_PTXRUN_PROGRAM_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/ptxrun/syntax.h"

namespace ptxrun {

class Warp;
struct Instr;

using Handler = void (*)(Warp& warp, const Instr& instr, uint32_t lanes);

// What the loop over instructions must know of one.
enum class Flow : uint8_t {
  kPlain,
  kMembers,  // waits until the lanes of its member mask have come: shfl.sync, vote.sync
  kWhole,    // waits until the whole warp has come: mma, ldmatrix, and what counts copies per warp
  kBranch,
  kTable,  // branch by index
  kBarrier,
  kExit,
};

inline constexpr uint32_t kNone = ~0u;

struct Instr {
  Handler run = nullptr;
  Flow flow = Flow::kPlain;
  bool guard_not = false;
  uint32_t guard = kNone;        // predicate
  std::array<uint32_t, 20> op;   // rows or predicates; each handler says which
  std::array<int64_t, 4> imm{};  // sizes, offsets, targets
  uint32_t members = kNone;      // row with the member mask
  int line = 0;
  uint32_t text = 0;  // index of Program::texts
};

struct Constant {
  uint32_t row = 0;
  bool is_wide = false;
  uint64_t value = 0;
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLane,
  kWarp,
  kMaskEq,
  kMaskLt,
  kMaskLe,
  kMaskGt,
  kMaskGe,
  kDynamicBytes,
  kTotalBytes,
  kZero,
  kCount
};

// Where variables are, as addresses of their space.
struct Place {
  Space space = Space::kGlobal;
  uint64_t address = 0;
  int64_t bytes = 0;
};

struct Program {
  std::string name;
  int target = 0;
  std::vector<Instr> code;
  std::vector<std::string> texts;             // opcodes with their modifiers
  std::vector<std::vector<uint32_t>> tables;  // of brx.idx
  uint32_t rows = 0, predicates = 0;
  std::vector<Constant> constants;
  std::array<uint32_t, static_cast<size_t>(Special::kCount)> specials;  // rows, kNone: unused
  std::vector<Variable> params;
  std::vector<uint32_t> param_offsets;
  uint32_t param_bytes = 0;
  uint32_t static_shared = 0;  // bytes; what the launch adds comes after them
  uint32_t local_bytes = 0;    // per lane
  uint32_t shared_granule = 4;
};

// Generic addresses: windows of the spaces that are not global.
inline constexpr uint64_t kSharedWindow = 0x1'0000'0000;
inline constexpr uint64_t kLocalWindow = 0x2'0000'0000;
inline constexpr uint64_t kWindowBytes = 0x1'0000'0000;

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_PROGRAM_H_

// The loop over instructions. Lanes of a warp go together; where they part, those at the lowest place in the program go
// first, so that they meet again where their ways join.
#include "tools/ptxrun/warp.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

std::string Hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", value);
  return text;
}

// Registers that nothing wrote hold this: a NaN as a float, and an address far from everything.
constexpr uint32_t kPoison = 0xFFFBADBA;

}  // namespace

Warp::Warp(Block& shared_block, uint32_t warp_index)
    : block(shared_block),
      index(warp_index),
      predicates(block.program.predicates),
      local(size_t{block.program.local_bytes} * kLanes),
      local_defined(local.size()),
      hints(block.program.code.size()) {
  const size_t count = size_t{block.program.rows} * kLanes;
  registers_.reset(static_cast<uint32_t*>(::operator new[](count * sizeof(uint32_t), std::align_val_t{64})));
  std::fill_n(registers_.get(), count, kPoison);
  for (const Constant& constant : block.program.constants) {
    if (constant.is_wide) {
      std::fill_n(Row<uint64_t>(constant.row), kLanes, constant.value);
    } else {
      std::fill_n(Row<uint32_t>(constant.row), kLanes, static_cast<uint32_t>(constant.value));
    }
  }
}

void Warp::FillSpecials(const uint32_t* block_index, const LaunchShape& shape) {
  const auto fill = [&](Special special, auto value) {
    const uint32_t row = block.program.specials[static_cast<size_t>(special)];
    if (row == kNone) return;
    for (uint32_t lane = 0; lane < kLanes; ++lane) Row<uint32_t>(row)[lane] = static_cast<uint32_t>(value(lane));
  };
  const uint32_t width = shape.block[0], plane = shape.block[0] * shape.block[1];
  const auto thread = [&](uint32_t lane) { return index * kLanes + lane; };
  fill(Special::kTidX, [&](uint32_t lane) { return thread(lane) % width; });
  fill(Special::kTidY, [&](uint32_t lane) { return thread(lane) % plane / width; });
  fill(Special::kTidZ, [&](uint32_t lane) { return thread(lane) / plane; });
  for (int axis = 0; axis < 3; ++axis) {
    const auto of = [&](Special x) { return static_cast<Special>(static_cast<int>(x) + axis); };
    fill(of(Special::kNtidX), [&](uint32_t) { return shape.block[axis]; });
    fill(of(Special::kCtaidX), [&](uint32_t) { return block_index[axis]; });
    fill(of(Special::kNctaidX), [&](uint32_t) { return shape.grid[axis]; });
  }
  fill(Special::kLane, [](uint32_t lane) { return lane; });
  fill(Special::kWarp, [&](uint32_t) { return index; });
  fill(Special::kMaskEq, [](uint32_t lane) { return 1u << lane; });
  fill(Special::kMaskLt, [](uint32_t lane) { return (1u << lane) - 1; });
  fill(Special::kMaskLe, [](uint32_t lane) { return (2u << lane) - 1; });
  fill(Special::kMaskGt, [](uint32_t lane) { return ~((2u << lane) - 1); });
  fill(Special::kMaskGe, [](uint32_t lane) { return ~((1u << lane) - 1); });
  fill(Special::kDynamicBytes, [&](uint32_t) { return shape.shared_bytes; });
  fill(Special::kTotalBytes, [&](uint32_t) { return block.shared.size(); });
  fill(Special::kZero, [](uint32_t) { return 0; });
}

void Warp::Start(const uint32_t* block_index, const LaunchShape& shape) {
  const uint32_t threads = shape.block[0] * shape.block[1] * shape.block[2];
  const uint32_t here = std::min(kLanes, threads - index * kLanes);
  live = here == kLanes ? kAll : (1u << here) - 1;
  waiting_ = 0;
  steps_ = 0;
  std::fill_n(pc_, kLanes, 0u);
  std::fill(local_defined.begin(), local_defined.end(), uint8_t{0});
  groups.clear();
  groups.emplace_back();
  stop = Stop::kRunning;
  FillSpecials(block_index, shape);
}

void Warp::Run() {
  stop = Stop::kRunning;
  Group group{};
  try {
    while (stop == Stop::kRunning) {
      if (live == 0) {
        stop = Stop::kDone;
        return;
      }
      if (!Choose(&group)) Stuck();
      while (Step(group)) {
      }
    }
  } catch (const Fault& fault) {
    const Instr& at = block.program.code[group.pc];
    throw Fault("line " + std::to_string(at.line) + ", " + block.program.texts[at.text] + ": warp " +
                std::to_string(index) + ": " + fault.what());
  }
}

// The lanes at the lowest place. Those that wait there for others go along, because others have just come.
bool Warp::Choose(Group* group) {
  const uint32_t ready = live & ~waiting_;
  if (ready == 0) return false;
  uint32_t lowest = kNone;
  ForLanes(ready, [&](uint32_t lane) { lowest = std::min(lowest, pc_[lane]); });
  *group = {.pc = lowest, .lanes = 0, .next = kNone};
  ForLanes(live, [&](uint32_t lane) {
    if (pc_[lane] == lowest) group->lanes |= 1u << lane;
    if (pc_[lane] > lowest) group->next = std::min(group->next, pc_[lane]);
  });
  waiting_ &= ~group->lanes;
  return true;
}

void Warp::Stuck() const {
  uint32_t first = kNone;
  ForLanes(live, [&](uint32_t lane) { first = std::min(first, pc_[lane]); });
  uint32_t here = 0;
  ForLanes(live, [&](uint32_t lane) { here |= static_cast<uint32_t>(pc_[lane] == first) << lane; });
  throw Fault("stuck: lanes " + Hex(here) + " wait in line " + std::to_string(block.program.code[first].line) +
              " for others that do not come (alive: " + Hex(live) + ")");
}

// One instruction of a group; false: look again who goes next.
bool Warp::Step(Group& group) {
  const Instr& instr = block.program.code[group.pc];
  if (++steps_ > block.options.max_steps)
    throw Fault("endless: more than " + std::to_string(steps_ - 1) + " instructions");
  ++block.statistics.per_instruction[group.pc];
  uint32_t lanes = group.lanes;
  if (instr.guard != kNone) lanes &= instr.guard_not ? ~predicates[instr.guard] : predicates[instr.guard];
  if (lanes != 0) {
    if (instr.flow == Flow::kPlain) {
      instr.run(*this, instr, lanes);
    } else if (instr.flow == Flow::kBranch || instr.flow == Flow::kTable) {
      return Jump(instr, group, lanes);
    } else if (instr.flow == Flow::kExit) {
      live &= ~lanes;
      group.lanes &= ~lanes;
    } else if (!Gather(instr, group, &lanes)) {
      return false;
    } else if (instr.flow == Flow::kBarrier) {
      barrier = instr.imm[0];
      barrier_instr = &instr;
      if (instr.run != nullptr) instr.run(*this, instr, lanes);
      stop = Stop::kBarrier;
    } else {
      instr.run(*this, instr, lanes);
    }
  }
  ++group.pc;
  if (group.pc < group.next && group.lanes != 0 && stop == Stop::kRunning) return true;
  ForLanes(group.lanes, [&](uint32_t lane) { pc_[lane] = group.pc; });
  // So that a fault that is found next names this instruction, and not one behind the end.
  --group.pc;
  return false;
}

// Whether all lanes have come that must go together; else those that have, wait.
bool Warp::Gather(const Instr& instr, Group& group, uint32_t* lanes) {
  uint32_t need = live;
  if (instr.flow == Flow::kMembers) {
    const uint32_t* row = Row<uint32_t>(instr.members);
    need = row[std::countr_zero(*lanes)];
    ForLanes(*lanes, [&](uint32_t lane) {
      if ((need >> lane & 1) == 0)
        throw Fault("lane " + std::to_string(lane) + " is not in the member mask " + Hex(need));
      if (row[lane] != need)
        throw Fault("lanes with different member masks meet: " + Hex(need) + ", " + Hex(row[lane]));
    });
    if ((need & ~live) != 0)
      throw Fault("the member mask " + Hex(need) + " names lanes that have left: " + Hex(need & ~live));
  }
  if (*lanes == need) return true;
  ForLanes(group.lanes, [&](uint32_t lane) { pc_[lane] = group.pc + ((*lanes >> lane & 1) == 0 ? 1 : 0); });
  waiting_ |= *lanes;
  --block.statistics.per_instruction[group.pc];
  return false;
}

bool Warp::Jump(const Instr& instr, Group& group, uint32_t lanes) {
  const uint32_t from = group.pc;
  if (instr.flow == Flow::kBranch && lanes == group.lanes) {
    const auto target = static_cast<uint32_t>(instr.imm[0]);
    // Lanes that wait behind must be met on the way.
    if (target < group.next && (target > from || waiting_ == 0)) {
      group.pc = target;
      return true;
    }
  }
  ForLanes(group.lanes, [&](uint32_t lane) {
    if ((lanes >> lane & 1) == 0) {
      pc_[lane] = from + 1;
    } else if (instr.flow == Flow::kBranch) {
      pc_[lane] = static_cast<uint32_t>(instr.imm[0]);
    } else {
      const std::vector<uint32_t>& table = block.program.tables[static_cast<size_t>(instr.imm[0])];
      const uint32_t entry = Row<uint32_t>(instr.op[0])[lane];
      if (entry >= table.size())
        throw Fault("entry " + std::to_string(entry) + " of a table of " + std::to_string(table.size()));
      pc_[lane] = table[entry];
    }
  });
  return false;
}

}  // namespace ptxrun

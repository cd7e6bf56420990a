// What handlers see: 32 lanes with their registers, and the memories they reach.
#ifndef SPARGE_TOOLS_PTXRUN_WARP_H_
#define SPARGE_TOOLS_PTXRUN_WARP_H_

#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <type_traits>
#include <vector>

#include "tools/ptxrun/memory.h"
#include "tools/ptxrun/program.h"
#include "tools/ptxrun/ptxrun.h"
#include "tools/ptxrun/shared.h"

namespace ptxrun {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kAll = ~0u;

// Values narrower than a row's element stay in its lower bits; signed ones are extended.
template <typename T>
using Element = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
T FromElement(Element<T> element) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(element);
  } else {
    return std::bit_cast<T>(element);
  }
}

template <typename T>
Element<T> ToElement(T value) {
  if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
    return static_cast<Element<T>>(static_cast<std::conditional_t<sizeof(T) == 8, int64_t, int32_t>>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<Element<T>>(value);
  } else {
    return std::bit_cast<Element<T>>(value);
  }
}

// One cp.async of one lane.
struct Copy {
  uint64_t target = 0;
  uint32_t bytes = 0;
  uint8_t data[16];
  uint8_t defined[16];
};

// What all warps of a block share.
struct Block {
  const Program& program;
  const Options& options;
  Memory& memory;
  const std::vector<uint8_t>& params;
  Statistics& statistics;
  Shared shared;
};

enum class Stop : uint8_t { kRunning, kBarrier, kDone };

class Warp {
 public:
  Warp(Block& block, uint32_t index);

  // Rows, as elements of T.
  template <typename T>
  const Element<T>* Row(uint32_t row) const {
    return reinterpret_cast<const Element<T>*>(registers_.get() + size_t{row} * kLanes);
  }
  template <typename T>
  Element<T>* Row(uint32_t row) {
    return reinterpret_cast<Element<T>*>(registers_.get() + size_t{row} * kLanes);
  }

  // Runs until a barrier or the end.
  void Run();
  void Start(const uint32_t* block_index, const LaunchShape& shape);

  Block& block;
  const uint32_t index;
  std::vector<uint32_t> predicates;
  std::vector<uint8_t> local;  // of all lanes, lane after lane
  std::vector<uint8_t> local_defined;
  std::deque<std::vector<Copy>> groups;  // of cp.async, oldest first; the last is not committed
  Stop stop = Stop::kRunning;
  int64_t barrier = 0;         // at which it waits
  uint32_t barrier_value = 0;  // what its lanes bring to a reduction
  const Instr* barrier_instr = nullptr;
  uint32_t live = 0;
  // Where a plain access found its allocation the last time, per instruction.
  std::vector<Allocation*> hints;

 private:
  struct Group {
    uint32_t pc, lanes, next;  // `next`: where lanes wait that are ahead
  };
  bool Choose(Group* group);
  bool Step(Group& group);
  bool Gather(const Instr& instr, Group& group, uint32_t* lanes);
  bool Jump(const Instr& instr, Group& group, uint32_t lanes);
  [[noreturn]] void Stuck() const;
  void FillSpecials(const uint32_t* block_index, const LaunchShape& shape);

  struct Free {
    void operator()(uint32_t* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<uint32_t[], Free> registers_;
  uint32_t pc_[kLanes];
  uint32_t waiting_ = 0;
  uint64_t steps_ = 0;
};

// f(lane) for the lanes of a mask. Full masks are common, and then the loop becomes vector code.
template <typename F>
void ForLanes(uint32_t lanes, F f) {
  if (lanes == kAll) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(static_cast<uint32_t>(std::countr_zero(lanes)));
  }
}

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_WARP_H_

// The scheduler of the fibers.
#include "tests/cuda/host/fibers.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace sparge::testing::host {

Index threadIdx, blockIdx, gridDim;
uint8_t* launched_shared;

namespace {

#ifndef __x86_64__
#error "fibers are written for x86-64"
#endif
// Leaves what a function must preserve on the stack, whose top goes to *from, and goes on where `to` was left. Of
// ucontext, every switch would ask the system for the signals that are blocked.
extern "C" void SpargeSwitch(void** from, void* to);
asm(R"(
.text
.local SpargeSwitch
.type SpargeSwitch, @function
SpargeSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size SpargeSwitch, .-SpargeSwitch
)");

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kSlotBytes = 32;

// What fibers wait for: all of `count` have come `generation` times.
struct Meeting {
  unsigned count = 0, arrived = 0;
  uint64_t generation = 0;
};
struct Warp : Meeting {
  alignas(16) uint8_t slots[2][32 * kSlotBytes];
};
struct Fiber {
  void* top = nullptr;  // of its stack while it waits
  std::unique_ptr<uint8_t[]> stack;
  bool done = false;
};

void* scheduler;  // the same for who runs the fibers
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Meeting block;
const std::function<void()>* body_of_all;
unsigned current;
bool moved;  // since the last round of the scheduler

void Yield() { SpargeSwitch(&fibers[current].top, scheduler); }

// Returns when all have come.
void Meet(Meeting& meeting) {
  const uint64_t mine = meeting.generation;
  moved = true;
  if (++meeting.arrived == meeting.count) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == mine) Yield();
  moved = true;
}

void Start() {
  (*body_of_all)();
  fibers[current].done = true;
  moved = true;
  Yield();
}

void RunBlock() {
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    // As if it had been left before the first instruction of Start: six registers, and where to return to; a call
    // leaves the stack 8 bytes off a multiple of 16.
    auto* words = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack.get()) + kStackBytes) / 16 * 16);
    *--words = nullptr;
    *--words = reinterpret_cast<void*>(&Start);
    for (int i = 0; i < 6; ++i) *--words = nullptr;
    fiber.top = words;
  }
  for (size_t left = fibers.size(); left > 0;) {
    moved = false;
    left = 0;
    for (current = 0; current < fibers.size(); ++current) {
      if (fibers[current].done) continue;
      threadIdx = {current, 0, 0};
      SpargeSwitch(&scheduler, fibers[current].top);
      left += !fibers[current].done;
    }
    if (!moved) {
      std::fprintf(stderr, "%zu threads of a block wait for others that are gone\n", left);
      std::abort();
    }
  }
}

}  // namespace

void SyncThreads() { Meet(block); }

const void* ExchangeBytes(const void* mine, size_t bytes) {
  if (bytes > kSlotBytes) std::abort();
  Warp& warp = warps[threadIdx.x / 32];
  // Of two generations, the other one may still be read by lanes that are behind.
  uint8_t* slots = warp.slots[warp.generation % 2];
  std::memcpy(slots + Lane() * bytes, mine, bytes);
  Meet(warp);
  return slots;
}

void Launch(Index grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  std::vector<uint8_t> shared(shared_bytes, 0xFF);
  launched_shared = shared.data();
  gridDim = grid;
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    if (fiber.stack == nullptr) fiber.stack = std::make_unique<uint8_t[]>(kStackBytes);
  }
  warps.assign(threads / 32, Warp{});
  for (Warp& warp : warps) warp.count = 32;
  block = Meeting{threads};
  body_of_all = &body;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) RunBlock();
    }
  }
}

}  // namespace sparge::testing::host

#include "tools/ptxrun/shared.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

std::string Place(uint64_t offset, uint32_t size) {
  return std::to_string(size) + " bytes of shared memory at offset " + std::to_string(offset);
}

std::string Warps(uint32_t warps) {
  std::string names;
  for (; warps != 0; warps &= warps - 1) names += (names.empty() ? "" : ", ") + std::to_string(std::countr_zero(warps));
  return names;
}

}  // namespace

Shared::Shared(uint32_t bytes, uint32_t granule)
    : bytes_(bytes), state_(bytes), records_((bytes + granule - 1) / granule), granule_(granule) {
  Clear();
}

void Shared::Clear() {
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{0xFF});
  std::fill(state_.begin(), state_.end(), static_cast<uint8_t>(kUndefined));
  NextEpoch();
}

void Shared::CheckBounds(uint64_t offset, uint32_t size, uint32_t align) const {
  if (offset > bytes_.size() || size > bytes_.size() - offset) {
    throw Fault(Place(offset, size) + " are beyond the " + std::to_string(bytes_.size()) + " bytes of the block");
  }
  if (offset % align != 0) throw Fault(Place(offset, size) + " are not aligned to " + std::to_string(align));
}

void Shared::CheckState(uint64_t offset, uint32_t size, Access access, bool may_be_undefined) const {
  const uint8_t* state = state_.data() + offset;
  for (uint32_t i = 0; i < size; ++i) {
    if (state[i] == kDefined) continue;
    if (state[i] == kPending) {
      throw Fault(Place(offset, size) + (access == Access::kWrite ? " are written" : " are read") +
                  " while a cp.async to them is under way");
    }
    if (access != Access::kWrite && !may_be_undefined)
      throw Fault(Place(offset, size) + " are read, but nothing wrote them");
  }
}

void Shared::Remember(uint64_t offset, uint32_t size, uint32_t warp, Access access) {
  const uint32_t self = 1u << warp;
  const size_t end = (offset + size + granule_ - 1) / granule_;
  for (size_t i = offset / granule_; i < end; ++i) {
    Record& record = records_[i];
    if (record.epoch != epoch_) record = {.epoch = epoch_, .readers = 0, .writers = 0, .atomics = 0};
    uint32_t others = record.writers;
    if (access != Access::kRead) others |= record.readers;
    if (access != Access::kAtomic) others |= record.atomics;
    (access == Access::kRead ? record.readers : access == Access::kWrite ? record.writers : record.atomics) |= self;
    if ((others & ~self) == 0) continue;
    throw Fault("race: warp " + std::to_string(warp) + (access == Access::kRead ? " reads " : " writes ") +
                Place(i * granule_, granule_) + " that since the last barrier warps {" + Warps(record.writers & ~self) +
                "} wrote, {" + Warps(record.readers & ~self) + "} read and {" + Warps(record.atomics & ~self) +
                "} changed atomically");
  }
}

uint8_t* Shared::Touch(uint64_t offset, uint32_t size, uint32_t align, uint32_t warp, Access access,
                       bool may_be_undefined) {
  CheckBounds(offset, size, align);
  uint8_t* state = state_.data() + offset;
  uint64_t low = 0;
  bool all_defined = false;
  if (size == 16) {
    uint64_t high = 0;
    std::memcpy(&low, state, 8);
    std::memcpy(&high, state + 8, 8);
    all_defined = (low & high) == 0x0101010101010101 && (low | high) == 0x0101010101010101;
  } else if (size == 4) {
    std::memcpy(&low, state, 4);
    all_defined = low == 0x01010101;
  }
  if (!all_defined) CheckState(offset, size, access, may_be_undefined);
  Remember(offset, size, warp, access);
  if (access != Access::kRead && !all_defined) std::memset(state, kDefined, size);
  return bytes_.data() + offset;
}

void Shared::StartCopy(uint64_t offset, uint32_t size, uint32_t warp) {
  CheckBounds(offset, size, size);
  const uint8_t* state = state_.data() + offset;
  if (std::find(state, state + size, static_cast<uint8_t>(kPending)) != state + size) {
    throw Fault(Place(offset, size) + " are the target of a second cp.async while the first is under way");
  }
  Remember(offset, size, warp, Access::kWrite);
  std::memset(bytes_.data() + offset, 0xFF, size);
  std::memset(state_.data() + offset, kPending, size);
}

void Shared::FinishCopy(uint64_t offset, uint32_t size, uint32_t warp, const uint8_t* data, const uint8_t* defined) {
  Remember(offset, size, warp, Access::kWrite);
  std::memcpy(bytes_.data() + offset, data, size);
  for (uint32_t i = 0; i < size; ++i) state_[offset + i] = defined[i] != 0 ? kDefined : kUndefined;
}

BankCost CountPasses(const uint64_t* offsets, uint32_t lanes, uint32_t mask, uint32_t size) {
  const uint32_t lanes_per_part = std::min(lanes, 128 / std::max(size, 4u));
  const uint32_t words = std::max(size, 4u) / 4;
  BankCost cost;
  for (uint32_t first = 0; first < lanes; first += lanes_per_part) {
    // Lanes that read the same word share one pass.
    uint64_t seen[32][32];
    uint32_t count[32] = {};
    uint32_t most = 0;
    for (uint32_t lane = first; lane < first + lanes_per_part; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      for (uint32_t w = 0; w < words; ++w) {
        const uint64_t word = offsets[lane] / 4 + w;
        const uint32_t bank = word % 32;
        uint64_t* end = seen[bank] + count[bank];
        if (std::find(seen[bank], end, word) != end) continue;
        *end = word;
        most = std::max(most, ++count[bank]);
      }
    }
    cost.passes += most;
    cost.least += most > 0;
  }
  return cost;
}

}  // namespace ptxrun

#include "tools/ptxrun/memory.h"

#include <cstdio>
#include <cstring>

#include "tools/ptxrun/fault.h"

namespace ptxrun {
namespace {

std::string Hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

uint64_t Memory::Allocate(uint64_t size) {
  Allocation allocation{.base = next_, .size = size, .bytes = nullptr, .defined = nullptr};
  allocation.bytes = std::make_unique_for_overwrite<uint8_t[]>(size);
  allocation.defined = std::make_unique<uint8_t[]>(size);
  std::memset(allocation.bytes.get(), 0xFF, size);
  const uint64_t base = next_;
  next_ += (size + kGap + kAlign - 1) / kAlign * kAlign;
  used_ += size;
  allocations_.emplace(base, std::move(allocation));
  return base;
}

bool Memory::Free(uint64_t base) {
  const auto found = allocations_.find(base);
  if (found == allocations_.end()) return false;
  used_ -= found->second.size;
  allocations_.erase(found);
  return true;
}

Allocation* Memory::Find(uint64_t address) const {
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return nullptr;
  const Allocation& allocation = (--after)->second;
  return address - allocation.base < allocation.size ? const_cast<Allocation*>(&allocation) : nullptr;
}

Allocation& Memory::Need(uint64_t address, uint64_t size) const {
  Allocation* allocation = Find(address);
  if (allocation != nullptr && size <= allocation->size - (address - allocation->base)) return *allocation;
  const std::string what = std::to_string(size) + " bytes of global memory at " + Hex(address);
  if (allocation != nullptr) {
    throw Fault(what + " pass the end of an allocation of " + std::to_string(allocation->size) + " bytes, which has " +
                std::to_string(allocation->size - (address - allocation->base)) + " from there");
  }
  auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) throw Fault(what + " are in no allocation");
  const Allocation& before = (--after)->second;
  throw Fault(what + " are in no allocation: " + std::to_string(address - before.base - before.size) +
              " bytes after the end of one of " + std::to_string(before.size));
}

void Memory::Write(uint64_t address, const void* data, uint64_t size) {
  if (size == 0) return;
  Allocation& allocation = Need(address, size);
  std::memcpy(allocation.bytes.get() + (address - allocation.base), data, size);
  std::memset(allocation.defined.get() + (address - allocation.base), 1, size);
}

void Memory::Read(uint64_t address, void* data, uint64_t size) const {
  if (size == 0) return;
  const Allocation& allocation = Need(address, size);
  std::memcpy(data, allocation.bytes.get() + (address - allocation.base), size);
}

void Memory::Copy(uint64_t to, uint64_t from, uint64_t size) {
  if (size == 0) return;
  Allocation& source = Need(from, size);
  Allocation& target = Need(to, size);
  std::memmove(target.bytes.get() + (to - target.base), source.bytes.get() + (from - source.base), size);
  std::memmove(target.defined.get() + (to - target.base), source.defined.get() + (from - source.base), size);
}

void Memory::Fill(uint64_t address, uint64_t value, uint64_t width, uint64_t count) {
  if (count == 0) return;
  Allocation& allocation = Need(address, width * count);
  uint8_t* to = allocation.bytes.get() + (address - allocation.base);
  for (uint64_t i = 0; i < count; ++i) std::memcpy(to + i * width, &value, width);
  std::memset(allocation.defined.get() + (address - allocation.base), 1, width * count);
}

}  // namespace ptxrun

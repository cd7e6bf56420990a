// Keeps workspaces of calls that are over.
#include "src/base/workspaces.h"

#include <algorithm>

namespace sparge::impl {

Workspaces::Memory Workspaces::Take(size_t size) {
  {
    const std::lock_guard lock(mutex_);
    kept_.reserve(kMostKept + 1);  // so that giving back allocates nothing
    auto found = kept_.end();      // the smallest that will do: a large one is for another call
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->size >= size && (found == kept_.end() || it->size < found->size)) found = it;
    }
    if (found != kept_.end()) {
      Memory taken = std::move(*found);
      kept_.erase(found);
      return taken;
    }
  }
  // Powers of two, so that slowly growing calls (decoding) do not need a new one each time.
  size_t room = size_t{1} << 16;
  while (room < size && room < kLargestKept) room *= 2;
  room = std::max(room, size);
  void* const bytes = ::operator new[](room, std::align_val_t{Arena::kAlignment});
  return {std::unique_ptr<std::byte[], FreeAligned>(static_cast<std::byte*>(bytes)), room};
}

size_t Workspaces::Kept() {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

void Workspaces::Return(Memory memory) noexcept {
  if (memory.size > kLargestKept) return;
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
  if (kept_.size() <= kMostKept) return;
  const auto smaller = [](const Memory& a, const Memory& b) { return a.size < b.size; };
  kept_.erase(std::min_element(kept_.begin(), kept_.end(), smaller));
}

}  // namespace sparge::impl

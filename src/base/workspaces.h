// Workspaces for calls that bring none: a context lends them, and keeps a few for the next calls.
#ifndef SPARGE_SRC_BASE_WORKSPACES_H_
#define SPARGE_SRC_BASE_WORKSPACES_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "src/base/arena.h"

namespace sparge::impl {

// Safe to use from several threads at once.
class Workspaces {
  struct FreeAligned {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{Arena::kAlignment}); }
  };
  struct Memory {
    std::unique_ptr<std::byte[], FreeAligned> bytes;
    size_t size = 0;
  };

 public:
  // Larger ones go back to the system after their call, whose work then hides the cost of new pages.
  static constexpr size_t kLargestKept = size_t{64} << 20;
  static constexpr size_t kMostKept = 4;

  // Memory for one call; goes back by itself.
  class Lease {
   public:
    Lease(Workspaces& owner, size_t size) : owner_(owner), memory_(owner.Take(size)) {}
    ~Lease() { owner_.Return(std::move(memory_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    void* data() const { return memory_.bytes.get(); }
    size_t size() const { return memory_.size; }

   private:
    Workspaces& owner_;
    Memory memory_;
  };

  // At least `size` bytes. Throws std::bad_alloc.
  Lease Lend(size_t size) { return Lease(*this, size); }
  size_t Kept();  // how many are waiting for a call

 private:
  Memory Take(size_t size);
  void Return(Memory memory) noexcept;

  std::mutex mutex_;
  std::vector<Memory> kept_;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_WORKSPACES_H_

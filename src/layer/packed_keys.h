// A layer's keys and values as they were packed: memory that lasts from call to call.
#ifndef SPARGE_SRC_LAYER_PACKED_KEYS_H_
#define SPARGE_SRC_LAYER_PACKED_KEYS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace sparge::impl {

// Tokens that there is room for at first.
inline constexpr int64_t kFirstRoom = 4096;

// As std::calloc: zeros, NULL if there is no memory.
using AllocateZeros = void* (*)(size_t count, size_t size);

// One call at a time.
class PackedKeys {
 public:
  explicit PackedKeys(AllocateZeros allocate) : allocate_(allocate) {}

  // So many tokens that the cache has room for, at least `tokens`; doubled when there are more. What follows a prompt
  // is mostly shorter, and has room, too, if that can be: another size is another cache, and all is packed anew.
  int64_t RoomFor(int64_t tokens) {
    while (room_ < tokens + tokens / 4) room_ *= 2;
    return std::min<int64_t>(room_, INT32_MAX);
  }
  // Memory of at least that size: what is there already, else zeros. NULL: there is none.
  void* Reserve(size_t size) {
    if (size_ < size) {
      memory_.reset();  // before the new one: never both
      size_ = 0;
      // Zeros of the system take no memory until they are written to: the part for int16 hardly ever is.
      memory_.reset(allocate_(size, 1));
      if (memory_) size_ = size;
    }
    return memory_.get();
  }
  size_t size() const { return size_; }
  // What is packed may be of other keys by now.
  void Forget() {
    memory_.reset();
    size_ = 0;
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  AllocateZeros allocate_;
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
  int64_t room_ = kFirstRoom;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_LAYER_PACKED_KEYS_H_

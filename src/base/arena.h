// Lays arrays one after the other in a workspace: once with no memory to learn the size, then for real.
#ifndef SPARGE_SRC_BASE_ARENA_H_
#define SPARGE_SRC_BASE_ARENA_H_

#include <cstddef>
#include <cstdint>

namespace sparge::impl {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

  // `base` may be NULL: then only `used` is of interest.
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* Take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_ARENA_H_

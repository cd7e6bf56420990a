// Device memory: allocations at addresses that no host pointer has, and which of their bytes were ever written.
#ifndef SPARGE_TOOLS_PTXRUN_MEMORY_H_
#define SPARGE_TOOLS_PTXRUN_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ptxrun {

struct Allocation {
  uint64_t base = 0;
  uint64_t size = 0;
  std::unique_ptr<uint8_t[]> bytes;
  std::unique_ptr<uint8_t[]> defined;  // 1 per byte that something wrote
};

class Memory {
 public:
  // Filled with 0xFF, which is a NaN in every floating-point type; undefined until written.
  uint64_t Allocate(uint64_t size);
  // False if nothing was allocated there.
  bool Free(uint64_t base);
  // What holds the byte at `address`, or nullptr.
  Allocation* Find(uint64_t address) const;
  // As Find, and throws Fault unless all of [address, address + size) is within one allocation.
  Allocation& Need(uint64_t address, uint64_t size) const;

  void Write(uint64_t address, const void* data, uint64_t size);
  void Read(uint64_t address, void* data, uint64_t size) const;
  // Moves what is defined along with the bytes.
  void Copy(uint64_t to, uint64_t from, uint64_t size);
  // `width` bytes of `value`, `count` times.
  void Fill(uint64_t address, uint64_t value, uint64_t width, uint64_t count);

  uint64_t used() const { return used_; }
  size_t count() const { return allocations_.size(); }

 private:
  std::map<uint64_t, Allocation> allocations_;  // by base
  uint64_t next_ = kFirst;
  uint64_t used_ = 0;

  // No host pointer looks like this on x86-64 or arm64: a host that follows a device address crashes, as with a real
  // one.
  static constexpr uint64_t kFirst = 0xD000'0000'0000;
  static constexpr uint64_t kAlign = 256;  // of cuMemAlloc
  static constexpr uint64_t kGap = 4096;   // between allocations, so that a step beyond one does not land in the next
};

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_MEMORY_H_

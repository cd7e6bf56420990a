// Shared memory of one block: bounds, what is defined or on its way, races between barriers, conflicts of banks.
#ifndef SPARGE_TOOLS_PTXRUN_SHARED_H_
#define SPARGE_TOOLS_PTXRUN_SHARED_H_

#include <cstdint>
#include <vector>

namespace ptxrun {

enum class Access : uint8_t { kRead, kWrite, kAtomic };

class Shared {
 public:
  // `granule`: bytes of the smallest access of the kernel, up to a word; races are judged by granules.
  Shared(uint32_t bytes, uint32_t granule);

  // A new block: nothing is defined.
  void Clear();
  // All warps have met: what was done before happened before what follows.
  void NextEpoch() { ++epoch_; }
  uint32_t size() const { return static_cast<uint32_t>(bytes_.size()); }

  // Checks an access of one lane and remembers it. Throws Fault. `may_be_undefined`: reads are let through.
  uint8_t* Touch(uint64_t offset, uint32_t size, uint32_t align, uint32_t warp, Access access, bool may_be_undefined);

  // cp.async: the target is poison from now on. Finish delivers; `defined`: one per byte of the source.
  void StartCopy(uint64_t offset, uint32_t size, uint32_t warp);
  void FinishCopy(uint64_t offset, uint32_t size, uint32_t warp, const uint8_t* data, const uint8_t* defined);

 private:
  enum State : uint8_t { kUndefined, kDefined, kPending };
  // Which warps touched a granule, each one bit. Older epochs do not count.
  struct Record {
    uint32_t epoch = 0, readers = 0, writers = 0, atomics = 0;
  };

  void CheckBounds(uint64_t offset, uint32_t size, uint32_t align) const;
  void CheckState(uint64_t offset, uint32_t size, Access access, bool may_be_undefined) const;
  void Remember(uint64_t offset, uint32_t size, uint32_t warp, Access access);

  std::vector<uint8_t> bytes_, state_;
  std::vector<Record> records_;
  uint32_t granule_;
  uint32_t epoch_ = 1;
};

// How often the 32 banks of 4 bytes must be read or written for one instruction, and how often at least: a warp of
// 16-byte accesses goes in four parts of eight lanes, of 8-byte ones in two.
struct BankCost {
  uint32_t passes = 0, least = 0;
};
BankCost CountPasses(const uint64_t* offsets, uint32_t lanes, uint32_t mask, uint32_t size);

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_SHARED_H_

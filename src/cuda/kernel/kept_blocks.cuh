// What stage 1 leaves for stage 2: a bit per key block of each row of the map.
#ifndef SPARGE_SRC_CUDA_KERNEL_KEPT_BLOCKS_CUH_
#define SPARGE_SRC_CUDA_KERNEL_KEPT_BLOCKS_CUH_

#include <cstdint>

namespace sparge::cuda {

// The key blocks of a row of the map, ascending; kEnd behind the last.
struct KeptBlocks {
  static constexpr int kEnd = -1;
  const uint32_t* words;
  int count, word;
  uint32_t rest;

  __device__ KeptBlocks(const uint32_t* bits, int word_count)
      : words(bits), count(word_count), word(0), rest(bits[0]) {}
  __device__ int Next() {
    while (rest == 0) {
      if (++word >= count) return kEnd;
      rest = words[word];
    }
    const int bit = __ffs(static_cast<int>(rest)) - 1;
    rest &= rest - 1;
    return word * 32 + bit;
  }
};

}  // namespace sparge::cuda
#endif  // SPARGE_SRC_CUDA_KERNEL_KEPT_BLOCKS_CUH_

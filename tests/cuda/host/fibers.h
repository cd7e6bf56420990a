// Threads of a block as fibers of one thread: they run in turn, and wait for each other at barriers and at what a warp
// does together.
#ifndef SPARGE_TESTS_CUDA_HOST_FIBERS_H_
#define SPARGE_TESTS_CUDA_HOST_FIBERS_H_

#include <cstdint>
#include <cstring>
#include <functional>

namespace sparge::testing::host {

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, gridDim;
extern uint8_t* launched_shared;

inline int Lane() { return static_cast<int>(threadIdx.x % 32); }

void SyncThreads();
// Waits until all lanes of the warp have given `bytes` bytes; returns those of all of them.
const void* ExchangeBytes(const void* mine, size_t bytes);
template <class T>
const T* Exchange(const T& mine) {
  return static_cast<const T*>(ExchangeBytes(&mine, sizeof(T)));
}

// Runs `body` in every thread of every block.
void Launch(Index grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body);

}  // namespace sparge::testing::host
#endif  // SPARGE_TESTS_CUDA_HOST_FIBERS_H_

// What a plan keeps on the GPU: sequences, heads, and where blocks belong.
#ifndef SPARGE_SRC_CUDA_TABLES_H_
#define SPARGE_SRC_CUDA_TABLES_H_

#include <cstdint>

#include "src/cuda/driver.h"
#include "src/cuda/kernel/params.h"
#include "src/problem/problem.h"

namespace sparge::impl {

struct Tables {
  CudaMemory memory;
  cuda::Shape shape;
  const cuda::HeadParams* heads;
  const cuda::EmptyRows* empty;
  int64_t empty_count;
};

Tables MakeTables(const Driver& driver, CudaContext context, const Problem& problem);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_TABLES_H_

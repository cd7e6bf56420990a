// Joins partial results on a GPU, in its default stream.
#ifndef SPARGE_SRC_CUDA_MERGE_H_
#define SPARGE_SRC_CUDA_MERGE_H_

#include <span>

#include "src/cuda/gpu.h"
#include "src/device.h"

namespace sparge::impl {

void MergeOnGpu(const Gpu& gpu, const MergeShape& shape, std::span<const sparge_partial> parts,
                const sparge_partial& out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_MERGE_H_

// One launch for all parts.
#include "src/cuda/merge.h"

#include <cinttypes>

#include "src/base/status.h"
#include "src/base/units.h"
#include "src/cuda/kernel/params.h"

namespace sparge::impl {
namespace {

constexpr int64_t kMostInGrid = 65535;  // of a grid's second and third dimension

cuda::Part PartOf(const sparge_partial& part) {
  const sparge_tensor& o = part.o;
  return {{o.data, o.batch_stride, o.head_stride, o.token_stride, RawEnum(o.dtype), 0},
          part.lse.data,
          part.lse.batch_stride,
          part.lse.head_stride};
}

}  // namespace

void MergeOnGpu(const Gpu& gpu, const MergeShape& shape, std::span<const sparge_partial> parts,
                const sparge_partial& out) {
  SPARGE_REQUIRE(parts.size() <= cuda::kMostParts, "count=%zu: a GPU merges up to %d parts at once", parts.size(),
                 cuda::kMostParts);
  SPARGE_REQUIRE(shape.batch <= kMostInGrid && shape.heads <= kMostInGrid,
                 "batch=%" PRId64 " heads=%" PRId64 ": a GPU takes up to %" PRId64, shape.batch, shape.heads,
                 kMostInGrid);
  cuda::MergeParams p{};
  for (size_t i = 0; i < parts.size(); ++i) p.parts[i] = PartOf(parts[i]);
  p.out = PartOf(out);
  p.tokens = shape.tokens;
  p.count = static_cast<int32_t>(parts.size());
  p.dim = static_cast<int32_t>(shape.dim);
  const CurrentContext current(gpu.driver(), gpu.context());
  void* parameters[] = {&p};
  const int64_t blocks = CeilDiv(shape.tokens, cuda::kThreads / 32);
  CheckCuda(gpu.driver(),
            gpu.driver().cuLaunchKernel(gpu.merge().function, static_cast<unsigned>(blocks),
                                        static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.batch),
                                        cuda::kThreads, 1, 1, 0, nullptr, parameters, nullptr),
            gpu.merge().name);
}

}  // namespace sparge::impl

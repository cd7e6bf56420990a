// Joins partial results over parts of the keys into one.
#ifndef SPARGE_SRC_CPU_MERGE_H_
#define SPARGE_SRC_CPU_MERGE_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <span>

namespace sparge::impl {

struct MergeShape {
  int64_t batch, heads, tokens, dim;
};

// `out` may be one of the parts. Arguments have been checked.
void MergeParts(const sparge_executor& executor, const MergeShape& shape, std::span<const sparge_partial> parts,
                const sparge_partial& out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_MERGE_H_

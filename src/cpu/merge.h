// Joins partial results over parts of the keys into one.
#ifndef SPARGE_SRC_CPU_MERGE_H_
#define SPARGE_SRC_CPU_MERGE_H_

#include <sparge/sparge.h>

#include <span>

#include "src/device.h"

namespace sparge::impl {

// `out` may be one of the parts. Arguments have been checked.
void MergeParts(const sparge_executor& executor, const MergeShape& shape, std::span<const sparge_partial> parts,
                const sparge_partial& out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_MERGE_H_

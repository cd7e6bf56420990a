// What parts of a call send each other in 8 bits (sparge_key_codes, sparge_pool_codes): the integers that packing made,
// row after row instead of in lanes, so that they do not depend on how wide vectors are.
#ifndef SPARGE_SRC_CPU_CODES_H_
#define SPARGE_SRC_CPU_CODES_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/cpu/pack.h"
#include "src/cpu/plan.h"

namespace sparge::impl {

// Other precisions of a call read its tensors.
inline bool TakesCodes(const Plan& plan, const sparge_run_args& args) {
  return args.key_codes != nullptr && plan.precision == SPARGE_PRECISION_INT8;
}

// A packed key block goes to key_codes_out; `task` is its Problem::KeyBlock.
void LeaveKeyCodes(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id,
                   int64_t task);
// A key block becomes what it was where its codes come from.
void TakeKeyCodes(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id, int64_t task,
                  bool with_values);

// Rows of pool_codes from the place `first` of its arrays on, to and from packed rows.
void LeavePoolCodes(const Plan& plan, const sparge_pool_codes& codes, int64_t first, int64_t count,
                    const QueryRows& from);
void TakePoolCodes(const Plan& plan, const sparge_pool_codes& codes, int64_t first, int64_t count, const QueryRows& to);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_CODES_H_

// What parts of a call leave for each other (sparge_run_args): the survey of their keys and values, after which all are
// rounded as in the whole; and the pools of their queries, which are all that stage 1 takes of these.
#ifndef SPARGE_SRC_CPU_PARTS_H_
#define SPARGE_SRC_CPU_PARTS_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/cpu/pack.h"
#include "src/cpu/plan.h"

namespace sparge::impl {

// Numbers per sequence and kv head: sums per channel, how many keys, largest |k|, largest |v|.
inline int64_t KeySurveySize(const Plan& plan) { return plan.qk_dim + 3; }

// Fills key_survey_out for the kv heads of the active heads.
void LeaveSurvey(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Packed& packed);
// Mean and units of a sequence and kv head (Problem::KvUnit) from key_survey.
void TakeSurvey(const Plan& plan, const sparge_run_args& args, int64_t index, const Packed& packed);

// The pools of a query block that has been packed go to pool_counts_out, and to pool_rows_out or pool_codes_out.
void LeavePools(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id, int32_t worker);
// Throw Failure if pool_counts or sparge_key_codes.fine are not what is left there. They are read here, not at the
// door, because the memory may be another device's.
void CheckCounts(const Plan& plan, const sparge_run_args& args);
void CheckFine(const Plan& plan, const sparge_key_codes& codes);
// Pools from elsewhere take the place of those of a query block; its queries that are pools of their own become its
// first rows.
void TakePools(const Plan& plan, const sparge_run_args& args, const BlockId& id, int32_t worker, const Packed& packed);
// The pools of a head from block `first` on, as the kernel takes them, where they came as codes.
void TakeCodedPools(const Plan& plan, const sparge_run_args& args, const BlockId& first, int64_t count,
                    const QueryRows& out);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_PARTS_H_

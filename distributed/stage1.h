// Stage 1 over the keys of all ranks without moving them: surveys of keys make the rounding of one rank, and pools of
// queries go to where keys are, from where sums come back, which make the block map of one rank.
#ifndef SPARGE_DISTRIBUTED_STAGE1_H_
#define SPARGE_DISTRIBUTED_STAGE1_H_

#include <vector>

#include "distributed/parts.h"

namespace sparge::distributed {

// key_survey of all keys, the same numbers on every rank.
std::vector<double> SurveyKeys(const Call& call);

// pool_lse of each segment of this rank's queries, over all keys.
std::vector<Buffer> SumPools(const Call& call, const std::vector<double>& survey);

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_STAGE1_H_

// What a call over several ranks asks: checked here, and compared with all ranks before anything is computed.
#ifndef SPARGE_DISTRIBUTED_AGREE_H_
#define SPARGE_DISTRIBUTED_AGREE_H_

#include <sparge/sparge.hpp>

#include "distributed/group.h"
#include "distributed/shards.h"

namespace sparge::distributed {

struct Asked {
  PlanDesc desc;  // of the whole
  RunArgs args;   // of this rank's tokens
};

// Copies what the caller gave, refuses what several ranks cannot do, and lets the library refuse what it would of one.
Asked CheckAsked(const Group& group, sparge_mpi_shard shard, sparge_context* context, const sparge_plan_desc* desc,
                 const sparge_run_args* args);

// Text of what has to be alike on all ranks: lines of a name and a value.
std::string Describe(const Asked& asked, sparge_mpi_shard shard);

// Throws the same Failure on all ranks if one of them refuses or asks for something else. `refusal` is this rank's own,
// empty if it has none.
void Agree(Group& group, const std::string& description, const std::string& refusal);

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_AGREE_H_

// Plans behind the door: made and run by sparge_plan and by sparge_layer alike.
#ifndef SPARGE_SRC_API_PLAN_H_
#define SPARGE_SRC_API_PLAN_H_

#include <sparge/sparge.h>

#include <memory>

#include "src/api/handles.h"

namespace sparge::impl {

// Both throw Failure. `desc` is in full size, `args` in that of its caller.
std::unique_ptr<sparge_plan> MakePlan(sparge_context& context, const sparge_plan_desc& desc);
void RunPlan(const sparge_plan& plan, const sparge_run_args* args);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_API_PLAN_H_

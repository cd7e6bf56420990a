// What stands behind the opaque types of sparge.h.
#ifndef SPARGE_SRC_API_HANDLES_H_
#define SPARGE_SRC_API_HANDLES_H_

#include <sparge/sparge.h>

#include <memory>
#include <vector>

#include "src/base/threads.h"
#include "src/base/workspaces.h"
#include "src/calibrate/calibration.h"
#include "src/layer/layer.h"
#include "src/problem/problem.h"

struct sparge_context {
  std::unique_ptr<sparge::impl::Pool> pool;  // NULL if the caller brought an executor
  sparge::impl::Runtime runtime;
  sparge::impl::Workspaces workspaces;  // for calls that bring none
};

struct sparge_plan {
  std::vector<sparge::impl::Plan> plans;  // problem.h: MakePlans
  size_t workspace_size, cache_size;

  const sparge::impl::Plan& front() const { return plans.front(); }
};

struct sparge_layer {
  sparge::impl::Layer layer;
};

#endif  // SPARGE_SRC_API_HANDLES_H_

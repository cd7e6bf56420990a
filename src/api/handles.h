// What stands behind the opaque types of sparge.h.
#ifndef SPARGE_SRC_API_HANDLES_H_
#define SPARGE_SRC_API_HANDLES_H_

#include <sparge/sparge.h>

#include <memory>

#include "src/base/threads.h"
#include "src/base/workspaces.h"
#include "src/calibrate/calibration.h"
#include "src/device.h"
#include "src/layer/layer.h"
#include "src/problem/order.h"

struct sparge_context {
  std::unique_ptr<sparge::impl::Pool> pool;  // NULL if the caller brought an executor, or on a GPU
  sparge_executor executor{};                // of the CPU
  std::unique_ptr<sparge::impl::Device> device;
  sparge::impl::Workspaces workspaces;  // for calls that bring none
  sparge::impl::Curves curves;
};

struct sparge_plan {
  const sparge_context* context;
  std::unique_ptr<sparge::impl::DevicePlan> on_device;

  const sparge::impl::Problem& problem() const { return on_device->problem(); }
};

struct sparge_layer {
  sparge::impl::Layer layer;
};

namespace sparge::impl {
// Refuses a context whose device is none that shares the host's memory.
void RequireHost(const sparge_context& context, const char* what);
}  // namespace sparge::impl

#endif  // SPARGE_SRC_API_HANDLES_H_

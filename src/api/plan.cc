// Plans and what is done with them: run, predict, calibrate, the reference; and orders of tokens.
#include "src/api/plan.h"

#include <sparge/sparge.h>

#include <algorithm>
#include <cinttypes>
#include <memory>
#include <vector>

#include "src/api/guard.h"
#include "src/api/handles.h"
#include "src/base/status.h"
#include "src/problem/order.h"
#include "src/problem/problem.h"
#include "src/reference.h"

namespace sparge::impl {
namespace {

const sparge_plan& CheckedPlan(const sparge_plan* plan) {
  SPARGE_REQUIRE(plan != nullptr, "plan is NULL");
  return *plan;
}

sparge_run_args CheckedArgs(const sparge_plan& plan, const sparge_run_args* given, Call call) {
  const sparge_run_args args = CopySized("args", given, Defaults(&sparge_run_args_init_sized));
  CheckArgs(plan.problem(), args, call, plan.on_device->needs());
  if (args.stats != nullptr) CheckSized("stats", args.stats);
  SPARGE_REQUIRE(args.stream == nullptr || !plan.context->device->on_host(),
                 "stream is given, but the device is a CPU, which has none");
  return args;
}

}  // namespace

std::unique_ptr<sparge_plan> MakePlan(sparge_context& context, const sparge_plan_desc& desc) {
  Calibration* calibration = desc.calibration == nullptr ? nullptr : &desc.calibration->calibration;
  SPARGE_REQUIRE(calibration == nullptr || calibration->q_heads() == desc.q_heads,
                 "q_heads=%" PRId64 " is not the %" PRId64 " of the calibration", desc.q_heads, calibration->q_heads());
  return std::make_unique<sparge_plan>(
      sparge_plan{&context, context.device->Prepare(MakeProblems(desc, calibration, &context.curves))});
}

void RunPlan(const sparge_plan& plan, const sparge_run_args* args) {
  plan.on_device->Run(CheckedArgs(plan, args, Call::kRun));
}

}  // namespace sparge::impl

using namespace sparge::impl;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

sparge_status sparge_token_order(sparge_order order, const int64_t grid[3], uint64_t seed, int64_t* out) {
  return Guard([&] {
    const int32_t raw = RawEnum(order);
    SPARGE_REQUIRE(raw >= SPARGE_ORDER_HILBERT && raw <= SPARGE_ORDER_RANDOM, "order=%d is outside %d..%d", raw,
                   SPARGE_ORDER_HILBERT, SPARGE_ORDER_RANDOM);
    SPARGE_REQUIRE(grid != nullptr, "grid is NULL");
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    SPARGE_REQUIRE(seed == 0 || order == SPARGE_ORDER_RANDOM, "seed=%" PRIu64 " has no effect on order=%d", seed, raw);
    std::vector<int32_t> cells(CountCells(grid));
    FillOrder(order, grid, seed, 0, cells.data());
    std::copy(cells.begin(), cells.end(), out);
  });
}

void sparge_plan_desc_init_sized(sparge_plan_desc* desc, size_t size) {
  sparge_plan_desc defaults{};
  defaults.query_offset = SPARGE_OFFSET_BOTTOM_RIGHT;
  defaults.precision = SPARGE_PRECISION_INT8;
  defaults.select = SPARGE_SELECT_CDF;
  defaults.keep_sink = -1;
  defaults.params = {0.3, 0.98, 0.5, 10.0};
  InitSized(desc, size, defaults);
}

sparge_status sparge_plan_create(sparge_context* context, const sparge_plan_desc* given, sparge_plan** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    SPARGE_REQUIRE(context != nullptr, "context is NULL");
    const sparge_plan_desc desc = CopySized("desc", given, Defaults(&sparge_plan_desc_init_sized));
    *out = MakePlan(*context, desc).release();
  });
}

void sparge_plan_destroy(sparge_plan* plan) { delete plan; }
size_t sparge_plan_workspace_size(const sparge_plan* plan) {
  return plan == nullptr ? 0 : plan->on_device->needs().workspace;
}
size_t sparge_plan_cache_size(const sparge_plan* plan) { return plan == nullptr ? 0 : plan->on_device->needs().cache; }
void sparge_plan_map_shape(const sparge_plan* plan, int64_t* q_blocks, int64_t* k_blocks) {
  *q_blocks = plan == nullptr ? 0 : plan->problem().q_blocks;
  *k_blocks = plan == nullptr ? 0 : plan->problem().k_blocks;
}

void sparge_run_args_init_sized(sparge_run_args* args, size_t size) { InitSized(args, size, {}); }
void sparge_stats_init_sized(sparge_stats* stats, size_t size) { InitSized(stats, size, {}); }

int64_t sparge_plan_pools(const sparge_plan* plan) { return plan == nullptr ? 0 : plan->on_device->pools(); }

sparge_status sparge_run(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] { RunPlan(CheckedPlan(plan), args); });
}

sparge_status sparge_predict(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] { CheckedPlan(plan).on_device->Predict(CheckedArgs(*plan, args, Call::kPredict)); });
}

sparge_status sparge_reference(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] {
    RequireHost(*CheckedPlan(plan).context, "reference");
    Reference(plan->problem(), plan->context->executor, CheckedArgs(*plan, args, Call::kReference));
  });
}

sparge_status sparge_calibrate(const sparge_plan* plan, const sparge_run_args* args, double effort) {
  return Guard([&] {
    const sparge_run_args checked = CheckedArgs(CheckedPlan(plan), args, Call::kCalibrate);
    SPARGE_REQUIRE((effort > 0 && effort <= 1) || effort == SPARGE_EFFORT_OF_RUN,
                   "effort=%g is neither above 0 and at most 1 nor that of a run (%g)", effort, SPARGE_EFFORT_OF_RUN);
    SPARGE_REQUIRE(plan->problem().select == SPARGE_SELECT_AUTO, "plan has no calibration: its select is not AUTO");
    plan->on_device->Calibrate(checked, effort);
  });
}

}  // extern "C"

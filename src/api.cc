// The C ABI over the rooms: copies sized structs, catches everything, keeps the detail of the last failure per thread.
#include <sparge/sparge.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "src/attend.h"
#include "src/base/half.h"
#include "src/base/isa.h"
#include "src/base/status.h"
#include "src/base/threads.h"
#include "src/calibration.h"
#include "src/kernel/kernels.h"
#include "src/kernel/state.h"
#include "src/permute.h"
#include "src/plan.h"
#include "src/reference.h"

struct sparge_context {
  std::unique_ptr<sparge::Pool> pool;  // NULL if the caller brought an executor
  sparge::Runtime runtime;
};

struct sparge_plan {
  std::vector<sparge::Plan> plans;  // plan.h: MakePlans
  size_t workspace_size, cache_size;

  const sparge::Plan& front() const { return plans.front(); }
};

struct sparge_calibration {
  sparge::Calibration calibration;
};

namespace sparge {
namespace {

thread_local char last_error[sizeof(Failure::detail)] = "";

void SetLastError(const char* detail) { std::snprintf(last_error, sizeof(last_error), "%s", detail); }

// Runs `body`; every exception becomes a status.
template <class Body>
sparge_status Guard(const Body& body) noexcept {
  try {
    body();
    return SPARGE_OK;
  } catch (const Failure& failure) {
    SetLastError(failure.detail);
    return failure.status;
  } catch (const std::bad_alloc&) {
    SetLastError("out of memory");
    return SPARGE_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    SetLastError(error.what());
  } catch (...) {
    SetLastError("unknown exception");
  }
  return SPARGE_INTERNAL_ERROR;
}

// A caller's struct may be shorter (older header) or longer (newer): missing members keep their default, and unknown
// ones are an error rather than ignored.
template <class T>
T CopySized(const char* name, const T* from, const T& defaults) {
  SPARGE_REQUIRE(from != nullptr, "%s is NULL", name);
  SPARGE_REQUIRE(from->struct_size >= sizeof(size_t) && from->struct_size <= sizeof(T),
                 "%s.struct_size=%zu is not that of this library (%zu); call its _init function", name,
                 from->struct_size, sizeof(T));
  T copy = defaults;
  std::memcpy(&copy, from, from->struct_size);
  return copy;
}

template <class T>
T Defaults(void (*init)(T*)) {
  T value;
  init(&value);
  return value;
}

sparge_executor CheckedExecutor(const sparge_executor* given) {
  const sparge_executor executor = CopySized("executor", given, sparge_executor{});
  SPARGE_REQUIRE(executor.workers >= 1 && executor.workers <= 4096, "executor.workers=%d is outside 1..4096",
                 executor.workers);
  SPARGE_REQUIRE(executor.run != nullptr, "executor.run is NULL");
  return executor;
}

const sparge_plan& CheckedPlan(const sparge_plan* plan) {
  SPARGE_REQUIRE(plan != nullptr, "plan is NULL");
  return *plan;
}

sparge_run_args CheckedArgs(const sparge_plan& plan, const sparge_run_args* given, Call call) {
  const sparge_run_args args = CopySized("args", given, Defaults(&sparge_run_args_init));
  CheckArgs(plan.front(), args, call, {plan.workspace_size, plan.cache_size});
  SPARGE_REQUIRE(args.stats == nullptr ||
                     (args.stats->struct_size >= sizeof(size_t) && args.stats->struct_size <= sizeof(sparge_stats)),
                 "stats.struct_size=%zu is not that of this library (%zu); call sparge_stats_init",
                 args.stats->struct_size, sizeof(sparge_stats));
  return args;
}

void CheckPartial(const char* name, const sparge_partial* partial) {
  SPARGE_REQUIRE(partial != nullptr, "%s is NULL", name);
  SPARGE_REQUIRE(partial->o.data != nullptr && partial->lse.data != nullptr, "%s.o.data or %s.lse.data is NULL", name,
                 name);
  const int32_t dtype = RawEnum(partial->o.dtype);
  SPARGE_REQUIRE(dtype >= SPARGE_F32 && dtype <= SPARGE_BF16, "%s.o.dtype=%d is unknown", name, dtype);
  SPARGE_REQUIRE(partial->o.batch_stride >= 0 && partial->o.head_stride >= 0 && partial->o.token_stride >= 0 &&
                     partial->lse.batch_stride >= 0 && partial->lse.head_stride >= 0,
                 "%s has a negative stride", name);
}

// Token `t` of a partial result.
struct PartialRow {
  std::byte* o;
  sparge_dtype dtype;
  float& lse;

  PartialRow(const sparge_partial& p, int64_t b, int64_t h, int64_t t)
      : o(static_cast<std::byte*>(p.o.data) + (b * p.o.batch_stride + h * p.o.head_stride + t * p.o.token_stride) *
                                                  static_cast<int64_t>(DtypeBytes(p.o.dtype))),
        dtype(p.o.dtype),
        lse(p.lse.data[b * p.lse.batch_stride + h * p.lse.head_stride + t]) {}
};

// A normalised result is the state m = lse * log2(e), l = 1.
void MergeRow(const PartialRow& a, const PartialRow& b, const PartialRow& out, int64_t dim) {
  constexpr float kLog2e = 1.44269504088896340736f;
  const Joined joined = JoinMaxima(a.lse * kLog2e, b.lse * kLog2e);
  const float l = joined.weight_a + joined.weight_b;
  const float weight_a = l > 0 ? joined.weight_a / l : 0.0f;
  const float weight_b = l > 0 ? joined.weight_b / l : 0.0f;
  for (int64_t c = 0; c < dim; ++c) {
    // A part of no weight may hold anything, also NaN from a row that its owner never wrote.
    const float from_a = weight_a > 0 ? weight_a * LoadElement(a.o, a.dtype, c) : 0.0f;
    const float from_b = weight_b > 0 ? weight_b * LoadElement(b.o, b.dtype, c) : 0.0f;
    StoreElement(out.o, out.dtype, c, from_a + from_b);
  }
  out.lse = l > 0 ? (joined.m + std::log2(l)) / kLog2e : -std::numeric_limits<float>::infinity();
}

}  // namespace
}  // namespace sparge

using namespace sparge;  // NOLINT: this file is the edge between the C names and the namespace

extern "C" {

const char* sparge_status_text(sparge_status status) {
  switch (status) {
    case SPARGE_OK:
      return "ok";
    case SPARGE_INVALID_ARGUMENT:
      return "invalid argument";
    case SPARGE_UNSUPPORTED_HARDWARE:
      return "this machine lacks the instruction set";
    case SPARGE_OUT_OF_MEMORY:
      return "out of memory";
    case SPARGE_INTERNAL_ERROR:
      return "internal error";
  }
  return "unknown status";
}

const char* sparge_last_error(void) { return last_error; }

#define SPARGE_TEXT_OF(x) #x
#define SPARGE_DOTTED(major, minor, patch) SPARGE_TEXT_OF(major) "." SPARGE_TEXT_OF(minor) "." SPARGE_TEXT_OF(patch)
const char* sparge_version(void) {
  return SPARGE_DOTTED(SPARGE_VERSION_MAJOR, SPARGE_VERSION_MINOR, SPARGE_VERSION_PATCH);
}

void sparge_context_desc_init(sparge_context_desc* desc) {
  *desc = {};
  desc->struct_size = sizeof(*desc);
}

sparge_status sparge_context_create(const sparge_context_desc* given, sparge_context** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    const auto defaults = Defaults(&sparge_context_desc_init);
    const sparge_context_desc desc = given == nullptr ? defaults : CopySized("desc", given, defaults);
    SPARGE_REQUIRE(desc.threads >= 0 && desc.threads <= 4096, "threads=%d is outside 0..4096", desc.threads);
    auto context = std::make_unique<sparge_context>();
    context->runtime.isa = ChooseIsa(desc.isa);
    context->runtime.kernels = KernelsFor(context->runtime.isa);
    if (desc.executor != nullptr) {
      context->runtime.executor = CheckedExecutor(desc.executor);
    } else {
      const auto cores = static_cast<int32_t>(std::thread::hardware_concurrency());
      context->pool = std::make_unique<Pool>(desc.threads > 0 ? desc.threads : std::max(cores, 1));
      context->runtime.executor = context->pool->executor();
    }
    *out = context.release();
  });
}

void sparge_context_destroy(sparge_context* context) { delete context; }
const char* sparge_context_isa(const sparge_context* context) {
  return context == nullptr ? "" : IsaName(context->runtime.isa);
}
int32_t sparge_context_threads(const sparge_context* context) {
  return context == nullptr ? 0 : context->runtime.executor.workers;
}

int32_t sparge_isa_count(void) { return IsaCount(); }

void sparge_isa_init(sparge_isa* isa) {
  *isa = {};
  isa->struct_size = sizeof(*isa);
}

sparge_status sparge_isa_at(int32_t index, sparge_isa* out) {
  return Guard([&] {
    const size_t size = CopySized("out", out, Defaults(&sparge_isa_init)).struct_size;
    SPARGE_REQUIRE(index >= 0 && index < IsaCount(), "index=%d is outside 0..%d", index, IsaCount() - 1);
    const IsaEntry entry = IsaAt(index);
    const KernelOps* kernels = KernelsFor(entry.isa);
    const sparge_isa isa{size, entry.name, entry.runnable, kernels->group_rows, kernels->int8_text};
    std::memcpy(out, &isa, size);
  });
}

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

void sparge_plan_desc_init(sparge_plan_desc* desc) {
  *desc = {};
  desc->struct_size = sizeof(*desc);
  desc->query_offset = SPARGE_OFFSET_BOTTOM_RIGHT;
  desc->precision = SPARGE_INT8;
  desc->select = SPARGE_SELECT_CDF;
  desc->keep_sink = -1;
  desc->params = {0.3, 0.98, 0.5, 10.0};
}

sparge_status sparge_plan_create(sparge_context* context, const sparge_plan_desc* given, sparge_plan** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    SPARGE_REQUIRE(context != nullptr, "context is NULL");
    const sparge_plan_desc desc = CopySized("desc", given, Defaults(&sparge_plan_desc_init));
    Calibration* calibration = desc.calibration == nullptr ? nullptr : &desc.calibration->calibration;
    SPARGE_REQUIRE(calibration == nullptr || calibration->q_heads() == desc.q_heads,
                   "q_heads=%" PRId64 " is not the %" PRId64 " of the calibration", desc.q_heads,
                   calibration->q_heads());
    auto plan = std::make_unique<sparge_plan>(sparge_plan{MakePlans(context->runtime, desc, calibration), 0, 0});
    plan->workspace_size = WorkspaceSize(plan->plans);
    plan->cache_size = CacheSize(plan->plans);
    *out = plan.release();
  });
}

void sparge_plan_destroy(sparge_plan* plan) { delete plan; }
size_t sparge_plan_workspace_size(const sparge_plan* plan) { return plan == nullptr ? 0 : plan->workspace_size; }
size_t sparge_plan_cache_size(const sparge_plan* plan) { return plan == nullptr ? 0 : plan->cache_size; }
void sparge_plan_map_shape(const sparge_plan* plan, int64_t* q_blocks, int64_t* k_blocks) {
  *q_blocks = plan == nullptr ? 0 : plan->front().q_blocks;
  *k_blocks = plan == nullptr ? 0 : plan->front().k_blocks;
}

void sparge_run_args_init(sparge_run_args* args) {
  *args = {};
  args->struct_size = sizeof(*args);
}
void sparge_stats_init(sparge_stats* stats) {
  *stats = {};
  stats->struct_size = sizeof(*stats);
}

sparge_status sparge_run(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] { Attend(CheckedPlan(plan).plans, CheckedArgs(CheckedPlan(plan), args, Call::kRun)); });
}

sparge_status sparge_predict(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] { Predict(CheckedPlan(plan).plans, CheckedArgs(CheckedPlan(plan), args, Call::kPredict)); });
}

sparge_status sparge_reference(const sparge_plan* plan, const sparge_run_args* args) {
  return Guard([&] { Reference(CheckedPlan(plan).front(), CheckedArgs(CheckedPlan(plan), args, Call::kReference)); });
}

void sparge_calibration_desc_init(sparge_calibration_desc* desc) {
  *desc = {sizeof(*desc), 0, 0.015, 0.01875, 0.05, 0};
}

sparge_status sparge_calibration_create(const sparge_calibration_desc* given, sparge_calibration** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    const auto desc = CopySized("desc", given, Defaults(&sparge_calibration_desc_init));
    *out = new sparge_calibration{Calibration(desc)};
  });
}

void sparge_calibration_destroy(sparge_calibration* calibration) { delete calibration; }

void sparge_head_estimate_init(sparge_head_estimate* estimate) {
  *estimate = {};
  estimate->struct_size = sizeof(*estimate);
}

sparge_status sparge_calibration_head(const sparge_calibration* calibration, int64_t head, sparge_head_estimate* out) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    sparge_head_estimate estimate = CopySized("out", out, Defaults(&sparge_head_estimate_init));
    calibration->calibration.Describe(head, estimate);
    std::memcpy(out, &estimate, estimate.struct_size);
  });
}

sparge_status sparge_calibration_set_bounds(sparge_calibration* calibration, int64_t head, double target_l1,
                                            double pv_l1) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    calibration->calibration.SetBounds(head, target_l1, pv_l1);
  });
}

sparge_status sparge_calibration_save(const sparge_calibration* calibration, void* buffer, size_t* size) {
  return Guard([&] {
    SPARGE_REQUIRE(calibration != nullptr, "calibration is NULL");
    SPARGE_REQUIRE(size != nullptr, "size is NULL");
    const size_t room = *size;
    *size = calibration->calibration.SavedSize();
    if (buffer == nullptr) return;
    SPARGE_REQUIRE(room >= *size, "size=%zu is less than the %zu needed", room, *size);
    calibration->calibration.Save(static_cast<std::byte*>(buffer));
  });
}

sparge_status sparge_calibration_load(const void* data, size_t size, sparge_calibration** out) {
  return Guard([&] {
    SPARGE_REQUIRE(out != nullptr, "out is NULL");
    *out = nullptr;
    SPARGE_REQUIRE(data != nullptr, "data is NULL");
    *out = new sparge_calibration{Calibration(static_cast<const std::byte*>(data), size)};
  });
}

sparge_status sparge_calibrate(const sparge_plan* plan, const sparge_run_args* args, double effort) {
  return Guard([&] {
    const sparge_run_args checked = CheckedArgs(CheckedPlan(plan), args, Call::kCalibrate);
    SPARGE_REQUIRE(effort > 0 && effort <= 1, "effort=%g is not above 0 and at most 1", effort);
    SPARGE_REQUIRE(plan->front().select == SPARGE_SELECT_AUTO, "plan has no calibration: its select is not AUTO");
    Calibrate(plan->plans, checked, effort);
  });
}

sparge_status sparge_merge(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, const sparge_partial* a,
                           const sparge_partial* b, const sparge_partial* out) {
  return Guard([&] {
    SPARGE_REQUIRE(batch >= 0 && heads >= 0 && tokens >= 0 && dim >= 0,
                   "batch=%" PRId64 " heads=%" PRId64 " tokens=%" PRId64 " dim=%" PRId64 " must not be negative", batch,
                   heads, tokens, dim);
    if (batch == 0 || heads == 0 || tokens == 0) return;
    CheckPartial("a", a);
    CheckPartial("b", b);
    CheckPartial("out", out);
    for (int64_t i = 0; i < batch; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          MergeRow(PartialRow(*a, i, h, t), PartialRow(*b, i, h, t), PartialRow(*out, i, h, t), dim);
        }
      }
    }
  });
}

}  // extern "C"

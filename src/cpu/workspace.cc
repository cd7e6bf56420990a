// Lays out the memory of a call; the same code tells how much that is.
#include "src/cpu/workspace.h"

#include <algorithm>
#include <utility>

namespace sparge::impl {
namespace {

Decisions LayDecisions(const Plan& plan, Arena& arena) {
  if (plan.calibration == nullptr) return {};
  const int64_t heads = plan.q_heads;
  return {arena.Take<sparge_head_params>(heads), arena.Take<uint8_t>(heads), arena.Take<uint8_t>(heads),
          arena.Take<uint8_t>(heads), arena.Take<uint8_t>(heads)};
}

}  // namespace

Workspace LayWorkspace(const Plan& plan, Arena& arena, Arena& cache) {
  const int64_t workers = plan.machine.executor.workers;
  Workspace w{};
  w.decisions = LayDecisions(plan, arena);
  w.packed = plan.direct() ? LayDirect(plan, arena) : LayPacked(plan, arena, cache);
  if (plan.decodes) {
    w.decode = LayDecode(plan, arena);
    return w;
  }
  w.map = LayBlockMap(plan, arena);
  w.stage1 = LayStage1(plan, arena);
  w.schedule = LaySchedule(plan, arena);
  w.kept = arena.Take<int32_t>(workers * plan.k_blocks);
  if (plan.calibrates()) w.probes = LayProbeMemory(plan, arena);
  w.states = arena.Take<float>((workers + MaxParts(plan)) * Workspace::StateFloats(plan));
  return w;
}

Arena ArenaOf(void* memory) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  return Arena(static_cast<std::byte*>(memory) + (RoundUp(address, Arena::kAlignment) - address));
}

Cache OpenCache(const std::vector<Plan>& plans, const sparge_run_args& args) {
  if (args.cache == nullptr || plans.front().direct()) return {Arena(), true};
  Cache cache{ArenaOf(args.cache), true};
  auto* const mark = cache.arena.Take<uint64_t>(1);
  cache.fits = std::exchange(*mark, CacheKind(plans)) == CacheKind(plans);
  return cache;
}

Needs SizesOf(const std::vector<Plan>& plans) {
  size_t most = 0;
  Arena cache;
  cache.Take<uint64_t>(1);  // the mark
  for (const Plan& plan : plans) {
    Arena arena;
    LayWorkspace(plan, arena, cache);
    most = std::max(most, arena.used());
  }
  // The caller's memory need not be aligned.
  const bool caches = plans.front().cache_blocks > 0 && !plans.front().direct();
  const size_t workspace = plans.front().idle() ? 0 : most + Arena::kAlignment;
  return {workspace, caches ? cache.used() + Arena::kAlignment : 0};
}

}  // namespace sparge::impl

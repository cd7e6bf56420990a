// Counts tiles, slices heads, and calls the library as any client does.
#include "src/tune/sample.h"

#include <chrono>
#include <cinttypes>

#include "src/base/half.h"
#include "src/base/status.h"
#include "src/base/visible.h"
#include "src/problem/problem.h"

namespace sparge::impl {
namespace {

const void* Advance(const void* data, int64_t elements, size_t element_bytes) {
  return static_cast<const std::byte*>(data) + elements * static_cast<int64_t>(element_bytes);
}

void SliceTensor(int64_t head, sparge_tensor& tensor) {
  tensor.data = const_cast<void*>(Advance(tensor.data, head * tensor.head_stride, DtypeBytes(tensor.dtype)));
}

double MsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void Require(sparge_status status) {
  if (status != SPARGE_OK) Fail(status, "%s", sparge_last_error());
}

TuneSample MakeSample(const sparge_plan_desc& desc) {
  SPARGE_REQUIRE(desc.q_tokens != 0 && desc.kv_tokens != 0,
                 "q_tokens=%" PRId64 " and kv_tokens=%" PRId64 ": nothing can be measured", desc.q_tokens,
                 desc.kv_tokens);
  TuneSample sample{desc, 0, 0};
  const Problem problem = MakeProblems(desc, nullptr).front();
  for (const Sequence& s : problem.sequences) {
    sample.queries += s.q_count;
    for (int64_t block = 0; block < s.q_blocks; ++block) {
      const int64_t first = block * kBlockQ;
      const Range seen = BlocksOf(s.visible.KeysOfAny(first, first + s.QueriesIn(block) - 1), kBlockK);
      sample.tiles += seen.end - seen.begin;
    }
  }
  return sample;
}

Asked SliceHead(const Asked& whole, int64_t head) {
  Asked slice = whole;
  const int64_t kv_head = head / (whole.desc.q_heads / whole.desc.kv_heads);
  slice.desc.q_heads = slice.desc.kv_heads = 1;
  if (slice.desc.alibi_slopes != nullptr) slice.desc.alibi_slopes += head;
  if (slice.desc.sink_logits != nullptr) slice.desc.sink_logits += head;
  SliceTensor(head, slice.args.q);
  SliceTensor(kv_head, slice.args.k);
  SliceTensor(kv_head, slice.args.v);
  if (slice.desc.mask != SPARGE_MASK_NONE) {
    const auto bytes = static_cast<size_t>(MaskElementBytes(slice.desc.mask));
    slice.args.mask.data = Advance(slice.args.mask.data, head * slice.args.mask.head_stride, bytes);
  }
  return slice;
}

Runner::PlanHandle Runner::MakePlan(const sparge_plan_desc& desc) const {
  sparge_plan* plan = nullptr;
  Require(sparge_plan_create(context_, &desc, &plan));
  return PlanHandle(plan);
}

sparge_run_args Runner::WithWorkspace(const sparge_plan* plan, sparge_run_args args) {
  const size_t size = sparge_plan_workspace_size(plan);
  if (size > workspace_size_) {
    workspace_.reset();  // before the larger one is made
    workspace_size_ = 0;
    workspace_.reset(new std::byte[size]);
    workspace_size_ = size;
  }
  args.workspace = workspace_.get();
  args.workspace_size = workspace_size_;
  return args;
}

double Runner::Calibrate(const Asked& asked, double effort) {
  const auto start = std::chrono::steady_clock::now();
  const PlanHandle plan = MakePlan(asked.desc);
  const sparge_run_args args = WithWorkspace(plan.get(), asked.args);
  Require(sparge_calibrate(plan.get(), &args, effort));
  return MsSince(start);
}

double Runner::Run(const Asked& asked) {
  const auto start = std::chrono::steady_clock::now();
  const PlanHandle plan = MakePlan(asked.desc);
  const sparge_run_args args = WithWorkspace(plan.get(), asked.args);
  Require(sparge_run(plan.get(), &args));
  return MsSince(start);
}

}  // namespace sparge::impl

// Counts tiles, slices heads, and calls the library as any client does.
#include "src/tune/sample.h"

#include <algorithm>
#include <chrono>

#include "src/base/half.h"
#include "src/base/status.h"
#include "src/base/visible.h"
#include "src/problem/problem.h"

namespace sparge::impl {
namespace {

int64_t VisibleTiles(const sparge_plan_desc& desc, int64_t queries, int64_t keys) {
  const bool bottom_right = desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT;
  const Visible visible{keys, bottom_right ? keys - queries : desc.query_offset, desc.window, desc.causal != 0};
  int64_t tiles = 0;
  for (int64_t first = 0; first < queries; first += SPARGE_BLOCK_Q) {
    const int64_t last = std::min<int64_t>(first + SPARGE_BLOCK_Q, queries) - 1;
    const Range blocks = BlocksOf(visible.KeysOfAny(first, last), SPARGE_BLOCK_K);
    tiles += blocks.end - blocks.begin;
  }
  return tiles;
}

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

int64_t VisibleTiles(const sparge_plan_desc& desc) {
  if (desc.q_offsets == nullptr) return desc.batch * VisibleTiles(desc, desc.q_tokens, desc.kv_tokens);
  int64_t tiles = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    tiles += VisibleTiles(desc, desc.q_offsets[b + 1] - desc.q_offsets[b], desc.kv_offsets[b + 1] - desc.kv_offsets[b]);
  }
  return tiles;
}

int64_t AllQueries(const sparge_plan_desc& desc) {
  return desc.q_offsets == nullptr ? desc.batch * desc.q_tokens : desc.q_tokens;
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

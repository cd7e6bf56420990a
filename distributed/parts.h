// Plans of parts, views of tensors, and what all steps of a call know.
#ifndef SPARGE_DISTRIBUTED_PARTS_H_
#define SPARGE_DISTRIBUTED_PARTS_H_

#include <cstddef>
#include <memory>
#include <new>
#include <sparge/sparge.hpp>
#include <vector>

#include "distributed/group.h"
#include "distributed/shards.h"

namespace sparge::distributed {

// A plan of somebody else's context, with a workspace of its own.
class PartPlan {
 public:
  PartPlan(sparge_context* context, const sparge_plan_desc& desc) {
    sparge_plan* plan = nullptr;
    Check(sparge_plan_create(context, &desc, &plan));
    plan_.reset(plan);
  }
  void Run(RunArgs args) const { With(args, &sparge_run); }
  void Predict(RunArgs args) const { With(args, &sparge_predict); }
  int64_t pools() const { return sparge_plan_pools(plan_.get()); }

 private:
  struct Destroy {
    void operator()(sparge_plan* plan) const { sparge_plan_destroy(plan); }
  };
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
  };
  void With(RunArgs& args, sparge_status (*call)(const sparge_plan*, const sparge_run_args*)) const {
    args.workspace_size = sparge_plan_workspace_size(plan_.get());
    const std::unique_ptr<std::byte[], Free> workspace(
        static_cast<std::byte*>(::operator new[](args.workspace_size + 1, std::align_val_t{64})));
    args.workspace = workspace.get();
    Check(call(plan_.get(), &args));
  }
  std::unique_ptr<sparge_plan, Destroy> plan_;
};

inline int64_t BytesOf(sparge_dtype dtype) { return dtype == SPARGE_F32 ? 4 : 2; }

// The tokens of a segment, of a tensor that has those of its rank.
inline sparge_tensor Cut(sparge_tensor tensor, const Segment& segment) {
  if (tensor.data != nullptr) {
    tensor.data = static_cast<std::byte*>(tensor.data) + segment.at * tensor.token_stride * BytesOf(tensor.dtype);
  }
  return tensor;
}

// One call at work on this rank.
struct Call {
  Group& group;
  sparge_context* context;
  PlanDesc desc;                     // of the whole
  RunArgs args;                      // of this rank's tokens
  std::vector<Segments> q_of, k_of;  // of each rank

  const Segments& own_q() const { return q_of[group.rank()]; }
  const Segments& own_k() const { return k_of[group.rank()]; }
  int64_t q_rows() const { return desc.batch * desc.q_heads; }
  int64_t kv_rows() const { return desc.batch * desc.kv_heads; }

  // Some queries against some keys. Sinks join the result of all keys, not that of a part.
  PlanDesc DescOf(const Segment& q, const Segment& k) const {
    PlanDesc part = desc;
    part.q_tokens = q.count;
    part.first_query = q.first;
    part.all_queries = desc.q_tokens;
    part.kv_tokens = k.count;
    part.first_key = k.first;
    part.all_keys = desc.kv_tokens;
    if (desc.query_offset != SPARGE_OFFSET_BOTTOM_RIGHT) part.query_offset += q.first;
    part.sink_logits = nullptr;
    return part;
  }
  // Whether any of these queries sees any of these keys by its position.
  bool Sees(const Segment& q, const Segment& k) const {
    const bool bottom_right = desc.query_offset == SPARGE_OFFSET_BOTTOM_RIGHT;
    const int64_t offset = bottom_right ? desc.kv_tokens - desc.q_tokens : desc.query_offset;
    if (desc.causal != 0 && k.first > q.end() - 1 + offset) return false;
    return desc.window == 0 || k.end() - 1 > q.first + offset - desc.window;
  }
};

}  // namespace sparge::distributed
#endif  // SPARGE_DISTRIBUTED_PARTS_H_

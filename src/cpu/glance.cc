// The first bytes of keys and values, of all or some tokens of a block.
#include "src/cpu/glance.h"

#include <algorithm>

#include "src/base/threads.h"

namespace sparge::impl {
namespace {

// From one token of a sample to the next: 0, 21, 42, 63.
constexpr int64_t kApart = 21;

// The first bytes of the tokens of a block in one kv head: a cache line of each.
TokenRows LineOf(const Plan& plan, const sparge_tensor& tensor, int64_t dim, int64_t sequence, int64_t kv_head,
                 int64_t block) {
  constexpr int64_t kBytes = 64;
  const Sequence& s = plan.sequences[sequence];
  const int64_t most = kBytes / static_cast<int64_t>(DtypeBytes(tensor.dtype));
  return RowsOf(plan, tensor, sequence, kv_head, s.k_begin + block * kBlockK, s.KeysIn(block), std::min(dim, most));
}

TokenRows LineOfKeys(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  return LineOf(plan, args.k, plan.qk_dim, sequence, 0, block);
}

// Of another head than the keys: who changes one alone, changes the other, too.
TokenRows LineOfValues(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  return LineOf(plan, args.v, plan.v_dim, sequence, plan.kv_heads - 1, block);
}

}  // namespace

uint64_t GlanceAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  const PackOps& ops = *plan.machine.ops.pack;
  const uint64_t keys = ops.glimpse(LineOfKeys(plan, args, sequence, block));
  return Mix(keys, ops.glimpse(LineOfValues(plan, args, sequence, block))) | 1;
}

void GlanceAtAll(const Plan& plan, const sparge_run_args& args, uint64_t* glances) {
  constexpr int64_t kBlocks = 16;  // of one task
  const int64_t tasks = CeilDiv(plan.k_blocks, kBlocks);
  ForEach(plan.machine.executor, plan.sequence_count() * tasks, [&](int32_t, int64_t task) {
    const int64_t sequence = task / tasks, first = task % tasks * kBlocks;
    for (int64_t j = first; j < std::min(first + kBlocks, plan.k_blocks); ++j) {
      glances[sequence * plan.cache_blocks + j] = GlanceAt(plan, args, sequence, j);
    }
  });
}

void ForeseeSample(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  const TokenRows rows = LineOfKeys(plan, args, sequence, block);
  for (int64_t t = 0; t < rows.count; t += kApart) __builtin_prefetch(rows.Token(t));
}

uint64_t SampleAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  TokenRows rows = LineOfKeys(plan, args, sequence, block);
  TokenRows last = rows;
  last.data = rows.Token(rows.count - 1);
  last.count = 1;
  rows.count = CeilDiv(rows.count, kApart);
  rows.token_stride *= kApart;
  const uint64_t few = plan.machine.ops.pack->glimpse(rows);
  return Mix(few, plan.machine.ops.pack->glimpse(last)) | 1;
}

}  // namespace sparge::impl

// The first bytes of keys, all or some of a block.
#include "src/cpu/glance.h"

#include <algorithm>

namespace sparge::impl {
namespace {

// From one token of a sample to the next: 0, 21, 42, 63.
constexpr int64_t kApart = 21;

// The first bytes of the keys of a block in the first kv head: a cache line of each.
TokenRows LineOfKeys(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  constexpr int64_t kBytes = 64;
  const Sequence& s = plan.sequences[sequence];
  const int64_t dim = std::min(plan.qk_dim, kBytes / static_cast<int64_t>(DtypeBytes(args.k.dtype)));
  return RowsOf(plan, args.k, sequence, 0, s.k_begin + block * kBlockK, s.KeysIn(block), dim);
}

}  // namespace

uint64_t GlanceAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  return plan.machine.ops.pack->glimpse(LineOfKeys(plan, args, sequence, block)) | 1;
}

void ForeseeSample(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  const TokenRows rows = LineOfKeys(plan, args, sequence, block);
  for (int64_t t = 0; t < rows.count; t += kApart) __builtin_prefetch(rows.Token(t));
}

uint64_t SampleAt(const Plan& plan, const sparge_run_args& args, int64_t sequence, int64_t block) {
  TokenRows rows = LineOfKeys(plan, args, sequence, block);
  const int64_t all = rows.count;
  rows.count = CeilDiv(all, kApart);
  rows.token_stride *= kApart;
  const uint64_t few = plan.machine.ops.pack->glimpse(rows);
  rows.data = LineOfKeys(plan, args, sequence, block).Token(all - 1);
  rows.count = 1;
  return Mix(few, plan.machine.ops.pack->glimpse(rows)) | 1;
}

}  // namespace sparge::impl

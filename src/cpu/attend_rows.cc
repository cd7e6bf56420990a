// Runs the kernel for every work item, joins the parts of split rows, and writes output and log-sum-exp.
#include "src/cpu/attend_rows.h"

#include <bit>
#include <cmath>

#include "src/base/threads.h"
#include "src/cpu/kernel/state.h"

namespace sparge::impl {
namespace {

// Indices of the begin'th to the end'th set bit of a row.
int64_t ListKept(const uint64_t* bits, int64_t words, int64_t begin, int64_t end, int32_t* out) {
  int64_t seen = 0;
  int64_t count = 0;
  for (int64_t w = 0; w < words && seen < end; ++w) {
    for (uint64_t rest = bits[w]; rest != 0 && seen < end; rest &= rest - 1) {
      if (seen++ >= begin) out[count++] = static_cast<int32_t>(w * 64 + std::countr_zero(rest));
    }
  }
  return count;
}

void FinishRow(const Plan& plan, const sparge_run_args& args, const Workspace& w, int64_t row, const RowState& state) {
  const BlockId id = FindQueryBlock(plan, row);
  FinishRows(plan, args, w.packed,
             {id.sequence, id.head, id.block * kBlockQ, plan.sequences[id.sequence].QueriesIn(id.block),
              w.packed.q_shift + row * kBlockQ},
             state);
}

void RunItem(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w, int32_t worker,
             WorkItem& item) {
  int32_t* kept = w.kept + worker * plan.k_blocks;
  const BlockId id = FindQueryBlock(plan, item.row);
  KernelArgs k = BlockArgs(plan, args, w.packed, id);
  k.masked_tiles = w.map.MaskedRow(item.row);
  k.skip = static_cast<float>(heads.params[id.head].pv_skip * kLog2e);
  k.kept = kept;
  k.kept_count = ListKept(w.map.KeptRow(item.row), w.map.words, item.begin, item.end, kept);
  k.state = item.part < 0 ? w.WorkerState(plan, worker) : w.PartState(plan, item.part);
  if (args.pv_out != nullptr) k.pv_groups = args.pv_out + TileRow(plan, FindQueryBlock(plan, item.row));
  const KernelOps& kernels = plan.kernel();
  item.skipped = (plan.direct() ? kernels.attend_direct : kernels.attend[plan.precision])(k);
  if (item.part < 0) FinishRow(plan, args, w, item.row, k.state);
}

void JoinParts(const Plan& plan, const sparge_run_args& args, const Workspace& w, const SplitRow& split) {
  const BlockId id = FindQueryBlock(plan, split.row);
  const RowState state = w.PartState(plan, split.first_part);
  for (int64_t p = 1; p < split.parts; ++p) {
    JoinStates(state, w.PartState(plan, split.first_part + p), plan.sequences[id.sequence].QueriesIn(id.block),
               plan.channels());
  }
  FinishRow(plan, args, w, split.row, state);
}

}  // namespace

void FinishRows(const Plan& plan, const sparge_run_args& args, const Packed& packed, const CompleteRows& rows,
                const RowState& state) {
  const Sequence& s = plan.sequences[rows.sequence];
  const int64_t unit = plan.KvUnit(rows.sequence, rows.head / plan.heads_per_kv);
  const RowPlaces out = PlacesOf(plan, args.o, rows.sequence, rows.head, s.q_begin + rows.first);
  float* lse = LseRow(plan, args.lse, rows.sequence, rows.head);
  for (int64_t r = 0; r < rows.count; ++r) {
    const double left_out = LeftOut(plan, s.visible, rows.head, rows.first + r, rows.shift[r]);
    if (std::isnan(rows.shift[r]) && state.l[r] > 0) state.l[r] = rows.shift[r];  // a query that is not finite
    if (lse != nullptr) {
      lse[out.order == nullptr ? rows.first + r : out.order[r]] =
          LogSumExp(state.m[r], state.l[r], left_out, SinkLogit(plan, rows.head));
    }
    if (!plan.sink_logits.empty()) {
      AddSink(static_cast<float>(SinkLogit(plan, rows.head) - left_out), state.o + r * plan.channels(), state.m[r],
              state.l[r], plan.channels());
    }
  }
  plan.kernel().finish({state, plan.channels(), rows.count, plan.v_dim, static_cast<float>(packed.units[unit].v_unit),
                        out.data, args.o.dtype, args.o.token_stride, out.order});
}

void AttendRows(const Plan& plan, const HeadChoice& heads, const sparge_run_args& args, const Workspace& w) {
  const sparge_executor& executor = plan.machine.executor;
  ForEach(executor, w.schedule.item_count,
          [&](int32_t worker, int64_t i) { RunItem(plan, heads, args, w, worker, w.schedule.items[i]); });
  ForEach(executor, w.schedule.split_count,
          [&](int32_t, int64_t i) { JoinParts(plan, args, w, w.schedule.split_rows[i]); });
}

}  // namespace sparge::impl

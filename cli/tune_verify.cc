// tune_verify.cc - runs a head as a problem of its own, so that only heads that changed are computed again.
#include "cli/tune_verify.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace sparge::cli {

int64_t VisibleTiles(const Problem& problem) {
  const PlanDesc& desc = problem.desc;
  if (desc.causal == 0) return problem.q_blocks() * problem.k_blocks();
  int64_t tiles = 0;
  for (int64_t block = 0; block < problem.q_blocks(); ++block) {
    const int64_t last = std::min((block + 1) * SPARGE_BLOCK_Q, desc.q_tokens) - 1;
    const int64_t keys = std::clamp<int64_t>(last + desc.kv_tokens - desc.q_tokens + 1, 0, desc.kv_tokens);
    tiles += (keys + SPARGE_BLOCK_K - 1) / SPARGE_BLOCK_K;
  }
  return tiles;
}

std::vector<float> HeadVerifier::Run(int64_t batch, int64_t head, const PlanDesc& desc,
                                     sparge_head_stats* stats) const {
  HeadProblem slice = SliceHead(problem_, batch, head);
  slice.desc.select = desc.select;
  slice.desc.precision = desc.precision;
  slice.desc.params = desc.params;
  std::vector<float> o;
  slice.args.o = OutputView(o, slice.desc);
  slice.args.head_stats = stats;
  const auto start = std::chrono::steady_clock::now();
  Plan(context_, slice.desc).Run(slice.args);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  spent_.ms += time.count();
  if (desc.select == SPARGE_SELECT_ALL && desc.precision == SPARGE_PRECISION_INT8) {
    spent_.int8_dense_ms += time.count();
    spent_.int8_dense_tiles += static_cast<double>(VisibleTiles(problem_));
  }
  return o;
}

void HeadVerifier::RunDense(int64_t head, sparge_precision precision, DenseResults& dense) const {
  PlanDesc desc = problem_.desc;
  desc.select = SPARGE_SELECT_ALL;
  desc.precision = precision;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  dense = {precision, {}};
  for (int64_t batch = 0; batch < desc.batch; ++batch) dense.o.push_back(Run(batch, head, desc, nullptr));
}

HeadErrors HeadVerifier::Verify(int64_t head, const io::PresetHead& setting, DenseResults& dense) const {
  if (dense.o.empty() || dense.precision != setting.precision) RunDense(head, setting.precision, dense);
  HeadErrors errors;
  PlanDesc desc = problem_.desc;
  desc.select = setting.select;
  desc.precision = setting.precision;
  for (int64_t batch = 0; batch < desc.batch; ++batch) {
    const std::vector<float>& want = dense.o[static_cast<size_t>(batch)];
    sparge_head_stats stats = {};
    desc.params = setting.params;
    desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
    std::vector<float> o = Run(batch, head, desc, &stats);
    errors.l1.Add(o, want);
    if (!std::isinf(setting.params.pv_skip)) {
      desc.params.pv_skip = setting.params.pv_skip;
      o = Run(batch, head, desc, &stats);
    }
    errors.l2.Add(o, want);
    errors.stats.qk_eligible += stats.qk_eligible;
    errors.stats.qk_computed += stats.qk_computed;
    errors.stats.pv_eligible += stats.pv_eligible;
    errors.stats.pv_computed += stats.pv_computed;
  }
  return errors;
}

}  // namespace sparge::cli

// Runs a head as a call of its own, so that only heads that changed are computed again.
#include "src/tune/verify.h"

#include <cmath>
#include <limits>

#include "src/calibrate/bounds.h"

namespace sparge::impl {
namespace {

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
}

sparge_head_stats Sum(const std::vector<sparge_head_stats>& sequences) {
  sparge_head_stats sum{};
  for (const sparge_head_stats& stats : sequences) {
    sum.qk_eligible += stats.qk_eligible;
    sum.qk_computed += stats.qk_computed;
    sum.pv_eligible += stats.pv_eligible;
    sum.pv_computed += stats.pv_computed;
  }
  return sum;
}

}  // namespace

double RelativeError(sparge_measure measure, const std::vector<float>& result, const std::vector<float>& reference) {
  double error = 0, size = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const auto want = static_cast<double>(reference[i]);
    error += InSums(measure, std::abs(static_cast<double>(result[i]) - want));
    size += InSums(measure, std::abs(want));
  }
  if (size == 0) return error == 0 ? 0.0 : error * std::numeric_limits<double>::infinity();
  return FromSums(measure, error / size);
}

void HeadVerifier::Run(Asked slice, std::vector<float>& o, sparge_head_stats* stats) const {
  const sparge_plan_desc& desc = slice.desc;
  const int64_t row = desc.q_tokens * desc.v_dim;
  o.resize(static_cast<size_t>(sample_.queries * desc.v_dim));
  slice.args.o = {o.data(), SPARGE_F32, row, row, desc.v_dim};
  slice.args.head_stats = stats;
  const double ms = runner_.Run(slice);
  spent_.ms += ms;
  if (desc.select == SPARGE_SELECT_ALL && desc.precision == SPARGE_PRECISION_INT8) {
    spent_.int8_dense_ms += ms;
    spent_.int8_dense_tiles += static_cast<double>(sample_.tiles);
  }
}

std::vector<float> HeadVerifier::RunDense(int64_t head, sparge_precision precision) const {
  Asked slice = SliceHead(asked_, head);
  slice.desc.select = SPARGE_SELECT_ALL;
  slice.desc.precision = precision;
  slice.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  std::vector<float> o;
  Run(slice, o, nullptr);
  return o;
}

HeadErrors HeadVerifier::Verify(int64_t head, const sparge_tuned_head& setting, std::vector<float>& dense) const {
  if (dense.empty()) dense = RunDense(head, setting.precision);
  Asked slice = SliceHead(asked_, head);
  slice.desc.select = setting.select;
  slice.desc.precision = setting.precision;
  slice.desc.params = setting.params;
  slice.desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
  std::vector<float> o;
  std::vector<sparge_head_stats> sequences(static_cast<size_t>(slice.desc.batch));
  Run(slice, o, sequences.data());
  const double plain = RelativeError(measure_, o, dense);
  if (!std::isinf(setting.params.pv_skip)) {
    slice.desc.params.pv_skip = setting.params.pv_skip;
    Run(slice, o, sequences.data());
  }
  const sparge_head_stats stats = Sum(sequences);
  const double qk = Share(stats.qk_computed, stats.qk_eligible);
  return {plain, RelativeError(measure_, o, dense), 1.0 - qk, 0.5 * (qk + Share(stats.pv_computed, stats.pv_eligible))};
}

}  // namespace sparge::impl

// bench_run.cc - runs and times one case.
#include "cli/bench_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace sparge::cli {
namespace {

// Below this, filling the caches is a part of the time that shows.
constexpr double kShortMs = 20;

// Linear between the two nearest values.
double Quantile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - std::floor(at)) * (values[high] - values[low]);
}

}  // namespace

double Median(std::vector<double> values) { return Quantile(values, 0.5); }

double Spread(std::vector<double> values) {
  const double median = Quantile(values, 0.5);
  return median > 0 ? (Quantile(values, 0.75) - Quantile(values, 0.25)) / median : 0;
}

BenchRun::BenchRun(const Context& context, const BenchCase& c, std::shared_ptr<const BenchInputs> inputs)
    : context_(context),
      inputs_(std::move(inputs)),
      random_map_(MakeRandomMap(c)),
      o_(static_cast<size_t>(c.heads * c.queries * c.dim) * ElementBytes(c.dtype)),
      plan_(context, DescribeCase(c)) {
  args_.q = ViewHeads(inputs_->q.data(), c.dtype, c.heads, c.queries, c.dim);
  args_.k = ViewHeads(inputs_->k.data(), c.dtype, c.kv_heads, c.tokens, c.dim);
  args_.v = ViewHeads(inputs_->v.data(), c.dtype, c.kv_heads, c.tokens, c.dim);
  args_.o = ViewHeads(o_.data(), c.dtype, c.heads, c.queries, c.dim);
  if (c.select == BenchSelect::kRandom) {
    args_.map = random_map_.data();
    args_.map_head_stride = c.q_blocks() * c.k_blocks();
  }
  args_.stats = &stats_;
  result_.c = c;
  result_.dense_flops = DenseFlops(c);
}

double BenchRun::RunOnce() {
  const auto start = std::chrono::steady_clock::now();
  plan_.Run(args_);
  last_ms_ = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return last_ms_;
}

double BenchRun::Probe() {
  const double ms = RunOnce();
  return ms < kShortMs ? 2 * ms : ms;
}

void BenchRun::Verify() {
  const BenchCase& c = result_.c;
  std::vector<uint8_t> map(static_cast<size_t>(c.heads * c.q_blocks() * c.k_blocks()));
  std::fill(o_.begin(), o_.end(), std::byte{0xFF});  // NaN in all types: what is not written will show
  args_.map_out = map.data();
  RunOnce();
  args_.map_out = nullptr;
  result_.verdict = VerifyCase(context_, c, args_, map);
  result_.tiles = stats_.total;
  result_.computed_flops = MapFlops(c, map);
  checked_ = o_;
}

void BenchRun::Time() {
  if (last_ms_ < kShortMs) RunOnce();
  result_.times_ms.push_back(RunOnce());
  result_.tiles = stats_.total;
  result_.stages.pack_ms.push_back(stats_.pack_ms);
  result_.stages.predict_ms.push_back(stats_.predict_ms);
  result_.stages.schedule_ms.push_back(stats_.schedule_ms);
  result_.stages.kernel_ms.push_back(stats_.kernel_ms);
}

void BenchRun::CheckSteady() { result_.steady = o_ == checked_; }

}  // namespace sparge::cli

// bench_verify.cc - chooses rows, computes them by the reference, judges the error.
#include "cli/bench_verify.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <span>

#include "cli/bench_data.h"
#include "cli/metrics.h"

namespace sparge::cli {
namespace {

// The contract of each precision, for scores of deviation 1 or so: docs/numerics.md, "Tolerances in the tests".
constexpr double kBoundFp32 = 1e-5, kBoundInt16 = 1e-3, kBoundInt8 = 3e-2;
// Half a unit in the last place of the output's type, relative.
constexpr double kRoundFp16 = 0x1p-11, kRoundBf16 = 0x1p-8;
// What --pv-skip leaves out weighs e^-skip of the row's largest weight per key, and some 20 such keys count.
constexpr double kSkippedKeys = 20;
// Rows differ in their error; one that is this many times worse than all may be is wrong, not unlucky.
constexpr double kRowFactor = 5;

// Rows of a group have the tiles of one map row, so the group must divide the block; and the reference converts all
// keys and values once per group, which for 32 rows is little beside the rest.
constexpr int64_t kGroupRows = 32;
static_assert(SPARGE_BLOCK_Q % kGroupRows == 0);
constexpr int64_t kFewestGroups = 4;
// Per case: about 0.2 s of the reference on one core.
constexpr int64_t kMultiplyAdds = 200'000'000;

struct Group {
  int64_t head, first, count;
};

std::vector<Group> ChooseGroups(const BenchCase& c) {
  const int64_t per_head = (c.queries + kGroupRows - 1) / kGroupRows;
  const int64_t all = per_head * c.heads;
  const int64_t wanted = std::max(kFewestGroups, kMultiplyAdds / (2 * c.dim * c.tokens * kGroupRows));
  std::vector<int64_t> order(static_cast<size_t>(all));
  std::iota(order.begin(), order.end(), 0);
  if (wanted < all) {
    std::mt19937_64 random(c.seed);
    std::swap(order[1], order.back());  // the first and the last group stay in front: edges fail first
    std::shuffle(order.begin() + 2, order.end(), random);
    order.resize(static_cast<size_t>(wanted));
  }
  std::vector<Group> groups;
  for (const int64_t index : order) {
    const int64_t first = index % per_head * kGroupRows;
    groups.push_back({index / per_head, first, std::min(kGroupRows, c.queries - first)});
  }
  return groups;
}

// The view from one head and token on.
sparge_tensor From(sparge_tensor tensor, int64_t head, int64_t token) {
  const auto skipped = static_cast<size_t>(head * tensor.head_stride + token * tensor.token_stride);
  tensor.data = static_cast<std::byte*>(tensor.data) + skipped * ElementBytes(tensor.dtype);
  return tensor;
}

// The rows of a group as a problem of its own, with the tiles that were computed for them.
std::vector<float> ReferenceRows(const Context& context, const BenchCase& c, const RunArgs& args,
                                 const std::vector<uint8_t>& map, const Group& group) {
  PlanDesc desc = DescribeCase(c);
  desc.q_heads = desc.kv_heads = 1;
  desc.q_tokens = group.count;
  desc.select = SPARGE_SELECT_MAP;
  if (c.causal) desc.query_offset = c.tokens - c.queries + group.first;
  const int64_t kv_head = group.head / (c.heads / c.kv_heads);
  std::vector<float> o(static_cast<size_t>(group.count * c.dim));
  RunArgs part;
  part.q = From(args.q, group.head, group.first);
  part.k = From(args.k, kv_head, 0);
  part.v = From(args.v, kv_head, 0);
  part.o = ViewHeads(o.data(), SPARGE_F32, 1, group.count, c.dim);
  part.map = map.data() + (group.head * c.q_blocks() + group.first / SPARGE_BLOCK_Q) * c.k_blocks();
  Plan(context, desc).Reference(part);
  return o;
}

std::vector<float> ResultRows(const BenchCase& c, const RunArgs& args, const Group& group) {
  std::vector<float> o(static_cast<size_t>(group.count * c.dim));
  ConvertRows(From(args.o, group.head, group.first), {o.data(), SPARGE_F32, 0, 0, c.dim}, group.count, c.dim);
  return o;
}

struct RowError {
  double error = 0, size = 0;
};

RowError CompareRow(std::span<const float> result, std::span<const float> reference) {
  RowError row;
  for (size_t i = 0; i < result.size(); ++i) {
    row.error += std::abs(static_cast<double>(result[i]) - reference[i]);
    row.size += std::abs(static_cast<double>(reference[i]));
  }
  return row;
}

// NaN if a row has one.
double WorstRow(const std::vector<RowError>& rows) {
  double mean = 0;
  for (const RowError& row : rows) mean += row.size / static_cast<double>(rows.size());
  double worst = 0;
  for (const RowError& row : rows) {
    const double ratio = row.error == 0 ? 0 : row.error / std::max(row.size, mean);
    if (!(ratio <= worst)) worst = ratio;
    if (std::isnan(worst)) break;
  }
  return worst;
}

}  // namespace

double ErrorBound(const BenchCase& c) {
  const double own = c.precision == SPARGE_PRECISION_FP32    ? kBoundFp32
                     : c.precision == SPARGE_PRECISION_INT16 ? kBoundInt16
                                                             : kBoundInt8;
  const double output = c.dtype == SPARGE_F16 ? kRoundFp16 : c.dtype == SPARGE_BF16 ? kRoundBf16 : 0;
  return own + output + kSkippedKeys * std::exp(-c.pv_skip);
}

Verdict VerifyCase(const Context& context, const BenchCase& c, const RunArgs& args, const std::vector<uint8_t>& map) {
  Verdict verdict;
  verdict.rows = c.heads * c.queries;
  ErrorTotals sums;
  std::vector<RowError> rows;
  for (const Group& group : ChooseGroups(c)) {
    const std::vector<float> want = ReferenceRows(context, c, args, map, group);
    const std::vector<float> have = ResultRows(c, args, group);
    sums.Add(have, want);
    for (int64_t i = 0; i < group.count; ++i) {
      const auto at = static_cast<size_t>(i * c.dim), size = static_cast<size_t>(c.dim);
      rows.push_back(CompareRow(std::span(have).subspan(at, size), std::span(want).subspan(at, size)));
    }
  }
  verdict.rows_checked = static_cast<int64_t>(rows.size());
  verdict.relative_l1 = sums.RelativeL1();
  verdict.bound = ErrorBound(c);
  verdict.worst_row = WorstRow(rows);
  verdict.row_bound = kRowFactor * verdict.bound;
  verdict.passed = verdict.relative_l1 <= verdict.bound && verdict.worst_row <= verdict.row_bound;  // NaN fails
  return verdict;
}

}  // namespace sparge::cli

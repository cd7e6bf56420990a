// bench_case.cc - names, plan and operation count of a case.
#include "cli/bench_case.h"

#include <algorithm>
#include <charconv>

namespace sparge::cli {
namespace {

// QK and PV: a multiply-add per channel each, for every pair.
double FlopsOf(const BenchCase& c, int64_t pairs) { return 4.0 * static_cast<double>(pairs * c.dim); }

}  // namespace

std::string NumberText(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

int64_t BenchCase::VisibleKeys(int64_t query) const {
  return causal ? std::clamp<int64_t>(query + tokens - queries + 1, 0, tokens) : tokens;
}

const char* NameOf(sparge_precision precision) {
  return precision == SPARGE_PRECISION_FP32 ? "fp32" : precision == SPARGE_PRECISION_INT16 ? "int16" : "int8";
}

const char* NameOf(sparge_dtype dtype) { return dtype == SPARGE_F32 ? "fp32" : dtype == SPARGE_F16 ? "fp16" : "bf16"; }

const char* NameOf(BenchSelect select) {
  switch (select) {
    case BenchSelect::kDense:
      return "dense";
    case BenchSelect::kCdf:
      return "cdf";
    case BenchSelect::kTopk:
      return "topk";
    case BenchSelect::kRandom:
      return "random";
  }
  return "";
}

const char* NameOf(BenchData data) { return data == BenchData::kNoise ? "noise" : "local"; }

std::string SelectText(const BenchCase& c) {
  std::string text = NameOf(c.select);
  if (c.select != BenchSelect::kDense) text.append(" ").append(NumberText(c.share));
  return text;
}

PlanDesc DescribeCase(const BenchCase& c) {
  PlanDesc desc;
  desc.batch = 1;
  desc.q_heads = c.heads;
  desc.kv_heads = c.kv_heads;
  desc.q_tokens = c.queries;
  desc.kv_tokens = c.tokens;
  desc.qk_dim = desc.v_dim = c.dim;
  desc.causal = c.causal ? 1 : 0;
  desc.precision = c.precision;
  desc.params.pv_skip = c.pv_skip;
  switch (c.select) {
    case BenchSelect::kDense:
      desc.select = SPARGE_SELECT_ALL;
      break;
    case BenchSelect::kCdf:
      desc.select = SPARGE_SELECT_CDF;
      desc.params.tau = c.share;
      break;
    case BenchSelect::kTopk:
      desc.select = SPARGE_SELECT_TOPK;
      desc.params.topk = c.share;
      break;
    case BenchSelect::kRandom:
      desc.select = SPARGE_SELECT_MAP;
      break;
  }
  return desc;
}

double DenseFlops(const BenchCase& c) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < c.queries; ++i) pairs += c.VisibleKeys(i);
  return FlopsOf(c, pairs * c.heads);
}

double MapFlops(const BenchCase& c, const std::vector<uint8_t>& map) {
  int64_t pairs = 0;
  for (int64_t row = 0; row < c.heads * c.q_blocks(); ++row) {
    const uint8_t* tiles = map.data() + row * c.k_blocks();
    const int64_t first = row % c.q_blocks() * SPARGE_BLOCK_Q;
    const int64_t last = std::min(first + SPARGE_BLOCK_Q, c.queries);
    for (int64_t block = 0; block < c.k_blocks(); ++block) {
      if (tiles[block] == 0) continue;
      for (int64_t i = first; i < last; ++i) {
        pairs += std::clamp<int64_t>(c.VisibleKeys(i) - block * SPARGE_BLOCK_K, 0, SPARGE_BLOCK_K);
      }
    }
  }
  return FlopsOf(c, pairs);
}

}  // namespace sparge::cli

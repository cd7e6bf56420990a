// bench_case.h - one case of `sparge bench`: shape, data and method, how much arithmetic it is.
#ifndef SPARGE_CLI_BENCH_CASE_H_
#define SPARGE_CLI_BENCH_CASE_H_

#include <cstdint>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

namespace sparge::cli {

enum class BenchSelect { kDense, kCdf, kTopk, kRandom };
enum class BenchData { kNoise, kLocal };

struct BenchCase {
  int64_t tokens = 0;   // keys and values
  int64_t queries = 0;  // the last ones of these tokens
  int64_t dim = 0, heads = 1, kv_heads = 1;
  bool causal = false;
  sparge_dtype dtype = SPARGE_F32;  // of q, k, v and o
  sparge_precision precision = SPARGE_PRECISION_INT8;
  BenchSelect select = BenchSelect::kDense;
  double share = 1;  // cdf: tau; topk and random: share of the visible tiles of a row
  double pv_skip = SPARGE_PV_SKIP_OFF;
  BenchData data = BenchData::kNoise;
  uint64_t seed = 1;
  int32_t threads = 1;

  int64_t q_blocks() const { return (queries + SPARGE_BLOCK_Q - 1) / SPARGE_BLOCK_Q; }
  int64_t k_blocks() const { return (tokens + SPARGE_BLOCK_K - 1) / SPARGE_BLOCK_K; }
  // Keys that this query sees: all, or those up to its own position.
  int64_t VisibleKeys(int64_t query) const;
};

const char* NameOf(sparge_precision precision);  // "fp32", "int16", "int8"
const char* NameOf(sparge_dtype dtype);          // "fp32", "fp16", "bf16"
const char* NameOf(BenchSelect select);          // "dense", "cdf", "topk", "random"
const char* NameOf(BenchData data);              // "noise", "local"
std::string SelectText(const BenchCase& c);      // "dense", "cdf 0.98", "random 0.1"

// As short as it can be and still be read back as the same number.
std::string NumberText(double value);

PlanDesc DescribeCase(const BenchCase& c);

// Floating-point operations of QK and PV, 2 per multiply-add, over pairs of a query and a key that it sees: all such
// pairs, or those in tiles of `map` (heads x q_blocks x k_blocks).
double DenseFlops(const BenchCase& c);
double MapFlops(const BenchCase& c, const std::vector<uint8_t>& map);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_CASE_H_

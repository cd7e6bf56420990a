// bench_data.h - made-up tensors and block maps for `sparge bench`: the same for the same case and seed, whatever
// other cases there are.
#ifndef SPARGE_CLI_BENCH_DATA_H_
#define SPARGE_CLI_BENCH_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/bench_case.h"

namespace sparge::cli {

// Contiguous (heads, tokens, dim) tensors of the case's type.
struct BenchInputs {
  std::vector<std::byte> q, k, v;
};
BenchInputs MakeInputs(const BenchCase& c);

// For BenchSelect::kRandom, (heads, q_blocks, k_blocks): each row keeps a random choice of its visible tiles, as many
// as the share says, but one at least. Empty for other cases.
std::vector<uint8_t> MakeRandomMap(const BenchCase& c);

size_t ElementBytes(sparge_dtype dtype);
// Rows of `dim` elements from one type to another, rounded as the library rounds its outputs.
void ConvertRows(const sparge_tensor& from, const sparge_tensor& to, int64_t rows, int64_t dim);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_DATA_H_

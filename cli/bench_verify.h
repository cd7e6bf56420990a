// bench_verify.h - is the result of a case right? Compares it with the library's double-precision reference.
#ifndef SPARGE_CLI_BENCH_VERIFY_H_
#define SPARGE_CLI_BENCH_VERIFY_H_

#include <cstdint>
#include <vector>

#include "cli/bench_case.h"

namespace sparge::cli {

struct Verdict {
  double relative_l1 = 0, bound = 0;    // over all checked rows: sum |o - ref| / sum |ref|
  double worst_row = 0, row_bound = 0;  // of one row, against its own size or the mean one, whichever is larger
  int64_t rows_checked = 0, rows = 0;   // a row is one query of one head
  bool passed = false;
};

// Relative L1 that the result of this case may have (docs/numerics.md).
double ErrorBound(const BenchCase& c);

// `args` has q, k, v and the result o; `map` are the tiles that were computed (map_out). The reference is slow, so of
// large cases it checks groups of rows chosen by the seed, the first and the last among them.
Verdict VerifyCase(const Context& context, const BenchCase& c, const RunArgs& args, const std::vector<uint8_t>& map);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_VERIFY_H_

// bench_decode.h - `sparge bench --decode`: what one token of an answer costs, from the tensors and from packed keys.
#ifndef SPARGE_CLI_BENCH_DECODE_H_
#define SPARGE_CLI_BENCH_DECODE_H_

#include "cli/bench_options.h"

namespace sparge::cli {

// Prints a table or JSON; returns the exit code.
int BenchDecode(const BenchOptions& options);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_BENCH_DECODE_H_

// One head of one sample in full: dense, sparse without and with PV skip, and what lies between them.
#ifndef SPARGE_SRC_TUNE_VERIFY_H_
#define SPARGE_SRC_TUNE_VERIFY_H_

#include <sparge/sparge.h>

#include <cstdint>
#include <vector>

#include "src/tune/sample.h"

namespace sparge::impl {

// Time that attention took, and of it that of dense int8 runs: the unit of work is a dense int8 tile.
struct Spent {
  double ms = 0;
  double int8_dense_ms = 0, int8_dense_tiles = 0;
};

// Reference all zero: 0 if the result is too, else infinity. NaN in either makes it NaN: a broken result must not look
// good.
double RelativeError(sparge_measure measure, const std::vector<float>& result, const std::vector<float>& reference);

// One setting on one sample.
struct HeadErrors {
  double error = 0, pv_error = 0;  // without and with PV skip, against dense of the same precision
  double sparsity = 0, work = 1;
};

class HeadVerifier {
 public:
  HeadVerifier(Runner& runner, const TuneSample& sample, const Asked& asked, sparge_measure measure, Spent& spent)
      : runner_(runner), sample_(sample), asked_(asked), measure_(measure), spent_(spent) {}

  // `dense` is the result of RunDense in the precision of the setting, kept by the caller: filled if it is empty.
  HeadErrors Verify(int64_t head, const sparge_tuned_head& setting, std::vector<float>& dense) const;
  std::vector<float> RunDense(int64_t head, sparge_precision precision) const;

 private:
  // `slice` with the result in `o`.
  void Run(Asked slice, std::vector<float>& o, sparge_head_stats* stats) const;

  Runner& runner_;
  const TuneSample& sample_;
  const Asked& asked_;
  const sparge_measure measure_;
  Spent& spent_;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_TUNE_VERIFY_H_

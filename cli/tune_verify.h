// tune_verify.h - one head of one sample in full: dense, sparse without and with PV skip, and what lies between them.
#ifndef SPARGE_CLI_TUNE_VERIFY_H_
#define SPARGE_CLI_TUNE_VERIFY_H_

#include <cstdint>
#include <sparge/sparge.hpp>
#include <vector>

#include "cli/metrics.h"
#include "cli/problem.h"
#include "io/preset.h"

namespace sparge::cli {

// Tiles of 128 queries x 64 keys that one head sees.
int64_t VisibleTiles(const Problem& problem);

// Time that the library spent, and the work it did in it: the unit is a dense int8 tile.
struct Spent {
  double ms = 0;
  double int8_dense_ms = 0, int8_dense_tiles = 0;  // of dense int8 runs only
};

// Errors of one setting on one sample.
struct HeadErrors {
  ErrorSums l1, l2;  // without and with PV skip, against dense of the same precision
  sparge_head_stats stats = {};
};

// Dense results of one head, one per batch entry: kept between the settings that are tried.
struct DenseResults {
  sparge_precision precision = SPARGE_PRECISION_INT8;
  std::vector<std::vector<float>> o;
};

class HeadVerifier {
 public:
  HeadVerifier(const Context& context, const Problem& problem, Spent& spent)
      : context_(context), problem_(problem), spent_(spent) {}

  // `dense` is filled if it is empty or of another precision.
  HeadErrors Verify(int64_t head, const io::PresetHead& setting, DenseResults& dense) const;
  void RunDense(int64_t head, sparge_precision precision, DenseResults& dense) const;

 private:
  std::vector<float> Run(int64_t batch, int64_t head, const PlanDesc& desc, sparge_head_stats* stats) const;

  const Context& context_;
  const Problem& problem_;
  Spent& spent_;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_TUNE_VERIFY_H_

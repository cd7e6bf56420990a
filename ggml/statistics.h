// statistics.h - the table that SPARGE_STATS asks for.
#ifndef SPARGE_GGML_STATISTICS_H_
#define SPARGE_GGML_STATISTICS_H_

#include <string>
#include <vector>

#include "ggml/layers.h"

namespace sparge::ggml {

struct LayerReport {
  std::string name;
  Totals totals;
  std::vector<double> errors, limits, rounding;  // estimates: of heads that skip (two), of all measured
};

// `where`: "stderr", or the path of a file that is written anew. A file that cannot be written is said on stderr.
void PrintStatistics(const std::string& where, const char* isa, int threads, std::vector<LayerReport> layers);

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_STATISTICS_H_

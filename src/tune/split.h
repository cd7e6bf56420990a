// Which samples of a layer are tuned on, and which are verified.
#ifndef SPARGE_SRC_TUNE_SPLIT_H_
#define SPARGE_SRC_TUNE_SPLIT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sparge::impl {

// Indices, ascending. Those held out are verified and not tuned on; a single sample serves both.
struct SampleSplit {
  std::vector<size_t> tuning, verified, held_out;
};

// Held out: none of 1, one of up to 4, a quarter of more, at most 3. Verified: these and others, 2 and a quarter of
// all. Which ones depends on seed and name of the layer.
SampleSplit SplitSamples(size_t count, const std::string& name, uint64_t seed);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_TUNE_SPLIT_H_

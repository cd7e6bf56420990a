// captures.h - recorded tensors of a model: captures/LAYER/SAMPLE.safetensors, found and checked before long work.
#ifndef SPARGE_CLI_CAPTURES_H_
#define SPARGE_CLI_CAPTURES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace sparge::cli {

struct Sample {
  std::string name;  // of the file, without its ending
  std::string path;
  int64_t tiles = 0;     // that one head sees, over the batch; set by CheckCaptures
  int64_t q_tokens = 0;  // over the batch; set by CheckCaptures
};

struct LayerCaptures {
  std::string name;
  std::vector<Sample> samples;  // sorted by name
  // The same in all samples; set by CheckCaptures.
  int64_t q_heads = 0, kv_heads = 0, qk_dim = 0, v_dim = 0;
  bool causal = false;
};

struct Captures {
  std::vector<LayerCaptures> layers;  // sorted by name
  std::string assumed;                // what was made of a path that is no folder of layers; empty if it is one
};

// `path` is a folder of layers; or a folder of samples or one sample, whose layer is named after the folder. Throws
// UsageError for anything else, and names the file or folder that is in the way.
Captures FindCaptures(const std::string& path);

// Reads every file once. Throws UsageError if one is broken, has values that are not finite, or differs from the first
// sample of its layer in more than length. Returns a digest of all names, shapes, values and metadata.
std::string CheckCaptures(Captures& captures);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CAPTURES_H_

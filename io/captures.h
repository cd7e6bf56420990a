// captures.h - recorded tensors of a model: captures/LAYER/SAMPLE.safetensors, found and checked before long work.
#ifndef SPARGE_IO_CAPTURES_H_
#define SPARGE_IO_CAPTURES_H_

#include <cstdint>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

namespace sparge::io {

// One file: what a layer was asked once.
struct Capture {
  std::string name;  // of the file, without its ending
  std::string path;
  PlanDesc desc;  // set by CheckCaptures
};

struct LayerCaptures {
  std::string name;
  std::vector<Capture> captures;  // sorted by name
};

struct Captures {
  std::vector<LayerCaptures> layers;  // sorted by name
  std::string assumed;                // what was made of a path that is no folder of layers; empty if it is one
};

// The folder that a capture lies in, which is its layer.
std::string LayerOf(const std::string& file);

// `path` is a folder of layers; or a folder of captures or one capture, whose layer is named after the folder. Throws
// Error for anything else, and names the file or folder that is in the way.
Captures FindCaptures(const std::string& path);

// Reads every file once. Throws Error if one is broken, has values that are not finite, or differs from the first
// capture of its layer in more than length. Returns a digest of all names, shapes, values and metadata.
std::string CheckCaptures(Captures& captures);

}  // namespace sparge::io
#endif  // SPARGE_IO_CAPTURES_H_

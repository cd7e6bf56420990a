// captures.h - recorded calls of a model: captures/LAYER/SAMPLE.safetensors, or in memory; found and checked before
// long work.
#ifndef SPARGE_IO_CAPTURES_H_
#define SPARGE_IO_CAPTURES_H_

#include <memory>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "io/call.h"

namespace sparge::io {

// What a layer was asked once.
struct Capture {
  std::string name;                          // of the file, without its ending
  std::string path;                          // also what messages call it
  PlanDesc desc;                             // set by CheckCaptures
  std::shared_ptr<const RecordedCall> call;  // in memory; else it is read from its file
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

// Adds a call that was recorded in memory, where its file would stand. Throws Error if it is there already.
void AddCapture(const std::string& layer, const std::string& name, RecordedCall call, Captures& captures);

// Reads every file once. Throws Error if one is broken, has values that are not finite, or differs from the first
// capture of its layer in more than length. Returns a digest of all names, shapes, values and metadata.
std::string CheckCaptures(Captures& captures);

}  // namespace sparge::io
#endif  // SPARGE_IO_CAPTURES_H_

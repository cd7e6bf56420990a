// outputs.h - output files: refused before the work begins, written together after all of it succeeded.
#ifndef SPARGE_CLI_OUTPUTS_H_
#define SPARGE_CLI_OUTPUTS_H_

#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "io/atomic_file.h"
#include "io/tensor.h"

namespace sparge::cli {

// Throws UsageError if an output has an unknown ending, cannot hold q's type, has no place to be written, or would
// overwrite an input or another output.
void CheckOutputs(const Options& options, io::DType q_dtype);

class Outputs {
 public:
  // Writes beside the final place; `path` decides the format, `name` is the tensor's name in a .safetensors file.
  void Add(const std::string& flag, const std::string& path, const std::string& name, const io::Tensor& tensor);
  // Puts all files in their places.
  void Commit();

 private:
  std::vector<std::unique_ptr<io::AtomicFile>> files_;
};

// Two names of one file, whether it exists or not.
bool SameFile(const std::string& a, const std::string& b);

// Writes `text` to stdout; throws if it did not get there (full disk, closed pipe).
void PrintOut(const std::string& text);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_OUTPUTS_H_

// outputs.h - output files: refused before the work begins, written together after all of it succeeded.
#ifndef SPARGE_CLI_OUTPUTS_H_
#define SPARGE_CLI_OUTPUTS_H_

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cli/options.h"
#include "io/atomic_file.h"
#include "io/tensor.h"

namespace sparge::cli {

// A file, and the flag that messages name it by; "" for one that was found in a folder.
struct NamedFile {
  std::string flag, path;
};

// The files that `options` name as inputs.
std::vector<NamedFile> NamedInputs(const Options& options);

// Throws UsageError if one of `outputs` has no place to be written, or is one file with an input or another output,
// however the two are spelled.
void CheckPlaces(const std::vector<NamedFile>& outputs, const std::vector<NamedFile>& inputs);

// For tensors: also if one has an unknown ending, or cannot hold q's type.
void CheckOutputs(const Options& options, io::DType q_dtype);

// All files of a verb. Errors name the flag.
class Outputs {
 public:
  // Writes beside the final place; `path` decides the format, `name` is the tensor's name in a .safetensors file.
  void Add(const std::string& flag, const std::string& path, const std::string& name, const io::Tensor& tensor);
  void Add(const std::string& flag, const std::string& path, std::span<const std::byte> bytes);
  void MakeFolder(const std::string& flag, const std::string& path);
  // Puts all files in their places, then calls `say`, which tells the user. If one of these fails, nothing has
  // happened.
  void Commit(const std::function<void()>& say) { files_.Commit(say); }

 private:
  io::AtomicFiles files_;
};

// Writes `text` to stdout; throws if it did not get there (full disk, closed pipe).
void PrintOut(const std::string& text);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_OUTPUTS_H_

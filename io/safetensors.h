// safetensors.h - .safetensors files: named tensors and a map of metadata strings.
#ifndef SPARGE_IO_SAFETENSORS_H_
#define SPARGE_IO_SAFETENSORS_H_

#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/atomic_file.h"
#include "io/tensor.h"

namespace sparge::io {

using Metadata = std::map<std::string, std::string>;

// A file held in memory, its header checked: every tensor lies inside the file and has the size that its shape says.
class Safetensors {
 public:
  // `name` is what messages call the file. Both throw Error.
  static Safetensors Parse(std::vector<std::byte> file, std::string name);
  static Safetensors Read(const std::string& path);

  bool Has(const std::string& tensor) const { return entries_.contains(tensor); }
  std::vector<std::string> Names() const;  // sorted
  // A copy. Throws Error if there is no such tensor, or if it has a type that Tensor does not know.
  Tensor Get(const std::string& tensor) const;
  const Metadata& metadata() const { return metadata_; }

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    size_t begin = 0;  // bytes from the start of the file
    size_t end = 0;
  };
  struct Builder;  // JSON stays out of this header

  std::string name_;
  std::vector<std::byte> file_;
  std::map<std::string, Entry> entries_;
  Metadata metadata_;
};

struct NamedTensor {
  std::string name;
  const Tensor* tensor;
};

// The second form leaves the commit to the caller.
void WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors, const Metadata& metadata = {});
void WriteSafetensors(AtomicFile& file, std::span<const NamedTensor> tensors, const Metadata& metadata = {});

}  // namespace sparge::io
#endif  // SPARGE_IO_SAFETENSORS_H_

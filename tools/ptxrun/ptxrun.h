// Runs kernels that nvcc compiled to PTX, on the host, and checks what they do. README.md says what is modelled.
#ifndef SPARGE_TOOLS_PTXRUN_PTXRUN_H_
#define SPARGE_TOOLS_PTXRUN_PTXRUN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/ptxrun/fault.h"
#include "tools/ptxrun/memory.h"
#include "tools/ptxrun/syntax.h"

namespace ptxrun {

struct Options {
  uint32_t seed = 0;              // of the errors of approximations, and of the order of blocks; 0: exact, in order
  bool may_be_undefined = false;  // reads of memory that nothing wrote give poison instead of a fault
  bool count_banks = true;
  int threads = 1;                     // of the host, each with a block of its own
  uint64_t max_steps = 1'000'000'000;  // of one warp, after which a loop counts as endless
  // Bits of the fraction that an accumulator of an 8-bit floating-point mma keeps; 23: all.
  int fp8_fraction_bits = 23;
};

struct LaunchShape {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;  // beyond what the kernel declares
};

struct Statistics {
  uint64_t instructions = 0;                   // of warps
  std::map<std::string, uint64_t> per_opcode;  // with modifiers
  uint64_t bank_passes = 0, least_passes = 0;  // of shared memory; equal: no conflicts
  std::map<int, uint64_t> conflicts_per_line;  // passes that a better layout would save
  std::vector<uint64_t> per_instruction;

  void Add(const Statistics& other);
};

struct Program;

class Kernel {
 public:
  explicit Kernel(std::shared_ptr<const Program> program) : program_(std::move(program)) {}

  const std::string& name() const;
  uint32_t static_shared() const;
  uint32_t local_bytes() const;
  size_t param_count() const;
  uint32_t param_bytes(size_t index) const;
  uint32_t param_offset(size_t index) const;
  uint32_t param_buffer_bytes() const;

  // `params`: as the kernel sees them, at param_offset. Throws Fault, which names the kernel, line, block and warp.
  Statistics Run(const LaunchShape& shape, const std::vector<uint8_t>& params, Memory& memory,
                 const Options& options) const;

 private:
  std::shared_ptr<const Program> program_;
};

// A module in memory: its global variables take room there.
class Module {
 public:
  Module(std::string_view text, Memory& memory);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Throws SyntaxError if the kernel uses what the interpreter does not know, Fault if there is none of that name.
  Kernel Find(const std::string& name);
  std::vector<std::string> names() const;
  int target() const { return syntax_.target; }
  // Address and size of a global variable; nullptr: none of that name.
  struct Global {
    uint64_t address, bytes;
  };
  const Global* FindGlobal(const std::string& name) const;

 private:
  Memory& memory_;
  Syntax syntax_;
  std::map<std::string, Global> globals_;
  std::map<std::string, std::shared_ptr<const Program>> programs_;
};

// Parameters one after the other, each at its natural alignment, as a kernel has them.
class Params {
 public:
  template <typename T>
  Params& Add(const T& value) {
    bytes_.resize((bytes_.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof(T));
    return *this;
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace ptxrun
#endif  // SPARGE_TOOLS_PTXRUN_PTXRUN_H_

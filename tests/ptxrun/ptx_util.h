// Kernels as text, run on vectors: for the tests of the interpreter.
#ifndef SPARGE_TESTS_PTXRUN_PTX_UTIL_H_
#define SPARGE_TESTS_PTXRUN_PTX_UTIL_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/ptxrun/ptxrun.h"

namespace ptxrun::testing {

// A kernel `k` with pointers as parameters, which arrive in %p0, %p1, ... Registers %r<40> (32 bits), %h<8> (16),
// %d<12> (64), %f<24>, %e<8> (f64) and %q<8> (predicates); %lane is the thread, %at four times it, both 64 bits in
// %at8.
inline std::string KernelText(int pointers, const std::string& body, int target = 89,
                              const std::string& variables = {}) {
  std::string text =
      ".version 9.0\n.target sm_" + std::to_string(target) + "\n.address_size 64\n" + variables + ".visible .entry k(";
  for (int i = 0; i < pointers; ++i) text += std::string(i == 0 ? "" : ", ") + ".param .u64 p" + std::to_string(i);
  text +=
      ")\n{\n.reg .b64 %p<8>; .reg .b32 %r<40>; .reg .b16 %h<8>; .reg .b64 %d<12>; .reg .f32 %f<24>;\n"
      ".reg .f64 %e<8>; .reg .pred %q<8>; .reg .b32 %lane; .reg .b64 %at4; .reg .b64 %at8;\n"
      "mov.u32 %lane, %tid.x; mul.wide.u32 %at4, %lane, 4; mul.wide.u32 %at8, %lane, 8;\n";
  for (int i = 0; i < pointers; ++i) {
    const std::string n = std::to_string(i);
    text += "ld.param.u64 %p" + n + ", [p" + n + "]; cvta.to.global.u64 %p" + n + ", %p" + n + ";\n";
  }
  return text + body + "\nret;\n}\n";
}

// Vectors in device memory, in the order of the kernel's pointers.
class Machine {
 public:
  template <typename T>
  Machine& In(const std::vector<T>& values) {
    const uint64_t address = memory.Allocate(values.size() * sizeof(T));
    memory.Write(address, values.data(), values.size() * sizeof(T));
    return Pointer(address);
  }
  Machine& Room(uint64_t bytes) { return Pointer(memory.Allocate(bytes)); }
  Machine& Pointer(uint64_t address) {
    addresses.push_back(address);
    params.Add(address);
    return *this;
  }
  template <typename T>
  std::vector<T> Out(size_t index, size_t count) const {
    std::vector<T> values(count);
    memory.Read(addresses[index], values.data(), count * sizeof(T));
    return values;
  }
  Statistics Run(const std::string& text) {
    Module module(text, memory);
    return module.Find("k").Run(shape, params.bytes(), memory, options);
  }

  Memory memory;
  LaunchShape shape{.grid = {1, 1, 1}, .block = {32, 1, 1}, .shared_bytes = 0};
  Options options;
  std::vector<uint64_t> addresses;
  Params params;
};

// What a run fails with; empty if it does not.
inline std::string FaultOf(Machine& machine, const std::string& text) {
  try {
    machine.Run(text);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// The 32 results of `body`, which leaves them in %r0, for the vectors a (in %r1), b (%r2) and c (%r3).
inline std::vector<uint32_t> Results(const std::string& body, const std::vector<uint32_t>& a,
                                     const std::vector<uint32_t>& b = std::vector<uint32_t>(32),
                                     const std::vector<uint32_t>& c = std::vector<uint32_t>(32), uint32_t seed = 0) {
  std::string text;
  for (int i = 1; i <= 3; ++i) {
    const std::string n = std::to_string(i);
    text += "add.u64 %d" + n + ", %p" + n + ", %at4; ld.global.u32 %r" + n + ", [%d" + n + "]; mov.b32 %f" + n +
            ", %r" + n + ";\n";
  }
  text += body + "\nadd.u64 %d0, %p0, %at4; st.global.u32 [%d0], %r0;";
  Machine machine;
  machine.options.seed = seed;
  machine.Room(128).In(a).In(b).In(c);
  machine.Run(KernelText(4, text));
  return machine.Out<uint32_t>(0, 32);
}

}  // namespace ptxrun::testing
#endif  // SPARGE_TESTS_PTXRUN_PTX_UTIL_H_

// loaded_call.h - from options and files to a call of the library: tensors, plan descriptor, run arguments.
#ifndef SPARGE_CLI_LOADED_CALL_H_
#define SPARGE_CLI_LOADED_CALL_H_

#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "cli/options.h"
#include "io/safetensors.h"
#include "io/tensor.h"

namespace sparge::cli {

// Parameters of each query head, and where they come from (choice.h).
struct PerHead {
  std::vector<sparge_head_params> params;
  std::vector<sparge_precision> precision;
  std::string preset, layer;            // from a file; or, if empty, from the layer of the library that ran:
  std::vector<HeadEstimate> estimates;  // empty if it had nothing to choose
  int64_t calls = 0;                    // of the layer, the last of which counts
};

// --select auto: how exactly is left to a layer of the library.
struct Automatic {
  LayerDesc layer;
  std::optional<int64_t> warm;  // calls before the one that counts; else as many as it takes (Runner)
};

// Owns the inputs; `args` points into them (moving keeps the pointers, copying would not).
struct LoadedCall {
  LoadedCall() = default;
  LoadedCall(LoadedCall&&) = default;
  LoadedCall& operator=(LoadedCall&&) = default;

  io::Tensor q, k;
  std::optional<io::Tensor> v, mask, map;
  io::Metadata metadata;           // of a .safetensors input
  std::vector<std::string> notes;  // what was taken from the metadata, for the user
  std::optional<TokenGrid> grid;
  std::optional<Automatic> automatic;
  std::optional<PerHead> per_head;  // of a preset; or, once `automatic` has run, what it chose
  PlanDesc desc;                    // what is asked and, unless `automatic`, how exactly
  RunArgs args;                     // inputs only: no o, lse, map_out, statistics

  // `desc`, with what `automatic` chose. Points into `per_head`.
  PlanDesc InForce() const;
  size_t rank() const { return q.shape.size(); }
  int64_t q_blocks() const { return (desc.q_tokens + SPARGE_BLOCK_Q - 1) / SPARGE_BLOCK_Q; }
  int64_t k_blocks() const { return (desc.kv_tokens + SPARGE_BLOCK_K - 1) / SPARGE_BLOCK_K; }
};

// One query head of one batch entry with its key/value head, as a call of its own. Points into the LoadedCall.
struct HeadCall {
  PlanDesc asked;  // LoadedCall::desc
  PlanDesc desc;   // LoadedCall::InForce
  RunArgs args;
};

// Reads `tensors` (a .safetensors file), or options.q, .k and .v if it is empty. Throws UsageError.
LoadedCall LoadCall(Verb verb, const Options& options, const std::string& tensors);
HeadCall SliceHead(const LoadedCall& call, int64_t batch, int64_t head);

// Switches PV skip off for all heads of `desc`, which then points into the result.
std::vector<sparge_head_params> SwitchSkipOff(PlanDesc& desc);

// Of a map file: (H, Tq, Tk), with the batch in front if q has one.
std::vector<int64_t> MapShape(const LoadedCall& call);

// View of a contiguous (batch, heads, tokens, dim) output; the second form makes `values` large enough.
sparge_tensor OutputView(io::Tensor& tensor, const PlanDesc& desc);
sparge_tensor OutputView(std::vector<float>& values, const PlanDesc& desc);

// The *.safetensors files under the given files and folders, sorted within each. Throws UsageError if there is none.
std::vector<std::string> FindTensorFiles(const std::vector<std::string>& paths);
// What a verb that TakesPaths goes through; "" stands for the .npy files of the options.
std::vector<std::string> InputFiles(const Options& options);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_LOADED_CALL_H_

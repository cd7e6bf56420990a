// call.h - q, k and v from files as a call of the library: shapes that belong together, and what metadata say of it.
#ifndef SPARGE_IO_CALL_H_
#define SPARGE_IO_CALL_H_

#include <sparge/sparge.h>

#include <optional>
#include <sparge/sparge.hpp>
#include <string>

#include "io/safetensors.h"
#include "io/tensor.h"

namespace sparge::io {

// What messages call the tensors.
struct TensorLabels {
  std::string q, k, v;
};

// The library wants a pointer even where there is nothing to read.
const void* DataOf(const Tensor& tensor);

// Sets shapes and inputs: (N,D), (H,N,D) or (B,H,N,D). `v` may be NULL: then it counts as k's shape. `args` points into
// the tensors. Throws Error if they do not belong together.
void DescribeTensors(const Tensor& q, const Tensor& k, const Tensor* v, const TensorLabels& labels,
                     sparge_plan_desc& desc, sparge_run_args& args);

// What the metadata of a file say; nothing where they do not. Throw Error, which names `path` and the value.
std::optional<bool> CausalOf(const Metadata& metadata, const std::string& path);
std::optional<double> ScaleOf(const Metadata& metadata, const std::string& path);

// A recorded call: captures/LAYER/SAMPLE.safetensors. Owns its tensors; `args` points into them (moving keeps the
// pointers, copying would not).
struct RecordedCall {
  RecordedCall() = default;
  RecordedCall(RecordedCall&&) = default;
  RecordedCall& operator=(RecordedCall&&) = default;

  Tensor q, k, v;
  Metadata metadata;
  PlanDesc desc;
  RunArgs args;
};

// As its metadata ask: `causal`, `scale`, and `grid` with `text_tokens` unless something keeps the tokens in their
// order. `name` is what messages call it. Throws Error.
RecordedCall MakeCall(Tensor q, Tensor k, Tensor v, Metadata metadata, const std::string& name);
RecordedCall ReadCall(const std::string& path);

}  // namespace sparge::io
#endif  // SPARGE_IO_CALL_H_

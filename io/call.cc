// call.cc - checks shapes against one another and describes them to the library.
#include "io/call.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "io/grid.h"

namespace sparge::io {
namespace {

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

sparge_dtype FloatType(const Tensor& tensor, const std::string& label) {
  switch (tensor.dtype) {
    case DType::F32:
      return SPARGE_F32;
    case DType::F16:
      return SPARGE_F16;
    case DType::BF16:
      return SPARGE_BF16;
    default:
      throw Error(label, std::string("dtype ") + DTypeName(tensor.dtype) + " is not a floating-point type");
  }
}

// q, k or v with missing leading dimensions filled in.
struct Dims {
  int64_t batch = 1, heads = 1, tokens = 0, dim = 0;
};

Dims LiftShape(const Tensor& tensor, const std::string& label) {
  const std::vector<int64_t>& shape = tensor.shape;
  const std::string which = "shape " + ShapeText(shape);
  if (shape.size() < 2 || shape.size() > 4) throw Error(label, which + " is not (N,D), (H,N,D) or (B,H,N,D)");
  Dims dims;
  dims.dim = shape[shape.size() - 1];
  dims.tokens = shape[shape.size() - 2];
  if (shape.size() > 2) dims.heads = shape[shape.size() - 3];
  if (shape.size() > 3) dims.batch = shape[0];
  if (dims.dim < 1 || dims.dim > SPARGE_MAX_HEAD_DIM) {
    throw Error(label, which + ": head size must be from 1 to " + std::to_string(SPARGE_MAX_HEAD_DIM));
  }
  if (dims.tokens > kMostTokens) throw Error(label, which + ": more than " + std::to_string(kMostTokens) + " tokens");
  if (dims.heads < 1 || dims.batch < 1) throw Error(label, which + ": batch and heads must be at least 1");
  return dims;
}

sparge_tensor InputView(const Tensor& tensor, const std::string& label, const Dims& dims) {
  return ViewHeads(DataOf(tensor), FloatType(tensor, label), dims.heads, dims.tokens, dims.dim);
}

// A file's grid is a default: it gives way to what it cannot be combined with.
void TakeGrid(const std::string& path, RecordedCall& call) {
  const auto grid = call.metadata.find("grid");
  if (grid == call.metadata.end()) return;
  const GridSides sides = ParseGrid(path + ": metadata 'grid'", grid->second);
  TextTokens text;
  const auto found = call.metadata.find("text_tokens");
  if (found != call.metadata.end()) text = ParseTextTokens(path + ": metadata 'text_tokens'", found->second);
  if (!OrderObstacle(call.desc).empty()) return;
  const std::string misfit = GridMisfit(sides, text, call.desc);
  if (!misfit.empty()) throw Error(path, "metadata " + misfit);
  TakeGridOrder(sides, text, call.desc);
}

}  // namespace

const void* DataOf(const Tensor& tensor) {
  static const double nothing = 0;
  return tensor.data.empty() ? static_cast<const void*>(&nothing) : tensor.data.data();
}

void DescribeTensors(const Tensor& q, const Tensor& k, const Tensor* v, const TensorLabels& labels,
                     sparge_plan_desc& desc, sparge_run_args& args) {
  const Dims q_dims = LiftShape(q, labels.q);
  const Dims k_dims = LiftShape(k, labels.k);
  const Dims v_dims = v != nullptr ? LiftShape(*v, labels.v) : k_dims;
  const std::string q_and_k = "q " + ShapeText(q.shape) + " and k " + ShapeText(k.shape);
  if (q.shape.size() != k.shape.size()) throw Error(labels.k, "number of dimensions differs: " + q_and_k);
  if (q_dims.batch != k_dims.batch) throw Error(labels.k, "batch differs: " + q_and_k);
  if (q_dims.dim != k_dims.dim) throw Error(labels.k, "head size differs: " + q_and_k);
  if (q_dims.heads % k_dims.heads != 0) {
    throw Error(labels.k, "heads of q are no multiple of heads of k: " + q_and_k);
  }
  if (v != nullptr) {
    if (v->shape.size() != k.shape.size() || k_dims.batch != v_dims.batch || k_dims.heads != v_dims.heads ||
        k_dims.tokens != v_dims.tokens) {
      throw Error(labels.v,
                  "all but the head size must be equal: k " + ShapeText(k.shape) + " and v " + ShapeText(v->shape));
    }
    args.v = InputView(*v, labels.v, v_dims);
  }
  args.q = InputView(q, labels.q, q_dims);
  args.k = InputView(k, labels.k, k_dims);
  desc.batch = q_dims.batch;
  desc.q_heads = q_dims.heads;
  desc.kv_heads = k_dims.heads;
  desc.q_tokens = q_dims.tokens;
  desc.kv_tokens = k_dims.tokens;
  desc.qk_dim = q_dims.dim;
  desc.v_dim = v_dims.dim;
}

std::optional<bool> CausalOf(const Metadata& metadata, const std::string& path) {
  const auto found = metadata.find("causal");
  if (found == metadata.end()) return std::nullopt;
  if (found->second == "true") return true;
  if (found->second == "false") return false;
  throw Error(path, "metadata 'causal' is " + Quoted(found->second) + ", must be 'true' or 'false'");
}

std::optional<double> ScaleOf(const Metadata& metadata, const std::string& path) {
  const auto found = metadata.find("scale");
  if (found == metadata.end()) return std::nullopt;
  const std::string& text = found->second;
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || stop != text.data() + text.size() || !std::isfinite(value) || value == 0) {
    throw Error(path, "metadata 'scale' is " + Quoted(text) + ", must be a finite number other than 0");
  }
  return value;
}

RecordedCall MakeCall(Tensor q, Tensor k, Tensor v, Metadata metadata, const std::string& name) {
  RecordedCall call;
  call.q = std::move(q);
  call.k = std::move(k);
  call.v = std::move(v);
  call.metadata = std::move(metadata);
  const TensorLabels labels = {name + ": tensor q", name + ": tensor k", name + ": tensor v"};
  DescribeTensors(call.q, call.k, &call.v, labels, call.desc, call.args);
  call.desc.causal = CausalOf(call.metadata, name).value_or(false) ? 1 : 0;
  call.desc.scale = ScaleOf(call.metadata, name).value_or(0.0);
  TakeGrid(name, call);
  return call;
}

RecordedCall ReadCall(const std::string& path) {
  const Safetensors file = Safetensors::Read(path);
  return MakeCall(file.Get("q"), file.Get("k"), file.Get("v"), file.metadata(), path);
}

}  // namespace sparge::io

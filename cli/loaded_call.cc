// loaded_call.cc - reads the inputs, and describes them and what the flags say to the library.
#include "cli/loaded_call.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <span>

#include "io/call.h"
#include "io/npy.h"
#include "io/preset.h"

namespace sparge::cli {
namespace {

using io::DataOf;
using io::DType;
using io::Quoted;
using io::ShapeText;
using io::Tensor;

// Names the flag in front of what the file reader says.
Tensor ReadNpyFor(const std::string& flag, const std::string& path) {
  try {
    return io::ReadNpy(path);
  } catch (const io::Error& error) {
    throw UsageError(flag + " " + error.what());
  }
}

void ReadTensors(Verb verb, const Options& options, const std::string& path, LoadedCall& call,
                 io::TensorLabels& labels) {
  if (path.empty()) {
    call.q = ReadNpyFor("--q", options.q);
    call.k = ReadNpyFor("--k", options.k);
    if (!options.v.empty()) call.v = ReadNpyFor("--v", options.v);
    labels = {"--q " + options.q, "--k " + options.k, "--v " + options.v};
    return;
  }
  const io::Safetensors file = io::Safetensors::Read(path);
  call.q = file.Get("q");
  call.k = file.Get("k");
  if (verb != Verb::kMap || file.Has("v")) call.v = file.Get("v");
  call.metadata = file.metadata();
  labels = {path + ": tensor q", path + ": tensor k", path + ": tensor v"};
}

// What the metadata of a capture say; a flag goes before them.
void TakeMetadata(const Options& options, const std::string& path, LoadedCall& call) {
  call.desc.causal = options.causal;
  call.desc.scale = options.scale.value_or(0.0);
  const std::optional<bool> causal = options.causal ? std::nullopt : io::CausalOf(call.metadata, path);
  if (causal) {
    call.desc.causal = *causal;
    call.notes.push_back("causal " + call.metadata.at("causal"));
  }
  const std::optional<double> scale = options.scale ? std::nullopt : io::ScaleOf(call.metadata, path);
  if (scale) {
    call.desc.scale = *scale;
    call.notes.push_back("scale " + call.metadata.at("scale"));
  }
}

void DescribeAttention(const Options& options, const std::string& path, LoadedCall& call) {
  TakeMetadata(options, path, call);
  PlanDesc& desc = call.desc;
  desc.window = options.window.value_or(0);
  if (options.query_offset && desc.causal == 0 && desc.window == 0) {
    throw UsageError("--query-offset " + std::to_string(*options.query_offset) +
                     " has no meaning without --causal or --window");
  }
  if (options.query_offset) desc.query_offset = *options.query_offset;
}

sparge_precision PrecisionOf(const Options& options, sparge_precision usual) {
  for (const sparge_precision precision : {SPARGE_PRECISION_FP32, SPARGE_PRECISION_INT16, SPARGE_PRECISION_INT8}) {
    if (options.precision && *options.precision == io::PrecisionName(precision)) return precision;
  }
  return usual;
}

Automatic DescribeLayer(const Options& options) {
  Automatic automatic;
  LayerDesc& layer = automatic.layer;
  if (options.target_l1) layer.target_l1 = *options.target_l1;
  if (options.target_l2) layer.target_l2 = *options.target_l2;
  if (options.pv_l1) layer.pv_l1 = *options.pv_l1;
  if (options.pv_l2) layer.pv_l2 = *options.pv_l2;
  if (options.round_l1) layer.round_l1 = *options.round_l1;
  layer.seed = static_cast<uint64_t>(options.seed.value_or(0));
  // What SPARGE_PRECISION_AUTO means, said outright because reports tell it.
  layer.precision = PrecisionOf(options, BoundsOf(layer).target == 0 ? SPARGE_PRECISION_FP32 : PlanDesc().precision);
  layer.keep_keys = 0;  // the same call again is not the next part of a prompt
  automatic.warm = options.warm;
  return automatic;
}

void DescribeSparsity(const Options& options, LoadedCall& call) {
  PlanDesc& desc = call.desc;
  const std::string select = SelectionOf(options).name;
  if (options.sink) desc.keep_sink = *options.sink ? 1 : 0;
  if (select == "auto") {
    if (options.preset.empty()) call.automatic = DescribeLayer(options);
    return;
  }
  desc.precision = PrecisionOf(options, desc.precision);
  desc.select = select == "all"     ? SPARGE_SELECT_ALL
                : select == "topk"  ? SPARGE_SELECT_TOPK
                : select == "map"   ? SPARGE_SELECT_MAP
                : select == "floor" ? SPARGE_SELECT_FLOOR
                                    : SPARGE_SELECT_CDF;
  if (options.predictor) desc.predictor = *options.predictor == "paper" ? SPARGE_PREDICT_PAPER : SPARGE_PREDICT_KEYS;
  if (options.tau) desc.params.tau = *options.tau;
  if (options.topk) desc.params.topk = *options.topk;
  if (options.theta) desc.params.theta = *options.theta;
  if (options.pv_skip) desc.params.pv_skip = *options.pv_skip;
}

// The library broadcasts by stride 0, except along keys, where the stride is 1: such a mask is written out.
Tensor WidenKeys(const Tensor& mask, int64_t keys) {
  std::vector<int64_t> shape = mask.shape;
  shape.back() = keys;
  Tensor wide = io::MakeTensor(mask.dtype, std::move(shape));
  const size_t size = io::ElementSize(mask.dtype);
  for (size_t at = 0; at < wide.data.size(); at += size) {
    const size_t row = at / size / static_cast<size_t>(keys);
    std::memcpy(wide.data.data() + at, mask.data.data() + row * size, size);
  }
  return wide;
}

void AttachMask(const Options& options, LoadedCall& call) {
  if (options.mask.empty()) return;
  Tensor mask = ReadNpyFor("--mask", options.mask);
  PlanDesc& desc = call.desc;
  const int64_t wanted[] = {desc.batch, desc.q_heads, desc.q_tokens, desc.kv_tokens};
  const size_t rank = mask.shape.size();
  const std::span<const int64_t> full = std::span(wanted).last(std::clamp<size_t>(rank, 2, 4));
  bool fits = rank >= 2 && rank <= 4;
  for (size_t i = 0; fits && i < rank; ++i) fits = mask.shape[i] == full[i] || mask.shape[i] == 1;
  if (!fits) {
    throw UsageError("--mask " + options.mask + ": shape " + ShapeText(mask.shape) + " does not broadcast to " +
                     ShapeText(full) + " (batch, heads, queries, keys, as far as given)");
  }
  if (mask.shape.back() != desc.kv_tokens) mask = WidenKeys(mask, desc.kv_tokens);
  desc.mask = mask.dtype == DType::F32   ? SPARGE_MASK_ADD_F32
              : mask.dtype == DType::F16 ? SPARGE_MASK_ADD_F16
                                         : SPARGE_MASK_BOOL;
  // Strides from the inside out; a dimension of 1 that stands for several gets 0.
  int64_t strides[4] = {0, 0, 0, 1};
  int64_t step = desc.kv_tokens;
  for (size_t i = rank - 1; i-- > 0;) {
    const size_t dim = 4 - rank + i;
    strides[dim] = mask.shape[i] == 1 ? 0 : step;
    step *= mask.shape[i];
  }
  call.mask = std::move(mask);
  call.args.mask = {DataOf(*call.mask), strides[0], strides[1], strides[2]};
}

void AttachMap(const Options& options, LoadedCall& call) {
  if (options.map.empty()) return;
  Tensor map = ReadNpyFor("--map", options.map);
  const std::string which = "--map " + options.map + ": ";
  if (map.dtype != DType::U8 && map.dtype != DType::BOOL) {
    throw UsageError(which + "dtype " + io::DTypeName(map.dtype) + " is neither uint8 nor bool");
  }
  const PlanDesc& desc = call.desc;
  const std::vector<int64_t> full = {desc.batch, desc.q_heads, call.q_blocks(), call.k_blocks()};
  const std::vector<int64_t> one(full.begin() + 1, full.end());
  if (map.shape != full && map.shape != one) {
    throw UsageError(which + "shape " + ShapeText(map.shape) + " must be " + ShapeText(one) + " or " + ShapeText(full) +
                     ": tiles of " + std::to_string(SPARGE_BLOCK_Q) + " queries x " + std::to_string(SPARGE_BLOCK_K) +
                     " keys");
  }
  call.args.map_head_stride = full[2] * full[3];
  call.args.map_batch_stride = map.shape == full ? full[1] * full[2] * full[3] : 0;
  call.map = std::move(map);
  call.args.map = static_cast<const uint8_t*>(DataOf(*call.map));
}

const void* Advance(const void* data, int64_t elements, size_t element_size) {
  return static_cast<const std::byte*>(data) + elements * static_cast<int64_t>(element_size);
}

sparge_tensor SliceTensor(const sparge_tensor& view, int64_t batch, int64_t head) {
  sparge_tensor slice = view;
  const size_t size = view.dtype == SPARGE_F32 ? 4 : 2;
  slice.data = const_cast<void*>(Advance(view.data, batch * view.batch_stride + head * view.head_stride, size));
  slice.batch_stride = slice.head_stride = view.token_stride;  // one of each: never stepped
  return slice;
}

}  // namespace

LoadedCall LoadCall(Verb verb, const Options& options, const std::string& tensors) {
  LoadedCall call;
  io::TensorLabels labels;
  try {
    ReadTensors(verb, options, tensors, call, labels);
  } catch (const io::Error& error) {
    throw UsageError(std::string(tensors == options.tensors ? "--tensors " : "") + error.what());
  }
  io::DescribeTensors(call.q, call.k, call.v ? &*call.v : nullptr, labels, call.desc, call.args);
  DescribeAttention(options, tensors, call);
  DescribeSparsity(options, call);
  AttachMask(options, call);
  call.grid = TakeGrid(options.grid, call.metadata, tensors, call.desc, call.notes);
  AttachMap(options, call);
  if (call.automatic && !call.v) {
    throw UsageError((tensors.empty() ? "--v is missing: " : tensors + ": has no tensor v: ") +
                     SelectionOf(options).flag +
                     " measures errors on the result; --tau X selects by predicted mass, without values");
  }
  return call;
}

PlanDesc LoadedCall::InForce() const {
  PlanDesc chosen = desc;
  if (!automatic || !per_head) return chosen;
  const auto sparse = [](const sparge_head_params& head) { return head.tau < 1; };
  chosen.precision = static_cast<sparge_precision>(automatic->layer.precision);
  // The rule of SELECT_AUTO.
  const bool any = std::any_of(per_head->params.begin(), per_head->params.end(), sparse);
  chosen.select = any ? SPARGE_SELECT_FLOOR : SPARGE_SELECT_ALL;
  chosen.heads = per_head->params.data();
  chosen.head_precision = per_head->precision.data();
  return chosen;
}

HeadCall SliceHead(const LoadedCall& call, int64_t batch, int64_t head) {
  HeadCall slice{call.desc, call.InForce(), call.args};
  const int64_t kv_head = head / (call.desc.q_heads / call.desc.kv_heads);
  for (PlanDesc* desc : {&slice.asked, &slice.desc}) {
    desc->batch = desc->q_heads = desc->kv_heads = 1;
    if (desc->heads != nullptr) desc->heads += head;
    if (desc->head_precision != nullptr) desc->head_precision += head;
  }
  slice.args.q = SliceTensor(call.args.q, batch, head);
  slice.args.k = SliceTensor(call.args.k, batch, kv_head);
  if (call.v) slice.args.v = SliceTensor(call.args.v, batch, kv_head);
  if (call.mask) {
    const sparge_mask& mask = call.args.mask;
    const int64_t offset = batch * mask.batch_stride + head * mask.head_stride;
    slice.args.mask = {Advance(mask.data, offset, io::ElementSize(call.mask->dtype)), 0, 0, mask.query_stride};
  }
  if (call.map) {
    slice.args.map = call.args.map + batch * call.args.map_batch_stride + head * call.args.map_head_stride;
    slice.args.map_batch_stride = slice.args.map_head_stride = 0;
  }
  return slice;
}

std::vector<sparge_head_params> SwitchSkipOff(PlanDesc& desc) {
  std::vector<sparge_head_params> heads(static_cast<size_t>(desc.q_heads), desc.params);
  if (desc.heads != nullptr) std::copy_n(desc.heads, desc.q_heads, heads.begin());
  for (sparge_head_params& head : heads) head.pv_skip = SPARGE_PV_SKIP_OFF;
  desc.heads = heads.data();
  return heads;
}

std::vector<int64_t> MapShape(const LoadedCall& call) {
  std::vector<int64_t> shape = {call.desc.q_heads, call.q_blocks(), call.k_blocks()};
  if (call.rank() == 4) shape.insert(shape.begin(), call.desc.batch);
  return shape;
}

sparge_tensor OutputView(io::Tensor& tensor, const PlanDesc& desc) {
  const sparge_dtype dtype = tensor.dtype == DType::F32   ? SPARGE_F32
                             : tensor.dtype == DType::F16 ? SPARGE_F16
                                                          : SPARGE_BF16;
  return ViewHeads(DataOf(tensor), dtype, desc.q_heads, desc.q_tokens, desc.v_dim);
}

sparge_tensor OutputView(std::vector<float>& values, const PlanDesc& desc) {
  const int64_t count = desc.batch * desc.q_heads * desc.q_tokens * desc.v_dim;
  values.resize(static_cast<size_t>(std::max<int64_t>(count, 1)));
  return ViewHeads(values.data(), SPARGE_F32, desc.q_heads, desc.q_tokens, desc.v_dim);
}

std::vector<std::string> FindTensorFiles(const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    std::vector<std::string> found;
    for (fs::recursive_directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      if (it->path().extension() == ".safetensors" && it->is_regular_file(error)) found.push_back(it->path().string());
    }
    if (error) throw UsageError(path + ": cannot be searched: " + error.message());
    if (found.empty()) throw UsageError(path + ": no .safetensors files in this folder");
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

std::vector<std::string> InputFiles(const Options& options) {
  if (!options.paths.empty()) return FindTensorFiles(options.paths);
  return {options.tensors};
}

}  // namespace sparge::cli

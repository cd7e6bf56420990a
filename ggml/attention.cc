#include "ggml/attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "ggml/statistics.h"
#include "ggml/usage.h"

namespace sparge::ggml {
namespace {

class Stopwatch {
 public:
  double Ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The threads of ggml itself: they spin for a while after their work, and would compete with those of another pool.
void RunOnOpenMp(void*, int32_t workers, sparge_task task, void* arg) {
#pragma omp parallel for num_threads(workers) schedule(static, 1)
  for (int32_t w = 0; w < workers; ++w) task(arg, w);
}

std::optional<sparge_dtype> DtypeOf(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return SPARGE_F32;
    case GGML_TYPE_F16:
      return SPARGE_F16;
    case GGML_TYPE_BF16:
      return SPARGE_BF16;
    default:
      return std::nullopt;
  }
}

bool CanConvert(ggml_type type) { return ggml_get_type_traits(type)->to_float != nullptr; }

// Rows without gaps, and the other strides whole elements.
bool CanRead(const ggml_tensor* t) {
  const size_t size = ggml_type_size(t->type);
  return t->nb[0] == size && std::all_of(t->nb + 1, t->nb + 4, [&](size_t stride) { return stride % size == 0; }) &&
         (DtypeOf(t->type) || CanConvert(t->type));
}

sparge_tensor View(const ggml_tensor* t, sparge_dtype dtype) {
  const auto stride = [&](int i) { return static_cast<int64_t>(t->nb[i] / t->nb[0]); };
  return {t->data, dtype, stride(3), stride(2), stride(1)};
}

// ggml's slope of a head: mask values are multiplied by it.
float SlopeOf(int64_t head, int64_t heads, float max_bias) {
  if (max_bias <= 0) return 1;
  const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(static_cast<float>(heads))));
  const auto base = [&](float bias) { return std::pow(2.0f, -bias / static_cast<float>(power)); };
  return head < power ? std::pow(base(max_bias), static_cast<float>(head + 1))
                      : std::pow(base(max_bias / 2), static_cast<float>(2 * (head - power) + 1));
}

PlanDesc Describe(const Operands& op) {
  PlanDesc desc;
  desc.batch = op.streams();
  desc.q_heads = op.heads();
  desc.kv_heads = op.k->ne[2];
  desc.q_tokens = op.queries();
  desc.kv_tokens = op.keys();
  desc.qk_dim = op.k->ne[0];
  desc.v_dim = op.v->ne[0];
  desc.scale = op.scale;
  desc.softcap = op.softcap;
  if (op.sinks != nullptr) desc.sink_logits = static_cast<const float*>(op.sinks->data);
  return desc;
}

// llama.cpp's caches are called cache_k_l0, cache_k_l1 and so on: "layer0". Elsewhere the operation itself has a name,
// at least the one that ggml gives to every node by its place in the graph.
std::string LayerName(const Operands& op) {
  const ggml_tensor* root = op.k;
  while (root->view_src != nullptr) root = root->view_src;
  constexpr std::string_view kCache = "cache_k_l";
  const std::string_view name = root->name;
  return name.starts_with(kCache) ? "layer" + std::string(name.substr(kCache.size())) : op.out->name;
}

}  // namespace

Operands::Operands(const ggml_tensor* op)
    : q(op->src[0]),
      k(op->src[1]),
      v(op->src[2]),
      mask(op->src[3]),
      sinks(op->src[4]),
      out(const_cast<ggml_tensor*>(op)) {
  std::memcpy(&scale, op->op_params, sizeof(float));
  std::memcpy(&max_bias, op->op_params + 1, sizeof(float));
  std::memcpy(&softcap, op->op_params + 2, sizeof(float));
}

bool CanCompute(const Operands& op) {
  const bool types = op.q->type == GGML_TYPE_F32 && op.out->type == GGML_TYPE_F32 && CanRead(op.q) && CanRead(op.k) &&
                     CanRead(op.v) && op.out->nb[0] == sizeof(float);
  const bool shapes = op.q->ne[0] == op.k->ne[0] && op.k->ne[1] == op.v->ne[1] && op.k->ne[2] == op.v->ne[2] &&
                      op.q->ne[3] == op.k->ne[3] && op.q->ne[3] == op.v->ne[3] && op.heads() % op.k->ne[2] == 0 &&
                      op.k->ne[0] <= SPARGE_MAX_HEAD_DIM && op.v->ne[0] <= SPARGE_MAX_HEAD_DIM;
  const bool mask = op.mask == nullptr || (op.mask->type == GGML_TYPE_F16 && op.mask->nb[0] == sizeof(uint16_t) &&
                                           op.mask->ne[0] >= op.keys() && op.mask->ne[1] >= op.queries() &&
                                           op.heads() % op.mask->ne[2] == 0 && op.streams() % op.mask->ne[3] == 0);
  // A scale of 0 means another one to the library.
  return types && shapes && mask && op.scale != 0 && (op.sinks == nullptr || op.sinks->type == GGML_TYPE_F32);
}

bool CanDecode(const Operands& op) {
  return DtypeOf(op.k->type) && DtypeOf(op.v->type) && op.streams() == 1 && op.max_bias == 0;
}

Attention::Attention(Settings settings) : settings_(std::move(settings)) { SetThreads(1); }

Attention::~Attention() {
  for (const auto& [key, layer] : layers_) NoteTiles(layer.Sums());
  if (!settings_.stats.empty()) WriteStatistics();
}

void Attention::SetThreads(int threads) {
  threads = std::max(threads, 1);
  if (threads == threads_) return;
  threads_ = threads;
  context_ = std::make_unique<Context>(sparge_executor{sizeof(sparge_executor), nullptr, threads, RunOnOpenMp});
}

ModelLayer& Attention::LayerOf(const Operands& op) {
  const std::string name = LayerName(op);
  const Key key{name, {op.heads(), op.k->ne[2], op.k->ne[0], op.v->ne[0]}};
  return layers_.try_emplace(key, settings_, name).first->second;
}

// The first `tokens` tokens of keys or values as a type that the library reads.
sparge_tensor Attention::Floats(const ggml_tensor* tensor, int64_t tokens, std::vector<float>& converted) {
  if (const auto dtype = DtypeOf(tensor->type)) return View(tensor, *dtype);
  const int64_t dim = tensor->ne[0];
  const int64_t planes = tensor->ne[2] * tensor->ne[3];
  converted.resize(static_cast<size_t>(planes * tokens * dim));
  const ggml_to_float_t to_float = ggml_get_type_traits(tensor->type)->to_float;
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (int64_t row = 0; row < planes * tokens; ++row) {
    const int64_t plane = row / tokens;
    const char* from = static_cast<const char*>(tensor->data) + plane / tensor->ne[2] * tensor->nb[3] +
                       plane % tensor->ne[2] * tensor->nb[2] + row % tokens * tensor->nb[1];
    to_float(from, converted.data() + row * dim, dim);
  }
  return ViewHeads(converted.data(), SPARGE_F32, tensor->ne[2], tokens, dim);
}

// All heads and streams in one run: one mask for all heads, or a rule of positions.
void Attention::ComputeTogether(const Operands& op, const MaskShape& shape, ModelLayer& layer, RunArgs& args) {
  PlanDesc desc = Describe(op);
  if (shape.positional) {
    desc.kv_tokens = shape.keys;
    desc.causal = shape.causal;
    if (shape.causal) desc.query_offset = shape.query_offset;
    desc.window = shape.window;
    if (shape.distances) {
      slopes_.clear();
      for (int64_t h = 0; h < op.heads(); ++h) slopes_.push_back(SlopeOf(h, op.heads(), op.max_bias));
      desc.alibi_slopes = slopes_.data();
    }
  } else {
    desc.mask = SPARGE_MASK_ADD_F16;
    const auto stride = [&](int i) { return static_cast<int64_t>(op.mask->nb[i] / sizeof(uint16_t)); };
    args.mask = {op.mask->data, op.mask->ne[3] > 1 ? stride(3) : 0, op.mask->ne[2] > 1 ? stride(2) : 0, stride(1)};
  }
  layer.Run(*context_, desc, args);
}

// What one run cannot say: a mask times the slope of each head, or masks that some heads or streams share. Every tile.
void Attention::ComputeByHead(const Operands& op, ModelLayer& layer, const RunArgs& args) {
  const int64_t rows = op.queries();
  const int64_t keys = op.keys();
  mask_.resize(static_cast<size_t>(rows * keys));
  for (int64_t i = 0; i < op.streams() * op.heads(); ++i) {
    const int64_t stream = i / op.heads();
    const int64_t head = i % op.heads();
    const int64_t kv_head = head / (op.heads() / op.k->ne[2]);
    const float slope = SlopeOf(head, op.heads(), op.max_bias);
    const char* from = static_cast<const char*>(op.mask->data) + stream % op.mask->ne[3] * op.mask->nb[3] +
                       head % op.mask->ne[2] * op.mask->nb[2];
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const auto* values = reinterpret_cast<const ggml_fp16_t*>(from + row * op.mask->nb[1]);
      for (int64_t j = 0; j < keys; ++j) mask_[row * keys + j] = slope * ggml_fp16_to_fp32(values[j]);
    }
    PlanDesc desc = Describe(op);
    desc.batch = desc.q_heads = desc.kv_heads = 1;
    if (op.sinks != nullptr) desc.sink_logits += head;
    desc.mask = SPARGE_MASK_ADD_F32;
    RunArgs one = args;
    const auto move = [&](sparge_tensor& tensor, size_t bytes, int64_t at) {
      tensor.data = static_cast<char*>(tensor.data) +
                    static_cast<int64_t>(bytes) * (stream * tensor.batch_stride + at * tensor.head_stride);
    };
    const auto bytes = [](const sparge_tensor& tensor) { return tensor.dtype == SPARGE_F32 ? size_t{4} : size_t{2}; };
    move(one.q, bytes(one.q), head);
    move(one.k, bytes(one.k), kv_head);
    move(one.v, bytes(one.v), kv_head);
    move(one.o, bytes(one.o), head);
    one.mask = {mask_.data(), 0, 0, keys};
    layer.RunOneHead(*context_, desc, one);
  }
}

void Attention::Compute(const Operands& op) {
  const Stopwatch watch;
  ModelLayer& layer = LayerOf(op);
  const bool shared = op.mask != nullptr && ((op.mask->ne[2] > 1 && op.mask->ne[2] != op.heads()) ||
                                             (op.mask->ne[3] > 1 && op.mask->ne[3] != op.streams()));
  const MaskShape shape = FindMaskShape(op.mask, op.queries(), op.keys(), threads_);
  const bool by_head =
      !shape.positional && (shared || (op.max_bias > 0 && !HidesOnly(op.mask, op.queries(), threads_)));
  layer.times.mask_ms += watch.Ms();

  const Stopwatch conversion;
  const int64_t keys = shape.positional ? shape.keys : op.keys();
  RunArgs args;
  args.q = View(op.q, SPARGE_F32);
  args.k = Floats(op.k, keys, keys_);
  args.v = Floats(op.v, keys, values_);
  const auto stride = [&](int i) { return static_cast<int64_t>(op.out->nb[i] / sizeof(float)); };
  args.o = {op.out->data, SPARGE_F32, stride(3), stride(1), stride(2)};  // dim, heads, tokens, streams
  layer.times.convert_ms += conversion.Ms();

  if (by_head) {
    ComputeByHead(op, layer, args);
  } else {
    ComputeTogether(op, shape, layer, args);
  }
  ++layer.times.calls;
  const double ms = watch.Ms();
  layer.times.total_ms += ms;
  NoteComputed(op.queries(), ms);
}

void Attention::WriteStatistics() const {
  std::vector<LayerReport> report;
  for (const auto& [key, layer] : layers_) {
    LayerReport& line = report.emplace_back(LayerReport{layer.name(), layer.Sums(), {}, {}, {}});
    for (const HeadEstimate& head : layer.Estimates()) {
      line.rounding.push_back(head.round_l1);
      if (head.state != SPARGE_HEAD_SPARSE) continue;
      line.errors.push_back(head.pv_error);
      line.limits.push_back(head.limit);
    }
  }
  PrintStatistics(settings_.stats, context_->isa(), threads_, std::move(report));
}

}  // namespace sparge::ggml

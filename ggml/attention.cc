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

namespace sparge::ggml {
namespace {

// Whoever asks at the end of a prompt, asks in its last queries: they see every key (see dense_tail in sparge.h). A
// prompt comes in batches of equal size, and the smaller one after them is its end.
constexpr int64_t kDenseTail = SPARGE_BLOCK_Q;

// A prompt comes in small batches against ever more keys, and each part of it is another text. The few per cent of a
// call that runs sample by themselves would be too little of so small calls: the choice would come late, and be of the
// parts before. So many keys of a dense call are spent instead, that is the same time in every batch, which is much of
// the early and cheap ones, within these shares. docs/ggml.md has what that does.
constexpr double kSampledKeys = 1536;
constexpr double kLeastEffort = 0.125;
constexpr double kMostEffort = 0.5;

// Room for keys in a layer's cache, at first; doubled when there are more.
constexpr int64_t kFirstRoom = 2048;

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

// Every tile, no skipping.
void ChooseDense(sparge_precision precision, PlanDesc& desc) {
  desc.select = SPARGE_SELECT_ALL;
  desc.precision = precision;
  desc.params.pv_skip = SPARGE_PV_SKIP_OFF;
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

// By the name that statistics have, or by that of PyTorch's module, which is what captures from Python are called.
const io::PresetLayer& FindPresetLayer(const io::Preset& preset, const std::string& path, const std::string& name) {
  constexpr std::string_view kLayer = "layer";
  const std::string module = "model.layers." + name.substr(std::min(kLayer.size(), name.size())) + ".self_attn";
  const bool by_module = name.starts_with(kLayer) && !preset.layers.contains(name) && preset.layers.contains(module);
  return io::FindLayer(preset, by_module ? module : name, path);
}

void CheckFits(const io::PresetLayer& layer, const PlanDesc& desc, const std::string& name) {
  const auto check = [&](const char* field, int64_t has, int64_t wants) {
    if (has != wants) {
      throw std::runtime_error("preset, layer " + name + ": " + field + "=" + std::to_string(has) + ", the model has " +
                               std::to_string(wants));
    }
  };
  check("q_heads", layer.q_heads, desc.q_heads);
  check("kv_heads", layer.kv_heads, desc.kv_heads);
  check("qk_dim", layer.qk_dim, desc.qk_dim);
  check("v_dim", layer.v_dim, desc.v_dim);
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

void Totals::Add(const Totals& other) {
  calls += other.calls;
  mask_ms += other.mask_ms;
  convert_ms += other.convert_ms;
  pack_ms += other.pack_ms;
  key_blocks += other.key_blocks;
  key_blocks_reused += other.key_blocks_reused;
  calibrate_ms += other.calibrate_ms;
  total_ms += other.total_ms;
  tiles.qk_eligible += other.tiles.qk_eligible;
  tiles.qk_computed += other.tiles.qk_computed;
}

double Totals::Sparsity() const {
  return tiles.qk_eligible == 0 ? 0
                                : 1 - static_cast<double>(tiles.qk_computed) / static_cast<double>(tiles.qk_eligible);
}

Attention::Attention(Settings settings) : settings_(std::move(settings)) { SetThreads(1); }

Attention::~Attention() {
  if (!settings_.stats.empty()) WriteStatistics();
}

void Attention::SetThreads(int threads) {
  threads = std::max(threads, 1);
  if (threads == threads_) return;
  threads_ = threads;
  context_ = std::make_unique<Context>(sparge_executor{sizeof(sparge_executor), nullptr, threads, RunOnOpenMp});
}

Layer& Attention::LayerOf(const Operands& op) {
  const std::string name = LayerName(op);
  Layer& layer = layers_[{name, {op.heads(), op.k->ne[2], op.k->ne[0], op.v->ne[0]}}];
  layer.name = name;
  return layer;
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

// As the preset says for this layer; every tile if it does not fit.
void Attention::ChoosePreset(Layer& layer, PlanDesc& desc) {
  try {
    if (layer.preset == nullptr && !layer.refused) {
      layer.preset = &FindPresetLayer(*settings_.preset, settings_.preset_path, layer.name);
      CheckFits(*layer.preset, desc, layer.name);
    }
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "sparge: %s; this layer skips nothing\n", error.what());
    layer.preset = nullptr;
    layer.refused = true;
  }
  ChooseDense(settings_.precision, desc);
  if (layer.refused) return;
  head_params_.clear();
  head_precision_.clear();
  sparge_select select = SPARGE_SELECT_ALL;
  for (const io::PresetHead& head : layer.preset->heads) {
    head_params_.push_back(head.params);
    head_precision_.push_back(head.precision);
    if (!head.dense()) select = head.select;
  }
  desc.head_precision = head_precision_.data();
  // Other positions than those it was tuned with (image tokens of a language model), or few keys: its bits, every tile.
  // A mask that is no rule of positions may come from a causal model, too: several sequences in one batch.
  const bool other = desc.mask == SPARGE_MASK_NONE && layer.preset->causal != (desc.causal != 0);
  if (other || FewKeys(desc)) return;
  desc.select = select;
  desc.heads = head_params_.data();
  desc.predictor = settings_.preset->predictor;
}

bool Attention::FewKeys(const PlanDesc& desc) const { return desc.kv_tokens < settings_.min_tokens; }

void Attention::ChooseAuto(Layer& layer, PlanDesc& desc) {
  if (!layer.calibration) {
    CalibrationDesc bounds;
    bounds.q_heads = desc.q_heads;
    bounds.pv_l1 *= settings_.target_l1 / bounds.target_l1;
    bounds.target_l1 = settings_.target_l1;
    layer.calibration = std::make_unique<Calibration>(bounds);
  }
  desc.select = SPARGE_SELECT_AUTO;
  desc.precision = settings_.precision;
  desc.calibration = layer.calibration->get();
  if (!desc.causal) return;
  desc.least_effort = std::clamp(kSampledKeys / static_cast<double>(desc.kv_tokens), kLeastEffort, kMostEffort);
}

// Which tiles, and with how many bits.
void Attention::Choose(Layer& layer, PlanDesc& desc) {
  if (settings_.mode == Mode::kExact) return ChooseDense(SPARGE_PRECISION_FP32, desc);
  if (settings_.preset) {
    ChoosePreset(layer, desc);
  } else if (settings_.target_l1 <= 0 || FewKeys(desc)) {
    ChooseDense(settings_.precision, desc);
  } else {
    ChooseAuto(layer, desc);
  }
  layer.most_queries = std::max(layer.most_queries, desc.q_tokens);
  const bool tail = desc.causal && desc.q_tokens < layer.most_queries;
  if (tail && desc.select != SPARGE_SELECT_ALL) desc.dense_tail = kDenseTail;
}

bool Cache::Lend(const Plan& plan, RunArgs& args) {
  const size_t needed = sparge_plan_cache_size(plan.get());
  if (needed == 0) return true;
  if (size_ < needed) {
    memory_.reset();  // before the new one: never both
    size_ = 0;
    // Zeros that take no memory until they are written to: the part for int16 hardly ever is.
    memory_.reset(static_cast<std::byte*>(std::calloc(needed, 1)));
    if (!memory_) return false;
    size_ = needed;
  }
  args.cache = memory_.get();
  args.cache_size = size_;
  return true;
}

// A prompt that goes on, in all heads at once.
void Attention::UseCache(PlanDesc& desc, Layer& layer) {
  if (!desc.causal) return;
  layer.cache_tokens = std::max(layer.cache_tokens, kFirstRoom);
  while (layer.cache_tokens < desc.kv_tokens) layer.cache_tokens *= 2;
  desc.cache_tokens = layer.cache_tokens;
}

void Attention::Run(PlanDesc desc, RunArgs& args, Layer& layer) {
  std::optional<Plan> made(std::in_place, *context_, desc);
  if (!layer.cache.Lend(*made, args)) {  // no memory for it: everything is packed again
    desc.cache_tokens = 0;
    made.emplace(*context_, desc);
  }
  const Plan& plan = *made;
  if (workspace_size_ < plan.workspace_size()) {
    workspace_.reset();  // before the new one: never both
    workspace_size_ = 0;
    workspace_ = std::make_unique_for_overwrite<std::byte[]>(plan.workspace_size());
    workspace_size_ = plan.workspace_size();
  }
  args.workspace = workspace_.get();
  args.workspace_size = workspace_size_;
  Stats stats;
  args.stats = &stats;
  Check(sparge_run(plan.get(), &args));
  layer.totals.pack_ms += stats.pack_ms;
  layer.totals.key_blocks += stats.key_blocks;
  layer.totals.key_blocks_reused += stats.key_blocks_reused;
  layer.totals.calibrate_ms += stats.calibrate_ms;
  layer.totals.tiles.qk_eligible += stats.total.qk_eligible;
  layer.totals.tiles.qk_computed += stats.total.qk_computed;
}

// All heads and streams in one run: one mask for all heads, or a rule of positions.
void Attention::ComputeTogether(const Operands& op, const MaskShape& shape, Layer& layer, RunArgs& args) {
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
  Choose(layer, desc);
  UseCache(desc, layer);
  Run(desc, args, layer);
}

// What one run cannot say: a mask times the slope of each head, or masks that some heads or streams share. Every tile.
void Attention::ComputeByHead(const Operands& op, Layer& layer, const RunArgs& args) {
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
    ChooseDense(settings_.mode == Mode::kExact ? SPARGE_PRECISION_FP32 : settings_.precision, desc);
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
    Run(desc, one, layer);
  }
}

void Attention::Compute(const Operands& op) {
  const Stopwatch watch;
  Layer& layer = LayerOf(op);
  const bool shared = op.mask != nullptr && ((op.mask->ne[2] > 1 && op.mask->ne[2] != op.heads()) ||
                                             (op.mask->ne[3] > 1 && op.mask->ne[3] != op.streams()));
  const MaskShape shape = FindMaskShape(op.mask, op.queries(), op.keys(), threads_);
  const bool by_head =
      !shape.positional && (shared || (op.max_bias > 0 && !HidesOnly(op.mask, op.queries(), threads_)));
  layer.totals.mask_ms += watch.Ms();

  const Stopwatch conversion;
  const int64_t keys = shape.positional ? shape.keys : op.keys();
  RunArgs args;
  args.q = View(op.q, SPARGE_F32);
  args.k = Floats(op.k, keys, keys_);
  args.v = Floats(op.v, keys, values_);
  const auto stride = [&](int i) { return static_cast<int64_t>(op.out->nb[i] / sizeof(float)); };
  args.o = {op.out->data, SPARGE_F32, stride(3), stride(1), stride(2)};  // dim, heads, tokens, streams
  layer.totals.convert_ms += conversion.Ms();

  if (by_head) {
    ComputeByHead(op, layer, args);
  } else {
    ComputeTogether(op, shape, layer, args);
  }
  ++layer.totals.calls;
  layer.totals.total_ms += watch.Ms();
}

void Attention::WriteStatistics() const {
  std::vector<LayerReport> report;
  for (const auto& [key, layer] : layers_) {
    LayerReport& line = report.emplace_back(LayerReport{layer.name, layer.totals, {}, {}});
    for (int64_t head = 0; layer.calibration && head < key.second[0]; ++head) {
      const HeadEstimate estimate = layer.calibration->Head(head);
      if (estimate.samples == 0) continue;
      line.errors.push_back(estimate.pv_l1);
      line.rounding.push_back(estimate.round_l1);
    }
  }
  PrintStatistics(settings_.stats, context_->isa(), threads_, std::move(report));
}

}  // namespace sparge::ggml

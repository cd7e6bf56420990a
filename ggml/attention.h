// attention.h - computes ggml's FLASH_ATTN_EXT with sparge: one object per backend, one calibration per layer.
#ifndef SPARGE_GGML_ATTENTION_H_
#define SPARGE_GGML_ATTENTION_H_

#include <ggml.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "ggml/mask.h"
#include "ggml/settings.h"

namespace sparge::ggml {

// The operands of one operation, by name.
struct Operands {
  const ggml_tensor *q, *k, *v, *mask, *sinks;  // the last two may be NULL
  ggml_tensor* out;
  float scale, max_bias, softcap;

  explicit Operands(const ggml_tensor* op);
  int64_t queries() const { return q->ne[1]; }
  int64_t keys() const { return k->ne[1]; }
  int64_t heads() const { return q->ne[2]; }
  int64_t streams() const { return q->ne[3]; }
};

// Whether Attention::Compute can do it: types, shapes and strides only, for data are not there yet.
bool CanCompute(const Operands& op);

// Sums over the calls of a layer.
struct Totals {
  int64_t calls = 0;
  double mask_ms = 0, convert_ms = 0, pack_ms = 0, calibrate_ms = 0, total_ms = 0;
  int64_t key_blocks = 0, key_blocks_reused = 0;
  sparge_head_stats tiles{};

  void Add(const Totals& other);
  double Sparsity() const;
};

// A layer's keys and values as they were packed.
class Cache {
 public:
  // Memory for what the next batches will see again: more of it if that plan needs more, empty then. False: there is
  // none.
  bool Lend(const Plan& plan, RunArgs& args);

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

struct Layer {
  std::string name;
  std::unique_ptr<Calibration> calibration;  // automatic layers only
  const io::PresetLayer* preset = nullptr;   // layers of a preset only
  bool refused = false;                      // the preset does not fit
  int64_t most_queries = 0;                  // of a call so far
  Cache cache;
  int64_t cache_tokens = 0;
  Totals totals;
};

class Attention {
 public:
  explicit Attention(Settings settings);
  ~Attention();  // writes the statistics, if wanted
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  void SetThreads(int threads);
  // Throws sparge::Error.
  void Compute(const Operands& op);

 private:
  // A layer is known by its name and shape: those of a draft model may have the same names.
  using Key = std::pair<std::string, std::array<int64_t, 4>>;

  Layer& LayerOf(const Operands& op);
  sparge_tensor Floats(const ggml_tensor* tensor, int64_t tokens, std::vector<float>& converted);
  void ComputeTogether(const Operands& op, const MaskShape& shape, Layer& layer, RunArgs& args);
  void ComputeByHead(const Operands& op, Layer& layer, const RunArgs& args);
  bool FewKeys(const PlanDesc& desc) const;
  void Choose(Layer& layer, PlanDesc& desc);
  void ChoosePreset(Layer& layer, PlanDesc& desc);
  void ChooseAuto(Layer& layer, PlanDesc& desc);
  void UseCache(PlanDesc& desc, Layer& layer);
  void Run(PlanDesc desc, RunArgs& args, Layer& layer);
  void WriteStatistics() const;

  Settings settings_;
  std::unique_ptr<Context> context_;
  int threads_ = 0;
  std::map<Key, Layer> layers_;
  std::unique_ptr<std::byte[]> workspace_;
  size_t workspace_size_ = 0;
  std::vector<float> keys_, values_, mask_;  // converted
  std::vector<float> slopes_;
  std::vector<sparge_head_params> head_params_;
  std::vector<sparge_precision> head_precision_;
};

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_ATTENTION_H_

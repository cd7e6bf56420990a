// attention.h - computes ggml's FLASH_ATTN_EXT with sparge: one object per backend.
#ifndef SPARGE_GGML_ATTENTION_H_
#define SPARGE_GGML_ATTENTION_H_

#include <ggml.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <sparge/sparge.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ggml/layers.h"
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

// Whether few queries can take their keys from what was packed: those are known again in the cache itself, not in a
// copy that is converted for every call; and several streams have several caches.
bool CanDecode(const Operands& op);

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

  ModelLayer& LayerOf(const Operands& op);
  sparge_tensor Floats(const ggml_tensor* tensor, int64_t tokens, std::vector<float>& converted);
  void ComputeTogether(const Operands& op, const MaskShape& shape, ModelLayer& layer, RunArgs& args);
  void ComputeByHead(const Operands& op, ModelLayer& layer, const RunArgs& args);
  void WriteStatistics() const;

  Settings settings_;
  std::unique_ptr<Context> context_;
  int threads_ = 0;
  std::map<Key, ModelLayer> layers_;
  std::vector<float> keys_, values_, mask_;  // converted
  std::vector<float> slopes_;
};

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_ATTENTION_H_

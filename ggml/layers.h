// layers.h - the layers of a model as the library keeps them: what the environment says becomes their descriptor.
#ifndef SPARGE_GGML_LAYERS_H_
#define SPARGE_GGML_LAYERS_H_

#include <cstdint>
#include <memory>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "ggml/settings.h"

namespace sparge::ggml {

// Sums over the calls of a layer, and what came before each of them.
struct Totals {
  int64_t calls = 0;
  double mask_ms = 0, convert_ms = 0, total_ms = 0;
  LayerTotals runs;  // there may be several in one call

  void Add(const Totals& other);
  void Add(const LayerTotals& other);
  double Sparsity() const;
};

// One attention layer of a model. Says on stderr what its user should know.
class ModelLayer {
 public:
  ModelLayer(const Settings& settings, std::string name);

  // As sparge_layer_run. Throws sparge::Error.
  void Run(const Context& context, const PlanDesc& desc, const RunArgs& args);
  // Every tile: for single heads, which are none of the calls that the layer is about.
  void RunOneHead(const Context& context, const PlanDesc& desc, const RunArgs& args);

  const std::string& name() const { return name_; }
  Totals Sums() const;
  // Estimates of the heads that were measured.
  std::vector<HeadEstimate> Estimates() const;

  Totals times;  // the caller's: all but `runs`

 private:
  void SkipNothing(const char* reason);

  Settings settings_;
  std::string name_;
  bool has_preset_ = false;
  std::unique_ptr<Layer> layer_, one_head_;  // the latter from its first use on
};

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_LAYERS_H_

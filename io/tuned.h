// tuned.h - the library's tuner on captures: files are opened as it asks for them, and what it finds becomes a layer of
// a preset.
#ifndef SPARGE_IO_TUNED_H_
#define SPARGE_IO_TUNED_H_

#include <cstdint>
#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "io/call.h"
#include "io/captures.h"
#include "io/preset.h"

namespace sparge::io {

// The captures of one layer, which outlives this. Checked by CheckCaptures.
class CaptureSamples : public TuneSamples {
 public:
  explicit CaptureSamples(const LayerCaptures& layer) : layer_(layer) {}

  std::vector<const sparge_plan_desc*> Descriptors() const override;
  const sparge_run_args& Open(int64_t index) override;  // throws Error
  void Close(int64_t index) noexcept override;
  std::vector<std::string> Names() const;

 private:
  const LayerCaptures& layer_;
  std::optional<RecordedCall> open_;
};

// What a tuner found that has finished; `names` are those of its samples.
PresetLayer TunedLayer(const Tuner& tuner, const std::vector<std::string>& names);

}  // namespace sparge::io
#endif  // SPARGE_IO_TUNED_H_

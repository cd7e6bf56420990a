// choice.h - parameters per head for a call: from a preset, or what a layer of the library chose.
#ifndef SPARGE_CLI_CHOICE_H_
#define SPARGE_CLI_CHOICE_H_

#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "cli/loaded_call.h"
#include "cli/options.h"
#include "io/preset.h"

namespace sparge::cli {

// What --preset asks for; without one it leaves calls as they are.
class HeadChooser {
 public:
  // Reads the preset. Throws UsageError.
  explicit HeadChooser(const Options& options);

  // Throws UsageError if the preset, if any, does not fit the call. `file` is where it was read from; its folder is
  // the layer unless --layer says otherwise.
  void TakePreset(const std::string& file, LoadedCall& call) const;
  const std::optional<io::Preset>& preset() const { return preset_; }

 private:
  const Options& options_;
  std::optional<io::Preset> preset_;
};

// Keeps in `call`, which has run through `layer` so many times, what is in force for its heads.
void TakeChoice(const Layer& layer, int64_t calls, LoadedCall& call);
// One line on that; empty without.
std::string ChoiceText(const LoadedCall& call);
// The error of a head with PV skip if it is known, else what it is below: "<3.1e-02".
std::string ErrorText(const HeadEstimate& estimate);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CHOICE_H_

// choice.h - parameters per head for a problem: from a preset, or what a layer of the library chose.
#ifndef SPARGE_CLI_CHOICE_H_
#define SPARGE_CLI_CHOICE_H_

#include <optional>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/problem.h"
#include "io/preset.h"

namespace sparge::cli {

// What --preset asks for; without one it leaves problems as they are.
class HeadChooser {
 public:
  // Reads the preset. Throws UsageError.
  explicit HeadChooser(const Options& options);

  // Throws UsageError if the preset, if any, does not fit the problem. `file` is where it was read from; its folder is
  // the layer unless --layer says otherwise.
  void TakePreset(const std::string& file, Problem& problem) const;
  const std::optional<io::Preset>& preset() const { return preset_; }

 private:
  const Options& options_;
  std::optional<io::Preset> preset_;
};

// Keeps in `problem`, which has run through `layer` so many times, what is in force for its heads.
void TakeChoice(const Layer& layer, int64_t calls, Problem& problem);
// One line on that; empty without.
std::string ChoiceText(const Problem& problem);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CHOICE_H_

// choice.h - parameters per head for a problem: from a preset, or from a calibration made for this one run.
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

// What --preset or --select auto ask for; without either it leaves problems as they are.
class HeadChooser {
 public:
  // Reads the preset. Throws UsageError.
  explicit HeadChooser(const Options& options);

  // Throws UsageError if the preset, if any, does not fit the problem. `file` is where it was read from; its folder is
  // the layer unless --layer says otherwise.
  void TakePreset(const std::string& file, Problem& problem) const;
  // The same, and calibrates if asked to, which takes about half the time of a dense run.
  void Choose(const Context& context, const std::string& file, Problem& problem) const;
  const std::optional<io::Preset>& preset() const { return preset_; }

 private:
  const Options& options_;
  std::optional<io::Preset> preset_;
};

// Makes `problem` a plan of these heads, one per query head.
void SetHeads(const std::vector<io::PresetHead>& heads, Problem& problem);
// The share of a dense run that a pass of calibration over so many query tokens takes: `usual`, and more where that
// would be fewer samples than a choice needs, up to `most`.
double CalibrationEffort(double usual, int64_t q_tokens, double most);
// What a calibration chose for a head; nothing is `measured` yet.
io::PresetHead ChosenHead(const HeadEstimate& estimate);

// One line on a calibration made for this run; empty without one.
std::string EstimatesText(const Problem& problem);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CHOICE_H_

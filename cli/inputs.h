// inputs.h - the files that check and report go through: each is read once before the slow part, so that a bad one is
// refused at once, and again when its turn has come.
#ifndef SPARGE_CLI_INPUTS_H_
#define SPARGE_CLI_INPUTS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/choice.h"
#include "cli/loaded_call.h"
#include "cli/options.h"
#include "cli/progress.h"

namespace sparge::cli {

class Inputs {
 public:
  // `file` is the one with the tensors; of .npy files that with the queries.
  using Look = std::function<void(const LoadedCall& call, const std::string& file)>;
  using Work = std::function<void(LoadedCall& call, const std::string& file, Progress& progress)>;

  Inputs(Verb verb, const Options& options, const HeadChooser& chooser)
      : verb_(verb), options_(options), chooser_(chooser), sources_(InputFiles(options)) {}

  const std::vector<std::string>& sources() const { return sources_; }  // "" stands for the .npy files of the options
  // Reads them all. Throws UsageError if one is bad, or the preset does not fit it.
  void LookAtAll(const Look& look = {});
  // Says what was taken from metadata, and works on one after the other; `work` steps the progress once per head.
  void ForEach(const std::string& doing, const Work& work) const;

 private:
  Verb verb_;
  const Options& options_;
  const HeadChooser& chooser_;
  std::vector<std::string> sources_;
  int64_t heads_ = 0;
  std::string notes_;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_INPUTS_H_

// tuned.h - from captures to a preset, by the library's tuner: layer by layer, and to be continued if it is stopped.
#ifndef SPARGE_IO_TUNED_H_
#define SPARGE_IO_TUNED_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <sparge/sparge.hpp>
#include <string>
#include <vector>

#include "io/captures.h"
#include "io/preset.h"

namespace sparge::io {

// Of one layer, against one dense int8 pass over all its captures and heads.
struct TuneTime {
  double ms = 0, dense_ms = 0;
};

struct TuneTask {
  std::string out;          // the preset, .json; what is finished is in OUT.partial
  TunerDesc bounds;         // with the seed; nothing else is set
  bool restart = false;     // do not go on with what OUT.partial has
  std::string how_restart;  // what messages call that: "give --restart"
};

std::string PartialOf(const std::string& out);

class PresetTuner {
 public:
  // `captures` have been checked, `digest` is what that gave; they and the context outlive this. Throws Error if
  // OUT.partial was begun with something else.
  PresetTuner(const Context& context, const Captures& captures, const std::string& digest, TuneTask task);
  ~PresetTuner();
  PresetTuner(const PresetTuner&) = delete;
  PresetTuner& operator=(const PresetTuner&) = delete;

  const Preset& preset() const { return preset_; }                         // the layers that are finished
  size_t resumed() const { return resumed_; }                              // those that an earlier run had finished
  int64_t steps() const { return steps_; }                                 // of the others
  const std::map<std::string, TuneTime>& times() const { return times_; }  // of those that Run has finished

  // `stops` is asked between calls of the library, with the steps that are done. False if it said so: layers that are
  // finished are on the disk. Else OUT has been written, and OUT.partial is gone. What `stops` throws passes through.
  bool Run(const std::function<bool(int64_t steps_done)>& stops);

 private:
  class Layer;

  Preset Fresh() const;
  Preset StartOrResume() const;

  const Context& context_;
  std::string digest_;
  TuneTask task_;
  Preset preset_;
  size_t resumed_ = 0;
  std::vector<std::unique_ptr<Layer>> layers_;  // to be tuned
  int64_t steps_ = 0;
  std::map<std::string, TuneTime> times_;
};

}  // namespace sparge::io
#endif  // SPARGE_IO_TUNED_H_

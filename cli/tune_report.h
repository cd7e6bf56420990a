// tune_report.h - what `sparge tune` found, as a table and as JSON.
#ifndef SPARGE_CLI_TUNE_REPORT_H_
#define SPARGE_CLI_TUNE_REPORT_H_

#include <map>
#include <optional>
#include <string>

#include "cli/report.h"
#include "io/preset.h"
#include "io/tuned.h"

namespace sparge::cli {

struct TuneReport {
  std::string file;  // of the preset
  std::string isa;
  int32_t threads = 0;
  double wall_ms = 0;  // with reading of files
  io::Preset preset;
  std::map<std::string, io::TuneTime> times;  // of the layers that were not there from an earlier run
};

std::string TuneText(const TuneReport& report);
Json TuneJson(const TuneReport& report);

}  // namespace sparge::cli
#endif  // SPARGE_CLI_TUNE_REPORT_H_

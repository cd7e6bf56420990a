// report_head.h - what a report says of one head: errors, times, the trade of sparsity against error, and pictures.
#ifndef SPARGE_CLI_REPORT_HEAD_H_
#define SPARGE_CLI_REPORT_HEAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cli/checker.h"
#include "cli/loaded_call.h"
#include "cli/report_picture.h"

namespace sparge::cli {

// The parameter that a report varies, because it trades sparsity for error; "" if the selection has none. Of a call
// that has run.
const char* SweptParameter(const LoadedCall& call);

// The shipped path with another value of the swept parameter.
struct FrontierPoint {
  double value = 0;
  double sparsity = 0, relative_l1 = 0;
};

struct Panel {
  const char* name;  // "true", "predicted", "kept", "pv"
  Image image;
};

// Of one head alone, the best and the worst of some rounds: dense fp32, and the shipped path.
struct HeadTimes {
  double dense_ms = 0, dense_worst_ms = 0;
  double sparse_ms = 0, sparse_worst_ms = 0;
};

struct HeadReport {
  int64_t batch = 0, head = 0;
  StageErrors errors;
  HeadTimes times;
  std::vector<FrontierPoint> frontier;
  std::vector<Panel> panels;  // empty if there are no tiles; without "predicted" if nothing was predicted
};

// All heads of one call.
class FileReporter {
 public:
  // As Checker.
  FileReporter(const Context& context, LoadedCall& call);
  int64_t heads() const { return checker_.heads(); }
  HeadReport Measure(int64_t head) const;

 private:
  TileGrid Grid() const { return {call_.q_blocks(), call_.k_blocks()}; }
  void Predict();
  HeadTimes TimeHead(const HeadCall& slice) const;
  std::vector<FrontierPoint> Frontier(const HeadCall& slice, const std::vector<float>& dense) const;
  std::vector<Panel> Draw(int64_t head, const std::vector<float>& mass) const;

  const Context& context_;
  const LoadedCall& call_;
  Checker checker_;
  int64_t group_rows_ = 1;
  std::vector<uint8_t> visible_;  // by tile, all heads
  std::vector<float> predicted_;  // likewise; empty if nothing was predicted
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_REPORT_HEAD_H_

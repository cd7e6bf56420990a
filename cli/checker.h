// checker.h - how far the shipped path is from a double-precision reference, head by head, and which stage is to blame.
#ifndef SPARGE_CLI_CHECKER_H_
#define SPARGE_CLI_CHECKER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "cli/loaded_call.h"
#include "cli/metrics.h"
#include "cli/report.h"

namespace sparge::cli {

// Four results, each one step from the one before, so that the differences are the error of one stage each:
// dense reference -> reference over the predicted tiles -> run over those tiles, no PV skip -> shipped run.
// Beside them the errors that bounds are given for, against a dense run of the same precision: what sparsity costs.
struct StageErrors {
  sparge_head_stats stats = {};
  ErrorTotals total;  // shipped run against the dense reference
  ErrorTotals selection, quantisation, pv_skip;
  ErrorTotals skipped;     // run without PV skip against the dense run
  ErrorTotals pv_skipped;  // shipped run against the dense run
  ErrorTotals rounding;    // dense run against the dense reference

  void Add(const StageErrors& other);
  double Selection() const { return selection.RelativeL1(total); }
  double Quantisation() const { return quantisation.RelativeL1(total); }
  double PvSkip() const { return pv_skip.RelativeL1(total); }
  const char* Largest() const;
};

Json ErrorsJson(const StageErrors& errors);

// What the dense reference says of one head.
struct HeadTruth {
  std::vector<float> o;
  std::vector<float> mass;  // of each tile
};

// All heads of one call; heads are numbered batch by batch.
class Checker {
 public:
  // Runs the shipped path, with and without PV skip, and the dense path. What a layer chose goes into `call`, which
  // must outlive this.
  Checker(const Context& context, LoadedCall& call);

  int64_t heads() const { return static_cast<int64_t>(head_stats_.size()); }
  // Runs the reference twice, which is slow.
  StageErrors Compare(int64_t head, HeadTruth& truth) const;

  // Of the shipped run, by tile: computed or not; row groups whose PV was computed.
  std::span<const uint8_t> Kept(int64_t head) const { return TilesOf(map_, head); }
  std::span<const uint8_t> PvGroups(int64_t head) const { return TilesOf(pv_groups_, head); }

 private:
  int64_t TilesPerHead() const { return call_.q_blocks() * call_.k_blocks(); }
  std::span<const uint8_t> TilesOf(const std::vector<uint8_t>& tiles, int64_t head) const {
    const auto size = static_cast<size_t>(TilesPerHead());
    return std::span(tiles).subspan(static_cast<size_t>(head) * size, size);
  }
  void RunShipped(LoadedCall& call);
  // As shipped but for the PV skip, over the tiles of `map` or, if that is NULL, all.
  std::vector<float> RunWithoutSkip(const uint8_t* map) const;
  std::vector<float> Reference(HeadCall slice, const uint8_t* map, float* mass) const;

  const Context& context_;
  const LoadedCall& call_;
  std::vector<uint8_t> map_, pv_groups_;
  std::vector<sparge_head_stats> head_stats_;
  std::vector<float> shipped_, without_skip_, dense_;
};

}  // namespace sparge::cli
#endif  // SPARGE_CLI_CHECKER_H_

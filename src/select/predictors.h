// The predictors: how the mass of a tile is guessed. A new one is an entry here, and a function of each device for its
// score.
#ifndef SPARGE_SRC_SELECT_PREDICTORS_H_
#define SPARGE_SRC_SELECT_PREDICTORS_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/base/units.h"

namespace sparge::impl {

struct Predictor {
  const char* name;
  int64_t pools;           // pooled queries per block, each the mean of as many neighbours
  bool summarises_keys;    // needs the mean and the self-similarity of every key block
  bool scores_are_logs;    // its score is the logarithm of a mass, else the mass itself
  bool own_rows;           // rows that are unlike their pool are judged by themselves
  bool can_be_calibrated;  // its masses are those of SELECT_AUTO, and can be joined over parts of the keys

  int64_t pool_rows() const { return kBlockQ / pools; }
};

// Two pools: docs/studies/predictor.md has the study that says so.
inline constexpr Predictor kPredictKeys{"keys", 2, false, false, true, true};
inline constexpr Predictor kPredictPaper{"paper", 1, true, true, false, false};

// Tau and theta that were set by hand go with the masses of the paper, for which they are known to do: pooled queries
// give a sink more than its due, and a share of that is soon reached. A floor on mass is measured, whatever the scale.
inline const Predictor& PredictorFor(sparge_select select, sparge_predictor wanted) {
  const bool by_hand = select == SPARGE_SELECT_CDF || select == SPARGE_SELECT_TOPK;
  const bool paper = wanted == SPARGE_PREDICT_PAPER || (wanted == SPARGE_PREDICT_DEFAULT && by_hand);
  return paper ? kPredictPaper : kPredictKeys;
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_SELECT_PREDICTORS_H_

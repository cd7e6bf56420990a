// What happens to a score between the product of query and key and the softmax.
#ifndef SPARGE_SRC_PROBLEM_SCORE_RULE_H_
#define SPARGE_SRC_PROBLEM_SCORE_RULE_H_

#include <sparge/sparge.h>

#include <cstdint>

#include "src/base/visible.h"

namespace sparge::impl {

// Softcap, slope, mask and visibility, in this order; log2 units throughout.
struct ScoreRule {
  Visible visible;
  float softcap = 0;  // 0 = off. If on, `shift` is added first, for the cap is not linear.
  float slope = 0;    // ALiBi: per key of Visible::DistanceOf, less its base, which is left out (BaseBias)
  sparge_mask_type mask_type = SPARGE_MASK_NONE;
  const void* mask = nullptr;  // element (row 0 of the query block, key 0)
  int64_t mask_stride = 0;     // elements from row to row
};

// What ALiBi takes from all scores of a query for the base of its distances. Kernels leave that out, for beside it
// floats may not tell the scores apart: whoever needs scores as they are adds it.
inline double BaseBias(const Visible& visible, double slope, int64_t query) {
  return slope == 0 ? 0.0 : -slope * static_cast<double>(visible.DistanceOf(query, slope < 0).base);
}

}  // namespace sparge::impl
#endif  // SPARGE_SRC_PROBLEM_SCORE_RULE_H_

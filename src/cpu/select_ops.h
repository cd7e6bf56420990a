// The vector functions of stage 1, one set per instruction set.
#ifndef SPARGE_SRC_CPU_SELECT_OPS_H_
#define SPARGE_SRC_CPU_SELECT_OPS_H_

#include <cstdint>

namespace sparge::impl {

struct SelectOps {
  // out[j] = a . b_j in double, b_j being `dim_pad` floats apart; both are padded with zeros to whole vectors.
  void (*dots)(const float* a, const float* b, int64_t dim_pad, int64_t count, double* out);
  // The sum of the numbers that are not below `least`.
  double (*mass_from)(const double* mass, int64_t count, double least);
};

// Of one of Highway's targets; NULL if that was not compiled in.
const SelectOps* SelectOpsOf(int64_t target);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CPU_SELECT_OPS_H_

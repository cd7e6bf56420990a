// mask.h - what an f16 mask says about positions. ggml has no causal flag: the structure is only in the mask.
#ifndef SPARGE_GGML_MASK_H_
#define SPARGE_GGML_MASK_H_

#include <ggml.h>

#include <cstdint>

namespace sparge::ggml {

// Which keys the queries of all streams see, if a rule of positions says the same as the mask.
struct MaskShape {
  bool positional = false;  // the rest holds, and the mask itself is not needed
  bool causal = false;      // query i sees keys up to i + query_offset
  int64_t query_offset = 0;
  int64_t window = 0;  // and of these the last so many; 0 = all
  int64_t keys = 0;    // none sees a key from here on
  // ALiBi: what is seen has minus its distance from query i, which is i + query_offset - j, instead of 0. In f16, that
  // is within 2^-11 of it; the library's distances are exact, which for equal scores changes no
  // weight by more than e^-1 * 2^-11.
  bool distances = false;

  bool operator==(const MaskShape&) const = default;
};

// NULL = every query sees every key. `threads`: of OpenMP.
MaskShape FindMaskShape(const ggml_tensor* mask, int64_t queries, int64_t keys, int threads);

// Nothing but 0 and -inf in the rows of these queries: then a factor changes nothing.
bool HidesOnly(const ggml_tensor* mask, int64_t queries, int threads);

}  // namespace sparge::ggml
#endif  // SPARGE_GGML_MASK_H_

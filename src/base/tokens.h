// Tokens as they lie in the caller's tensors.
#ifndef SPARGE_SRC_BASE_TOKENS_H_
#define SPARGE_SRC_BASE_TOKENS_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>

namespace sparge {

// `count` tokens of `dim` elements.
struct TokenRows {
  const std::byte* data;
  sparge_dtype dtype;
  int64_t token_stride;  // elements
  int64_t count, dim;
};

}  // namespace sparge
#endif  // SPARGE_SRC_BASE_TOKENS_H_

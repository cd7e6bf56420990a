// Tokens as they lie in the caller's tensors.
#ifndef SPARGE_SRC_BASE_TOKENS_H_
#define SPARGE_SRC_BASE_TOKENS_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>

#include "src/base/half.h"

namespace sparge::impl {

// `count` tokens of `dim` elements.
struct TokenRows {
  const std::byte* data;
  sparge_dtype dtype;
  int64_t token_stride;  // elements
  int64_t count, dim;
  const int32_t* order = nullptr;  // token t lies at place order[t]; NULL: at place t

  const std::byte* Place(int64_t place) const {
    return data + place * token_stride * static_cast<int64_t>(DtypeBytes(dtype));
  }
  const std::byte* Token(int64_t token) const { return Place(order == nullptr ? token : order[token]); }
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_TOKENS_H_

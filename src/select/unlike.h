// Queries that no pool speaks for, and what they add to the masses of tiles. Alike on every device.
#ifndef SPARGE_SRC_SELECT_UNLIKE_H_
#define SPARGE_SRC_SELECT_UNLIKE_H_

#include <cstdint>

namespace sparge::impl {

// The rows of a query block that are unlike their pool: their squared distance from its mean is more than kRatio times
// the median of the pool. A mean does not speak for them. Of those that are as close as that to each other, one is
// here.
struct UnlikeRows {
  static constexpr int kMostUnlike = 6;       // that are judged one by one; with more the block is computed in full
  static constexpr float kRatio = 4;          // squared
  static constexpr int64_t kFewestRows = 16;  // rows of a pool, else a median says nothing

  int16_t count;  // may be more than kMostUnlike
  int16_t rows[kMostUnlike];

  bool TooMany() const { return count > kMostUnlike; }
};

// From this share of such a query's attention on a tile is kept, though its pool may hardly look there.
inline constexpr double kOwnShare = 0.125;

}  // namespace sparge::impl
#endif  // SPARGE_SRC_SELECT_UNLIKE_H_

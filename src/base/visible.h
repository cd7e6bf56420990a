// Which keys a query may see by position alone (causal, window, length), and what follows for a whole tile.
#ifndef SPARGE_SRC_BASE_VISIBLE_H_
#define SPARGE_SRC_BASE_VISIBLE_H_

#include <algorithm>
#include <cstdint>

namespace sparge::impl {

// Half-open range of keys or key blocks.
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// Query i sees key j iff j < keys, and if causal j <= i + offset, and if window > 0 j > i + offset - window.
struct Visible {
  int64_t keys = 0;
  int64_t offset = 0;
  int64_t window = 0;
  bool causal = false;

  Range KeysOf(int64_t query) const {
    const int64_t diagonal = query + offset;
    const int64_t begin = window > 0 ? std::clamp<int64_t>(diagonal - window + 1, 0, keys) : 0;
    const int64_t end = causal ? std::clamp<int64_t>(diagonal + 1, 0, keys) : keys;
    return {begin, end};
  }

  // The distance of a query's position p = query + offset to any key j, in parts that differ in size:
  //   |p - j| = base + (|nearest - j| - back)
  // `base` may be far beyond what a float tells apart, but is one number per query. What is left is small for the keys
  // that matter: those near the query, or with `far_first` (a slope that grows with the distance) those far from it.
  struct Distance {
    int64_t base, nearest, back;
  };
  Distance DistanceOf(int64_t query, bool far_first) const {
    const int64_t position = query + offset;
    const int64_t nearest = std::clamp<int64_t>(position, 0, std::max<int64_t>(keys - 1, 0));
    int64_t back = 0;
    if (far_first) {
      const Range seen = KeysOf(query);
      back = std::max<int64_t>({nearest - seen.begin, seen.end - 1 - nearest, 0});
    }
    return {std::max(position, nearest) - std::min(position, nearest) + back, nearest, back};
  }

  // Keys that some query of [first, last] sees. Both ends move right with the query, so the union has no hole as long
  // as neighbours overlap or touch, which they do: each end moves by at most one key per query.
  Range KeysOfAny(int64_t first, int64_t last) const { return {KeysOf(first).begin, KeysOf(last).end}; }

  // Keys that every query of [first, last] sees.
  Range KeysOfAll(int64_t first, int64_t last) const { return {KeysOf(last).begin, KeysOf(first).end}; }

  // Keys on the diagonal (j == i + offset) of the queries [first, last], and `before` keys before each: empty unless
  // causal.
  Range Diagonal(int64_t first, int64_t last, int64_t before = 0) const {
    if (!causal) return {0, 0};
    return {std::clamp<int64_t>(first + offset - before, 0, keys), std::clamp<int64_t>(last + offset + 1, 0, keys)};
  }
};

// Blocks of `size` that a range of tokens touches.
inline Range BlocksOf(Range tokens, int64_t size) {
  if (tokens.empty()) return {0, 0};
  return {tokens.begin / size, (tokens.end + size - 1) / size};
}

inline bool Overlaps(Range a, Range b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace sparge::impl
#endif  // SPARGE_SRC_BASE_VISIBLE_H_

// A generalised Hilbert curve through any box, and the orders it is compared with.
#include "src/problem/order.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <numeric>
#include <utility>

#include "src/base/status.h"

namespace sparge::impl {
namespace {

// One side of a box: how many cells it has, and what one step along it adds to a raster index. A negative step walks
// backwards, so that a turned or mirrored box needs no coordinates.
struct Side {
  int64_t length, step;

  int64_t Past(int64_t cells) const { return cells * step; }
  int64_t Last() const { return (length - 1) * step; }
  Side First(int64_t cells) const { return {cells, step}; }
  Side Without(int64_t cells) const { return {length - cells, step}; }
  Side Back() const { return {length, -step}; }
  bool odd() const { return length % 2 != 0; }
};

// About half, and even. Less than `length` for 3 and more.
int64_t EvenHalf(int64_t length) {
  const int64_t half = length / 2;
  return half + half % 2;
}

// Visits every cell of a box once, neighbour after neighbour. The curve starts in the corner `first` and ends in the
// corner at the other end of side a. It is cut into smaller boxes that are walked likewise, each starting beside the
// end of the one before (J. Cerveny's generalised Hilbert curve), until they are lines.
//
// Cells alternate in colour like a chessboard, so that a walk through an even number of cells ends on the other colour.
// Hence such a walk from end to end of side a exists only if
//   a is even, or all three sides are odd.                                                              (*)
// Walk demands (*) and cuts such that it holds for every part. That is the reason for each "even" and "odd" below.
class Walker {
 public:
  explicit Walker(int32_t* out) : out_(out) {}

  void Walk(int64_t first, Side a, Side b, Side c) {
    if (b.length < c.length) std::swap(b, c);
    if (b.length == 1) return Line(first, a);
    if (2 * a.length > 3 * b.length) return Halve(first, a, b, c);  // here a >= 4, or >= 5 if all are odd
    const bool all_odd = a.odd() && b.odd() && c.odd();
    if (c.length == 1 || all_odd || 3 * b.length > 4 * c.length) return CutOne(first, a, b, c);
    if (c.odd() && !b.odd()) std::swap(b, c);
    CutBoth(first, a, b, c);
  }

 private:
  void Line(int64_t first, const Side& a) {
    for (int64_t i = 0; i < a.length; ++i) *out_++ = static_cast<int32_t>(first + a.Past(i));
  }

  // A long box: the first half of a, then the second.
  void Halve(int64_t first, const Side& a, const Side& b, const Side& c) {
    const int64_t half = EvenHalf(a.length);
    Walk(first, a.First(half), b, c);
    Walk(first + a.Past(half), a.Without(half), b, c);
  }

  // As a Hilbert curve in the plane of a and b: out along b, over along a, and back along b.
  void CutOne(int64_t first, const Side& a, const Side& b, const Side& c) {
    const int64_t b_half = BesideFirst(b);
    const int64_t a_half = a.length / 2;
    const Side out = b.First(b_half);
    Walk(first, out, a.First(a_half), c);
    Walk(first + b.Past(b_half), a, b.Without(b_half), c);
    Walk(first + a.Last() + out.Last(), out.Back(), a.Without(a_half).Back(), c);
  }

  // b and c are about as long: out along b, up along c, over along a, down along c, back along b.
  // The second and the fourth part need an even c, or odd sides only: then b is odd, and so is what is left of it.
  void CutBoth(int64_t first, const Side& a, const Side& b, const Side& c) {
    const int64_t a_half = c.odd() ? a.length / 2 | 1 : a.length / 2;
    const int64_t b_half = BesideFirst(b);
    const int64_t c_half = c.length / 2;
    const Side out = b.First(b_half);
    const Side near = c.First(c_half);
    const Side far = c.Without(c_half);
    const Side a_rest = a.Without(a_half);
    Walk(first, out, near, a.First(a_half));
    Walk(first + b.Past(b_half), c, a.First(a_half), b.Without(b_half));
    Walk(first + out.Last() + c.Last(), a, out.Back(), far.Back());
    Walk(first + a.Last() + b.Past(b_half) + c.Last(), c.Back(), a_rest.Back(), b.Without(b_half));
    Walk(first + a.Last() + out.Last(), out.Back(), near, a_rest.Back());
  }

  // Where b is cut. With b = 2, a is 2 and c at most 2, so that what goes out along b is a single cell.
  static int64_t BesideFirst(const Side& b) { return b.length == 2 ? 1 : EvenHalf(b.length); }

  int32_t* out_;
};

void FillHilbert(const int64_t grid[3], int64_t base, int32_t* out) {
  Side sides[3] = {{grid[2], 1}, {grid[1], grid[2]}, {grid[0], grid[1] * grid[2]}};
  std::stable_sort(sides, sides + 3, [](const Side& x, const Side& y) { return x.length > y.length; });
  auto [a, b, c] = sides;
  Walker walker(out);
  if (b.odd()) std::swap(b, c);
  if (!a.odd() || b.odd()) return walker.Walk(base, a, b, c);  // (*) holds for the longest side
  // Else the curve has to end in another corner: it goes a part of the way along a, and then along b, which is even.
  const int64_t rest = (std::min(a.length / 2, b.length) - 1) | 1;
  const int64_t cut = a.length - rest;
  walker.Walk(base, a.First(cut), b, c);
  walker.Walk(base + a.Past(cut), b, a.Without(cut), c);
}

void FillTimeMajor(const int64_t grid[3], int64_t base, int32_t* out) {
  const int64_t area = grid[1] * grid[2];
  for (int64_t cell = 0; cell < area; ++cell) {
    for (int64_t t = 0; t < grid[0]; ++t) *out++ = static_cast<int32_t>(base + t * area + cell);
  }
}

// SplitMix64 (Steele, Lea, Flood 2014). The standard library's distributions differ between platforms.
uint64_t NextRandom(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void Shuffle(uint64_t seed, int64_t count, int32_t* values) {
  // The remainder favours small numbers by less than 2^-33.
  for (int64_t i = count - 1; i > 0; --i) {
    std::swap(values[i], values[NextRandom(seed) % static_cast<uint64_t>(i + 1)]);
  }
}

}  // namespace

int64_t CountCells(const int64_t grid[3]) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t cells = 1;
  for (int i = 0; i < 3; ++i) {
    SPARGE_REQUIRE(grid[i] >= 1 && grid[i] <= kMost, "grid[%d]=%" PRId64 " is outside 1..%" PRId64, i, grid[i], kMost);
    SPARGE_REQUIRE(grid[i] <= kMost / cells, "grid=%" PRId64 ",%" PRId64 ",%" PRId64 " has more than %" PRId64 " cells",
                   grid[0], grid[1], grid[2], kMost);
    cells *= grid[i];
  }
  return cells;
}

void FillOrder(sparge_order order, const int64_t grid[3], uint64_t seed, int32_t base, int32_t* out) {
  const int64_t cells = grid[0] * grid[1] * grid[2];
  switch (order) {
    case SPARGE_ORDER_HILBERT:
      return FillHilbert(grid, base, out);
    case SPARGE_ORDER_TIME_MAJOR:
      return FillTimeMajor(grid, base, out);
    case SPARGE_ORDER_ROW_MAJOR:
    case SPARGE_ORDER_RANDOM:
      std::iota(out, out + cells, base);
      if (order == SPARGE_ORDER_RANDOM) Shuffle(seed, cells, out);
  }
}

TokenOrder LayCurve(const sparge_plan_desc& desc) {
  auto order = std::make_shared<std::vector<int32_t>>(desc.q_tokens);
  std::iota(order->begin(), order->end(), 0);
  const int64_t first = desc.text_after == 1 ? 0 : desc.text_tokens;
  FillOrder(SPARGE_ORDER_HILBERT, desc.grid, 0, static_cast<int32_t>(first), order->data() + first);
  return order;
}

TokenOrder Curves::Get(const sparge_plan_desc& desc) {
  const Key key{desc.grid[0], desc.grid[1], desc.grid[2], desc.text_tokens, desc.text_after};
  const std::lock_guard lock(mutex_);  // whoever needs the same curve waits for it
  const auto found = std::find_if(curves_.begin(), curves_.end(), [&](const Curve& curve) { return curve.key == key; });
  if (found != curves_.end()) {
    curves_.splice(curves_.begin(), curves_, found);
  } else {
    curves_.push_front({key, LayCurve(desc)});
    if (curves_.size() > kMostKept) curves_.pop_back();
  }
  return curves_.front().order;
}

}  // namespace sparge::impl

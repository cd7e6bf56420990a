#include "ggml/mask.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace sparge::ggml {
namespace {

constexpr uint16_t kSeen = 0;         // 0.0 in f16
constexpr uint16_t kHidden = 0xfc00;  // -inf

const uint16_t* MaskRow(const ggml_tensor* mask, int64_t stream, int64_t head, int64_t query) {
  return reinterpret_cast<const uint16_t*>(static_cast<const char*>(mask->data) + stream * mask->nb[3] +
                                           head * mask->nb[2] + query * mask->nb[1]);
}

struct Run {
  int64_t begin, end;
};

// All of [begin, end) is `value`. Without a branch in the loop, so that it becomes vectors; not inlined, for then they
// are half as wide.
[[gnu::noinline]] bool AllAre(const uint16_t* row, Run run, uint16_t value) {
  uint16_t difference = 0;
  for (int64_t j = run.begin; j < run.end; ++j) difference |= static_cast<uint16_t>(row[j] ^ value);
  return difference == 0;
}

// The first run of visible keys.
Run FirstSeen(const uint16_t* row, int64_t keys) {
  int64_t begin = 0;
  while (begin < keys && row[begin] == kHidden) ++begin;
  int64_t end = begin;
  while (end < keys && row[end] != kHidden) ++end;
  return {begin, end};
}

// -distance in f16, to nearest, ties to even; -inf beyond the largest number.
uint16_t MinusDistance(int64_t distance) {
  constexpr uint16_t kMinus = 0x8000;
  constexpr int kDigits = 10, kBias = 15;
  if (distance == 0) return kMinus;
  const int exponent = std::bit_width(static_cast<uint64_t>(distance)) - 1;
  const int shift = exponent - kDigits;
  int64_t digits = shift <= 0 ? distance << -shift : distance >> shift;
  if (shift > 0) {
    const int64_t rest = distance & ((int64_t{1} << shift) - 1);
    const int64_t half = int64_t{1} << (shift - 1);
    digits += rest > half || (rest == half && digits % 2 == 1) ? 1 : 0;
  }
  // A carry goes into the exponent.
  const int64_t bits = (int64_t{exponent + kBias} << kDigits) + (digits - (int64_t{1} << kDigits));
  return static_cast<uint16_t>(kMinus + std::min<int64_t>(bits, kHidden - kMinus));
}

// Minus the distance of each key from the query's own place; that of the place itself may be 0 of either sign.
bool AllAreDistances(const uint16_t* row, Run run, int64_t place, const std::vector<uint16_t>& minus_distance) {
  uint16_t difference = 0;
  for (int64_t j = run.begin; j < std::min(run.end, place); ++j) {
    difference |= static_cast<uint16_t>(row[j] ^ minus_distance[place - j]);
  }
  const bool own = place < run.begin || place >= run.end || row[place] == kSeen || row[place] == MinusDistance(0);
  return difference == 0 && own;
}

// The rule that the first and the last query obey, if there is one.
MaskShape Guess(const ggml_tensor* mask, int64_t queries, int64_t keys) {
  const Run first = FirstSeen(MaskRow(mask, 0, 0, 0), keys);
  const Run last = FirstSeen(MaskRow(mask, 0, 0, queries - 1), keys);
  MaskShape shape;
  shape.positional = last.end > last.begin;
  shape.causal = last.end - first.end == queries - 1 && (queries > 1 || last.end < keys || last.begin > 0);
  shape.query_offset = last.end - queries;
  shape.window = last.begin > 0 ? last.end - last.begin : 0;
  shape.keys = last.end;
  // Without the causal rule all queries see the same keys, from the first one on.
  if (!shape.causal && (last.begin > 0 || first.end != last.end)) shape.positional = false;
  if (!shape.causal) shape.query_offset = 0;
  shape.distances = shape.causal && last.end - last.begin > 1 && MaskRow(mask, 0, 0, queries - 1)[last.begin] != kSeen;
  return shape;
}

bool Obeys(const uint16_t* row, const MaskShape& shape, int64_t query, int64_t keys,
           const std::vector<uint16_t>& minus_distance) {
  const int64_t end = shape.causal ? std::clamp<int64_t>(query + shape.query_offset + 1, 0, shape.keys) : shape.keys;
  const int64_t begin = shape.window > 0 ? std::max<int64_t>(0, query + shape.query_offset + 1 - shape.window) : 0;
  const Run seen{std::min(begin, end), end};
  return AllAre(row, {0, seen.begin}, kHidden) && AllAre(row, {end, keys}, kHidden) &&
         (shape.distances ? AllAreDistances(row, seen, query + shape.query_offset, minus_distance)
                          : AllAre(row, seen, kSeen));
}

// check(row, query) for every row of the mask that these queries use.
template <class Check>
bool EveryRow(const ggml_tensor* mask, int64_t queries, int threads, const Check& check) {
  const int64_t planes = mask->ne[2] * mask->ne[3];
  int broken = 0;
// A row or two are read sooner than threads wake.
#pragma omp parallel for num_threads(threads) reduction(| : broken) schedule(static) if (planes * queries > 4)
  for (int64_t i = 0; i < planes * queries; ++i) {
    const int64_t plane = i / queries;
    if (broken == 0 && !check(MaskRow(mask, plane / mask->ne[2], plane % mask->ne[2], i % queries), i % queries)) {
      broken = 1;
    }
  }
  return broken == 0;
}

}  // namespace

MaskShape FindMaskShape(const ggml_tensor* mask, int64_t queries, int64_t keys, int threads) {
  if (mask == nullptr) return {.positional = true, .keys = keys};
  MaskShape shape = Guess(mask, queries, keys);
  std::vector<uint16_t> minus_distance(static_cast<size_t>(shape.distances ? shape.keys + 1 : 0));
  for (size_t i = 0; i < minus_distance.size(); ++i) minus_distance[i] = MinusDistance(static_cast<int64_t>(i));
  shape.positional = shape.positional && EveryRow(mask, queries, threads, [&](const uint16_t* row, int64_t query) {
                       return Obeys(row, shape, query, keys, minus_distance);
                     });
  return shape;
}

bool HidesOnly(const ggml_tensor* mask, int64_t queries, int threads) {
  return EveryRow(mask, queries, threads, [&](const uint16_t* row, int64_t) {
    return std::all_of(row, row + mask->ne[0], [](uint16_t value) { return value == kSeen || value == kHidden; });
  });
}

}  // namespace sparge::ggml

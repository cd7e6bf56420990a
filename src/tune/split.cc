// Draws the samples that are held out, the same ones on every machine.
#include "src/tune/split.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace sparge::impl {

SampleSplit SplitSamples(size_t count, const std::string& name, uint64_t seed) {
  if (count == 1) return {{0}, {0}, {}};
  const size_t held_out = count <= 4 ? 1 : std::clamp<size_t>(count / 4, 1, 3);
  // std::shuffle and distributions differ between libraries; engine and seed_seq do not.
  std::vector<uint32_t> words = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (const char c : name) words.push_back(static_cast<unsigned char>(c));
  std::seed_seq sequence(words.begin(), words.end());
  std::mt19937_64 random(sequence);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = 0; i < held_out; ++i) std::swap(order[i], order[i + random() % (count - i)]);
  const auto border = order.begin() + static_cast<std::ptrdiff_t>(held_out);
  SampleSplit split;
  split.tuning.assign(border, order.end());
  split.held_out.assign(order.begin(), border);
  // Others are verified as well: what is within the bound on average over samples need not be on each.
  split.verified.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(count, 2 + count / 4)));
  for (std::vector<size_t>* part : {&split.tuning, &split.verified, &split.held_out}) {
    std::sort(part->begin(), part->end());
  }
  return split;
}

}  // namespace sparge::impl

// bench_data.cc - random tensors and maps.
#include "cli/bench_data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace sparge::cli {
namespace {

using Random = std::mt19937_64;

// Of the seed and one more number that says what is made, so that nothing depends on what was made before.
Random Generator(const BenchCase& c, uint32_t purpose) {
  std::seed_seq seeds{static_cast<uint32_t>(c.seed), static_cast<uint32_t>(c.seed >> 32), purpose};
  return Random(seeds);
}
enum Purpose : uint32_t { kQueries = 1, kKeys, kValues, kMap };

struct Rows {
  int64_t heads, tokens, dim;
  std::vector<float> values;
  Rows(int64_t h, int64_t n, int64_t d) : heads(h), tokens(n), dim(d), values(static_cast<size_t>(h * n * d)) {}
  float* Row(int64_t head, int64_t token) { return values.data() + (head * tokens + token) * dim; }
  const float* Row(int64_t head, int64_t token) const { return values.data() + (head * tokens + token) * dim; }
};

void FillNoise(Rows& rows, Random random) {
  std::normal_distribution<float> normal;
  for (float& x : rows.values) x = normal(random);
}

// A walk of unit variance in which neighbours have cosine 0.99, with a jump to a new place every 500 tokens or so: like
// the scenes of a video. Most blocks are self-similar, some are not.
void FillWalk(Rows& rows, Random random) {
  constexpr float kStay = 0.99f, kJump = 0.002f;
  const float step = std::sqrt(1 - kStay * kStay);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  for (int64_t h = 0; h < rows.heads; ++h) {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      float* row = rows.Row(h, t);
      const bool jump = t == 0 || uniform(random) < kJump;
      for (int64_t d = 0; d < rows.dim; ++d)
        row[d] = jump ? normal(random) : kStay * row[d - rows.dim] + step * normal(random);
    }
  }
}

// Queries that look for their own neighbourhood: what the key of the same position has, and noise. A query's score with
// that key is kKey * 8 for every head size, so that its neighbourhood has most of the weight among thousands of keys.
void FillSeekers(Rows& q, const Rows& k, Random random) {
  constexpr float kKey = 1.6f, kNoise = 0.8f;
  const float gain = 8 / std::sqrt(static_cast<float>(q.dim));
  std::normal_distribution<float> normal;
  for (int64_t h = 0; h < q.heads; ++h) {
    for (int64_t t = 0; t < q.tokens; ++t) {
      const float* key = k.Row(h / (q.heads / k.heads), std::max<int64_t>(t + k.tokens - q.tokens, 0));
      float* row = q.Row(h, t);
      for (int64_t d = 0; d < q.dim; ++d) row[d] = gain * (kKey * key[d] + kNoise * normal(random));
    }
  }
}

std::vector<std::byte> Store(Rows rows, sparge_dtype dtype) {
  std::vector<std::byte> bytes(rows.values.size() * ElementBytes(dtype));
  ConvertRows({rows.values.data(), SPARGE_F32, 0, 0, rows.dim}, {bytes.data(), dtype, 0, 0, rows.dim},
              rows.heads * rows.tokens, rows.dim);
  return bytes;
}

}  // namespace

BenchInputs MakeInputs(const BenchCase& c) {
  Rows q(c.heads, c.queries, c.dim), k(c.kv_heads, c.tokens, c.dim), v(c.kv_heads, c.tokens, c.dim);
  if (c.data == BenchData::kNoise) {
    FillNoise(q, Generator(c, kQueries));
    FillNoise(k, Generator(c, kKeys));
    FillNoise(v, Generator(c, kValues));
  } else {
    FillWalk(k, Generator(c, kKeys));
    FillWalk(v, Generator(c, kValues));
    FillSeekers(q, k, Generator(c, kQueries));
  }
  return {Store(std::move(q), c.dtype), Store(std::move(k), c.dtype), Store(std::move(v), c.dtype)};
}

std::vector<uint8_t> MakeRandomMap(const BenchCase& c) {
  if (c.select != BenchSelect::kRandom) return {};
  Random random = Generator(c, kMap);
  std::vector<uint8_t> map(static_cast<size_t>(c.heads * c.q_blocks() * c.k_blocks()));
  std::vector<int64_t> order(static_cast<size_t>(c.k_blocks()));
  for (int64_t row = 0; row < c.heads * c.q_blocks(); ++row) {
    const int64_t last = std::min((row % c.q_blocks() + 1) * SPARGE_BLOCK_Q, c.queries) - 1;
    const int64_t visible = (c.VisibleKeys(last) + SPARGE_BLOCK_K - 1) / SPARGE_BLOCK_K;
    const int64_t kept = std::max<int64_t>(std::llround(c.share * static_cast<double>(visible)), 1);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.begin() + visible, random);
    for (int64_t i = 0; i < std::min(kept, visible); ++i) map[row * c.k_blocks() + order[i]] = 1;
  }
  return map;
}

size_t ElementBytes(sparge_dtype dtype) { return dtype == SPARGE_F32 ? 4 : 2; }

// The library's `merge` with an empty part is a conversion, and keeps half precision out of this program.
void ConvertRows(const sparge_tensor& from, const sparge_tensor& to, int64_t rows, int64_t dim) {
  std::vector<float> full(static_cast<size_t>(rows)), out(static_cast<size_t>(rows));
  std::vector<float> empty(static_cast<size_t>(rows), -std::numeric_limits<float>::infinity());
  const sparge_partial all{from, {full.data(), 0, 0}};
  const sparge_partial none{from, {empty.data(), 0, 0}};
  const sparge_partial result{to, {out.data(), 0, 0}};
  Check(sparge_merge(1, 1, rows, dim, &all, &none, &result));
}

}  // namespace sparge::cli

// Which tiles a mask hides or changes.
#include "src/cpu/visible_tiles.h"

#include <algorithm>
#include <limits>

#include "src/base/half.h"
#include "src/select/block_map.h"

namespace sparge::impl {
namespace {

enum class MaskTile { kHidden, kPlain, kMixed };

// Reads the mask over the pairs of a tile that are visible by position.
template <class IsHidden, class IsPlain>
MaskTile ClassifyPairs(const Visible& visible, const TileRows& row, Range keys, const IsHidden& hidden,
                       const IsPlain& plain) {
  bool any_visible = false;
  bool all_plain = true;
  for (int64_t i = row.first; i <= row.last; ++i) {
    const Range seen = visible.KeysOf(i);
    for (int64_t j = std::max(seen.begin, keys.begin); j < std::min(seen.end, keys.end); ++j) {
      any_visible |= !hidden(i, j);
      all_plain &= plain(i, j);
    }
    if (any_visible && !all_plain) return MaskTile::kMixed;
  }
  return !any_visible ? MaskTile::kHidden : all_plain ? MaskTile::kPlain : MaskTile::kMixed;
}

// What the mask does to one tile.
MaskTile ClassifyTile(const Problem& problem, const sparge_run_args& args, const TileRows& row, Range keys) {
  const Visible& visible = problem.sequences[row.id.sequence].visible;
  const std::byte* base = MaskRow(problem, args.mask, row.id.sequence, row.id.head, 0);
  const int64_t stride = args.mask.query_stride;
  if (problem.mask == SPARGE_MASK_BOOL) {
    const auto* mask = reinterpret_cast<const uint8_t*>(base);
    return ClassifyPairs(
        visible, row, keys, [&](int64_t i, int64_t j) { return mask[i * stride + j] == 0; },
        [&](int64_t i, int64_t j) { return mask[i * stride + j] != 0; });
  }
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  const sparge_dtype dtype = problem.mask == SPARGE_MASK_ADD_F16 ? SPARGE_F16 : SPARGE_F32;
  return ClassifyPairs(
      visible, row, keys, [&](int64_t i, int64_t j) { return LoadElement(base, dtype, i * stride + j) == kMinusInf; },
      [&](int64_t i, int64_t j) { return LoadElement(base, dtype, i * stride + j) == 0.0f; });
}

Range KeysSeen(const Problem& problem, const TileRows& row) {
  return problem.sequences[row.id.sequence].visible.KeysOfAny(row.first, row.last);
}

// `seen`: what the row sees by position.
bool IsVisibleOf(const Problem& problem, const sparge_run_args& args, const TileRows& row, Range seen, int64_t block,
                 uint64_t* masked) {
  const Range keys{block * kBlockK, (block + 1) * kBlockK};
  if (seen.empty() || !Overlaps(seen, keys)) return false;
  if (masked == nullptr) return true;
  const MaskTile tile = ClassifyTile(problem, args, row, keys);
  if (tile == MaskTile::kMixed) SetBit(masked, block);
  return tile != MaskTile::kHidden;
}

}  // namespace

bool IsVisible(const Problem& problem, const sparge_run_args& args, const TileRows& row, int64_t block,
               uint64_t* masked) {
  return IsVisibleOf(problem, args, row, KeysSeen(problem, row), block, masked);
}

int64_t FindVisible(const Problem& problem, const sparge_run_args& args, const TileRows& row, bool* visible,
                    uint64_t* masked) {
  const Range seen = KeysSeen(problem, row);
  int64_t eligible = 0;
  for (int64_t j = 0; j < problem.sequences[row.id.sequence].k_blocks; ++j) {
    visible[j] = IsVisibleOf(problem, args, row, seen, j, masked);
    eligible += visible[j];
  }
  return eligible;
}

}  // namespace sparge::impl

#include "src/cpu/codes.h"

#include <algorithm>
#include <cstring>

namespace sparge::impl {
namespace {

constexpr int64_t kPer = PerLane(SPARGE_PRECISION_INT8);

// Where a key block stands in the arrays of the interface, which have no places for what pads it.
struct CodePlace {
  int64_t tokens, blocks;  // before it
  int64_t count;           // its keys

  CodePlace(const Plan& plan, const BlockId& id) {
    const Sequence& s = plan.sequences[id.sequence];
    const int64_t head = s.index * plan.kv_heads + id.head;
    tokens = head * plan.kv_tokens + id.block * kBlockK;
    blocks = head * plan.k_blocks + id.block;
    count = s.KeysIn(id.block);
  }
};

// Bytes of a row of a query or key: rotation fills the last lane, too.
int64_t RowBytes(const Plan& plan) { return plan.row_lanes() * kLaneBytes; }

// body(token, lane, where the lane is in the packed block): docs/layout.md.
template <class Body>
void ForEachLaneOfKeys(const Plan& plan, int64_t count, const Body& body) {
  const int64_t panel = plan.kernel().panel_lanes, lanes = plan.row_lanes();
  for (int64_t t = 0; t < count; ++t) {
    const int64_t within = t % panel;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      body(t, lane, ((t - within) * lanes + lane * panel + within) * kLaneBytes);
    }
  }
}

// The values of one lane of keys, channel by channel, padded with zeros.
struct FourRows {
  int8_t of[kPer][RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign)];
};

// body(step, first channel, how many lie together, where in the packed block).
template <class Body>
void ForEachRunOfValues(const Plan& plan, const Body& body) {
  constexpr int64_t kSteps = kBlockK / kPer;
  const int64_t panel = plan.kernel().panel_lanes, channels = plan.channels();
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t c = 0; c < channels;) {
      // A narrower last panel is one vector, half a panel, after the other.
      const int64_t together = channels - c / panel * panel >= panel ? panel : panel / 2;
      body(step, c, together, (c * kSteps + step * together) * kLaneBytes);
      c += together;
    }
  }
}

void LeaveValues(const Plan& plan, const std::byte* block, int64_t count, int8_t* out) {
  FourRows rows;
  ForEachRunOfValues(plan, [&](int64_t step, int64_t c, int64_t together, int64_t at) {
    for (int64_t w = 0; w < together; ++w) {
      for (int64_t i = 0; i < kPer; ++i) rows.of[i][c + w] = static_cast<int8_t>(block[at + w * kPer + i]);
    }
    if (c + together < plan.channels()) return;
    for (int64_t i = 0; i < std::min(kPer, count - step * kPer); ++i) {
      std::copy_n(rows.of[i], plan.v_dim, out + (step * kPer + i) * plan.v_dim);
    }
  });
}

void TakeValues(const Plan& plan, const int8_t* from, int64_t count, std::byte* block) {
  FourRows rows{};
  ForEachRunOfValues(plan, [&](int64_t step, int64_t c, int64_t together, int64_t at) {
    for (int64_t i = 0; c == 0 && i < kPer; ++i) {
      const int64_t token = step * kPer + i;
      if (token < count) {
        std::copy_n(from + token * plan.v_dim, plan.v_dim, rows.of[i]);
      } else {
        std::fill_n(rows.of[i], plan.v_dim, int8_t{0});
      }
    }
    for (int64_t w = 0; w < together; ++w) {
      for (int64_t i = 0; i < kPer; ++i) block[at + w * kPer + i] = static_cast<std::byte>(rows.of[i][c + w]);
    }
  });
}

// As StartOf in pack-inl.h makes it, of one row of integers: -offset * their sum, or in every 64 dims of those that are
// first and second in their quad (low half) and of the others (high half).
void SetStarts(const Plan& plan, const int8_t* row, int32_t* start) {
  const QuantGrid& grid = plan.grid();
  const int64_t dims = RowBytes(plan), span = grid.sum_lanes == 0 ? dims : grid.sum_lanes * kPer;
  for (int64_t begin = 0; begin < dims; begin += span, start += kBlockK) {
    int32_t sums[2] = {};
    for (int64_t d = begin; d < std::min(begin + span, dims); ++d) sums[d % kPer / 2] += row[d];
    if (grid.sum_lanes == 0) {
      *start = -grid.q_offset * (sums[0] + sums[1]);
    } else {
      const auto low = static_cast<uint16_t>(-grid.q_offset * sums[0]),
                 high = static_cast<uint16_t>(-grid.q_offset * sums[1]);
      *start = static_cast<int32_t>(uint32_t{high} << 16 | low);
    }
  }
}

// Where the packed values of a block are, or the second half of their bits.
int64_t ValuesAt(const Plan& plan, int64_t task) { return task * (kBlockK / kPer) * plan.channels() * kLaneBytes; }
int64_t KeysAt(const Plan& plan, int64_t task) { return task * plan.row_lanes() * kBlockK * kLaneBytes; }

}  // namespace

void LeaveKeyCodes(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id,
                   int64_t task) {
  const sparge_key_codes& codes = *args.key_codes_out;
  const CodePlace place(plan, id);
  const std::byte* keys = packed.keys + KeysAt(plan, task);
  const int64_t row = RowBytes(plan);
  int8_t* out = codes.keys + place.tokens * row;
  ForEachLaneOfKeys(plan, place.count, [&](int64_t t, int64_t lane, int64_t at) {
    std::memcpy(out + t * row + lane * kLaneBytes, keys + at, kLaneBytes);
  });
  std::copy_n(packed.key_scale + task * kBlockK, place.count, codes.key_scales + place.tokens);
  LeaveValues(plan, packed.values + ValuesAt(plan, task), place.count, codes.values + place.tokens * plan.v_dim);
  std::copy_n(packed.value_scale + task * plan.channels(), plan.v_dim, codes.value_scales + place.blocks * plan.v_dim);
  const FineValues fine = packed.fine[task];
  codes.fine[place.blocks] = static_cast<uint8_t>(fine);
  if (fine != FineValues::kNever) {
    LeaveValues(plan, packed.fine_values + ValuesAt(plan, task), place.count,
                codes.fine_values + place.tokens * plan.v_dim);
  }
  codes.not_finite[place.blocks] = packed.poison[task];
}

void TakeKeyCodes(const Plan& plan, const sparge_run_args& args, const Packed& packed, const BlockId& id, int64_t task,
                  bool with_values) {
  const sparge_key_codes& codes = *args.key_codes;
  const CodePlace place(plan, id);
  const int64_t row = RowBytes(plan);
  const int8_t* rows = codes.keys + place.tokens * row;
  std::byte* keys = packed.keys + KeysAt(plan, task);
  std::fill_n(keys, plan.row_lanes() * kBlockK * kLaneBytes, std::byte{0});
  ForEachLaneOfKeys(plan, place.count, [&](int64_t t, int64_t lane, int64_t at) {
    std::memcpy(keys + at, rows + t * row + lane * kLaneBytes, kLaneBytes);
  });
  float* scale = packed.key_scale + task * kBlockK;
  std::fill_n(std::copy_n(codes.key_scales + place.tokens, place.count, scale), kBlockK - place.count, 0.0f);
  if (plan.grid().q_offset != 0) {
    const int64_t starts = plan.grid().Sums(plan.row_lanes()) * kBlockK;
    int32_t* start = packed.key_start + task * starts;
    std::fill_n(start, starts, 0);
    for (int64_t t = 0; t < place.count; ++t) SetStarts(plan, rows + t * row, start + t);
  }
  packed.poison[task] = codes.not_finite == nullptr ? 0 : codes.not_finite[place.blocks];
  if (!with_values) return;
  TakeValues(plan, codes.values + place.tokens * plan.v_dim, place.count, packed.values + ValuesAt(plan, task));
  float* value_scale = packed.value_scale + task * plan.channels();
  std::fill_n(std::copy_n(codes.value_scales + place.blocks * plan.v_dim, plan.v_dim, value_scale),
              plan.channels() - plan.v_dim, 0.0f);
  packed.fine[task] = static_cast<FineValues>(codes.fine[place.blocks]);
  if (packed.fine[task] == FineValues::kNever) return;
  TakeValues(plan, codes.fine_values + place.tokens * plan.v_dim, place.count,
             packed.fine_values + ValuesAt(plan, task));
}

void LeavePoolCodes(const Plan& plan, const sparge_pool_codes& codes, int64_t first, int64_t count,
                    const QueryRows& from) {
  const int64_t bytes = RowBytes(plan);
  std::transform(from.rows, from.rows + count * bytes, codes.rows + first * bytes, [&](std::byte stored) {
    return static_cast<int8_t>(std::to_integer<int>(stored) - plan.grid().q_offset);
  });
  std::copy_n(from.factor, count, codes.factors + first);
  std::copy_n(from.shift, count, codes.shifts + first);
}

void TakePoolCodes(const Plan& plan, const sparge_pool_codes& codes, int64_t first, int64_t count,
                   const QueryRows& to) {
  const int64_t bytes = RowBytes(plan);
  const int8_t* from = codes.rows + first * bytes;
  std::transform(from, from + count * bytes, to.rows,
                 [&](int8_t n) { return static_cast<std::byte>(n + plan.grid().q_offset); });
  std::copy_n(codes.factors + first, count, to.factor);
  std::copy_n(codes.shifts + first, count, to.shift);
}

}  // namespace sparge::impl

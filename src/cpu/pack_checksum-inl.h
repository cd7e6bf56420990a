// A checksum of tokens, compiled once per instruction set.
#if defined(SPARGE_SRC_CPU_PACK_CHECKSUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_CPU_PACK_CHECKSUM_INL_H_
#undef SPARGE_SRC_CPU_PACK_CHECKSUM_INL_H_
#else
#define SPARGE_SRC_CPU_PACK_CHECKSUM_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "src/base/half.h"
#include "src/base/tokens.h"
#include "src/cpu/pack_ops.h"
#include "src/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

using U32 = hn::ScalableTag<uint32_t>;
using VU = hn::Vec<U32>;

// What one chain of words has come to. One step is a bijection of `last`, so that one word that differs always shows;
// `all` also remembers what two that differ may cancel in `last`.
struct Sums {
  VU last, all;

  HWY_INLINE Sums() {}
  HWY_INLINE Sums(VU last, VU all) : last(last), all(all) {}
};
HWY_INLINE Sums Stir(const Sums& sums, VU word) {
  const VU product = hn::Mul(hn::Xor(sums.last, word), hn::Set(U32(), 0x9E3779B1u));
  const VU last = hn::Xor(product, hn::ShiftRight<15>(product));
  return {last, hn::Add(sums.all, last)};
}

// All bytes of one token.
HWY_INLINE Sums StirToken(const std::byte* from, int64_t bytes, Sums sums) {
  const hn::Repartition<uint8_t, F32> d8;
  constexpr int64_t kBytes = kLanes * static_cast<int64_t>(sizeof(float));
  const auto* at = reinterpret_cast<const uint8_t*>(from);
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) sums = Stir(sums, hn::BitCast(U32(), hn::LoadU(d8, at + i)));
  if (i < bytes) {
    HWY_ALIGN uint8_t rest[kBytes] = {};
    std::memcpy(rest, at + i, static_cast<size_t>(bytes - i));
    sums = Stir(sums, hn::BitCast(U32(), hn::Load(d8, rest)));
  }
  return sums;
}

uint64_t Checksum(const TokenRows& tokens) {
  constexpr int kChains = 4;  // the steps of one have to wait for each other
  const int64_t bytes = tokens.dim * static_cast<int64_t>(DtypeBytes(tokens.dtype));
  Sums sums[kChains];
  for (int c = 0; c < kChains; ++c) {
    const auto seed = static_cast<uint32_t>((tokens.count * 3 + tokens.dtype) * kChains + c);
    sums[c] = {hn::Set(U32(), seed), hn::Zero(U32())};
  }
  int64_t t = 0;
  for (; t + kChains <= tokens.count; t += kChains) {
    Unroll<kChains>([&](auto c) SPARGE_INLINE { sums[c] = StirToken(tokens.Token(t + c), bytes, sums[c]); });
  }
  for (; t < tokens.count; ++t) sums[0] = StirToken(tokens.Token(t), bytes, sums[0]);
  uint64_t all = 0;
  for (int c = 0; c < kChains; ++c) {
    HWY_ALIGN uint32_t lanes[2 * kLanes];
    hn::Store(sums[c].last, U32(), lanes);
    hn::Store(sums[c].all, U32(), lanes + kLanes);
    for (const uint32_t lane : lanes) all = Mix(all, lane);
  }
  return all;
}

// A few bytes of each token: what takes long is to have them come, so nothing here waits for another token but at the
// end.
uint64_t Glimpse(const TokenRows& tokens) {
  const int64_t bytes = tokens.dim * static_cast<int64_t>(DtypeBytes(tokens.dtype));
  VU last = hn::Set(U32(), static_cast<uint32_t>(tokens.count));
  VU all = hn::Zero(U32());
  for (int64_t t = 0; t < tokens.count; ++t) {
    const Sums token = StirToken(tokens.Token(t), bytes, {hn::Set(U32(), static_cast<uint32_t>(t)), hn::Zero(U32())});
    last = hn::Add(last, token.last);
    all = hn::Add(all, hn::Xor(token.last, hn::ShiftRight<7>(token.all)));
  }
  // Lanes one after the other, so that bytes that change places show.
  HWY_ALIGN uint32_t lanes[2 * kLanes];
  hn::Store(last, U32(), lanes);
  hn::Store(all, U32(), lanes + kLanes);
  uint64_t sum = static_cast<uint64_t>(tokens.count);
  for (int i = 0; i < kLanes; ++i) sum = Mix(sum, uint64_t{lanes[i]} << 32 | lanes[kLanes + i]);
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

// A checksum of tokens, compiled once per instruction set.
#if defined(SPARGE_SRC_PACK_CHECKSUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARGE_SRC_PACK_CHECKSUM_INL_H_
#undef SPARGE_SRC_PACK_CHECKSUM_INL_H_
#else
#define SPARGE_SRC_PACK_CHECKSUM_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "src/base/half.h"
#include "src/base/tokens.h"
#include "src/base/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge {
namespace HWY_NAMESPACE {

using U32 = hn::ScalableTag<uint32_t>;
using VU = hn::Vec<U32>;

// One step of every lane: a bijection of `sum`, so that one word that differs always shows, and each bit of it reaches
// all higher ones by the product and the lower ones by the shift.
HWY_INLINE VU Stir(VU sum, VU word) {
  const VU product = hn::Mul(hn::Xor(sum, word), hn::Set(U32(), 0x9E3779B1u));
  return hn::Xor(product, hn::ShiftRight<15>(product));
}

// All bytes of one token.
HWY_INLINE VU StirToken(const std::byte* from, int64_t bytes, VU sum) {
  const hn::Repartition<uint8_t, F32> d8;
  constexpr int64_t kBytes = kLanes * static_cast<int64_t>(sizeof(float));
  const auto* at = reinterpret_cast<const uint8_t*>(from);
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) sum = Stir(sum, hn::BitCast(U32(), hn::LoadU(d8, at + i)));
  if (i < bytes) {
    HWY_ALIGN uint8_t rest[kBytes] = {};
    std::memcpy(rest, at + i, static_cast<size_t>(bytes - i));
    sum = Stir(sum, hn::BitCast(U32(), hn::Load(d8, rest)));
  }
  return sum;
}

uint64_t Checksum(const TokenRows& tokens) {
  constexpr int kChains = 4;  // the steps of one have to wait for each other
  const int64_t bytes = tokens.dim * static_cast<int64_t>(DtypeBytes(tokens.dtype));
  VU sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = hn::Set(U32(), static_cast<uint32_t>(tokens.count * kChains + c));
  int64_t t = 0;
  for (; t + kChains <= tokens.count; t += kChains) {
    Unroll<kChains>([&](auto c) SPARGE_INLINE { sums[c] = StirToken(tokens.Token(t + c), bytes, sums[c]); });
  }
  for (; t < tokens.count; ++t) sums[0] = StirToken(tokens.Token(t), bytes, sums[0]);
  uint64_t all = 0;
  for (int c = 0; c < kChains; ++c) {
    HWY_ALIGN uint32_t lanes[kLanes];
    hn::Store(sums[c], U32(), lanes);
    for (const uint32_t lane : lanes) {
      all = (all ^ lane) * 0xff51afd7ed558ccdu;
      all ^= all >> 32;
    }
  }
  return all;
}

}  // namespace HWY_NAMESPACE
}  // namespace sparge
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard

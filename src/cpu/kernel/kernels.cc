// Compiles the kernels for every target and puts each target's into its table.
#include "src/cpu/kernel/kernel.h"
#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/kernel/kernels.cc"
#include <hwy/foreach_target.h>
// Must come after foreach_target.
#include <hwy/highway.h>

#include "src/cpu/kernel/mass-inl.h"
#include "src/cpu/kernel/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparge::impl {
namespace HWY_NAMESPACE {

// Floats to the output type, rounded to nearest even.
HWY_INLINE void StoreRow(const float* row, int64_t count, sparge_dtype dtype, std::byte* out) {
  const F32 d;
  int64_t i = 0;
  if (dtype == SPARGE_F32) {
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(d, row + i), d, reinterpret_cast<float*>(out) + i);
  } else if (dtype == SPARGE_F16 && HWY_TARGET != HWY_EMU128) {  // EMU128 truncates
    const hn::Rebind<hwy::float16_t, F32> half;
    for (; i + kLanes <= count; i += kLanes) {
      hn::StoreU(hn::DemoteTo(half, hn::LoadU(d, row + i)), half, reinterpret_cast<hwy::float16_t*>(out) + i);
    }
  }
  for (; i < count; ++i) StoreElement(out, dtype, i, row[i]);
}

void Finish(const FinishArgs& args) {
  const F32 d;
  // Rounding may put a mean of the largest floats one step above them.
  const VF limit = hn::Set(d, std::numeric_limits<float>::max());
  HWY_ALIGN float row[RoundUp(SPARGE_MAX_HEAD_DIM, kChannelAlign)];
  for (int64_t r = 0; r < args.count; ++r) {
    const float l = args.state.l[r];
    const float* o = args.state.o + r * args.channels;
    const VF inverse = hn::Set(d, l > 0 ? 1.0f / l : 0.0f);
    const VF unit = hn::Set(d, args.value_unit);
    for (int64_t c = 0; c < args.channels; c += kLanes) {
      const VF value = hn::Mul(hn::Mul(hn::LoadU(d, o + c), inverse), unit);
      // Sums are finite unless a value is not: then, and only then, o - o is NaN and not 0.
      const VF sum = hn::LoadU(d, o + c);
      hn::Store(hn::Add(hn::Max(hn::Min(value, limit), hn::Neg(limit)), hn::Sub(sum, sum)), d, row + c);
    }
    if (std::isnan(l)) std::fill_n(row, args.channels, l);
    const int64_t place = args.order == nullptr ? r : args.order[r];
    StoreRow(row, args.v_dim, args.dtype,
             args.out + place * args.token_stride * static_cast<int64_t>(DtypeBytes(args.dtype)));
  }
}

template <class I16, class I8>
constexpr KernelOps OpsWith(const char* int8_text) {
  return {int8_text,
          kGroup,
          kPassRows,
          kPanelLanes,
          {PrecisionF32::kGrid, I16::kGrid, I8::kGrid},
          {&Attend<PrecisionF32>, &Attend<I16>, &Attend<I8>},
          &Attend<PrecisionDirect>,
          {&Masses<PrecisionF32>, &Masses<I16>, &Masses<I8>},
          &Finish};
}
inline constexpr KernelOps kKernelOps = OpsWith<PrecisionI16, PrecisionI8>(kInt8Text);
#if HWY_TARGET == HWY_AVX2
inline constexpr KernelOps kAvxVnniOps = OpsWith<PrecisionI16Vnni, PrecisionI8Vnni>(kInt8VnniText);
#elif HWY_TARGET == HWY_NEON
inline constexpr KernelOps kNeonDotprodOps = OpsWith<PrecisionI16, PrecisionI8Sdot>(kInt8SdotText);
inline constexpr KernelOps kNeonI8mmOps = OpsWith<PrecisionI16, PrecisionI8Usdot>(kInt8UsdotText);
#endif

}  // namespace HWY_NAMESPACE
}  // namespace sparge::impl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/cpu/dispatch.h"

namespace sparge::impl {

const KernelOps* KernelOpsOf(int64_t target) { SPARGE_RETURN_TABLE_OF(target, kKernelOps) }

#if HWY_TARGETS & HWY_AVX2
const KernelOps* AvxVnniOps() { return &N_AVX2::kAvxVnniOps; }
#endif
#if HWY_TARGETS & HWY_NEON
const KernelOps* NeonDotprodOps() { return &N_NEON::kNeonDotprodOps; }
const KernelOps* NeonI8mmOps() { return &N_NEON::kNeonI8mmOps; }
#endif

}  // namespace sparge::impl
#endif  // HWY_ONCE

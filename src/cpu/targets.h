// Include before any Highway header: which targets the per-ISA files are compiled for.
#ifndef SPARGE_SRC_CPU_TARGETS_H_
#define SPARGE_SRC_CPU_TARGETS_H_

// VNNI comes with Highway's AVX3_DL target, which has to be asked for.
#define HWY_WANT_AVX3_DL 1
// Kept: the portable baseline, AVX2, AVX-512 with and without VNNI, NEON. The x86 targets between them cost compile
// time and serve machines older than 2013; SVE vectors have no fixed size and cannot sit in the kernels' arrays.
#define SPARGE_UNUSED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#ifdef SPARGE_FEW_TARGETS  // sanitized builds: what each line of code does is seen without it
#define HWY_DISABLED_TARGETS (SPARGE_UNUSED_TARGETS | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS SPARGE_UNUSED_TARGETS
#endif
// The portable baseline is EMU128. Highway replaces it with one-lane vectors before g++ 12.3, because g++ 12.2 may
// miscompile MulHigh (GCC bug 106322); the kernels do not use MulHigh, and the tests run on the baseline too.
#define HWY_BROKEN_EMU128 0

#endif  // SPARGE_SRC_CPU_TARGETS_H_

// The only place that maps an Isa to a target's namespace. Include after Highway, in the part compiled once.
#ifndef SPARGE_SRC_CPU_DISPATCH_H_
#define SPARGE_SRC_CPU_DISPATCH_H_

#include "src/cpu/isa.h"

#if HWY_TARGETS & HWY_AVX3_DL
#define SPARGE_CASE_AVX512VNNI(table) \
  case Isa::kAvx512Vnni:              \
    return &N_AVX3_DL::table;
#else
#define SPARGE_CASE_AVX512VNNI(table)
#endif
#if HWY_TARGETS & HWY_AVX3
#define SPARGE_CASE_AVX512(table) \
  case Isa::kAvx512:              \
    return &N_AVX3::table;
#else
#define SPARGE_CASE_AVX512(table)
#endif
#if HWY_TARGETS & HWY_AVX2
#define SPARGE_CASE_AVX2(table) \
  case Isa::kAvx2:              \
    return &N_AVX2::table;
#else
#define SPARGE_CASE_AVX2(table)
#endif
#if HWY_TARGETS & HWY_NEON
#define SPARGE_CASE_NEON(table) \
  case Isa::kNeon:              \
    return &N_NEON::table;
#else
#define SPARGE_CASE_NEON(table)
#endif
#if HWY_TARGETS & HWY_EMU128
#define SPARGE_CASE_BASELINE(table) \
  case Isa::kBaseline:              \
    return &N_EMU128::table;
#else
#define SPARGE_CASE_BASELINE(table)
#endif

// Returns the address of `table` in the namespace of `isa`, NULL if that one was not compiled in.
#define SPARGE_RETURN_TABLE_OF(isa, table) \
  switch (isa) {                           \
    SPARGE_CASE_AVX512VNNI(table)          \
    SPARGE_CASE_AVX512(table)              \
    SPARGE_CASE_AVX2(table)                \
    SPARGE_CASE_NEON(table)                \
    SPARGE_CASE_BASELINE(table)            \
    default:                               \
      return nullptr;                      \
  }

#endif  // SPARGE_SRC_CPU_DISPATCH_H_

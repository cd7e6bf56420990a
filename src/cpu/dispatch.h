// Finds the table of one of Highway's targets among those compiled in. Include after Highway, in the part compiled
// once.
#ifndef SPARGE_SRC_CPU_DISPATCH_H_
#define SPARGE_SRC_CPU_DISPATCH_H_

#if HWY_TARGETS & HWY_AVX3_DL
#define SPARGE_CASE_AVX3_DL(table) \
  case HWY_AVX3_DL:                \
    return &N_AVX3_DL::table;
#else
#define SPARGE_CASE_AVX3_DL(table)
#endif
#if HWY_TARGETS & HWY_AVX3
#define SPARGE_CASE_AVX3(table) \
  case HWY_AVX3:                \
    return &N_AVX3::table;
#else
#define SPARGE_CASE_AVX3(table)
#endif
#if HWY_TARGETS & HWY_AVX2
#define SPARGE_CASE_AVX2(table) \
  case HWY_AVX2:                \
    return &N_AVX2::table;
#else
#define SPARGE_CASE_AVX2(table)
#endif
#if HWY_TARGETS & HWY_NEON
#define SPARGE_CASE_NEON(table) \
  case HWY_NEON:                \
    return &N_NEON::table;
#else
#define SPARGE_CASE_NEON(table)
#endif
#if HWY_TARGETS & HWY_EMU128
#define SPARGE_CASE_EMU128(table) \
  case HWY_EMU128:                \
    return &N_EMU128::table;
#else
#define SPARGE_CASE_EMU128(table)
#endif

// Returns the address of `table` in the namespace of `target`, NULL if that one was not compiled in.
#define SPARGE_RETURN_TABLE_OF(target, table) \
  switch (target) {                           \
    SPARGE_CASE_AVX3_DL(table)                \
    SPARGE_CASE_AVX3(table)                   \
    SPARGE_CASE_AVX2(table)                   \
    SPARGE_CASE_NEON(table)                   \
    SPARGE_CASE_EMU128(table)                 \
    default:                                  \
      return nullptr;                         \
  }

#endif  // SPARGE_SRC_CPU_DISPATCH_H_

// Symbols of 0.3 that the header no longer has, for programs that were compiled with it. Initialisers were functions of
// the library then, so that these must not write more than the structs of 0.3 had: sizes in bytes, final.
#include <sparge/sparge.h>

// The header's inline functions have these names; the label keeps the two apart.
#define SPARGE_OLD_INIT(type, bytes)                                                 \
  extern "C" SPARGE_API void type##_init_of_0_3(type* value) __asm__(#type "_init"); \
  extern "C" void type##_init_of_0_3(type* value) { type##_init_sized(value, bytes); }

SPARGE_OLD_INIT(sparge_context_desc, 32)
SPARGE_OLD_INIT(sparge_isa, 32)
SPARGE_OLD_INIT(sparge_plan_desc, 288)
SPARGE_OLD_INIT(sparge_run_args, 320)
SPARGE_OLD_INIT(sparge_stats, 120)
SPARGE_OLD_INIT(sparge_calibration_desc, 48)
SPARGE_OLD_INIT(sparge_head_estimate, 120)

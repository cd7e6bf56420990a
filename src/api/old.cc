// Symbols of 0.3 that the header no longer has, for programs that were compiled with it. Initialisers were functions of
// the library then, so that these must not write more than the structs of 0.3 had: up to the member that was the last.
#include <sparge/sparge.h>

#include <cstddef>

// The header's inline functions have these names; the label keeps the two apart.
// NOLINTBEGIN(bugprone-macro-parentheses): types cannot have any
#define SPARGE_TEXT(x) SPARGE_TEXT_OF(x)
#define SPARGE_TEXT_OF(x) #x
#define SPARGE_OLD_INIT(type, last)                                                                           \
  extern "C" SPARGE_API void type##_init_of_0_3(type* value) __asm__(SPARGE_TEXT(__USER_LABEL_PREFIX__) #type \
                                                                     "_init");                                \
  extern "C" void type##_init_of_0_3(type* value) {                                                           \
    constexpr size_t kEnd = offsetof(type, last) + sizeof(value->last);                                       \
    type##_init_sized(value, (kEnd + alignof(type) - 1) / alignof(type) * alignof(type));                     \
  }
// NOLINTEND(bugprone-macro-parentheses)

SPARGE_OLD_INIT(sparge_context_desc, isa)
SPARGE_OLD_INIT(sparge_isa, int8_qk)
SPARGE_OLD_INIT(sparge_plan_desc, least_effort)
SPARGE_OLD_INIT(sparge_run_args, cache_size)
SPARGE_OLD_INIT(sparge_stats, key_blocks_reused)
SPARGE_OLD_INIT(sparge_calibration_desc, seed)
SPARGE_OLD_INIT(sparge_head_estimate, work)

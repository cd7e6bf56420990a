// Takes the fat binaries that nvcc made into the library. SPARGE_CUDA_IMAGES is the folder they are in.
#include "src/cuda/images.h"

#define SPARGE_IMAGE(name)                      \
  asm(".pushsection .rodata\n"                  \
      ".balign 64\n"                            \
      ".hidden sparge_cuda_" #name              \
      "\n"                                      \
      ".globl sparge_cuda_" #name               \
      "\n"                                      \
      "sparge_cuda_" #name                      \
      ":\n"                                     \
      ".incbin \"" SPARGE_CUDA_IMAGES "/" #name \
      ".fatbin\"\n"                             \
      ".popsection\n");                         \
  extern "C" const char sparge_cuda_##name[] __attribute__((visibility("hidden")))

SPARGE_IMAGE(attend);
SPARGE_IMAGE(merge);
SPARGE_IMAGE(pack_keys);
SPARGE_IMAGE(pack_queries);
SPARGE_IMAGE(score);
SPARGE_IMAGE(select);

namespace sparge::impl {

const void* ImageOf(Image image) {
  switch (image) {
    case kAttendImage:
      return sparge_cuda_attend;
    case kMergeImage:
      return sparge_cuda_merge;
    case kPackKeysImage:
      return sparge_cuda_pack_keys;
    case kPackQueriesImage:
      return sparge_cuda_pack_queries;
    case kScoreImage:
      return sparge_cuda_score;
    case kSelectImage:
      return sparge_cuda_select;
    case kImages:
      break;
  }
  return nullptr;
}

}  // namespace sparge::impl

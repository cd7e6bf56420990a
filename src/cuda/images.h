// The compiled kernels that are part of this library, one image per file of src/cuda/kernel.
#ifndef SPARGE_SRC_CUDA_IMAGES_H_
#define SPARGE_SRC_CUDA_IMAGES_H_

namespace sparge::impl {

enum Image : int { kAttendImage, kMergeImage, kPackKeysImage, kPackQueriesImage, kScoreImage, kSelectImage, kImages };
// A fat binary: machine code for several architectures, and PTX.
const void* ImageOf(Image image);

}  // namespace sparge::impl
#endif  // SPARGE_SRC_CUDA_IMAGES_H_

# The device for NVIDIA GPUs: nvcc makes fat binaries, which become a part of the library. No CUDA library is linked; the
# driver is opened at run time.
find_program(SPARGE_NVCC nvcc HINTS /usr/local/cuda/bin)
if(NOT SPARGE_NVCC)
  message(FATAL_ERROR "SPARGE_CUDA=ON, but nvcc is not on the PATH nor in /usr/local/cuda/bin")
endif()
set(SPARGE_CUDA_ARCHITECTURES 80 86 89 90 100 120 CACHE STRING "Architectures with machine code; others get it from PTX by the driver")

set(SPARGE_CUDA_PTX 80 89 CACHE STRING "Architectures whose PTX is kept, for all that come later: with products of f16, and with those of e4m3")
set(codes)
foreach(architecture ${SPARGE_CUDA_ARCHITECTURES})
  list(APPEND codes -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
foreach(architecture ${SPARGE_CUDA_PTX})
  list(APPEND codes -gencode arch=compute_${architecture},code=compute_${architecture})
endforeach()
# Contraction is left to the kernels (fmaf), so that packing gets the integers of the CPU.
set(SPARGE_NVCC_FLAGS -std=c++20 --expt-relaxed-constexpr -O3 --fmad=false --compress-mode=size -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include)

set(SPARGE_CUDA_IMAGES ${CMAKE_CURRENT_BINARY_DIR}/cuda)
file(MAKE_DIRECTORY ${SPARGE_CUDA_IMAGES})
file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernel/*.h ${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernel/*.cuh)
set(images)
foreach(name attend merge pack_keys pack_queries score select)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernel/${name}.cu)
  add_custom_command(OUTPUT ${SPARGE_CUDA_IMAGES}/${name}.fatbin BYPRODUCTS ${SPARGE_CUDA_IMAGES}/${name}.log
    COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/cuda/nvcc_logged.sh ${SPARGE_CUDA_IMAGES}/${name}.log
      ${SPARGE_NVCC} ${SPARGE_NVCC_FLAGS} -Xptxas -v ${codes} -fatbin -o ${SPARGE_CUDA_IMAGES}/${name}.fatbin ${source}
    DEPENDS ${source} ${headers} ${PROJECT_SOURCE_DIR}/src/base/packing.h ${PROJECT_SOURCE_DIR}/src/select/unlike.h
    COMMENT "Building GPU kernels ${name}" VERBATIM)
  list(APPEND images ${SPARGE_CUDA_IMAGES}/${name}.fatbin)
endforeach()
add_custom_target(sparge_cuda_images DEPENDS ${images})

sparge_room(cuda SOURCES cuda/device.cc cuda/driver.cc cuda/gpu.cc cuda/images.cc cuda/merge.cc cuda/plan.cc cuda/tables.cc)
add_dependencies(sparge_cuda sparge_cuda_images)
set_source_files_properties(cuda/images.cc PROPERTIES OBJECT_DEPENDS "${images}"
  COMPILE_DEFINITIONS SPARGE_CUDA_IMAGES="${SPARGE_CUDA_IMAGES}")
target_compile_definitions(sparge_api PRIVATE SPARGE_WITH_CUDA)
foreach(library ${SPARGE_LIBRARIES})
  target_link_libraries(${library} PRIVATE ${CMAKE_DL_LIBS})
endforeach()

# The GPU's path without a GPU. Two drivers stand in for NVIDIA's: one of our own runs the kernels, compiled as C++, in the
# test's process; the other one (tools/ptxrun) runs the PTX that nvcc made, and checks every access.
get_filename_component(cuda_root ${SPARGE_NVCC} REALPATH)
get_filename_component(cuda_root ${cuda_root}/../.. ABSOLUTE)
set(kernel_folder ${PROJECT_SOURCE_DIR}/src/cuda/kernel)
set(kernels ${kernel_folder}/attend.cu ${kernel_folder}/merge.cu ${kernel_folder}/pack_keys.cu ${kernel_folder}/pack_queries.cu
  ${kernel_folder}/score.cu ${kernel_folder}/select.cu)
add_library(fake_cuda SHARED cuda/host/driver.cc cuda/host/fibers.cc ${kernels})
set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS
  "-include;${CMAKE_CURRENT_LIST_DIR}/host/kernel_host.h;-x;c++;-Wno-unknown-pragmas;-Wno-unused-function")
target_include_directories(fake_cuda PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
target_include_directories(fake_cuda SYSTEM PRIVATE ${cuda_root}/include)
target_link_libraries(fake_cuda PRIVATE sparge_flags)
set(fake_folder ${CMAKE_CURRENT_BINARY_DIR}/fake_cuda)
set_target_properties(fake_cuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1 LIBRARY_OUTPUT_DIRECTORY ${fake_folder})

if(NOT TARGET ptxrun)
  add_subdirectory(${PROJECT_SOURCE_DIR}/tools/ptxrun ${PROJECT_BINARY_DIR}/tools/ptxrun)
endif()
# g++ 12 sees overlaps in every text + text (GCC bug 105651).
target_compile_options(ptxrun_libcuda PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
set(ptx_folder $<TARGET_FILE_DIR:ptxrun_libcuda>)

add_custom_target(cuda_tests)
add_dependencies(cuda_tests fake_cuda ptxrun_libcuda)
foreach(name gpu_test gpu_select_test gpu_door_test)
  add_executable(${name} cuda/${name}.cc cuda/gpu_util.cc)
  target_link_libraries(${name} PRIVATE sparge_test_util ${CMAKE_DL_LIBS})
  add_dependencies(cuda_tests ${name})
endforeach()

# sparge_gpu_test(NAME PROGRAM FILTER FOLDER [SETTING...]): with the driver in a folder. A test that says it was skipped
# ran on a device that was not meant.
function(sparge_gpu_test name program filter folder)
  add_test(NAME ${name} COMMAND ${program} --gtest_filter=${filter} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES LABELS cuda TIMEOUT 900 ENVIRONMENT "LD_LIBRARY_PATH=${folder};${ARGN}"
    FAIL_REGULAR_EXPRESSION "SKIPPED;0 tests ran")
endfunction()
sparge_gpu_test(gpu_door gpu_door_test * ${fake_folder})
sparge_gpu_test(gpu_no_driver gpu_door_test NoDriver.* ${CMAKE_CURRENT_BINARY_DIR} SPARGE_NO_DRIVER=1)
sparge_gpu_test(gpu_host gpu_test *Exact*ragged*:*Exact*causal*:*Exact*map* ${fake_folder})
sparge_gpu_test(gpu_host_select gpu_select_test GpuSkip*:GpuEdges* ${fake_folder})
sparge_gpu_test(gpu_ptx_80 gpu_test *_f16 ${ptx_folder} PTXRUN_SM=80)
sparge_gpu_test(gpu_ptx_89 gpu_test *_fp8 ${ptx_folder} PTXRUN_SM=89)
sparge_gpu_test(gpu_ptx_80_select gpu_select_test *:-*fp8 ${ptx_folder} PTXRUN_SM=80)
sparge_gpu_test(gpu_ptx_89_skip gpu_select_test GpuSkip*fp8 ${ptx_folder} PTXRUN_SM=89)
# The other architectures have PTX of their own, from the same source: without this it is compiled and not run.
foreach(architecture 86 90 100)
  if(${architecture} IN_LIST SPARGE_CUDA_PTX)
    sparge_gpu_test(gpu_ptx_${architecture} gpu_test *Exact*_f16 ${ptx_folder} PTXRUN_SM=${architecture})
  endif()
endforeach()
if(120 IN_LIST SPARGE_CUDA_PTX)
  sparge_gpu_test(gpu_ptx_120 gpu_test *Exact*_fp8 ${ptx_folder} PTXRUN_SM=120)
endif()

# The package on the GPU, and what a person with a GPU runs once: through the interpreter.
if(TARGET sparge_python)
  set(SPARGE_GPU_PYTHON ${Python_EXECUTABLE} CACHE FILEPATH "Python for the package's tests on a GPU: with NumPy, pytest, and PyTorch if it is to be tested")
  set(package ${CMAKE_CURRENT_BINARY_DIR}/gpu_python)
  add_custom_target(gpu_python_package COMMAND ${CMAKE_COMMAND} -E copy_directory ${PROJECT_SOURCE_DIR}/python/sparge ${package}/sparge
    COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_FILE:sparge_python> ${package}/sparge DEPENDS sparge_python)
  add_dependencies(cuda_tests gpu_python_package)
  foreach(name gpu gpu_torch)
    add_test(NAME python_${name} COMMAND ${SPARGE_GPU_PYTHON} -m pytest -q -p no:cacheprovider ${CMAKE_CURRENT_LIST_DIR}/python/test_${name}.py)
    # 5: without PyTorch nothing is collected of its file.
    set_tests_properties(python_${name} PROPERTIES LABELS cuda SKIP_RETURN_CODE 5 ENVIRONMENT
      "PYTHONPATH=${package};PYTHONDONTWRITEBYTECODE=1;LD_LIBRARY_PATH=${ptx_folder};PTXRUN_SM=80")
  endforeach()
endif()
add_test(NAME gpu_check COMMAND ${PROJECT_SOURCE_DIR}/scripts/gpu_check.sh --build ${PROJECT_BINARY_DIR} --python ${Python3_EXECUTABLE}
  --out ${CMAKE_CURRENT_BINARY_DIR}/gpu_check --driver ${ptx_folder} --quick)
add_test(NAME gpu_check_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_test.py)
add_test(NAME gpu_model_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/model_test.py)
set_tests_properties(gpu_check gpu_check_test gpu_model_test PROPERTIES LABELS cuda)

find_program(SPARGE_NVDISASM nvdisasm HINTS ${cuda_root}/bin)
set(disassemble)
if(SPARGE_NVDISASM)
  set(disassemble --nvdisasm ${SPARGE_NVDISASM})
endif()
add_test(NAME gpu_gates COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/gates.py ${PROJECT_BINARY_DIR}/src/cuda ${disassemble})
set_tests_properties(gpu_gates PROPERTIES LABELS cuda)

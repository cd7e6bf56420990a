# Several ranks on this machine, by mpirun: against one rank, with one that is lost, and a program that uses the installed
# library.
add_executable(mpi_test mpi/mpi_test.cc)
target_link_libraries(mpi_test PRIVATE sparge_mpi sparge_test_util)
add_executable(lost_rank mpi/lost_rank.cc)
target_link_libraries(lost_rank PRIVATE sparge_mpi sparge_flags)
foreach(program mpi_test lost_rank)
  target_compile_definitions(${program} PRIVATE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
endforeach()
add_custom_target(mpi_tests DEPENDS mpi_test lost_rank)

# More ranks than cores, as one may have them in a test, and as root, as containers have it.
set(mpirun ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none --allow-run-as-root)
foreach(ranks 1 2 3 4)
  add_test(NAME mpi_test_${ranks} COMMAND ${mpirun} -n ${ranks} $<TARGET_FILE:mpi_test> --gtest_brief=1)
endforeach()
add_test(NAME mpi_lost_rank_test
  COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/lost_rank_test.py ${mpirun} $<TARGET_FILE:lost_rank>)
add_test(NAME mpi_install_test COMMAND ${CMAKE_CURRENT_LIST_DIR}/install.sh ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR})
set_tests_properties(mpi_test_1 mpi_test_2 mpi_test_3 mpi_test_4 mpi_lost_rank_test mpi_install_test PROPERTIES LABELS mpi
  TIMEOUT 300 RUN_SERIAL ON)

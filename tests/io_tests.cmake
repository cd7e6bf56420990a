# Tests of the file formats and of the command line; included by tests/CMakeLists.txt.
add_executable(io_test ${CMAKE_CURRENT_LIST_DIR}/io_test.cc)
target_compile_definitions(io_test PRIVATE SPARGE_FUZZ_CORPUS="${CMAKE_CURRENT_LIST_DIR}/fuzz/corpus")
target_link_libraries(io_test PRIVATE sparge_flags sparge_io GTest::gtest_main)
gtest_discover_tests(io_test)

if(TARGET sparge_cli)
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_FOUND)
    add_test(NAME cli_verbs_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_verbs_test.py
                                          $<TARGET_FILE:sparge_cli>)
  endif()
endif()

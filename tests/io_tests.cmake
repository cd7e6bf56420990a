# Tests of the file formats; included by tests/CMakeLists.txt.
add_executable(io_test ${CMAKE_CURRENT_LIST_DIR}/io_test.cc)
target_compile_definitions(io_test PRIVATE SPARGE_FUZZ_CORPUS="${CMAKE_CURRENT_LIST_DIR}/fuzz/corpus")
target_link_libraries(io_test PRIVATE sparge_flags sparge_io GTest::gtest_main)
gtest_discover_tests(io_test)

add_executable(preset_test ${CMAKE_CURRENT_LIST_DIR}/preset_test.cc)
target_link_libraries(preset_test PRIVATE sparge_flags sparge_io GTest::gtest_main)
gtest_discover_tests(preset_test)

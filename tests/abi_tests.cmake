# Programs of other versions, and of other ways to link: a program of 0.3, and a C++ consumer of the static library.
function(sparge_abi_test name header)
  add_executable(${name} abi/program.c)
  target_compile_definitions(${name} PRIVATE SPARGE_HEADER=${header})
  target_compile_options(${name} PRIVATE -Wpedantic ${ARGN})
  target_link_libraries(${name} PRIVATE sparge sparge_flags m)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
sparge_abi_test(abi_0_3_test "\"tests/abi/sparge_0_3.h\"")
target_include_directories(abi_0_3_test PRIVATE ${PROJECT_SOURCE_DIR})
sparge_abi_test(abi_source_test "<sparge/sparge.h>" -Wno-deprecated-declarations)

# At -O0 every inline function of the header is a symbol of its own, which one of the library's could take the place of.
foreach(level 0 2)
  add_executable(static_O${level}_test static/consumer.cc)
  target_compile_options(static_O${level}_test PRIVATE -O${level})
  target_link_libraries(static_O${level}_test PRIVATE sparge_static sparge_flags)
  add_test(NAME static_O${level}_test COMMAND static_O${level}_test)
  set_tests_properties(static_O${level}_test PROPERTIES TIMEOUT 120)
endforeach()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME static_symbols_test
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/static/symbols_test.py ${CMAKE_NM} $<TARGET_FILE:sparge_static>)

# Tests that are scripts: the command line and the benchmark's binding against NumPy, the installed package, the rules
# of the source tree.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME rooms_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/rooms_test.py ${PROJECT_SOURCE_DIR})
add_test(NAME instructions_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/instructions_test.py)
if(NOT CMAKE_CROSSCOMPILING AND NOT SPARGE_SANITIZE)  # Python alone
  add_test(NAME prompt_test COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/prompt_test.py)
endif()
# Only where all instruction sets are compiled in, by GNU's disassembler, whose lines it reads.
find_program(SPARGE_OBJDUMP NAMES ${CMAKE_CXX_LIBRARY_ARCHITECTURE}-objdump ${CMAKE_LIBRARY_ARCHITECTURE}-objdump objdump)
if(SPARGE_OBJDUMP AND NOT SPARGE_SANITIZE)
  add_test(NAME encodings_test
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/encodings_test.py ${SPARGE_OBJDUMP} $<TARGET_FILE:sparge>)
endif()

if(TARGET sparge_cli)
  set(program $<TARGET_FILE:sparge_cli>)
  if(CMAKE_CROSSCOMPILING)
    # The scripts start the program themselves, so the emulator has to be part of what they start.
    set(program ${CMAKE_CURRENT_BINARY_DIR}/sparge)
    list(JOIN CMAKE_CROSSCOMPILING_EMULATOR " " emulator)
    file(GENERATE OUTPUT ${program} CONTENT "#!/bin/sh\nexec ${emulator} $<TARGET_FILE:sparge_cli> \"$@\"\n"
      FILE_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  endif()
  # The thread sanitizer runs this one alone: the program has threads of its own in `bench` only. All others are the
  # library's, whose tests it runs all.
  add_test(NAME cli_bench_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_bench_test.py ${program})
endif()
if(TARGET sparge_cli AND NOT SPARGE_SANITIZE STREQUAL thread)
  add_test(NAME cli_verbs_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_verbs_test.py ${program})
  add_test(NAME cli_grid_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_grid_test.py ${program})
  # Of these an emulator runs some: they take minutes each there, for code that is not compiled differently, and what it
  # calls has tests of its own.
  set(parts oracle refusals results maps extremes preset tune)
  if(CMAKE_CROSSCOMPILING)
    set(parts oracle refusals)
  endif()
  foreach(part ${parts})
    add_test(NAME cli_${part}_test
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli/run_all.py --sparge ${program} test_${part})
  endforeach()
  # Looks at the calls that the program makes, through a library that is loaded before libc. What an emulator would make of
  # that is no matter of the program.
  if(NOT CMAKE_CROSSCOMPILING)
    add_library(file_calls MODULE ${CMAKE_CURRENT_LIST_DIR}/file_calls.c)
    add_test(NAME cli_outputs_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli_outputs_test.py ${program}
      $<TARGET_FILE:file_calls>)
  endif()
  add_test(NAME report_test COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/report_test.py ${program})
  # Documents and the page are the same whatever compiled the program; beside an emulator or a sanitizer these tests would
  # only be slow.
  if(NOT CMAKE_CROSSCOMPILING AND NOT SPARGE_SANITIZE)
    add_test(NAME snippets_test
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cli/run_all.py --sparge ${program} test_documents)
    add_test(NAME documents_test
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/documents_test.py ${program} ${PROJECT_SOURCE_DIR})
    add_test(NAME report_browser_test COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/report_browser_test.py
      ${program} ${PROJECT_SOURCE_DIR}/data)
    set_tests_properties(report_browser_test PROPERTIES SKIP_RETURN_CODE 77 COST 100)
  endif()
  # The longest start first, or one core would wait for them at the end.
  foreach(test cli_results_test cli_extremes_test cli_verbs_test cli_maps_test)
    if(TEST ${test})
      set_tests_properties(${test} PROPERTIES COST 100)
    endif()
  endforeach()
endif()

# A consumer would need the same emulator or sanitizer, and then would test that and not the package.
if(NOT CMAKE_CROSSCOMPILING AND NOT SPARGE_SANITIZE)
  add_test(NAME install_test
    COMMAND ${CMAKE_CURRENT_LIST_DIR}/install/run.sh ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR})
endif()

# Python loads the library itself, which neither an emulator nor a sanitizer's runtime allows.
get_target_property(library_type sparge TYPE)
if(library_type STREQUAL SHARED_LIBRARY AND NOT CMAKE_CROSSCOMPILING AND NOT SPARGE_SANITIZE)
  add_test(NAME bench_test
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/bench_test.py $<TARGET_FILE:sparge>)
endif()

# The Python package, installed into the build folder. What needs PyTorch is skipped where that is missing.
if(SPARGE_PYTHON)
  set(package ${CMAKE_CURRENT_BINARY_DIR}/python)
  add_test(NAME python_install
    COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --component python --prefix ${package})
  set_tests_properties(python_install PROPERTIES FIXTURES_SETUP python_package)
  add_test(NAME python_test WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
    COMMAND ${Python_EXECUTABLE} -m pytest -q -p no:cacheprovider ${PROJECT_SOURCE_DIR}/python/tests)
  set_tests_properties(python_test PROPERTIES FIXTURES_REQUIRED python_package COST 100 RUN_SERIAL ON
    ENVIRONMENT "PYTHONPATH=${package};PYTHONDONTWRITEBYTECODE=1")
endif()

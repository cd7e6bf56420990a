# `cmake --install`: library, headers, command line, find_package(sparge) and pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS sparge EXPORT spargeTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/sparge DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp"
  PATTERN sparge_mpi.h EXCLUDE)
install(EXPORT spargeTargets NAMESPACE sparge:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sparge)
configure_package_config_file(cmake/spargeConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/spargeConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sparge)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/spargeConfigVersion.cmake COMPATIBILITY ${SPARGE_COMPATIBILITY})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/spargeConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/spargeConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sparge)
# Relative to its own place, so that it stays true under `cmake --install --prefix`.
file(RELATIVE_PATH SPARGE_PC_UP /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
# What a C program that links the archive must add: the run-time libraries of C++, under the names that this compiler has.
set(SPARGE_PC_CXX ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER SPARGE_PC_CXX INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|m)$")
list(REMOVE_DUPLICATES SPARGE_PC_CXX)
list(TRANSFORM SPARGE_PC_CXX PREPEND -l)
list(JOIN SPARGE_PC_CXX " " SPARGE_PC_CXX)
configure_file(cmake/sparge.pc.in ${CMAKE_CURRENT_BINARY_DIR}/sparge.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sparge.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(SPARGE_MPI)
  # find_package(sparge COMPONENTS mpi) and pkg-config sparge_mpi.
  install(TARGETS sparge_mpi EXPORT spargeMpiTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES include/sparge/sparge_mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/sparge)
  install(EXPORT spargeMpiTargets NAMESPACE sparge:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sparge)
  configure_file(cmake/sparge_mpi.pc.in ${CMAKE_CURRENT_BINARY_DIR}/sparge_mpi.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sparge_mpi.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
if(SPARGE_CLI)
  # The program finds its library wherever the two are installed.
  set_target_properties(sparge_cli PROPERTIES INSTALL_RPATH $ORIGIN/../${CMAKE_INSTALL_LIBDIR})
  install(TARGETS sparge_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

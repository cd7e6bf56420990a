#!/usr/bin/env bash
# The program of docs/distributed.md with the installed library, by pkg-config and by find_package: install.sh BUILD_DIR
# SOURCE_DIR. One rank and three count the same tiles.
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'cat "$work/log" >&2' ERR
prefix=$work/prefix
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
ranks() { "$(cached MPIEXEC_EXECUTABLE)" --oversubscribe --bind-to none --allow-run-as-root -n "$@"; }

cmake --install "$build" --prefix "$prefix" >"$work/log"
# shellcheck disable=SC2016  # backquotes of a document
sed -n '/^```c$/,/^```$/{/^```/d;p}' "$source/docs/distributed.md" >"$work/ring.c"

echo "-- pkg-config"
pc=$(dirname "$(find "$prefix" -name sparge_mpi.pc)")
form=()
[[ -n $(find "$prefix" -name 'libsparge_mpi.so') ]] || form=(--static)
read -ra flags <<<"$(PKG_CONFIG_PATH=$pc pkg-config "${form[@]}" --cflags --libs sparge_mpi)"
OMPI_CC=$(cached CMAKE_C_COMPILER) mpicc -std=c11 -Wall -Wextra -Wpedantic -Werror "$work/ring.c" "${flags[@]}" -lm -o "$work/ring" \
  >>"$work/log" 2>&1
export LD_LIBRARY_PATH=${pc%/pkgconfig}
ranks 1 "$work/ring" | tee "$work/one"
ranks 3 "$work/ring" | tee "$work/three"
tiles() { grep -oE '[0-9]+ of [0-9]+ tiles' "$1"; }
[[ $(tiles "$work/one") == "$(tiles "$work/three")" ]] || { echo "one rank and three do not agree" >&2; false; }

echo "-- find_package(sparge COMPONENTS mpi)"
cat >"$work/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(ring LANGUAGES C CXX) # an archive is linked by the C++ compiler
find_package(sparge 0.4 REQUIRED COMPONENTS mpi)
add_executable(ring ring.c)
target_link_libraries(ring PRIVATE sparge::mpi m)
END
cmake -S "$work" -B "$work/ring_build" -G "$(cached CMAKE_GENERATOR)" -DCMAKE_C_COMPILER="$(cached CMAKE_C_COMPILER)" \
  -DCMAKE_CXX_COMPILER="$(cached CMAKE_CXX_COMPILER)" -DCMAKE_PREFIX_PATH="$prefix" >>"$work/log"
cmake --build "$work/ring_build" >>"$work/log"
ranks 2 "$work/ring_build/ring" | grep -F "$(tiles "$work/one")"

#!/usr/bin/env bash
# Installs a build into a folder of its own and uses it from there: run.sh BUILD_DIR SOURCE_DIR
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'cat "$work/log" >&2' ERR
prefix=$work/prefix

# Generator and compilers as in the build: a machine need not have those that CMake would choose.
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
cc=$(cached CMAKE_C_COMPILER)

cmake --install "$build" --prefix "$prefix" >"$work/log"

echo "-- find_package(sparge)"
cmake -S "$source/tests/install" -B "$work/consumer" -G "$(cached CMAKE_GENERATOR)" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$(cached CMAKE_CXX_COMPILER)" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" >>"$work/log"
cmake --build "$work/consumer" >>"$work/log"
"$work/consumer/consumer_c"
"$work/consumer/consumer_cc"

echo "-- pkg-config"
pc=$(dirname "$(find "$prefix" -name sparge.pc)")
read -ra flags <<<"$(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs sparge)"
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "$source/tests/install/consumer.c" "${flags[@]}" -lm -o "$work/consumer_pc"
LD_LIBRARY_PATH=$(dirname "$pc") "$work/consumer_pc"

# The program finds its library in a prefix that the system's loader does not know.
if [[ -e $prefix/bin/sparge ]]; then
  echo "-- bin/sparge"
  "$prefix/bin/sparge" info
fi

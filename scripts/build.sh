# Configures and builds one preset of CMakePresets.json in build/PRESET; sourced by test.sh and demo.sh.
# shellcheck shell=bash

# use_ccache: compilers run behind ccache where it is installed, in all that is built from here on: a file that one stage
# compiled is not compiled again by the next with the same flags, nor in another checkout of the same text.
use_ccache() {
  command -v ccache >/dev/null || return 0
  local folder
  # Its own folder is outside the checkout and outlives it. Where it may not write there, the cache serves this checkout.
  folder=$(ccache --get-config cache_dir 2>/dev/null) || folder=
  if [[ -z $folder ]] || ! mkdir -p "$folder" 2>/dev/null || [[ ! -w $folder ]]; then export CCACHE_DIR=$PWD/build/ccache; fi
  # Paths in the checkout count from the build folder: all folders build/NAME see the same ones.
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
}

# Runs a command with its output in a file, and shows the end of that file only if it fails.
quietly() {
  local log=$1
  shift
  if "$@" >"$log" 2>&1; then return 0; fi
  tail -n 60 "$log" >&2
  echo "failed: $* (all output: $log)" >&2
  return 1
}

# The same for a build, but on a terminal it shows itself: ninja keeps its progress to one line there.
with_progress() {
  if [[ -t 1 ]]; then "${@:2}"; else quietly "$@"; fi
}

# build_preset PRESET [CMAKE_ARGUMENT...] [-- TARGET...]
build_preset() {
  local preset=$1 configure=()
  shift
  while (($#)) && [[ $1 != -- ]]; do
    configure+=("$1")
    shift
  done
  shift || true
  local begin=$SECONDS jobs
  jobs=$(nproc)
  mkdir -p "build/$preset"
  echo "building build/$preset ($jobs jobs)"
  quietly "build/$preset/configure.log" cmake --preset "$preset" "${configure[@]}" || return 1
  with_progress "build/$preset/build.log" cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"} || return 1
  echo "built in $((SECONDS - begin)) s"
}

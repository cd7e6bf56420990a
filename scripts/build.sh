# Configures and builds one preset of CMakePresets.json in build/PRESET; sourced by test.sh and demo.sh.
# shellcheck shell=bash

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

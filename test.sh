#!/usr/bin/env bash
# Builds and tests: the suite, its quick part, or everything that has to pass before a change goes in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/packages.sh
source scripts/build.sh
source scripts/python.sh
source scripts/llama.sh
source scripts/side_by_side.sh
source scripts/stages.sh

usage() {
  cat <<'TEXT'
usage: ./test.sh [--quick | --ci] [-- ARGUMENTS OF ctest]

  (nothing)  the full suite on an optimised build, in build/test, with the Python tests that need NumPy only: at most
             10 minutes on two cores
  --quick    the same build, without the tests labelled `full` and with smaller sweeps: at most 3 minutes
  --ci       the full suite; instruction counts against bench/instructions.json; with smaller sweeps under address and
             undefined-behaviour sanitizers, under the thread sanitizer and for 64-bit ARM under an emulator; wheels for
             every Python, and for 64-bit ARM; the package with PyTorch, transformers and diffusers (several GB in build/venv); the ggml backend under ggml's own
             tests; warnings of g++ and clang++, clang-format, clang-tidy, shellcheck; the static library; the documents as a site; and one minute
             of fuzzing. Side by side: at most 60 minutes on two cores
Missing Debian packages are installed when run as root or with sudo, Python packages into build/venv. Compiled objects are
kept by ccache where it is installed. Arguments after `--` go to every ctest run.
TEXT
}

mode=full
case ${1:-} in
  --quick) mode=quick; shift ;;
  --ci) mode=ci; shift ;;
  -h | --help) usage; exit 0 ;;
esac
if (($#)) && [[ $1 != -- ]]; then
  echo "test.sh: unknown argument $1" >&2
  usage >&2
  exit 2
fi
ctest_arguments=("${@:2}")

packages=("${build_packages[@]}" "${test_packages[@]}")
if [[ $mode == ci ]]; then
  packages+=("${ci_first_packages[@]}")
  check_packages "${packages[@]}" "${ci_packages[@]}"  # which a stage installs: better to know now that it may not
fi
need_packages "${packages[@]}"
use_ccache

case $mode in
  full) run_suite test test ;;
  quick) run_suite test test-quick ;;
  ci) run_all_stages ;;
esac

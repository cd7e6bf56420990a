#!/usr/bin/env bash
# Builds the command line and runs its demonstration; arguments go to `sparge demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/packages.sh
source scripts/build.sh

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  cat <<'TEXT'
usage: ./demo.sh [ARGUMENTS OF `sparge demo`]

Installs the packages it needs if they are missing, builds the command line in build/release (a minute or two the
first time, nothing afterwards) and runs `sparge demo`: dense against sparse attention on recorded heads, with time,
sparsity and error of each.
TEXT
  exit 0
fi

need_packages "${build_packages[@]}"
build_preset release -- sparge_cli
exec build/release/cli/sparge demo "$@"

# 64-bit ARM on another machine: the Pythons that are fetched for it, and environments whose programs run under qemu;
# sourced by arm64_root.sh and wheels.sh.
# shellcheck shell=bash

# Pythons that there are as packages, and the Debian that has each.
# shellcheck disable=SC2034  # used by those who source this
declare -A arm64_suites=([python3.11]=bookworm [python3.13]=trixie)

# A server's processor with dot products (neon_dotprod), which that of the `neon` tests has not.
arm64_cpu=neoverse-n1

# emulated FILE ROOT PROGRAM: a script FILE that runs PROGRAM, and lets it believe that FILE is its name.
emulated() {
  # shellcheck disable=SC2016  # $0 and $@ are of the script that is written
  printf '#!/bin/sh\nexec qemu-aarch64 -cpu %s -L %q -0 "$0" %q "$@"\n' "$arm64_cpu" "$2" "$3" >"$1"
  chmod +x "$1"
}

# emulated_environment ROOT VERSION FOLDER: what `python -m venv` makes. Its Python is a script that starts the emulator, so
# that the programs which pip installs start it, too: nothing needs to be registered with the kernel.
emulated_environment() {
  mkdir -p "$3/bin" "$3/lib/$2/site-packages"
  printf 'home = %s\ninclude-system-site-packages = false\n' "$1/usr/bin" >"$3/pyvenv.cfg"
  emulated "$3/bin/python" "$1" "$1/usr/bin/$2"
}

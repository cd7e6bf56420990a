# Makes sure that Debian packages are installed; sourced by test.sh and demo.sh.
# shellcheck shell=bash

# `package:command` counts as present wherever the command comes from.
# shellcheck disable=SC2034  # used by those who source this
{
  build_packages=(g++:c++ cmake:cmake ninja-build:ninja pkg-config:pkg-config libhwy-dev libcli11-dev nlohmann-json3-dev
    libpng-dev)
  test_packages=(libgtest-dev python3:python3 python3-venv python3-dev)
  # Instruction counts (valgrind), fuzzers (clang), reports in a browser (chromium), and 64-bit ARM (cross compiler and
  # emulator).
  ci_packages=(valgrind:valgrind clang:clang++ libclang-rt-dev g++-aarch64-linux-gnu:aarch64-linux-gnu-g++
    qemu-user:qemu-aarch64 chromium:chromium)
}

# Prints those of the given packages that are missing, one per line.
missing_packages() {
  local entry package
  for entry in "$@"; do
    package=${entry%%:*}
    if [[ $entry == *:* ]] && command -v "${entry#*:}" >/dev/null; then continue; fi
    if [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]]; then continue; fi
    echo "$package"
  done
}

# Installs what is missing of the given packages; exits 2 with the command to type if it may not.
need_packages() {
  # Without dpkg this is another system, whose packages have other names; the configure step says what it misses.
  command -v dpkg-query >/dev/null || return 0
  local missing apt_get
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID == 0)); then
    apt_get=(env DEBIAN_FRONTEND=noninteractive apt-get)
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    apt_get=(sudo -n env DEBIAN_FRONTEND=noninteractive apt-get)
  else
    echo "missing packages; please run: sudo apt-get install ${missing[*]}" >&2
    exit 2
  fi
  echo "installing ${missing[*]}"
  "${apt_get[@]}" -qq update || true  # one source out of order need not matter
  if ! "${apt_get[@]}" -qq -y --no-install-recommends install "${missing[@]}" >/dev/null; then
    echo "could not install; please run: apt-get install ${missing[*]}" >&2
    exit 2
  fi
}

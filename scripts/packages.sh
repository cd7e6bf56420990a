# Makes sure that Debian packages are installed; sourced by test.sh and demo.sh.
# shellcheck shell=bash

# `package:command` counts as present wherever the command comes from.
# shellcheck disable=SC2034  # used by those who source this
{
  build_packages=(g++:c++ cmake:cmake ninja-build:ninja pkg-config:pkg-config libhwy-dev libcli11-dev nlohmann-json3-dev
    libpng-dev)
  test_packages=(libgtest-dev python3:python3 python3-venv python3-dev)
  # Instruction counts (valgrind), fuzzers and a second compiler (clang), rules of the source (clang-format,
  # clang-tidy, shellcheck), reports in a browser (chromium), several machines (Open MPI), and 64-bit ARM.
  arm64_packages=(g++-aarch64-linux-gnu:aarch64-linux-gnu-g++ qemu-user:qemu-aarch64)
  ci_packages=(valgrind:valgrind clang:clang++ libclang-rt-dev clang-format:clang-format clang-tidy:clang-tidy
    shellcheck:shellcheck chromium:chromium libopenmpi-dev openmpi-bin:mpirun "${arm64_packages[@]}")
  # The first build already is to leave its objects there, for the stages after it.
  ci_first_packages=(ccache:ccache)
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

# Sets `apt_get` to a command that may install; exits 2 with the command to type if there is none but something is missing.
check_packages() {
  apt_get=()
  # Without dpkg this is another system, whose packages have other names; the configure step says what it misses.
  command -v dpkg-query >/dev/null || return 0
  local missing
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
}

# Installs what is missing of the given packages.
need_packages() {
  local missing apt_get
  check_packages "$@"
  ((${#apt_get[@]})) || return 0
  mapfile -t missing < <(missing_packages "$@")
  echo "installing ${missing[*]}"
  "${apt_get[@]}" -qq update || true  # one source out of order need not matter
  if ! "${apt_get[@]}" -qq -y --no-install-recommends install "${missing[@]}" >/dev/null; then
    echo "could not install; please run: apt-get install ${missing[*]}" >&2
    exit 2
  fi
}

#!/usr/bin/env bash
# Fetches 64-bit ARM packages into folders of build/; the system is not altered:
#   scripts/arm64_root.sh                  the libraries that a cross build links, in build/arm64-root
#   scripts/arm64_root.sh python3.11 ...   that Python with its headers and all that it needs, in build/arm64-python3.11
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/arm64.sh
libraries=(libhwy1 libhwy-dev libgtest-dev libcli11-dev nlohmann-json3-dev libpng16-16 libpng-dev zlib1g zlib1g-dev)

# open_index STATE [SUITE]: a package index of its own, of this system's sources or of a suite of Debian: `dpkg
# --add-architecture` would change which packages the whole system sees. Sets `options`, for apt-get.
open_index() {
  rm -rf "$1"
  mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
  : >"$1/status"
  options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User="$(id -un)"
    -o Dir::State::Lists="$1/lists" -o Dir::State::status="$1/status" -o Dir::Cache="$1/cache")
  if [[ -n ${2-} ]]; then
    local mirror
    # shellcheck disable=SC2016  # names of apt's, not of the shell's
    mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' | awk '$1 !~ /-/ { print $2; exit }')
    [[ -n $mirror ]] || { echo "arm64_root.sh: apt names no mirror of Debian" >&2; exit 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $2 main" >"$1/sources.list"
    options+=(-o Dir::Etc::SourceList="$1/sources.list" -o Dir::Etc::SourceParts=/dev/null)
  fi
  apt-get "${options[@]}" update
}

# unpack ROOT STATE: the packages that were fetched. As on the system these are for: one library folder. Links such as
# libz.so -> /lib/.../libz.so.1.2.13 name the root of that system; here they are to name the file beside them, or a library
# that needs libz.so.1 does not find it.
unpack() {
  local package link
  mkdir -p "$1/lib"
  for package in "$2"/cache/archives/*.deb; do dpkg-deb -x "$package" "$1"; done
  cp -a "$1/lib/." "$1/usr/lib/"
  rm -rf "${1:?}/lib"
  ln -s usr/lib "$1/lib"
  while IFS= read -r link; do
    ln -sf "$(basename "$(readlink "$link")")" "$link"
  done < <(find "$1/usr/lib" -type l -lname '/*')
}

# fetch ROOT NAME PACKAGE...: the libraries as they are named; a Python with all that it needs.
fetch() {
  local root=$1 suite=${arm64_suites[$2]-} state=$PWD/$1.apt options
  # Complete means: with all that this version of the list names.
  [[ -L $root/lib && -e $root/complete && $(<"$root/complete") == "${*:2}" ]] && return 0
  echo "fetching arm64 $2 into $root"
  rm -rf "$root"
  open_index "$state" "$suite"
  if [[ -z $suite ]]; then
    (cd "$state/cache/archives" && apt-get "${options[@]}" download "${@:3}")
  else
    apt-get "${options[@]}" --yes --no-install-recommends --download-only install "${@:3}"
  fi
  unpack "$root" "$state"
  rm -rf "$state"
  # Debian has this header once per machine, in a folder where only a compiler for that machine looks.
  if [[ -n $suite ]]; then mv "$root/usr/include/aarch64-linux-gnu/$2/pyconfig.h" "$root/usr/include/$2/"; fi
  echo "${*:2}" >"$root/complete"
}

(($#)) || set -- libraries
for name in "$@"; do
  if [[ $name == libraries ]]; then
    fetch build/arm64-root libraries "${libraries[@]}"
  elif [[ -n ${arm64_suites[$name]-} ]]; then
    fetch "build/arm64-$name" "$name" "$name" "lib$name-dev" libgomp1 libstdc++6
  else
    echo "arm64_root.sh: $name is neither 'libraries' nor one of: ${!arm64_suites[*]}" >&2
    exit 2
  fi
done

#!/usr/bin/env bash
# Fetches the 64-bit ARM libraries that a cross build links into build/arm64-root; the system is not altered.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=build/arm64-root
[[ -e $root/complete ]] && exit 0

# A package index of its own: `dpkg --add-architecture` would change which packages the whole system sees.
state=$PWD/build/arm64-apt
rm -rf "$root" "$state"
mkdir -p "$root" "$state/lists/partial" "$state/cache/archives/partial"
: >"$state/status"
options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User="$(id -un)"
  -o Dir::State::Lists="$state/lists" -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache")
echo "fetching arm64 libraries into $root"
apt-get "${options[@]}" update
(cd "$state" && apt-get "${options[@]}" download libhwy1 libhwy-dev libgtest-dev libcli11-dev nlohmann-json3-dev)
for package in "$state"/*.deb; do dpkg-deb -x "$package" "$root"; done
rm -rf "$state"
touch "$root/complete"

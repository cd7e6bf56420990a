#!/usr/bin/env bash
# Fetches the 64-bit ARM libraries that a cross build links into build/arm64-root; the system is not altered.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=build/arm64-root
packages=(libhwy1 libhwy-dev libgtest-dev libcli11-dev nlohmann-json3-dev libpng16-16 libpng-dev zlib1g zlib1g-dev)
# Complete means: with all that this version of the list names.
[[ -L $root/lib && -e $root/complete && $(<"$root/complete") == "${packages[*]}" ]] && exit 0

# A package index of its own: `dpkg --add-architecture` would change which packages the whole system sees.
state=$PWD/build/arm64-apt
rm -rf "$root" "$state"
mkdir -p "$root" "$state/lists/partial" "$state/cache/archives/partial"
: >"$state/status"
options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User="$(id -un)"
  -o Dir::State::Lists="$state/lists" -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache")
echo "fetching arm64 libraries into $root"
apt-get "${options[@]}" update
(cd "$state" && apt-get "${options[@]}" download "${packages[@]}")
for package in "$state"/*.deb; do dpkg-deb -x "$package" "$root"; done
rm -rf "$state"
# As on the system these packages are for: one library folder. Links such as libz.so -> /lib/.../libz.so.1.2.13 name the
# root of that system; here they are to name the file beside them, or a library that needs libz.so.1 does not find it.
cp -a "$root/lib/." "$root/usr/lib/"
rm -rf "${root:?}/lib"
ln -s usr/lib "$root/lib"
while IFS= read -r link; do
  ln -sf "$(basename "$(readlink "$link")")" "$link"
done < <(find "$root/usr/lib" -type l -lname '/*')
echo "${packages[*]}" >"$root/complete"

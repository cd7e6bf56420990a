#!/usr/bin/env python3
"""Tokens per second against depth: llama.cpp with and without the backend, and what memory gives.

  bench/depth.py --llama-bench build/llama/bin/llama-bench --model model.gguf --backend build/release/ggml/libggml-sparge.so
                 [--sparge build/release/cli/sparge] [--depths 0,512,2048,8192] [--threads 2] [--out DIR]

Runs llama-bench (-p 0 -n 32 -d DEPTH -fa 1) for one depth after the other, without and with the backend in turn, and
`sparge bench --decode`, and reads what they print. Every figure goes to DIR/depth.json as soon as it is there; figures of an
earlier run stay unless they are taken again, so long depths can be measured by themselves. Then DIR/depth.png and a table on
stdout. --draw only draws again. matplotlib is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WITHOUT, WITH = "llama.cpp", "with sparge"
LOADED = "attention for ggml"  # what the backend says then
COLOURS = {WITHOUT: "#777777", WITH: "#D55E00"}  # as in plots.py


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    parser.add_argument("--model", metavar="FILE", help=".gguf")
    parser.add_argument("--backend", metavar="FILE", help="libggml-sparge.so")
    parser.add_argument("--sparge", metavar="PROGRAM", help="the command line, for GB/s of one layer")
    parser.add_argument("--depths", default="0,512,2048,8192")
    parser.add_argument("--tokens", type=int, default=32, help="written at each depth; default 32")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args(given)
    if not options.draw and options.llama_bench is None and options.sparge is None:
        parser.error("nothing to measure: --llama-bench, --sparge or both")
    if options.llama_bench is not None and (options.model is None or options.backend is None):
        parser.error("--llama-bench needs --model and --backend")
    for name in ("model", "backend"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            parser.error(f"--{name} {path}: no such file")
    try:
        options.depths = [int(depth) for depth in options.depths.split(",")]
    except ValueError:
        options.depths = [-1]
    if min(options.depths) < 0 or min(options.tokens, options.repetitions, options.threads) < 1:
        parser.error("--depths, --tokens, --repetitions or --threads: is no number, or too small")
    return options


def output_of(command: list[str], environment: dict[str, str]) -> Any:
    """What a program prints, as JSON. Backends that others have set are not ours to measure."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "SPARGE_"))}
    result = subprocess.run(command, env={**clean, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise SystemExit(f"depth.py: {' '.join(command)}: {result.stderr.strip()[-600:]}")
    loaded = LOADED in result.stderr
    if ("GGML_BACKEND_PATH" in environment) != loaded:
        raise SystemExit(f"depth.py: {command[0]}: the backend was {'' if loaded else 'not '}loaded: {result.stderr.strip()[-600:]}")
    return json.loads(result.stdout)


def measure_answer(options: argparse.Namespace, depth: int, kind: str) -> dict[str, Any]:
    command = [options.llama_bench, "-m", options.model, "-p", "0", "-n", str(options.tokens), "-d", str(depth), "-fa", "1",
               "-t", str(options.threads), "-r", str(options.repetitions), "-o", "json"]  # fmt: skip
    (entry,) = output_of(command, {"GGML_BACKEND_PATH": os.path.abspath(options.backend)} if kind == WITH else {})
    return {
        "depth": depth, "kind": kind, "threads": options.threads, "tokens": options.tokens, "per_s": entry["avg_ts"],
        "deviation": entry["stddev_ts"], "all_per_s": entry["samples_ts"], "cpu": entry["cpu_info"],
        "model": entry["model_type"], "model_bytes": entry["model_size"], "llama_commit": entry["build_commit"],
    }  # fmt: skip


def store(path: Path, results: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def replace(entries: list[dict[str, Any]], new: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Takes the place of the entry that was measured alike."""
    entries[:] = [entry for entry in entries if any(entry[key] != new[key] for key in keys)] + [new]


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, memory) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    answers = results["answers"]
    threads = max((entry["threads"] for entry in answers), default=0)
    for kind, colour in COLOURS.items():
        points = sorted((e["depth"], e["per_s"]) for e in answers if e["kind"] == kind and e["threads"] == threads)
        if points:
            speed.plot(*zip(*points), "-o", color=colour, label=kind, linewidth=2.4 if kind == WITH else 1.5)
    if answers:
        speed.set_title(f"{answers[0]['model']}, {threads} threads: tokens per second", fontsize=10)
        speed.legend(frameon=False)
    for count, dash in ((1, "--"), (2, "-")):
        mine = sorted((c["depth"], c) for c in results["layers"] if c["threads"] == count)
        if mine:
            depths = [depth for depth, _ in mine]
            memory.plot(depths, [c["gb_per_s"] for _, c in mine], dash, marker="o", color=COLOURS[WITH],
                        label=f"packed keys and values, {count} threads")  # fmt: skip
            memory.plot(depths, [c["memory_gb_per_s"] for _, c in mine], dash, color="#0072B2",
                        label=f"memory, read only, {count} threads")  # fmt: skip
    memory.set_title("one layer: GB/s", fontsize=10)
    memory.legend(frameon=False, fontsize=8.5)
    for axis in (speed, memory):
        axis.set_xscale("symlog", base=2, linthresh=512)
        ticks = sorted({entry["depth"] for entry in answers} | {c["depth"] for c in results["layers"]})
        axis.set_xticks(ticks, [f"{n // 1024}K" if n and n % 1024 == 0 else str(n) for n in ticks])
        axis.set_xlabel("depth, tokens")
        axis.set_ylim(bottom=0)
        axis.grid(True, color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=140)


def table(results: dict[str, Any]) -> str:
    found = {(e["depth"], e["kind"]): e for e in results["answers"]}
    lines = [f"| depth | {WITHOUT} | {WITH} | |", "|---|---|---|---|"]
    for depth in sorted({depth for depth, _ in found}):
        pair = [found.get((depth, kind)) for kind in (WITHOUT, WITH)]
        cells = ["-" if e is None else f"{e['per_s']:.1f} ± {e['deviation']:.1f}" for e in pair]
        ratio = f"{pair[1]['per_s'] / pair[0]['per_s']:.2f}x" if all(pair) else ""
        lines.append(f"| {depth} | {cells[0]} | {cells[1]} | {ratio} |")
    return "\n".join(lines)


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What there is in the file, with what is measured now."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"answers": [], "layers": []}
    for depth in options.depths if options.llama_bench else []:
        for kind in (WITHOUT, WITH):
            new = measure_answer(options, depth, kind)
            replace(results["answers"], new, ("depth", "kind", "threads"))
            store(path, results)
            print(f"{depth}, {kind}: {new['per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    if options.sparge:
        counts = ",".join(str(n) for n in sorted({1, options.threads}))
        for case in output_of([options.sparge, "bench", "--decode", "--threads", counts, "--json"], {})["cases"]:
            replace(results["layers"], case, ("depth", "threads", "dim", "heads", "queries"))
        store(path, results)
    return results


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    options.out.mkdir(parents=True, exist_ok=True)
    results = measure(options, options.out / "depth.json")
    print(table(results))
    draw(results, options.out / "depth.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures sparge beside torch, FlexAttention, ONNX Runtime, OpenVINO and ggml, in one process, round by round.

Runs under any Python 3: makes a virtual environment with the peers, builds the library, and starts itself again there.
bench/README.md says what is compared and how."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import setup_env

STAGE_TWO = "SPARGE_BENCH_SETUP"  # what the first start prepared, as JSON, for the second one
PEERS = ("torch", "flex", "onnxruntime", "openvino", "ggml")
GROUPS = ("dense", "causal", "kept", "inputs", "scaling", "short", "decode", "dims")
GROWTH_UP_TO = {"quick": 0, "default": 32768, "full": 131072}


def number_list(text):
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1024,8192") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers must be 1 or more")
    return tuple(dict.fromkeys(values))


def name_list(known):
    def read(text):
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage
        self.exit(2, f"compare.py: {message} (--help lists the options)\n")


def parse(arguments):
    cores = len(os.sched_getaffinity(0))
    parser = Parser(description=__doc__.split("\n")[0])
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", dest="level", action="store_const", const="quick", help="under 2 minutes, N <= 2048")
    level.add_argument("--full", dest="level", action="store_const", const="full", help="every case at every length")
    parser.add_argument("--tokens", type=number_list, help="lengths, for example 1024,8192")
    parser.add_argument("--dims", type=number_list, default=(64, 128), help="head sizes (default 64,128)")
    parser.add_argument("--threads", type=number_list, default=(1, 2) if cores > 1 else (1,), help="default 1,2")
    parser.add_argument("--heads", type=int, default=2, help="heads of long cases (default 2)")
    parser.add_argument("--groups", type=name_list(GROUPS), default=GROUPS, help=",".join(GROUPS))
    parser.add_argument("--peers", type=name_list(PEERS), help=f"only these: {','.join(PEERS)}; the yardstick is torch")
    parser.add_argument("--growth", type=int, metavar="N", help="growth up to N tokens, 0 = none (default 32768, "
                        "with --full 131072, with --quick none)")
    parser.add_argument("--out", default=str(setup_env.BENCH / "results"), help="folder of the results")
    parser.add_argument("--venv", default=str(setup_env.ROOT / "build" / "bench-venv"), help="virtual environment")
    parser.add_argument("--library", help="libsparge.so to measure, instead of building build/release")
    parser.add_argument("--jobs", type=int, default=cores, help="parallel compilers (default: all cores)")
    options = parser.parse_args(arguments)
    options.level = options.level or "default"
    if max(options.threads) > cores:
        parser.error(f"--threads {max(options.threads)}: this machine has {cores} cores")
    return options


def start_again(options):
    """Prepares, then replaces this process by one inside the environment, with threads that sleep when they wait."""
    prepared = setup_env.prepare(options)
    environment = setup_env.environment(Path(options.venv).resolve().parent / "bench-cache")
    environment[STAGE_TWO] = json.dumps(prepared)
    sys.stderr.flush()
    os.execve(prepared["python"], [prepared["python"], os.path.abspath(__file__), *sys.argv[1:]], environment)


class Progress:
    """Lines on stderr with the time left, from what the work done so far has cost."""

    def __init__(self, costs):
        self.costs, self.start, self.done = costs, time.perf_counter(), 0

    def step(self, label):
        spent = time.perf_counter() - self.start
        before, after = sum(self.costs[: self.done]), sum(self.costs[self.done:])
        left = f"{spent * after / before / 60:.1f} min left" if self.done >= 3 else "..."
        print(f"[{self.done + 1}/{len(self.costs)}, {left}] {label}", file=sys.stderr, flush=True)
        self.done += 1


def new_results(found, missing):
    import report

    return {"machine": report.machine(), "isa": found["sparge"].isa, "library": found["sparge"].library.path,
            "versions": {name: peer.version for name, peer in found.items()}, "missing": missing,
            "command": shlex.join(["bench/compare.py", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "environment": setup_env.QUIET_THREADS, "entries": [], "growth": [], "bars": [], "interrupted": False}


def measure_all(options, results, found, missing):
    import cases
    import growth
    import measure
    import peers

    tokens = options.tokens or cases.TOKENS[options.level]
    plan = cases.make_cases(options.level, tokens, options.dims, options.threads, options.heads, options.groups)
    upto = GROWTH_UP_TO[options.level] if options.growth is None else options.growth
    lengths = [length for length in growth.LENGTHS if length <= upto]
    steps = [(case, cost(case, len(peers.contestants(case, options.level)))) for case in plan]
    progress = Progress([price for _, price in steps] + [0.5 + 1e-9 * length**2 for length in lengths])
    for case, _ in steps:
        progress.step(case.label)
        entries = measure.measure_case(case, found, missing, options.level)
        measure.add_ratios(entries)
        for entry in entries:
            entry["gmacs"] = case.gmacs()
        results["entries"] += entries
    for length in lengths:
        progress.step(f"growth N={length}")
        for point in growth.measure_length(results["library"], length, max(options.threads), tuple(results["growth"])):
            results["growth"].append(point)


def cost(case, contestants):
    """Seconds, roughly: five calls at 50 billion multiply-adds per second and thread, and what every case costs."""
    return 0.3 * contestants + 5 * contestants * case.gmacs() / (50 * case.threads)


def write_all(results, folder):
    import bars
    import report

    results["bars"] = bars.judge(results["entries"])
    report.write_json(results, folder / "results.json")
    text = report.text(results)
    report.write_whole(folder / "results.md", text)
    print(text)
    import plots

    for file in plots.draw_all(results, folder):
        print(f"written: {file}", file=sys.stderr)


def run(options, prepared):
    import peers

    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    found, missing = peers.open_peers(prepared["library"], prepared["ggml"], options.peers)
    missing = {name: prepared["missing"].get("torch" if name == "flex" else name, reason)
               for name, reason in missing.items()}
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    results = new_results(found, missing)
    try:
        measure_all(options, results, found, missing)
    except KeyboardInterrupt:
        results["interrupted"] = True
        print("interrupted: writing what was measured", file=sys.stderr)
    write_all(results, folder)
    return 130 if results["interrupted"] else 0


def main():
    options = parse(sys.argv[1:])
    try:
        if STAGE_TWO not in os.environ:
            start_again(options)
        return run(options, json.loads(os.environ[STAGE_TWO]))
    except KeyboardInterrupt:
        print("compare.py: interrupted before anything was measured", file=sys.stderr)
        return 130
    except (setup_env.SetupError, OSError, RuntimeError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

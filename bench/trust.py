#!/usr/bin/env python3
"""Does the named error hold? Heads of many structures, calibrations that are kept while the input changes.

  python3 bench/trust.py [--heads 24] [--tokens 4096] [--measure l1 --target 0.015]     # with the package installed
  python3 bench/trust.py --only change --change 'mean 1'                                # one part of it

Prints, per structure, how many heads of a first call are over the bound, by how much the worst, what was skipped, and of the
heads that skip, how many are within the limit that the library names, how many it calls known, and how many of these are
within 1.3 times of what it says; then the errors of calls after a change of the input; then what samples cost, which needs a
quiet machine. With --captures only the heads of a recording (docs/python-tuning.md): one calibration per layer, one call per
sample. That needs the package safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import sparge

Heads = tuple[np.ndarray, np.ndarray, np.ndarray]
DIM = 64
TOGETHER = 4  # heads per call
PV_ROOM = sparge._core.PV_ROOM  # the bound with PV skip over the bound


def walk(rng: np.random.Generator, tokens: int, forget: float = 0.02) -> np.ndarray:
    """Neighbours are alike: a walk that forgets, of unit variance per channel."""
    steps = rng.standard_normal((tokens, DIM)).astype(np.float32) * np.float32(np.sqrt(2 * forget - forget**2))
    out = np.empty_like(steps)
    at = rng.standard_normal(DIM).astype(np.float32)
    for t in range(tokens):
        at = np.float32(1 - forget) * at + steps[t]
        out[t] = at
    return out


def local(rng: np.random.Generator, tokens: int, sharp: float = 1.5, mean: float = 0.0) -> Heads:
    k = walk(rng, tokens)
    q = sharp * k + 0.3 * rng.standard_normal((tokens, DIM)).astype(np.float32)
    v = walk(rng, tokens, 0.05) + np.float32(mean)
    return q.astype(np.float32), k, v


def change_point(rng: np.random.Generator, tokens: int) -> Heads:
    one, two = local(rng, tokens, 0.5), local(rng, tokens, 3)
    half = tokens // 2
    return tuple(np.concatenate([a[:half], b[half:]]) for a, b in zip(one, two))  # type: ignore[return-value]


def heavy_values(rng: np.random.Generator, tokens: int) -> Heads:
    q, k, v = local(rng, tokens)
    return q, k, v * np.abs(rng.standard_t(1.5, (tokens, 1))).astype(np.float32)


def stripes(rng: np.random.Generator, tokens: int) -> Heads:
    q, k, v = local(rng, tokens, 0.7)
    k[:: int(rng.integers(60, 200))] += q.mean(0) * np.float32(2)
    return q, k, v


def bursts(rng: np.random.Generator, tokens: int) -> Heads:
    q, k, v = local(rng, tokens, 0.4)
    for start in rng.integers(0, tokens - 64, 8):
        q[start : start + 64] *= np.float32(6)
    return q, k, v


def cancelling(rng: np.random.Generator, tokens: int) -> Heads:
    q, k, v = local(rng, tokens, 0.8)
    return q, k, v * np.where(np.arange(tokens) % 2, 1, -1)[:, None].astype(np.float32)


def mixture(rng: np.random.Generator, tokens: int) -> Heads:
    q, k, v = local(rng, tokens, 2)
    rows = rng.random(tokens) < 0.3
    q[rows] = rng.standard_normal((int(rows.sum()), DIM)).astype(np.float32)
    return q, k, v


def point_at(q: np.ndarray, k: np.ndarray, row: int, key: int) -> None:
    """The row's whole mass lies on one key."""
    q[row] = k[key] * np.float32(40 * np.sqrt(DIM) / float(k[key] @ k[key]))


def needles(rng: np.random.Generator, tokens: int) -> Heads:
    """3 to 39 rows anywhere that want one far key each, of large value."""
    q, k, v = local(rng, tokens)
    for row in rng.integers(tokens // 2, tokens - 256, int(rng.integers(3, 40))):
        key = int(rng.integers(64, row - 512))
        point_at(q, k, int(row), key)
        v[key] *= np.float32(8)
    return q, k, v


def needles_of_a_block(rng: np.random.Generator, tokens: int) -> Heads:
    """1 to 19 rows of one block that want one far key each, of very large value."""
    q, k, v = local(rng, tokens)
    block = int(rng.integers(tokens // 256, tokens // 128 - 2))
    for row in rng.choice(128, int(rng.integers(1, 20)), replace=False):
        key = int(rng.integers(64, tokens // 2 - 512))
        point_at(q, k, block * 128 + int(row), key)
        v[key] *= np.float32(100)
    return q, k, v


STRUCTURES: dict[str, Callable[[np.random.Generator, int], Heads]] = {
    "local": local, "sharp": lambda r, n: local(r, n, 4), "change point": change_point, "heavy values": heavy_values,
    "stripes": stripes, "bursts": bursts, "cancelling": cancelling, "mixture": mixture,
    "needles": needles, "needles, one block": needles_of_a_block,
}  # fmt: skip


def stacked(make: Callable[[np.random.Generator, int], Heads], tokens: int, seed: int, heads: int = TOGETHER) -> Heads:
    made = [make(np.random.default_rng([seed, h]), tokens) for h in range(heads)]
    return tuple(np.stack(parts) for parts in zip(*made))  # type: ignore[return-value]


def errors(out: np.ndarray, want: np.ndarray, measure: str) -> np.ndarray:
    if measure == "l1":
        return np.abs(out - want).sum((1, 2)) / np.abs(want).sum((1, 2))
    return np.sqrt(np.square(out - want, dtype=np.float64).sum((1, 2)) / np.square(want, dtype=np.float64).sum((1, 2)))


def new_calibration(args: argparse.Namespace, heads: int = TOGETHER) -> sparge.Calibration:
    return sparge.Calibration(heads, **{f"target_{args.measure}": args.target})


def measure(heads: Heads, calibration: sparge.Calibration) -> tuple[np.ndarray, np.ndarray, list[sparge.HeadEstimate]]:
    """Of one call: error that skipping caused per head, sparsity, what the library says."""
    out, stats = sparge.attention(*heads, causal=True, calibration=calibration, return_stats=True)
    estimates = [calibration.head(h) for h in range(calibration.heads)]
    dense = sparge.attention(*heads, causal=True, select="all", precision=[e.precision for e in estimates])
    return errors(out, dense, estimates[0].measure), np.array(stats.head_sparsity), estimates


def print_titles(first: str) -> None:
    print(f"{first:<20} {'>1.2':>6} {'>2':>6} {'worst':>7} {'sparsity':>8} {'below limit':>11} {'known':>6} {'right':>6}"
          "   (errors in bounds)")  # fmt: skip


def recorded(args: argparse.Namespace) -> None:
    """Causal samples of a recording: the calls of each layer one after the other."""
    from safetensors.numpy import load_file

    print_titles("recorded heads")
    by_call: dict[int, list[tuple[np.ndarray, np.ndarray, list[sparge.HeadEstimate]]]] = {}
    for folder in sorted(path for path in args.captures.iterdir() if path.is_dir()):
        calibration = None
        for call, file in enumerate(sorted(folder.glob("*.safetensors")), 1):
            tensors = load_file(file)
            q, k, v = (tensors[name].astype(np.float32) for name in "qkv")
            calibration = calibration or new_calibration(args, len(q))
            by_call.setdefault(call, []).append(measure((q, k, v), calibration))
    for call, found in by_call.items():
        report(f"call {call}", args.target, *(np.concatenate(parts) for parts in zip(*found)))


def first_calls(args: argparse.Namespace) -> None:
    print_titles("first call")
    for name, make in STRUCTURES.items():
        found = []
        for group in range(args.heads // TOGETHER):
            calibration = new_calibration(args)
            found.append(measure(stacked(make, args.tokens, args.seed + group), calibration))
        report(name, args.target, *(np.concatenate(parts) for parts in zip(*found)))


def share(which: np.ndarray) -> str:
    return f"{which.mean():.1%}" if which.size else "-"


def report(name: str, target: float, error: np.ndarray, sparsity: np.ndarray, said: np.ndarray) -> None:
    ratio = error / (PV_ROOM * target)
    skips = np.array([e.state == "sparse" for e in said])
    below = np.array([true <= e.limit for true, e in zip(error, said)])[skips]
    known = np.array([e.known for e in said])[skips]
    right = np.array([max(true, e.pv_error) <= 1.3 * min(true, e.pv_error) for true, e in zip(error, said)])[skips]
    print(
        f"{name:<20} {np.mean(ratio > 1.2):6.1%} {np.mean(ratio > 2):6.1%} {ratio.max():7.2f} {sparsity.mean():8.1%}"
        f" {share(below):>11} {share(known):>6} {share(right[known]):>6}",
        flush=True,
    )


def drifts() -> Iterator[tuple[str, int, Callable[[int], Callable[[np.random.Generator, int], Heads]]]]:
    """Name, calls before the change, and what call i has as its input."""
    sharp = lambda r, n: local(r, n, 3, 2.0)
    for mean in (0.0, 0.3, 1.0):
        flat = lambda r, n, mean=mean: local(r, n, 0.6, mean)
        yield f"sudden, mean {mean:g}", 40, lambda i, flat=flat: sharp if i < 40 else flat
    flat = lambda r, n: local(r, n, 0.6, 0.0)
    yield "sudden, after 4", 4, lambda i: sharp if i < 4 else flat
    yield "there and back", 16, lambda i: sharp if (i // 8) % 2 == 0 else flat
    yield "slow", 8, lambda i: lambda r, n: local(r, n, 3 * 0.9 ** max(i - 8, 0) + 0.4, 2 * 0.8 ** max(i - 8, 0))


def follow(args: argparse.Namespace) -> None:
    print(f"\n{'change of input':<20} worst head of the calls after it, in bounds (sparsity)")
    for name, before, make in drifts():
        if args.change not in name:
            continue
        calibration = new_calibration(args)
        line = []
        for i in range(before + 8):
            error, sparsity, _ = measure(stacked(make(i), args.tokens, args.seed + 1000 + i), calibration)
            if i >= before - 1:
                line.append(f"{error.max() / (PV_ROOM * args.target):.2f} ({sparsity.mean():.0%})")
        print(f"{name:<20} {' '.join(line)}", flush=True)


def costs(args: argparse.Namespace) -> None:
    """Best of several, because a machine is never quite quiet."""
    print("\nsamples, of the time of a dense int8 call; calls of a new calibration")
    for tokens in (args.tokens, 2 * args.tokens):
        heads = stacked(lambda r, n: local(r, n, 0.5), tokens, args.seed)
        dense, sampled = np.inf, np.full(args.calls, np.inf)
        for _ in range(5):
            calibration = new_calibration(args)
            for call in range(args.calls):
                stats = sparge.attention(*heads, causal=True, calibration=calibration, return_stats=True)[1]
                sampled[call] = min(sampled[call], stats.stages_ms["calibrate"])
            stats = sparge.attention(*heads, causal=True, select="all", precision="int8", return_stats=True)[1]
            dense = min(dense, stats.time_ms)
        print(f"{tokens:>6} tokens        {' '.join(f'{share:.1%}' for share in sampled / dense)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--measure", choices=("l2", "l1"), default="l2")
    parser.add_argument("--target", type=float, default=sparge._core.TARGET_L2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--captures", type=Path, metavar="FOLDER")
    parser.add_argument("--only", choices=("first", "change", "cost"))
    parser.add_argument("--change", default="", help="a part of the names of the changes that are tried")
    parser.add_argument("--calls", type=int, default=6, help="of which the cost is shown")
    args = parser.parse_args()
    what = args.captures or f"{args.tokens} tokens of {DIM}"
    print(f"sparge {sparge.__version__}, {what}, causal, target_{args.measure} {args.target:g}, pv {PV_ROOM * args.target:g}")
    if args.captures:
        recorded(args)
        return 0
    for name, part in (("first", first_calls), ("change", follow), ("cost", costs)):
        if args.only in (None, name):
            part(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

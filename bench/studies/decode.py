#!/usr/bin/env python3
"""Which key blocks does a single query need, and can a summary of each block tell? The figures of docs/studies/decode.md.

    bench/studies/decode.py FILE...     captures of sparge.capture or record.py: q (H, N, D), k and v (Hkv, N, D), causal

Queries are 64 of the last 1024 tokens; blocks are those of the keys before them, without the first: sinks and what is recent are always
read. A block is left out where its estimated share of the attention is below a floor. Each head has the largest floor that keeps its
relative L2 error within the bound: the best that a calibration could do. --learn: the floor is that of the first half of the queries, and figures
are of the second half, with what became of the error there. --tokens: only the beginning of a capture. Needs NumPy and safetensors.
"""

import argparse

import numpy as np
from safetensors.numpy import load_file

BLOCK, RECENT, STEP = 64, 1024, 16
FLOORS = np.geomspace(1e-5, 1e3, 60)


def estimates(q, keys, top, total, summaries):
    """Shares of the attention per query and block: exact ones, and by summaries of the keys of a block."""

    def by_means(parts, with_variance):
        split = keys.reshape(len(keys), parts, BLOCK // parts, -1)
        score = np.einsum("qd,bpd->qbp", q, split.mean(2))
        if with_variance:  # of normally distributed keys the mean of exp2(score) is known
            score += 0.5 * np.log(2) * np.einsum("qd,bpd->qbp", q * q, split.var(2))
        return np.exp2(np.minimum(score - top[:, :, None], 0)).sum(2) * (BLOCK // parts) / total

    def by_limits():
        largest = np.maximum(q, 0) @ keys.max(1).T + np.minimum(q, 0) @ keys.min(1).T
        return np.exp2(largest - top) * BLOCK / total

    ways = {
        "exact": lambda: np.exp2(np.einsum("qd,bkd->qbk", q, keys) - top[:, :, None]).sum(2) / total,
        "mean": lambda: by_means(1, False),
        "mean and variance": lambda: by_means(1, True),
        "4 means": lambda: by_means(4, False),
        "4 means and variances": lambda: by_means(4, True),
        "16 means": lambda: by_means(16, False),
        "least and largest": by_limits,
    }
    return {name: way() for name, way in ways.items() if not summaries or name in summaries}


def head_choices(q, k, v, bound, learn, summaries):
    """Per summary: the blocks (queries, blocks) that are kept with the largest floor within the bound, and the error in units of it."""
    tokens = len(k)
    rows = np.arange(tokens - RECENT, tokens, STEP)
    scores = (q[rows] / np.sqrt(q.shape[1]) * np.log2(np.e)) @ k.T
    scores[np.arange(tokens)[None] > rows[:, None]] = -np.inf
    top = scores.max(1, keepdims=True)
    weights = np.exp2(scores - top)
    total = weights.sum(1, keepdims=True)
    out = weights @ v / total
    decided = slice(BLOCK, tokens - RECENT)
    shares = weights[:, decided].reshape(len(rows), -1, BLOCK)
    parts = np.einsum("qbk,bkd->qbd", shares, v[decided].reshape(-1, BLOCK, v.shape[1])) / total[:, :, None]
    mass = shares.sum(2) / total
    chosen = {}
    scaled = q[rows] / np.sqrt(q.shape[1]) * np.log2(np.e)
    half = len(rows) // 2
    judged, counted = (slice(0, half), slice(half, None)) if learn else (slice(None), slice(None))

    def error_of(left_out, which):
        rest = 1 - (mass[which] * left_out[which]).sum(1, keepdims=True)
        error = out[which] - (out[which] - np.einsum("qbd,qb->qd", parts[which], left_out[which])) / np.maximum(rest, 1e-9)
        return np.linalg.norm(error) / np.linalg.norm(out[which]) / bound

    for name, share in estimates(scaled, k[decided].reshape(-1, BLOCK, k.shape[1]), top, total, summaries).items():
        left_out = np.zeros(share.shape, bool)
        for floor in FLOORS:
            more = share < floor
            if error_of(more, judged) > 1:
                break
            left_out = more
        chosen[name] = ~left_out[counted], error_of(left_out, counted)
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--bound", type=float, default=0.03)
    parser.add_argument("--tokens", type=int, help="only the first so many")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--summaries", type=lambda text: text.split(","), help="only these, for example exact,mean")
    arguments = parser.parse_args()
    alone, together, errors = {}, {}, {}
    for file in arguments.files:
        tensors = load_file(file)
        q, k, v = (np.asarray(tensors[name], np.float32).reshape(-1, *tensors[name].shape[-2:])[:, : arguments.tokens] for name in "qkv")
        shared = len(q) // len(k)
        for kv_head in range(len(k)):
            heads = [head_choices(q[h], k[kv_head], v[kv_head], arguments.bound, arguments.learn, arguments.summaries)
                     for h in range(kv_head * shared, (kv_head + 1) * shared)]
            for name in heads[0]:
                alone.setdefault(name, []).extend(head[name][0].mean() for head in heads)
                errors.setdefault(name, []).extend(head[name][1] for head in heads)
                together.setdefault(name, []).append(np.any([head[name][0] for head in heads], axis=0).mean())
    count = len(next(iter(alone.values())))
    print(f"{count} heads, {q.shape[1]} tokens, bound {arguments.bound}; share of the blocks that is read, errors in bounds\n")
    print(f"{'summary':<24} {'per head':>9} {'median':>7} {'for all heads of a key':>23} {'beyond 1.2':>11} {'worst':>6}")
    for name, kept in alone.items():
        print(f"{name:<24} {np.mean(kept):>9.3f} {np.median(kept):>7.3f} {np.mean(together[name]):>23.3f} "
              f"{np.mean(np.array(errors[name]) > 1.2):>10.1%} {np.max(errors[name]):>6.2f}")


if __name__ == "__main__":
    main()

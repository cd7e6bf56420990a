#!/usr/bin/env python3
"""Make one synthetic attention head that looks like a head of a video diffusion model.

Needs:  pip install numpy
Usage:  make_video_head.py --out data/video-synthetic.safetensors [--grid 8,16,16] [--dim 64] [--seed 1]

Tokens lie on a T x H x W grid, row by row. q and k are made of
  - a smooth function of position shared by q and k (random Fourier features of a Gaussian kernel), so that the
    attention of a token is centred on its neighbours in time, height and width,
  - a smooth random field (the "content"), different in q and k but correlated, so that distant regions attend to
    one another too,
  - a constant offset in k, as real models have, and white noise.
All three are mixed by a random rotation, so that no channel is special. v is a smooth random field plus noise.
The result depends on the arguments only (up to the last bit of fp16, which may differ between numpy builds).
This is not a capture of a real model; it stands in for one.
"""
import argparse
import json
import os
import struct
import sys

import numpy as np


def positions(grid):
    t, h, w = np.meshgrid(*(np.arange(n, dtype=np.float64) for n in grid), indexing="ij")
    return np.stack([t, h, w], -1).reshape(-1, 3)


def fourier(rng, pos, dim, lengths):
    """(N, dim) features of norm 1; the product of two of them is about exp(-distance^2 / 2)."""
    w = rng.standard_normal((dim // 2, 3)) / np.asarray(lengths)
    x = pos @ w.T
    return np.concatenate([np.cos(x), np.sin(x)], -1) / np.sqrt(dim // 2)


def field(rng, pos, dim, lengths, waves=64):
    """(N, dim) independent smooth Gaussian random fields, unit variance."""
    w = rng.standard_normal((waves, 3)) / np.asarray(lengths)
    x = pos @ w.T + rng.uniform(0, 2 * np.pi, waves)
    return np.cos(x) @ rng.standard_normal((waves, dim)) * np.sqrt(2.0 / waves)


def make(grid, dim, seed):
    rng = np.random.default_rng(seed)
    pos = positions(grid)
    near = 3 * dim // 4 // 2 * 2
    rest = dim - near
    scale = dim ** -0.5
    local = fourier(rng, pos, near, (1.8, 2.2, 2.2)) * np.sqrt(8.0 / scale)
    base, dq, dk = (field(rng, pos, rest, (3.0, 5.0, 5.0)) for _ in range(3))
    amp = np.sqrt(2.2 / scale / np.sqrt(rest))
    q = np.concatenate([local, amp * (0.6 * base + 0.8 * dq)], -1)
    k = np.concatenate([local, amp * (0.6 * base + 0.8 * dk)], -1)
    q += 0.25 * rng.standard_normal(q.shape)
    k += 0.25 * rng.standard_normal(k.shape) + 0.5 * rng.standard_normal(dim)
    turn, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    v = field(rng, pos, dim, (2.5, 3.5, 3.5)) + 0.2 * rng.standard_normal((len(pos), dim))
    return [x.astype(np.float16)[None] for x in (q @ turn, k @ turn, v)]


def measure(q, k, grid):
    q, k, pos = q[0].astype(np.float64), k[0].astype(np.float64), positions(grid)
    s = q @ k.T * q.shape[1] ** -0.5
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    box = np.abs(pos[:, None] - pos[None]).max(-1) <= 2
    order = np.abs(np.arange(len(pos))[:, None] - np.arange(len(pos))[None]) <= 64
    ent = -(p * np.log(p)).sum(1).mean()
    inside = pos[:, 2] < grid[2] - 1
    i = np.nonzero(inside)[0]

    def cos(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        return (x[i] * x[i + 1]).sum(1).mean()

    return ("mass within 2 steps in 3-D %.3f, within 64 tokens in row order %.3f, entropy %.2f nats (rel %.2f), scores "
            "%.1f..%.1f (1st..99th percentile), %.1f..%.1f in all, cosine of neighbours q %.2f k %.2f"
            % ((p * box).sum(1).mean(), (p * order).sum(1).mean(), ent, ent / np.log(len(pos)),
               *np.percentile(s, [1, 99]), s.min(), s.max(), cos(q), cos(k)))


def write_safetensors(path, tensors, metadata):
    """fp16 arrays and string metadata; the header is padded with spaces so that data starts 8-byte aligned."""
    header, at = {"__metadata__": metadata}, 0
    for name, a in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for a in tensors.values():
            f.write(np.ascontiguousarray(a).tobytes())


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--grid", default="8,16,16", help="T,H,W")
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    try:
        grid = tuple(int(x) for x in a.grid.split(","))
        assert len(grid) == 3 and min(grid) > 1 and a.dim >= 8 and a.dim % 2 == 0
    except (ValueError, AssertionError):
        print("make_video_head: --grid wants T,H,W, each above 1; --dim an even number from 8", file=sys.stderr)
        sys.exit(2)
    q, k, v = make(grid, a.dim, a.seed)
    text = measure(q, k, grid)
    write_safetensors(a.out, dict(q=q, k=k, v=v), dict(
        causal="false", scale="%.9g" % a.dim ** -0.5, grid=a.grid, model="synthetic", layer="0", heads="0", kv_head="0",
        kind="video", title="Synthetic video head, grid %s" % a.grid.replace(",", " x "),
        text="none: random smooth fields, seed %d" % a.seed, measured_head_0=text))
    print("%s  %d bytes\n    %s" % (a.out, os.path.getsize(a.out), text))


if __name__ == "__main__":
    main()

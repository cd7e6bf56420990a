#!/usr/bin/env python3
"""Self-similarity and sparsity of image and video heads in four orders of their tokens: random, row by row, time first,
and along the Hilbert curve (docs/studies/hilbert.md).

Needs:  pip install numpy, and a build of sparge with a shared library
Usage:  hilbert_study.py [--build build/release] [--error 0.02] [--seeds 3] [--json FILE]

No model is at hand, so heads are made up, of two kinds:
  near     tools/make_video_head.py: tokens attend to their neighbours in space and time, and a little to what is alike
  texture  16 latent channels with a 1/f spectrum, as natural images and videos have, through random linear maps to q, k
           and v: tokens attend to what is alike, wherever it is
Tensors are permuted here, and `sparge run` gets them without --grid, so that all orders are treated alike. For the
Hilbert order the script also runs the unpermuted tensors with --grid, and insists on the same tiles and output.
Figures: mean self-similarity of the blocks of 128 queries and of 64 keys, as stage 1 sees them; sparsity and relative L1
at the defaults (tau 0.98, theta 0.3); and the best sparsity of all tau and theta that keep relative L1 within --error, as
tuning would choose them. In fp32 and without PV skip, so that the error is that of the selection alone.
"""
import argparse
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from make_video_head import make as make_near

GRIDS = ((8, 16, 16), (6, 20, 28), (1, 48, 64))
ORDERS = {"random": 3, "row-major": 1, "time-major": 2, "hilbert": 0}  # sparge_order
BLOCK_Q, BLOCK_K = 128, 64
DIM = 64
THETAS = (-1.0, 0.3, 0.6)  # -1: the fallback is off


def spectrum_field(rng, grid, channels):
    """(N, channels) fields whose amplitude falls as 1/f^(d/2 + 1/2), so that power per octave falls as 1/f."""
    shape = [1 if n == 1 else 2 * n for n in grid]  # twice the size and cut, because the transform is periodic
    freq = np.meshgrid(*(np.fft.fftfreq(n) * n for n in shape), indexing="ij")
    f = np.sqrt(sum((x * max(shape) / n) ** 2 for x, n in zip(freq, shape)))
    f.flat[0] = np.inf
    power = (sum(n > 1 for n in grid) + 1) / 2
    noise = np.fft.fftn(rng.standard_normal((channels, *shape)), axes=(1, 2, 3))
    x = np.fft.ifftn(noise / f ** power, axes=(1, 2, 3)).real[:, :grid[0], :grid[1], :grid[2]].reshape(channels, -1).T
    return (x - x.mean(0)) / x.std(0)


def make_texture(grid, dim, seed, latents=16):
    rng = np.random.default_rng(seed)
    z = spectrum_field(rng, grid, latents)
    shared, own_q, own_k, to_v = (rng.standard_normal((latents, dim)) / np.sqrt(latents) for _ in range(4))
    gain = np.sqrt(1.5)  # scores then have a standard deviation of about 2
    q = gain * z @ (0.8 * shared + 0.6 * own_q) + 0.25 * rng.standard_normal((len(z), dim))
    k = gain * z @ (0.8 * shared + 0.6 * own_k) + 0.25 * rng.standard_normal((len(z), dim)) + rng.standard_normal(dim)
    v = z @ to_v + 0.2 * rng.standard_normal((len(z), dim))
    return q, k, v


def make_head(kind, grid, seed):
    tensors = make_near(grid, DIM, seed) if kind == "near" else make_texture(grid, DIM, seed)
    return [np.asarray(x, np.float32).reshape(-1, DIM) for x in tensors]


def attention(q, k, v):
    s = q.astype(np.float64) @ k.T.astype(np.float64) * DIM ** -0.5
    p = np.exp(s - s.max(1, keepdims=True))
    return p @ v / p.sum(1, keepdims=True)


def self_similarity(x, block):
    """Mean over blocks of the mean pairwise cosine: the squared norm of the mean unit vector."""
    unit = x.astype(np.float64) / np.linalg.norm(x, axis=1, keepdims=True)
    return float(np.mean([(unit[i:i + block].mean(0) ** 2).sum() for i in range(0, len(unit), block)]))


class Sparge:
    def __init__(self, build, folder):
        self.program = build / "cli" / "sparge"
        self.folder = folder
        library = ctypes.CDLL(str(build / "src" / "libsparge.so"))
        self.token_order = library.sparge_token_order
        self.token_order.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]

    def order(self, name, grid, seed):
        out = np.zeros(int(np.prod(grid)), np.int64)
        sides = np.array(grid, np.int64)
        if self.token_order(ORDERS[name], sides.ctypes.data, seed if name == "random" else 0, out.ctypes.data) != 0:
            sys.exit(f"sparge_token_order refused {name} {grid}")
        return out

    def store(self, tensors):
        for name, x in zip("qkv", tensors):
            np.save(self.folder / f"{name}.npy", np.ascontiguousarray(x))

    def run(self, tau=0.98, theta=0.3, *flags):
        """The tensors stored last: sparsity, tiles computed, output."""
        inputs = sum((["--" + n, str(self.folder / f"{n}.npy")] for n in "qkv"), [])
        done = subprocess.run([self.program, "run", *inputs, "--out", str(self.folder / "o.npy"), "--tau", repr(tau),
                               "--theta", repr(theta), "--precision", "fp32", "--pv-skip", "off", "--json", *flags],
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        report = json.loads(done.stdout)
        return report["sparsity"], report["qk_tiles"]["computed"], np.load(self.folder / "o.npy")


def relative_l1(o, want):
    return float(np.abs(o - want).sum() / np.abs(want).sum())


def best_within(sparge, want, error):
    """(sparsity, theta, tau): the most that can be skipped within `error`, where tau = 1 - 2^-u, u to 1/8."""
    best = (0.0, 0.3, 1.0)  # tau 1 keeps everything
    for theta in THETAS:
        low, high = 0.0, 12.0
        while high - low > 0.125:
            u = (low + high) / 2
            tau = 1 - 2 ** -u
            sparsity, _, o = sparge.run(tau, theta)
            if relative_l1(o, want) <= error:
                high = u
                best = max(best, (sparsity, theta, tau))
            else:
                low = u
    return best


def study(sparge, kind, grid, seed, error):
    head = make_head(kind, grid, seed)
    want = attention(*head)
    rows = {}
    for name in ORDERS:
        order = sparge.order(name, grid, seed)
        q, k, v = (x[order] for x in head)
        sparge.store((q, k, v))
        sparsity, tiles, o = sparge.run()
        best, _, _ = best_within(sparge, want[order], error)
        rows[name] = [self_similarity(q, BLOCK_Q), self_similarity(k - k.mean(0), BLOCK_K), sparsity,
                      relative_l1(o, want[order]), best]
    sparge.store(head)
    _, by_flag, there_and_back = sparge.run(0.98, 0.3, "--grid", ",".join(map(str, grid)))
    if by_flag != tiles or not np.array_equal(there_and_back[order], o):
        sys.exit(f"--grid {grid} is not what permuting by hand gives: {by_flag} tiles instead of {tiles}")
    return rows


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", type=pathlib.Path, default="build/release", help="folder of the build")
    ap.add_argument("--error", type=float, default=0.02, help="relative L1 to allow")
    ap.add_argument("--seeds", type=int, default=3, help="heads of each kind and grid; figures are means")
    ap.add_argument("--json", type=pathlib.Path, help="also write the figures of every head")
    a = ap.parse_args()
    every = []
    print("| head, grid | order | self-similarity q | k | defaults: sparsity | rel. L1 | sparsity within %g |" % a.error)
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="hilbert_study_") as folder:
        sparge = Sparge(a.build, pathlib.Path(folder))
        for kind in ("near", "texture"):
            for grid in GRIDS:
                heads = [study(sparge, kind, grid, seed, a.error) for seed in range(1, a.seeds + 1)]
                for name in ORDERS:
                    mean = np.mean([rows[name] for rows in heads], 0)
                    text = "%s, %s" % (kind, " x ".join(map(str, grid))) if name == "random" else ""
                    print("| %s | %s | %.2f | %.2f | %.1f%% | %.1e | %.1f%% |"
                          % (text, name, mean[0], mean[1], 100 * mean[2], mean[3], 100 * mean[4]), flush=True)
                    every += [dict(kind=kind, grid=grid, seed=i + 1, order=name, figures=rows[name])
                              for i, rows in enumerate(heads)]
    if a.json:
        a.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs the program on files: configuration, random data, .npy and .safetensors writers, one call, its tolerances."""

import json
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

import oracle
from oracle import Problem, Selection

# Relative L1 that each precision promises. fp32: score error of a float32 dot product, about |s| * 2^-24 * sqrt(D) with
# |s| <= 20, is below 1e-5. int16 and int8: uniform rounding error max/(L*sqrt(12)) per element of q, k, v and P; for
# normal data max is 4 to 5 deviations, so L = 127 gives 0.9 to 1.2e-2 from V and about as much from each of q and k.
BOUND = {"fp32": 1e-5, "int16": 1e-3, "int8": 3e-2}
PRECISIONS = tuple(BOUND)
DENSE = ("--select", "all")
EXACT = ("--pv-skip", "off")
# A tile that --pv-skip 10 leaves out has every weight below e^-10 = 4.5e-5 of the row's running maximum.
PV_SKIP_BOUND = 1e-3
HALF_ULP_F16 = 2.0**-11       # round to nearest, normal numbers, relative
HALF_STEP_F16_TINY = 2.0**-25  # round to nearest, subnormal numbers, absolute


class Config:
    """Set by run_all.py (or by the environment, when unittest is started by hand)."""
    sparge = os.environ.get("SPARGE", "")
    quick = False
    seed = 1
    keep = False


def rng(*salt):
    """A generator of its own for each case, so that cases do not depend on their order."""
    return np.random.default_rng([Config.seed, *(sum(map(ord, str(s))) for s in salt)])


# ------------------------------------------------------------------ data


def noise(r, *shape):
    return r.standard_normal(shape).astype(np.float32)


def smooth(r, batch, heads, tokens, dim, rho=0.97):
    """AR(1) along the tokens, unit variance: neighbours are alike, as in images, sound and video."""
    x = r.standard_normal((batch, heads, tokens, dim))
    for t in range(1, tokens):
        x[:, :, t] = rho * x[:, :, t - 1] + np.sqrt(1 - rho * rho) * x[:, :, t]
    return x.astype(np.float32)


def segments(r, tokens, kinds, shortest=64, longest=256):
    """A label per token, constant over runs of random length; neighbouring runs differ."""
    labels, label = [], int(r.integers(kinds))
    while len(labels) < tokens:
        labels += [label] * int(r.integers(shortest, longest + 1))
        label = (label + int(r.integers(1, kinds))) % kinds
    return np.array(labels[:tokens], int)


def structured(r, batch, hq, hkv, nq, nk, dk, dv=None, kinds=8, strength=8.0, wobble=0.5, offset=0.0):
    """q, k, v in clusters that come in runs: a query scores `strength` with its own cluster, about 0 elsewhere."""
    dv = dk if dv is None else dv
    gain = np.sqrt(strength / np.sqrt(dk))
    k_label, q_label = segments(r, nk, kinds), segments(r, nq, kinds)
    if nq == nk:
        q_label = k_label
    centre = gain * r.standard_normal((batch, hkv, kinds, dk))
    k = centre[:, :, k_label] + wobble * gain * smooth(r, batch, hkv, nk, dk) + offset
    q = np.repeat(centre, hq // hkv, axis=1)[:, :, q_label] + wobble * gain * smooth(r, batch, hq, nq, dk)
    v = r.standard_normal((batch, hkv, kinds, dv))[:, :, k_label] + noise(r, batch, hkv, nk, dv)
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def noise_qkv(r, batch, hq, hkv, nq, nk, dk, dv=None):
    """Normal noise. With few channels V gets mean 1, lest the one average that counts be nearly 0 by chance."""
    dv = dk if dv is None else dv
    v = noise(r, batch, hkv, nk, dv) + np.float32(1.0 if dv < 16 else 0.0)
    return noise(r, batch, hq, nq, dk), noise(r, batch, hkv, nk, dk), v


# ------------------------------------------------------------------ files


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype name, shape, bytes)."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    write_raw_safetensors(path, header, b"".join(t[2] for t in tensors.values()))


def write_raw_safetensors(path, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def as_bf16(x):
    """The array rounded to bfloat16 (to nearest even), as float32 and as its two-byte form."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    high = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return (high.astype(np.uint32) << 16).view(np.float32).reshape(x.shape), high.tobytes()


def write_npy_header(path, descr, shape, data=b"", fortran=False):
    """A version 1.0 .npy whose header may lie."""
    text = "{'descr': %r, 'fortran_order': %s, 'shape': %s, }" % (descr, fortran, shape)
    text += " " * (-(len(text) + 11) % 64) + "\n"
    Path(path).write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin1") + data)


# ------------------------------------------------------------------ one call


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str
    command: str
    out: Optional[np.ndarray] = None    # (B, H, Nq, Dv), in the file's type
    lse: Optional[np.ndarray] = None    # (B, H, Nq)
    map: Optional[np.ndarray] = None    # (B, H, Tq, Tk) bool
    figures: Optional[dict] = None      # the object of --json


def call(args, env=None):
    """Runs the program with plain arguments."""
    command = [Config.sparge, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})
    return Result(done.returncode, done.stdout, done.stderr, shlex.join(command))


def selection_flags(s: Selection):
    flags = ["--select", s.select]
    if s.select == "cdf":
        flags += ["--tau", s.tau, "--theta", s.theta]
    if s.select == "topk":
        flags += ["--topk", s.topk, "--theta", s.theta]
    if s.sink is not None:
        flags += ["--sink" if s.sink else "--no-sink"]
    return flags


class Case(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sparge_cli_"))
        if not Config.keep:
            self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return self.folder / name

    def save(self, p: Problem, ndim=4):
        """Writes the problem's files and returns the arguments that name them."""
        drop = tuple(range(4 - ndim))
        args = []
        for name in "qkv":
            np.save(self.path(f"{name}.npy"), getattr(p, name).squeeze(axis=drop))
            args += [f"--{name}", self.path(f"{name}.npy")]
        if p.causal:
            args += ["--causal"]
        if p.query_offset is not None:
            args += ["--query-offset", p.query_offset]
        if p.window is not None:
            args += ["--window", p.window]
        if p.scale is not None:
            args += ["--scale", p.scale]
        if p.mask is not None:
            np.save(self.path("mask.npy"), p.mask)
            args += ["--mask", self.path("mask.npy")]
        return args

    def run_case(self, p: Problem, *flags, ndim=4, verb="run", given_map=None, env=None, select="cdf"):
        """Runs it with all outputs on; checks exit code, shapes and types; returns everything lifted to four axes.

        `select`, whose rule the oracle knows, is for flags that name none; None = the program's own default."""
        args = [verb, *self.save(p, ndim), "--map-out", self.path("map.npy"), "--json", *flags]
        if select is not None and given_map is None and "--select" not in flags:
            args += ["--select", select]
        if verb == "run":
            args += ["--out", self.path("o.npy"), "--lse", self.path("lse.npy")]
        if given_map is not None:
            np.save(self.path("given.npy"), given_map)
            args += ["--select", "map", "--map", self.path("given.npy")]
        for name in ("map.npy", "o.npy", "lse.npy"):
            self.path(name).unlink(missing_ok=True)
        result = call(args, env)
        self.assertEqual(result.code, 0, f"{result.command}\n{result.stderr}")
        result.figures = json.loads(result.stdout)
        batch, heads, nq, nk = p.shape
        tiles = (batch, heads, oracle.blocks(nq, oracle.BLOCK_Q), oracle.blocks(nk, oracle.BLOCK_K))
        found = np.load(self.path("map.npy"))
        self.assertIn(found.dtype, (np.dtype(bool), np.dtype(np.uint8)))
        self.assertIn(found.shape, (tiles, tiles[1:]) if batch == 1 else (tiles,), result.command)
        self.assertLessEqual(int(found.max(initial=0)), 1)
        result.map = found.reshape(tiles).astype(bool)
        if verb == "run":
            out, lse = np.load(self.path("o.npy")), np.load(self.path("lse.npy"))
            self.assertEqual(out.dtype, p.q.dtype, "the output has q's type")
            self.assertEqual(out.shape, (*p.q.shape[4 - ndim:3], p.v.shape[3]))
            self.assertEqual(lse.dtype, np.float32)
            self.assertEqual(lse.size, batch * heads * nq)
            result.out = out.reshape(batch, heads, nq, p.v.shape[3])
            result.lse = lse.reshape(batch, heads, nq)
        return result

    def check_output(self, p: Problem, result: Result, precision, pv_skip=False, rows=None, heads=slice(None)):
        """Output and log-sum-exp against the oracle over the tiles the program says it computed."""
        rows = slice(None) if rows is None else rows
        want, want_lse = (x[:, heads][:, :, rows] for x in oracle.attention(p, result.map))
        got, got_lse = (x[:, heads][:, :, rows] for x in (result.out, result.lse))
        limit = tolerance(precision, p.q.dtype, want, pv_skip)
        error = oracle.relative_l1(got, want)
        self.assertLessEqual(error, limit, f"{precision}: relative L1\n{result.command}")
        empty = np.isneginf(want_lse)
        self.assertTrue((got[empty] == 0).all(), f"rows without a key are zero\n{result.command}")
        self.assertTrue(np.isneginf(got_lse[empty]).all(), f"rows without a key have lse -inf\n{result.command}")
        if not empty.all():
            # The log of a sum of weights moves by the weights' relative error: the same bound, per row on average;
            # in float32 the value itself is rounded, and so is each score below it.
            error = np.abs(got_lse[~empty] - want_lse[~empty])
            size = 1.0 + np.abs(want_lse[~empty])
            limit = BOUND[precision] + (PV_SKIP_BOUND if pv_skip else 0.0)
            self.assertLessEqual((error / size).mean(), limit, f"{precision}: log-sum-exp\n{result.command}")
        return want

    def sweep(self, p, *flags, ndim=4, given_map=None, precisions=PRECISIONS, env=None, pv_skip=True):
        """Every precision, with the PV skip off and with its default."""
        for precision in precisions:
            args = (*flags, "--precision", precision)
            result = self.run_case(p, *args, *EXACT, ndim=ndim, given_map=given_map, env=env)
            self.check_output(p, result, precision)
            if pv_skip:
                result = self.run_case(p, *args, ndim=ndim, given_map=given_map, env=env)
                self.check_output(p, result, precision, pv_skip=True)


def tolerance(precision, dtype, want, pv_skip=False):
    limit = BOUND[precision] + (PV_SKIP_BOUND if pv_skip else 0.0)
    if dtype == np.float16:
        limit += HALF_ULP_F16 + HALF_STEP_F16_TINY * want.size / max(np.abs(want).sum(), 1e-30)
    return limit


def runnable_isas():
    """Names from `sparge info --json`: wherever a list of objects with `name` and `runnable` is."""
    result = call(["info", "--json"])
    return [str(x["name"]) for x in find_isas(json.loads(result.stdout)) if x["runnable"]]


def find_isas(node):
    if isinstance(node, list) and node and all(isinstance(x, dict) and {"name", "runnable"} <= x.keys() for x in node):
        return node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        found = find_isas(child)
        if found:
            return found
    return []

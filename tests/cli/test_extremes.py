"""Extreme and non-finite input: nothing overflows, constants stay, damage stays in rows that can see it."""

import unittest

import numpy as np

import cases
import oracle
from cases import BOUND, Case, Config, DENSE, EXACT, PRECISIONS, noise, noise_qkv, rng, structured
from oracle import Problem

LARGEST = {np.float32: 3e38, np.float16: 65504.0}
TINY = {np.float32: 1e-40, np.float16: 6e-8}  # subnormal


def patterns(r, kind, shape):
    """Name -> array of `shape` (..., N, D) and type `kind`."""
    top, tiny = LARGEST[kind], TINY[kind]
    spike = noise(r, *shape)
    spike[..., shape[-2] // 2, shape[-1] // 3] = top
    made = {
        "all largest": np.full(shape, top),
        "signs of largest": np.where(r.random(shape) < 0.5, top, -top),
        "rows of alternating sign": np.broadcast_to(np.where(np.arange(shape[-2]) % 2, top, -top)[:, None], shape),
        "one spike": spike,
        "constant rows": np.broadcast_to(noise(r, shape[-2], 1), shape),
        "all zero": np.zeros(shape),
        "subnormal": tiny * np.sign(noise(r, *shape)),
        "large and tiny": np.where(r.random(shape) < 0.5, top, tiny),
    }
    if kind is np.float32:
        made["1e30"] = 1e30 * noise(r, *shape)
        made["1e-30"] = 1e-30 * noise(r, *shape)
    return {name: x.astype(kind) for name, x in made.items()}


class Extremes(Case):
    shape = (1, 2, 200, 64)

    def each(self):
        kinds = (np.float32,) if Config.quick else (np.float32, np.float16)
        for kind in kinds:
            made = list(patterns(rng("extremes"), kind, self.shape).items())
            for name, x in made[::2] if Config.quick else made:
                for precision in PRECISIONS:
                    yield kind, name, x, precision

    def check(self, p, precision, flags=(), select="cdf"):
        result = self.run_case(p, "--precision", precision, *flags, select=select)
        self.assertTrue(np.isfinite(result.out).all(), f"output is not finite\n{result.command}")
        # A weighted mean cannot leave the range of V by more than the promised error.
        top = np.abs(p.v.astype(np.float64)).max()
        limit = top * (1 + BOUND[precision] + cases.HALF_ULP_F16) + float(np.finfo(p.q.dtype).smallest_subnormal)
        self.assertLessEqual(np.abs(result.out.astype(np.float64)).max(), limit, result.command)
        return result

    def test_in_every_tensor(self):
        for kind, name, x, precision in self.each():
            for causal in (False, True):
                with self.subTest(kind=kind.__name__, pattern=name, precision=precision, causal=causal):
                    self.check(Problem(x, x[:, ::-1], x, causal=causal), precision)
                    if precision == "int8":
                        self.check(Problem(x, x[:, ::-1], x, causal=causal), precision, select=None)

    def test_in_one_tensor(self):
        q, k, v = noise_qkv(rng("one tensor"), *self.shape[:2], 2, 200, 200, 64)
        for kind, name, x, precision in self.each():
            for at in "qkv":
                with self.subTest(kind=kind.__name__, pattern=name, precision=precision, tensor=at):
                    tensors = dict(q=q.astype(kind), k=k.astype(kind), v=v.astype(kind))
                    tensors[at] = x
                    self.check(Problem(**tensors), precision, DENSE)

    def test_constant_values_stay(self):
        """Weights sum to one, so a constant V is the answer whatever q and k are."""
        for kind, name, x, precision in self.each():
            for constant in (1.5, -LARGEST[kind]):
                with self.subTest(kind=kind.__name__, pattern=name, precision=precision, constant=constant):
                    p = Problem(x, x, np.full(self.shape, constant, kind))
                    result = self.check(p, precision)
                    error = np.abs(result.out.astype(np.float64) / np.float64(kind(constant)) - 1).max()
                    rounding = cases.HALF_ULP_F16 if kind is np.float16 else 0.0
                    self.assertLessEqual(error, BOUND[precision] + rounding, result.command)

    def test_subnormal_and_huge_values_are_averaged(self):
        """q = 0: the mean of V, at either end of the range of float32."""
        r = rng("mean")
        for size in (1e-36, 1e36):
            p = Problem(np.zeros((1, 1, 130, 64), np.float32), noise(r, 1, 1, 130, 64),
            (size * noise(r, 1, 1, 130, 64)).astype("f4"))
            for precision in PRECISIONS:
                with self.subTest(size=size, precision=precision):
                    self.check_output(p, self.run_case(p, *DENSE, *EXACT, "--precision", precision), precision)

    def test_uniform_weights_with_a_spike_in_each_channel(self):
        n = 4096
        r = rng("spikes")
        p = Problem(np.zeros((1, 1, 128, 64), np.float32), noise(r, 1, 1, n, 64), noise(r, 1, 1, n, 64))
        p.v[0, 0, r.integers(n, size=64), np.arange(64)] = 100.0
        for precision in PRECISIONS:
            with self.subTest(precision=precision):
                self.check_output(p, self.run_case(p, *DENSE, "--precision", precision), precision)

    def test_finite_masks_of_any_size(self):
        """The lowest float as a mask is not -inf: a row that has nothing else averages those keys."""
        for kind in (np.float32, np.float16):
            lowest = np.finfo(kind).min
            r = rng("lowest")
            bias = np.zeros((150, 150), kind)
            bias[10] = lowest
            bias[11, :100] = lowest
            bias[12] = lowest / 4
            bias[140:, ::2] = lowest
            bias[13], bias[13, 0] = -np.inf, lowest
            p = Problem(*noise_qkv(r, 1, 2, 2, 150, 150, 32), mask=bias)
            rows = np.delete(np.arange(150), [10, 12, 13])
            for precision in PRECISIONS:
                with self.subTest(kind=kind.__name__, precision=precision):
                    result = self.run_case(p, *DENSE, "--precision", precision)
                    self.assertTrue(np.isfinite(result.out).all())
                    self.check_output(p, result, precision, pv_skip=True, rows=rows)
                    want = oracle.attention(p)[0][:, :, [10, 12, 13]]
                    # A float32 sum of score and mask keeps the score only to half a step of the mask: 2^-10 below
                    # 32768 for fp16 masks of 65504 (2^-8 at most); for the lowest float32 the score is gone.
                    error = oracle.relative_l1(result.out[:, :, [10, 12, 13]], want)
                    self.assertLessEqual(error, BOUND[precision] + 2.0**-8, result.command)


class NonFinite(Case):
    token = 100  # in the first query block's diagonal tile, so that its tile also serves rows that cannot see it

    def pair(self, p, tensor, head, value, flags):
        """Runs with `value` in one token of one head, and with that token zeroed."""
        x = getattr(p, tensor)
        x[:, head, self.token] = 0.0
        clean = self.run_case(p, *flags)
        x[:, head, self.token, 5] = value
        dirty = self.run_case(p, *flags)
        x[:, head, self.token] = 0.0
        return clean, dirty

    def each(self, tensors):
        values = (np.nan,) if Config.quick else (np.nan, np.inf, -np.inf)
        topk = () if Config.quick else (("--select", "topk", "--topk", 0.5),)
        for tensor in tensors:
            for value in values:
                for precision in PRECISIONS:
                    for select in (DENSE, ("--select", "cdf"), *topk):
                        yield tensor, value, precision, (*select, "--precision", precision)

    def check_rows(self, p, clean, dirty, precision, rows):
        """`p` has the token zeroed. The rows must be right for their own map, and no worse than the clean run's."""
        heads = slice(0, 2)  # those that share the damaged key head, or hold the damaged query
        got = dirty.out[:, heads, rows]
        self.assertTrue(np.isfinite(got).all(), f"rows that cannot see the token are damaged\n{dirty.command}")
        self.check_output(p, dirty, precision, pv_skip=True, rows=rows, heads=heads)
        # The predictor may judge a block with such a token otherwise, but not so that the answer gets worse. Both runs
        # are within the bound of what their tiles give.
        dense = oracle.attention(p)[0][:, heads, rows]
        error, before = (oracle.relative_l1(x.out[:, heads, rows], dense) for x in (dirty, clean))
        self.assertLessEqual(error, before + 2 * BOUND[precision] + cases.PV_SKIP_BOUND, dirty.command)

    def test_key_or_value(self):
        for tensor, value, precision, flags in self.each("kv"):
            with self.subTest(tensor=tensor, value=value, flags=flags):
                p = Problem(*structured(rng("nonfinite"), 1, 4, 2, 300, 300, 64), causal=True)
                clean, dirty = self.pair(p, tensor, 0, value, flags)
                self.check_rows(p, clean, dirty, precision, slice(0, self.token))
                np.testing.assert_array_equal(dirty.out[:, 2:], clean.out[:, 2:], "another head changed")

    def test_query(self):
        for tensor, value, precision, flags in self.each("q"):
            for causal in (True,) if Config.quick else (False, True):
                with self.subTest(value=value, flags=flags, causal=causal):
                    p = Problem(*structured(rng("nonfinite q"), 1, 4, 2, 300, 300, 64), causal=causal)
                    clean, dirty = self.pair(p, tensor, 1, value, flags)
                    self.check_rows(p, clean, dirty, precision, np.delete(np.arange(300), self.token))
                    others = [0, 2, 3]
                    np.testing.assert_array_equal(dirty.out[:, others], clean.out[:, others], "another head changed")

    def test_everything(self):
        """Nothing to promise but an end."""
        for value in (np.nan, np.inf):
            for precision in PRECISIONS:
                p = Problem(*(np.full((1, 1, 150, 32), value, np.float32) for _ in range(3)))
                for select in ("cdf", None):
                    self.run_case(p, "--precision", precision, select=select)


if __name__ == "__main__":
    unittest.main()

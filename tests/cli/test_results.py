"""Outputs and log-sum-exp of `sparge run` against the oracle: shapes, masks, precisions, threads, instruction sets."""

import unittest

import numpy as np

import cases
import oracle
from cases import Case, Config, DENSE, EXACT, PRECISIONS, noise, noise_qkv, rng, structured
from oracle import Problem, Selection


class Outputs(Case):
    """The kernel alone: the oracle is masked with the map that the run itself reports."""

    def test_array_ranks_and_groups(self):
        for ndim, batch, hq, hkv in ((2, 1, 1, 1), (3, 1, 3, 3), (3, 1, 4, 2), (4, 1, 2, 1), (4, 2, 6, 2),
                                     (4, 3, 5, 1)):
            with self.subTest(ndim=ndim, batch=batch, hq=hq, hkv=hkv):
                r = rng("ranks", ndim, batch, hq)
                self.sweep(Problem(*noise_qkv(r, batch, hq, hkv, 150, 170, 32)), *DENSE, ndim=ndim)
                self.sweep(Problem(*structured(r, batch, hq, hkv, 150, 170, 32)), ndim=ndim)

    def test_ragged_lengths(self):
        lengths = (1, 63, 65, 200) if Config.quick else (1, 63, 64, 65, 127, 129, 200, 1000)
        for nq in lengths:
            for nk in {nq, lengths[-1 - lengths.index(nq)]}:
                for causal in (False, True):
                    with self.subTest(nq=nq, nk=nk, causal=causal):
                        r = rng("ragged", nq, nk)
                        self.sweep(Problem(*noise_qkv(r, 1, 2, 1, nq, nk, 64), causal=causal), pv_skip=False)

    def test_head_sizes(self):
        sizes = (1, 40, 72, 128, 576) if Config.quick else (1, 16, 40, 64, 72, 80, 96, 128, 192, 256, 576)
        for dk in sizes:
            dv = sizes[-1 - sizes.index(dk)]
            with self.subTest(dk=dk, dv=dv):
                r = rng("sizes", dk)
                self.sweep(Problem(*noise_qkv(r, 1, 2, 1, 140, 200, dk)), *DENSE, pv_skip=False)
                self.sweep(Problem(*noise_qkv(r, 1, 2, 1, 140, 200, dk, dv), causal=True), pv_skip=False)

    def test_correlated_tokens(self):
        lengths = ((300, 300),) if Config.quick else ((300, 300), (1000, 1000), (257, 700))
        for nq, nk in lengths:
            for causal in (False, True):
                with self.subTest(nq=nq, nk=nk, causal=causal):
                    r = rng("correlated", nq, nk)
                    p = Problem(*structured(r, 1, 4, 2, nq, nk, 64, offset=1.0), causal=causal)
                    self.sweep(p)
                    self.sweep(p, "--select", "topk", "--topk", 0.4)

    def test_causal_offsets(self):
        # Negative: the first rows see nothing. Large: everything is visible. Chunked: 100 queries at 150 of 400.
        for nq, nk, offset in ((200, 200, -70), (200, 200, -500), (200, 200, 17), (100, 400, 150), (100, 400, 0),
                               (130, 90, None), (300, 130, None), (90, 300, None), (64, 64, 1000)):
            with self.subTest(nq=nq, nk=nk, offset=offset):
                r = rng("offset", nq, nk, offset)
                p = Problem(*noise_qkv(r, 1, 2, 2, nq, nk, 48), causal=True, query_offset=offset)
                self.sweep(p, *DENSE, pv_skip=False)
                self.sweep(p, pv_skip=False)

    def test_windows(self):
        for nq, nk, window, offset in ((300, 300, 1, None), (300, 300, 64, None), (300, 300, 100, None),
                                       (300, 300, 1000, None),
                                       (100, 400, 70, None), (200, 200, 30, -50), (200, 200, 30, 100),
                                       (60, 60, 20, 90)):
            with self.subTest(nq=nq, nk=nk, window=window, offset=offset):
                r = rng("window", nq, window)
                p = Problem(*noise_qkv(r, 1, 2, 1, nq, nk, 32), causal=True, window=window, query_offset=offset)
                self.sweep(p, pv_skip=False)

    def test_masks(self):
        batch, heads, nq, nk = 2, 4, 150, 210
        for shape in ((nq, nk), (heads, nq, nk), (batch, heads, nq, nk)):
            for kind in (bool, np.float32) if Config.quick else (bool, np.uint8, np.float32, np.float16):
                with self.subTest(shape=shape, kind=kind.__name__):
                    r = rng("mask", len(shape), kind.__name__)
                    m = random_mask(r, shape, kind)
                    p = Problem(*noise_qkv(r, batch, heads, 2, nq, nk, 32), mask=m, causal=kind is np.float16)
                    if kind is np.uint8:
                        p.mask = m.astype(bool)
                        np.save(self.path("bytes.npy"), m)
                        q = Problem(p.q, p.k, p.v)
                        result = self.run_case(q, "--mask", self.path("bytes.npy"), "--precision", "fp32", *EXACT)
                        self.check_output(p, result, "fp32")
                    else:
                        self.sweep(p, pv_skip=False)

    def test_masks_that_hide_whole_tiles_and_rows(self):
        for kind in (bool, np.float32, np.float16):
            with self.subTest(kind=kind.__name__):
                r = rng("tiles", kind.__name__)
                m = random_mask(r, (300, 300), kind)
                hide = False if kind is bool else -np.inf
                m[:128, 64:192] = hide
                m[140:150] = hide
                m[256:] = hide
                self.sweep(Problem(*noise_qkv(r, 1, 2, 1, 300, 300, 32), mask=m), pv_skip=False)

    def test_scale(self):
        for scale in (1.0, 0.01, 0.3, -0.3):
            with self.subTest(scale=scale):
                p = Problem(*noise_qkv(rng("scale"), 1, 2, 2, 150, 150, 16), scale=scale)
                self.sweep(p, *DENSE, pv_skip=False)

    def test_given_maps(self):
        for share in (0.0, 0.5) if Config.quick else (0.0, 0.3, 0.8, 1.0):
            for extra in (dict(), dict(causal=True), dict(causal=True, window=90)):
                with self.subTest(share=share, **extra):
                    r = rng("given", share)
                    p = Problem(*noise_qkv(r, 2, 4, 2, 300, 333, 64), **extra)
                    tiles = r.random((2, 4, 3, 6)) < share
                    self.sweep(p, given_map=tiles, pv_skip=False, precisions=("fp32", "int8"))
        r = rng("given3")
        p = Problem(*noise_qkv(r, 1, 4, 2, 300, 333, 64))
        self.sweep(p, given_map=(r.random((4, 3, 6)) < 0.5).astype(np.uint8), ndim=3, pv_skip=False)

    def test_fp16_inputs(self):
        for extra in (dict(), dict(causal=True)):
            with self.subTest(**extra):
                r = rng("fp16")
                for q, k, v in (noise_qkv(r, 1, 4, 2, 200, 260, 64), structured(r, 1, 4, 2, 300, 300, 80)):
                    self.sweep(Problem(*(x.astype(np.float16) for x in (q, k, v)), **extra))

    def test_mixed_types(self):
        r = rng("mixed")
        q, k, v = noise_qkv(r, 1, 2, 2, 150, 150, 32)
        self.sweep(Problem(q, k.astype(np.float16), v.astype(np.float16)), pv_skip=False)
        self.sweep(Problem(q.astype(np.float16), k, v), pv_skip=False)

    def test_no_keys_and_no_queries(self):
        r = rng("empty")
        for select in ("cdf", None):
            result = self.run_case(Problem(*noise_qkv(r, 1, 2, 2, 70, 0, 16)), select=select)
            self.assertTrue((result.out == 0).all() and np.isneginf(result.lse).all())
            self.run_case(Problem(*noise_qkv(r, 1, 2, 2, 0, 70, 16)), select=select)

    def test_pv_skip_counts(self):
        """Peaked rows: the skip really happens, and `off` really computes every row group."""
        r = rng("pv")
        p = Problem(*structured(r, 1, 2, 2, 700, 700, 64, strength=25.0))
        for precision in PRECISIONS:
            full = self.run_case(p, *DENSE, "--precision", precision, *EXACT)
            self.assertEqual(full.figures["pv_tiles"]["computed"], full.figures["pv_tiles"]["eligible"])
            result = self.run_case(p, *DENSE, "--precision", precision)
            pv, qk = result.figures["pv_tiles"], result.figures["qk_tiles"]
            self.assertLess(pv["computed"], 0.9 * pv["eligible"])
            self.check_output(p, result, precision, pv_skip=True)
            work = (qk["computed"] / qk["eligible"] + pv["computed"] / pv["eligible"]) / 2
            self.assertAlmostEqual(result.figures["work"], work, places=4)
        self.assertTrue(np.isfinite(self.run_case(p, *DENSE, "--pv-skip", 0).out).all())


class Safetensors(Case):

    def compare(self, tensors, p, precision="fp32"):
        cases.write_safetensors(self.path("t.safetensors"), tensors, {"note": "any"})
        result = cases.call(["run", "--tensors", self.path("t.safetensors"), "--out", self.path("o.npy"), "--precision",
                             precision, *DENSE, *EXACT])
        self.assertEqual(result.code, 0, f"{result.command}\n{result.stderr}")
        got = np.load(self.path("o.npy"))
        self.assertEqual(got.dtype, p.q.dtype)
        want = oracle.attention(p)[0]
        error = oracle.relative_l1(got.reshape(want.shape), want)
        self.assertLessEqual(error, cases.tolerance(precision, got.dtype, want))

    def test_types(self):
        q, k, v = noise_qkv(rng("safe"), 1, 2, 1, 100, 120, 32)
        for name, kind in (("F32", np.float32), ("F16", np.float16)):
            with self.subTest(name):
                p = Problem(*(x.astype(kind) for x in (q, k, v)))
                self.compare({n: (name, x.shape[1:], x.tobytes()) for n, x in zip("qkv", (p.q, p.k, p.v))}, p)
        with self.subTest("BF16 k and v"):
            (kb, k_bytes), (vb, v_bytes) = cases.as_bf16(k), cases.as_bf16(v)
            tensors = {"v": ("BF16", v.shape[1:], v_bytes), "q": ("F32", q.shape[1:], q.tobytes()),
                       "k": ("BF16", k.shape[1:], k_bytes)}
            self.compare(tensors, Problem(q, kb, vb))


class WholePath(Case):
    """Realistic data, default flags, against dense attention."""

    def test_sparse_default_is_close_to_dense(self):
        n = 1200 if Config.quick else 2000
        for causal in (False, True):
            for select in ("cdf", None):
                with self.subTest(causal=causal, select=select):
                    p = Problem(*structured(rng("whole"), 1, 2, 1, n, n, 64), causal=causal)
                    learned = () if select else ("--warm", 20)  # the first choices, of few samples, are cautious
                    result = self.run_case(p, *learned, select=select)
                    self.assertGreater(result.figures["sparsity"], 0.1)
                    dense, _ = oracle.attention(p)
                    self.assertLess(oracle.relative_l1(result.out, dense), 0.05, result.command)
                    self.check_output(p, result, "int8", pv_skip=True)

    def test_dropping_a_heavy_tile_shows(self):
        p = Problem(*structured(rng("heavy"), 1, 1, 1, 512, 512, 64))
        mass = np.exp(np.einsum("qd,kd->qk", *(x[0, 0].astype(float) for x in (p.q, p.k))) * p.sigma)
        mass /= mass.sum(axis=1, keepdims=True)
        per_tile = mass.reshape(4, 128, 8, 64).sum(axis=(1, 3))
        i, j = np.unravel_index(per_tile.argmax(), per_tile.shape)
        p.v[0, 0, 64 * j:64 * j + 64] += 3.0
        dense, _ = oracle.attention(p)
        tiles = np.ones((1, 1, 4, 8), bool)
        for precision in PRECISIONS:
            whole = self.run_case(p, "--precision", precision, given_map=tiles)
            self.assertLess(oracle.relative_l1(whole.out, dense), 0.04)
        tiles[0, 0, i, j] = False
        for precision in PRECISIONS:
            holed = self.run_case(p, "--precision", precision, given_map=tiles)
            rows = slice(128 * i, 128 * i + 128)
            self.assertGreater(oracle.relative_l1(holed.out[..., rows, :], dense[..., rows, :]), 0.1)
            self.check_output(p, holed, precision, pv_skip=True)


class Causality(Case):

    def test_a_future_token_does_not_matter(self):
        """A fixed map, because the predictor's mean of K is allowed to see the future."""
        for offset, token in ((None, 150), (None, 191), (None, 192), (-40, 100), (30, 128)):
            for given in (None, np.ones((1, 2, 3, 5), bool)):
                with self.subTest(offset=offset, token=token, given=given is not None):
                    r = rng("future", token)
                    p = Problem(*noise_qkv(r, 1, 2, 1, 300, 300, 64), causal=True, query_offset=offset)
                    flags = (*(DENSE if given is None else ()), "--precision", "fp32", *EXACT)
                    before = self.run_case(p, *flags, given_map=given)
                    p.k[:, :, token] = 3.0 * noise(r, 64)
                    p.v[:, :, token] = 100.0
                    after = self.run_case(p, *flags, given_map=given)
                    first = token - p.offset  # the first query that sees the token
                    early, late = (before.out[:, :, :first], after.out[:, :, :first]), slice(first, None)
                    self.assertLessEqual(oracle.relative_l1(*early), cases.BOUND["fp32"])
                    self.assertTrue((np.abs(before.out - after.out)[:, :, late].max(axis=-1) > 1e-4).mean() > 0.5)


class Threads(Case):

    def test_bit_identical_for_any_number(self):
        n = 500 if Config.quick else 1100
        kinds = [(precision, "cdf", n) for precision in PRECISIONS] + [("int8", None, 1100)]
        for precision, select, n in kinds:
            for extra in (dict(), dict(causal=True)):
                with self.subTest(precision=precision, select=select, **extra):
                    p = Problem(*structured(rng("threads"), 2, 4, 2, n, n, 64), **extra)
                    seen = set()
                    for threads in (1, 2, 3, 7):
                        result = self.run_case(p, "--precision", precision, "--threads", threads, select=select)
                        self.assertEqual(result.figures["threads"], threads)
                        seen.add((result.out.tobytes(), result.lse.tobytes(), result.map.tobytes()))
                    self.assertEqual(len(seen), 1, "outputs differ between numbers of threads")


class InstructionSets(Case):
    """A smaller set on everything this machine can run, forced by the environment."""

    def test_each(self):
        names = cases.runnable_isas()
        self.assertTrue(names, "`sparge info --json` lists no runnable instruction set")
        r = rng("isa")
        bias = random_mask(r, (150, 210), np.float32)
        problems = (
            Problem(*noise_qkv(r, 1, 2, 1, 150, 210, 72, 40), mask=bias),
            Problem(*noise_qkv(r, 1, 2, 2, 129, 65, 1)),
            Problem(*noise_qkv(r, 1, 1, 1, 70, 200, 576), causal=True),
            Problem(*structured(r, 1, 2, 1, 400, 400, 64), causal=True),
            Problem(*(x.astype(np.float16) for x in structured(r, 1, 2, 1, 257, 300, 128))),
        )
        problems = problems[::2] if Config.quick else problems
        maps = [oracle.block_rule(p, Selection()) for p in problems]
        for name in names:
            env = {"SPARGE_ISA": name}
            for index, p in enumerate(problems):
                with self.subTest(isa=name, problem=index):
                    result = self.run_case(p, env=env)
                    self.assertEqual(result.figures["isa"], name, "the forced instruction set is the one that ran")
                    clear = ~maps[index].ambiguous
                    np.testing.assert_array_equal(result.map[clear], maps[index].map[clear])
                    self.sweep(p, env=env, pv_skip=False)
                    self.sweep(p, *DENSE, env=env, precisions=("int8",))


    def test_fp16_output_is_rounded_to_nearest(self):
        """The same numbers as float32 and as fp16 files take the same path, up to the last store."""
        half = [x.astype(np.float16) for x in noise_qkv(rng("rounding"), 1, 1, 1, 150, 150, 64)]
        for name in cases.runnable_isas():
            with self.subTest(isa=name):
                narrow, wide = (self.run_case(Problem(*(x.astype(kind) for x in half)), *DENSE, "--precision", "fp32",
                                              env={"SPARGE_ISA": name}).out for kind in (np.float16, np.float32))
                step = np.spacing(np.abs(wide).astype(np.float16)).astype(np.float64)
                self.assertLessEqual((np.abs(narrow.astype(np.float64) - wide) / step).max(), 0.51)


class Combinations(Case):
    """Everything at once, drawn at random: map and output of each draw."""

    def draw(self, r):
        dims = (1, 3, 8, 24, 32, 64, 65, 80, 100, 128)
        groups, hkv, batch = (int(r.integers(1, n)) for n in (4, 3, 3))
        nq, nk = (int(np.exp(r.uniform(0, np.log(700)))) for _ in range(2))
        if r.random() < 0.4:
            nq = nk
        make = structured if r.random() < 0.7 else noise_qkv
        kind = np.float16 if r.random() < 0.3 else np.float32
        tensors = make(r, batch, hkv * groups, hkv, nq, nk, r.choice(dims), r.choice(dims))
        p = Problem(*(x.astype(kind) for x in tensors))
        if r.random() < 0.5:
            p.causal = True
            if r.random() < 0.5:
                p.query_offset = int(r.integers(-nq, nk + 2))
            if r.random() < 0.4:
                p.window = int(r.integers(1, nk + 2))
        if r.random() < 0.3:
            shape = p.shape[int(r.integers(3)):]
            p.mask = random_mask(r, shape, r.choice([bool, np.float32, np.float16]))
        if r.random() < 0.3:
            p.scale = float(r.uniform(0.2, 1.5)) * p.q.shape[3] ** -0.5
        theta = float(r.choice([-1.0, 0.0, 0.3, 0.6]))
        s = Selection("cdf", tau=float(r.choice([0.5, 0.9, 0.98])), theta=theta)
        if r.random() < 0.4:
            s = Selection("topk", topk=float(r.choice([0.125, 0.25, 0.5])), theta=theta)
        s.sink = [None, True, False][int(r.integers(3))]
        return p, s

    def test_random(self):
        isas = cases.runnable_isas()
        for index in range(15 if Config.quick else 120):
            r = np.random.default_rng([Config.seed, index])
            p, s = self.draw(r)
            precision, isa = r.choice(PRECISIONS), r.choice(isas)
            if p.q.shape[3] < 16 or p.q.shape[2] * p.v.shape[3] < 1000:
                precision = "fp32"  # the integers' bounds are averages over many products and many outputs
            with self.subTest(index=index, isa=isa, precision=precision):
                rule = oracle.block_rule(p, s)
                flags = (*cases.selection_flags(s), "--precision", precision, *EXACT)
                result = self.run_case(p, *flags, env={"SPARGE_ISA": isa})
                clear = ~rule.ambiguous
                np.testing.assert_array_equal(result.map[clear], rule.map[clear], result.command)
                self.check_output(p, result, precision)


def random_mask(r, shape, kind):
    """About a third hidden; every eighth query sees nothing at all."""
    shown = r.random(shape) > 0.3
    shown[..., ::8, :] = False
    if kind in (bool, np.uint8):
        return shown.astype(kind)
    return np.where(shown, r.standard_normal(shape), -np.inf).astype(kind)


if __name__ == "__main__":
    unittest.main()

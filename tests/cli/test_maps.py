"""The block map and its figures from `sparge map` and `sparge run --map-out` against the oracle's rule, row by row."""

import unittest

import numpy as np

import cases
import oracle
from cases import Case, Config, noise, noise_qkv, rng, selection_flags, structured
from oracle import Problem, Selection

SELECTIONS = (
    Selection(tau=0.98), Selection(tau=0.9, theta=0.6), Selection(tau=0.7, theta=-1.0), Selection(tau=0.0),
    Selection(tau=1.0),
    Selection(select="topk", topk=0.25), Selection(select="topk", topk=0.5, theta=-1.0),
    Selection(select="topk", topk=0.3, theta=0.6), Selection(select="topk", topk=0.0, theta=-1.0),
    Selection(select="topk", topk=1.0), Selection(select="all"),
)


class Maps(Case):
    rows = ambiguous = 0  # over all comparisons, for the last test

    def compare(self, p, s, ndim=4, verbs=("map", "run")):
        """Exact equality on every row that float32 can decide; figures must equal the counts of the map."""
        rule = oracle.block_rule(p, s)
        Maps.rows += rule.ambiguous.size
        Maps.ambiguous += int(rule.ambiguous.sum())
        clear = ~rule.ambiguous
        seen = []
        for verb in verbs:
            result = self.run_case(p, *selection_flags(s), ndim=ndim, verb=verb)
            wrong = np.argwhere((result.map != rule.map).any(axis=-1) & clear)
            message = f"{verb}: rows (b, h, i) that differ from the rule\n{result.command}"
            self.assertEqual(wrong.tolist(), [], message)
            self.assertFalse((result.map & ~rule.visible).any(), "a hidden tile is in the map")
            self.check_figures(result, rule)
            seen.append(result.map)
        self.assertTrue(all((m == seen[0]).all() for m in seen), "`map` and `run` disagree")
        return rule

    def check_figures(self, result, rule):
        tiles = result.figures["qk_tiles"]
        self.assertEqual(tiles["eligible"], int(rule.visible.sum()), result.command)
        self.assertEqual(tiles["computed"], int(result.map.sum()), result.command)
        if tiles["eligible"]:
            self.assertAlmostEqual(result.figures["sparsity"], 1.0 - tiles["computed"] / tiles["eligible"], places=5)

    def test_structured(self):
        n = 700 if Config.quick else 2100
        r = rng("map")
        p = Problem(*structured(r, 1, 4, 2, n, n, 64, offset=2.0))
        for s in SELECTIONS:
            with self.subTest(s):
                rule = self.compare(p, s)
                if s.select != "all" and s.tau < 1 and s.topk < 1:
                    self.assertGreater(rule.sparsity, 0.1, "the case must drop tiles, or it proves nothing")

    def test_the_similarity_gate_fires_both_ways(self):
        r = rng("gate")
        p = Problem(*structured(r, 1, 2, 2, 1200, 1200, 64, kinds=5, wobble=1.5))
        p.q[:, :, 300:500] = noise(r, 200, 64)
        p.k[:, :, 640:760] = noise(r, 120, 64)
        for theta in (0.3, 0.5):
            rule = self.compare(p, Selection(tau=0.9, theta=theta))
            self.assertGreater(rule.notes["q_dissimilar"], 0)
            self.assertGreater(rule.notes["k_dissimilar"], 0)
            self.assertGreater(rule.sparsity, 0.1)
        rule = self.compare(p, Selection(theta=1.0))
        self.assertEqual(rule.sparsity, 0.0)

    def test_causal_offsets_windows_and_sink(self):
        n = 600 if Config.quick else 1500
        r = rng("mapcausal")
        q, k, v = structured(r, 1, 2, 1, n, n, 64)
        for extra in (dict(), dict(query_offset=-200), dict(query_offset=100), dict(query_offset=77, window=300),
                      dict(window=500), dict(query_offset=-1 - n), dict(query_offset=n)):
            for sink in (None, True, False):
                for s in (Selection(tau=0.9, sink=sink), Selection(select="topk", topk=0.25, theta=-1.0, sink=sink)):
                    with self.subTest(sink=sink, select=s.select, **extra):
                        self.compare(Problem(q, k, v, causal=True, **extra), s, verbs=("map",))
        for window in (1, 64, 65, 66, 129):  # 65: a block's first row reaches exactly one tile back
            self.compare(Problem(q, k, v, causal=True, window=window), Selection(select="all"))
        for sink in (True, False):
            rule = self.compare(Problem(q, k, v), Selection(tau=0.9, sink=sink))
            self.assertGreater(rule.sparsity, 0.1)

    def test_chunked_prefill(self):
        q, k, v = structured(rng("chunk"), 1, 4, 2, 300, 1000, 64)
        for offset in (None, 0, 400):
            with self.subTest(offset=offset):
                self.compare(Problem(q, k, v, causal=True, query_offset=offset), Selection(tau=0.9))

    def test_ragged_tails_and_groups(self):
        for batch, hq, hkv, nq, nk, ndim in ((2, 4, 1, 300, 450, 4), (1, 3, 3, 129, 65, 3), (1, 1, 1, 1, 500, 2),
                                             (1, 2, 1, 640, 641, 3),
                                             (1, 2, 2, 257, 63, 4), (1, 6, 2, 127, 1000, 3), (1, 1, 1, 1000, 1, 2)):
            with self.subTest(nq=nq, nk=nk, hq=hq):
                r = rng("tails", nq, nk)
                p = Problem(*structured(r, batch, hq, hkv, nq, nk, 40, 24))
                for s in (SELECTIONS[0], SELECTIONS[2], SELECTIONS[5]):
                    self.compare(p, s, ndim=ndim)

    def test_ragged_tail_is_judged_by_its_real_tokens(self):
        """A self-similar tail block is dropped like any other: padding must not make it look dissimilar."""
        p = Problem(*structured(rng("fair"), 1, 1, 1, 400, 650, 64, wobble=0.2))
        p.q[..., 0] += 4.0
        p.q[:, :, 384:] = p.q[:, :, 383:384]
        p.k[:, :, 640:] = p.k[:, :, 639:640]
        p.k[:, :, 640:, 0] = -20.0  # similar to each other, and far from what any query wants
        rule = self.compare(p, Selection(tau=0.9))
        self.assertFalse(rule.map[0, 0, :, -1].any())
        self.assertFalse(rule.map[0, 0, -1].all())

    def test_masks(self):
        n = 700
        q, k, v = structured(rng("mapmask"), 2, 2, 1, n, n, 64)
        for kind in (bool, np.float32, np.float16):
            for shape in ((n, n), (2, n, n), (2, 2, n, n)):
                r = rng("mapmask", len(shape))
                shown = r.random(shape) > 0.2
                shown[..., 100:400, 128:320] = False
                shown[..., 256:384, :] = False  # a query block that sees nothing
                shown[..., 255, 130] = True     # one pair makes a tile visible
                bias = shown if kind is bool else np.where(shown, r.standard_normal(shape), -np.inf).astype(kind)
                with self.subTest(kind=kind.__name__, shape=shape):
                    p = Problem(q, k, v, mask=bias, causal=len(shape) == 3)
                    rule = self.compare(p, Selection(tau=0.9), verbs=("map", "run") if kind is bool else ("map",))
                    self.assertGreater(rule.sparsity, 0.1)
                    self.assertFalse(rule.visible.all())

    def test_zero_tokens(self):
        """Whole numbers that sum to zero, so that K's mean is exactly zero in any arithmetic zero keys stay zero."""
        r = rng("zeros")
        half = np.repeat(np.rint(2 * r.standard_normal((1, 2, 5, 64))), 64, axis=2) + r.integers(-1, 2, (1, 2, 320, 64))
        k = np.concatenate([half, -half], axis=2).astype(np.float32)
        for block, zeros in ((0, 10), (1, 32), (2, 50), (3, 64)):
            k[:, :, block * 64:block * 64 + zeros] = 0
            k[:, :, 320 + block * 64:320 + block * 64 + zeros] = 0
        q = np.rint(cases.smooth(r, 1, 2, 640, 64, rho=0.99) * 2).astype(np.float32)
        q[:, :, 128:188] = 0
        q[:, :, 256:384] = 0
        p = Problem(q, k, noise(r, 1, 2, 640, 64))
        for theta in (-1.0, 0.0, 0.05, 0.2, 0.4):
            with self.subTest(theta=theta):
                self.compare(p, Selection(tau=0.7, theta=theta))
        dissimilar = oracle.block_rule(p, Selection(theta=0.0)).notes
        self.assertEqual(dissimilar["k_dissimilar"], 4, "an all-zero key block has similarity 0 in each head, twice")
        self.assertEqual(dissimilar["q_dissimilar"], 2)

    def test_ties_take_the_lower_index(self):
        """q = 0 gives equal scores: 4 of 8 blocks hold 0.5 exactly, in every arithmetic."""
        r = rng("ties")
        p = Problem(np.zeros((1, 1, 128, 32), np.float32), noise(r, 1, 1, 512, 32), noise(r, 1, 1, 512, 32))
        for flags, count in ((("--tau", 0.5), 4), (("--tau", 0.51), 5), (("--tau", 0.1), 1),
                             (("--select", "topk", "--topk", 0.375), 3)):
            with self.subTest(flags):
                result = self.run_case(p, "--theta", -1, *flags)
                self.assertEqual(np.flatnonzero(result.map).tolist(), list(range(count)))

    def test_scale_reaches_the_predictor(self):
        p = Problem(*structured(rng("mapscale"), 1, 2, 1, 700, 700, 64))
        for scale, sparser in ((0.5, True), (0.001, False)):
            p.scale = scale
            rule = self.compare(p, Selection(tau=0.9, theta=-1.0))
            self.assertEqual(rule.sparsity > 0.5, sparser)

    def test_fp16_and_head_sizes(self):
        for dim in (1, 16, 80, 128, 256, 576):
            with self.subTest(dim=dim):
                q, k, v = structured(rng("mapfp16", dim), 1, 2, 1, 500, 500, dim, 16)
                self.compare(Problem(*(x.astype(np.float16) for x in (q, k, v))), Selection(tau=0.9))
                self.compare(Problem(q, k, v), Selection(tau=0.9))

    def test_given_map_is_kept_exactly(self):
        """No forcing: neither the diagonal, nor the sink, nor dissimilar blocks."""
        r = rng("mapgiven")
        for extra in (dict(), dict(causal=True), dict(causal=True, window=100),
                      dict(mask=r.random((400, 400)) > 0.999)):
            p = Problem(*noise_qkv(r, 2, 2, 1, 400, 400, 32), **extra)
            tiles = r.random((2, 2, 4, 7)) < 0.4
            visible = oracle.block_rule(p, Selection(select="all"))
            for verb in ("map", "run"):
                with self.subTest(verb=verb, extra=sorted(extra)):
                    result = self.run_case(p, verb=verb, given_map=tiles)
                    np.testing.assert_array_equal(result.map, tiles & visible.map)
                    self.check_figures(result, visible)

    def test_precision_does_not_change_the_map(self):
        p = Problem(*structured(rng("mapprec"), 1, 2, 1, 700, 700, 64))
        maps = [self.run_case(p, "--precision", x).map for x in cases.PRECISIONS]
        self.assertTrue((maps[0] == maps[1]).all() and (maps[0] == maps[2]).all())

    def test_zz_few_rows_were_ambiguous(self):
        """Runs last: the comparisons above really compared."""
        if Maps.rows:
            self.assertLess(Maps.ambiguous, 0.01 * Maps.rows)


class Figures(Case):

    def test_json_names(self):
        p = Problem(*noise_qkv(rng("json"), 1, 2, 1, 130, 130, 32), causal=True)
        figures = self.run_case(p, "--threads", 2).figures
        for name in ("time_ms", "stages_ms", "isa", "threads", "qk_tiles", "pv_tiles", "sparsity", "work"):
            self.assertIn(name, figures)
        self.assertEqual(figures["threads"], 2)
        self.assertGreater(figures["time_ms"], 0)
        flat = repr(figures)
        for parameter in ("precision", "select", "tau", "theta", "pv_skip"):
            self.assertIn(parameter, flat.replace("-", "_"), "the parameters in force are reported")


if __name__ == "__main__":
    unittest.main()

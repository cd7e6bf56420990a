"""Checks the oracle itself: attention against a naive triple loop, the block rule against examples done by hand."""

import math
import unittest

import numpy as np

import cases
import oracle
from oracle import Problem, Selection


def naive_attention(p: Problem, block_map):
    """Scalars and loops only."""
    batch, heads, nq, nk = p.shape
    out = np.zeros((batch, heads, nq, p.v.shape[3]))
    lse = np.full((batch, heads, nq), -np.inf)
    offset = nk - nq if p.query_offset is None else p.query_offset
    mask = None if p.mask is None else np.broadcast_to(p.mask, p.shape)
    for b in range(batch):
        for h in range(heads):
            g = h * p.k.shape[1] // heads
            for i in range(nq):
                weights = {}
                for j in range(nk):
                    if p.causal and j > i + offset:
                        continue
                    if p.window is not None and j <= i + offset - p.window:
                        continue
                    if not block_map[b, h, i // 128, j // 64]:
                        continue
                    s = sum(float(x) * float(y) for x, y in zip(p.q[b, h, i], p.k[b, g, j])) * p.sigma
                    if mask is not None and mask.dtype == bool:
                        if not mask[b, h, i, j]:
                            continue
                    elif mask is not None:
                        s += float(mask[b, h, i, j])
                    if s > -math.inf:
                        weights[j] = math.exp(s)
                total = sum(weights.values())
                if total > 0:
                    lse[b, h, i] = math.log(total)
                    for j, w in weights.items():
                        out[b, h, i] += w / total * p.v[b, g, j].astype(float)
    return out, lse


class OracleAttention(unittest.TestCase):

    def test_against_triple_loop(self):
        r = cases.rng("naive")
        bias = cases.noise(r, 4, 9, 130)
        bias[r.random(bias.shape) < 0.3] = -np.inf
        for extra in (dict(), dict(causal=True), dict(causal=True, query_offset=-3), dict(causal=True, window=5),
                      dict(mask=bias), dict(mask=bias > 0, scale=0.7), dict(mask=bias.astype(np.float16), causal=True)):
            p = Problem(*cases.noise_qkv(r, 2, 4, 2, 9, 130, 3, 2), **extra)
            tiles = r.random((2, 4, 1, 3)) < 0.7
            want, want_lse = naive_attention(p, tiles)
            got, got_lse = oracle.attention(p, tiles)
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(got_lse, want_lse, rtol=1e-12, atol=1e-12)


def four_blocks(first_axis, queries=128):
    """One query block along (1, 0) and key blocks that are constant at (first_axis[j], 0); scale 1."""
    q = np.tile([1.0, 0.0], (queries, 1))
    k = np.repeat([[x, 0.0] for x in first_axis], 64, axis=0)
    return Problem(q[None, None], k[None, None], k[None, None], scale=1.0)


class OracleRule(unittest.TestCase):

    def kept(self, p, **selection):
        rule = oracle.block_rule(p, Selection(**selection))
        self.assertFalse(rule.ambiguous.any())
        return [list(np.flatnonzero(row)) for row in rule.map[0, 0]]

    def test_cdf_by_hand(self):
        # Scores 3, 1, -1, -3: probabilities 0.86496, 0.11706, 0.01584, 0.00214; running 0.86496, 0.98202, 0.99786.
        p = four_blocks([3, 1, -1, -3])
        for tau, want in ((0.0, [0]), (0.86, [0]), (0.9, [0, 1]), (0.98, [0, 1]), (0.99, [0, 1, 2]),
                          (1.0, [0, 1, 2, 3])):
            self.assertEqual(self.kept(p, tau=tau), [want], tau)

    def test_centring_removes_a_common_offset(self):
        p = four_blocks([103, 101, 99, 97])
        self.assertEqual(self.kept(p, tau=0.9), [[0, 1]])

    def test_topk_by_hand(self):
        p = four_blocks([-3, 3, 1, -1])
        for topk, want in ((0.0, [1]), (0.25, [1]), (0.26, [1, 2]), (0.5, [1, 2]), (1.0, [0, 1, 2, 3])):
            self.assertEqual(self.kept(p, select="topk", topk=topk), [want], topk)

    def test_dissimilar_key_block_is_forced_and_not_ranked(self):
        # Block 1 alternates (1, 10), (1, -10): mean (1, 0), similarity 1 / 101. Without it 3, -1, -3 give
        # 0.97963, 0.01794, 0.00243.
        p = four_blocks([3, 1, -1, -3])
        p.k[0, 0, 64:128, 1] = np.tile([10.0, -10.0], 32)
        self.assertEqual(self.kept(p, tau=0.97), [[0, 1]])
        self.assertEqual(self.kept(p, tau=0.98), [[0, 1, 2]])
        self.assertEqual(self.kept(p, tau=0.97, theta=-1.0), [[0, 1]])
        self.assertEqual(self.kept(p, tau=0.86, theta=-1.0), [[0]])
        self.assertEqual(self.kept(p, select="topk", topk=0.5), [[0, 1, 2]])  # two ranked, one forced

    def test_dissimilar_query_block_keeps_all(self):
        p = four_blocks([3, 1, -1, -3], queries=192)
        p.q[0, 0, 128:] = np.tile([[1.0, 10.0], [1.0, -10.0]], (32, 1))
        self.assertEqual(self.kept(p, tau=0.5), [[0], [0, 1, 2, 3]])

    def test_zero_tokens_count(self):
        # 40 of 128 query tokens are zero: |mean unit|^2 = (88 / 128)^2 = 0.4727.
        p = four_blocks([3, 1, -1, -3])
        p.q[0, 0, :40] = 0
        self.assertEqual(self.kept(p, tau=0.5, theta=0.47), [[0]])
        self.assertEqual(self.kept(p, tau=0.5, theta=0.48), [[0, 1, 2, 3]])

    def test_causal_diagonal_and_sink(self):
        # 256 x 256: query block 0 sees key blocks 0 and 1, block 1 sees all; the diagonal is {0, 1} and {2, 3}.
        p = four_blocks([-1, 3, 1, -3], queries=256)
        p.causal = True
        self.assertEqual(self.kept(p, tau=0.5, sink=False), [[0, 1], [1, 2, 3]])
        self.assertEqual(self.kept(p, tau=0.5), [[0, 1], [0, 1, 2, 3]])
        p.query_offset = -64  # diagonal: keys 0..63 for block 0, 64..191 for block 1; block 3 is never seen
        self.assertEqual(self.kept(p, tau=0.5, sink=False), [[0], [1, 2]])
        p.query_offset = -200  # block 0 sees nothing
        self.assertEqual(self.kept(p, tau=0.5), [[], [0]])
        p.query_offset, p.window = 0, 1  # each query sees its own key only
        self.assertEqual(self.kept(p, tau=0.5), [[0, 1], [2, 3]])

    def test_ties_take_the_lower_index(self):
        rule = oracle.block_rule(four_blocks([1, 1, 1, 1]), Selection(tau=0.5, theta=-1.0))
        self.assertEqual(list(np.flatnonzero(rule.map)), [0, 1])
        self.assertTrue(rule.ambiguous.all())


if __name__ == "__main__":
    unittest.main()

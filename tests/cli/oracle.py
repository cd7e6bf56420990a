"""Double-precision oracle: masked attention and the stage-1 block rule, plain NumPy, written from the documents only.

Shapes are always (B, H, N, D) here; `cases.py` lifts smaller arrays. Nothing in this file knows about the program.
"""

from dataclasses import dataclass, field
from typing import Optional

import numpy as np

BLOCK_Q, BLOCK_K = 128, 64

# How close a float32 program may come to a decision before its answer counts as undecided (see `BlockRule.ambiguous`).
NEAR_TAU = 1e-5    # running mass against tau: a sum of up to a few thousand float32 terms <= 1
NEAR_SCORE = 1e-6  # two scores, relative to the largest score of the row (but at least absolute)
NEAR_THETA = 1e-5  # similarity against theta: a float32 mean of at most 128 unit vectors, squared


@dataclass
class Problem:
    """One attention problem. `mask`: bool = may attend, float = added; any shape that broadcasts to (B, H, Nq, Nk)."""
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = False
    query_offset: Optional[int] = None
    window: Optional[int] = None
    mask: Optional[np.ndarray] = None
    scale: Optional[float] = None

    @property
    def shape(self):
        """(B, Hq, Nq, Nk)"""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def sigma(self):
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def offset(self):
        return self.k.shape[2] - self.q.shape[2] if self.query_offset is None else self.query_offset

    def kv_head(self, h):
        """Grouped heads: query head h reads key/value head h // (Hq / Hkv)."""
        return h // (self.q.shape[1] // self.k.shape[1])

    def visible(self, b, h):
        """(Nq, Nk) bool: which query may attend to which key, token by token."""
        nq, nk = self.shape[2:]
        diagonal = np.arange(nq)[:, None] + self.offset
        j = np.arange(nk)[None, :]
        seen = np.ones((nq, nk), bool)
        if self.causal:
            seen &= j <= diagonal
        if self.window is not None:
            seen &= j > diagonal - self.window
        if self.mask is not None:
            m = np.broadcast_to(self.mask, self.shape)[b, h]
            seen &= m if m.dtype == bool else ~np.isneginf(m)
        return seen

    def bias(self, b, h):
        """(Nq, Nk) what the mask adds to the scaled scores, or 0."""
        if self.mask is None or self.mask.dtype == bool:
            return 0.0
        m = np.broadcast_to(self.mask, self.shape)[b, h].astype(np.float64)
        return np.where(np.isneginf(m), 0.0, m)


def attention(p: Problem, block_map=None):
    """Output (B, H, Nq, Dv) and log-sum-exp (B, H, Nq); `block_map` (B, H, Tq, Tk) restricts it to those tiles.

    A query without a visible key gives zeros and -inf.
    """
    batch, heads, nq, nk = p.shape
    out = np.zeros((batch, heads, nq, p.v.shape[3]))
    lse = np.full((batch, heads, nq), -np.inf)
    if nk == 0:
        return out, lse
    for b in range(batch):
        for h in range(heads):
            g = p.kv_head(h)
            seen = p.visible(b, h)
            if block_map is not None:
                seen = seen & expand_tiles(block_map[b, h], nq, nk)
            q, k, v = (x.astype(np.float64) for x in (p.q[b, h], p.k[b, g], p.v[b, g]))
            s = np.where(seen, q @ k.T * p.sigma + p.bias(b, h), -np.inf)
            top = s.max(axis=1)
            some = ~np.isneginf(top)
            e = np.exp(s[some] - top[some, None])
            total = e.sum(axis=1)
            out[b, h, some] = (e / total[:, None]) @ v
            lse[b, h, some] = top[some] + np.log(total)
    return out, lse


def expand_tiles(tiles, nq, nk):
    """(Tq, Tk) -> (Nq, Nk)"""
    return np.repeat(np.repeat(tiles.astype(bool), BLOCK_Q, axis=0)[:nq], BLOCK_K, axis=1)[:, :nk]


def any_per_tile(tokens):
    """(Nq, Nk) bool -> (Tq, Tk) bool: does the tile hold at least one true pair?"""
    nq, nk = tokens.shape
    tq, tk = blocks(nq, BLOCK_Q), blocks(nk, BLOCK_K)
    padded = np.zeros((tq * BLOCK_Q, tk * BLOCK_K), bool)
    padded[:nq, :nk] = tokens
    return padded.reshape(tq, BLOCK_Q, tk, BLOCK_K).any(axis=(1, 3))


def blocks(n, size):
    return -(-n // size)


@dataclass
class Selection:
    """The stage-1 parameters of one run. `sink` None = kept when causal."""
    select: str = "cdf"
    tau: float = 0.98
    topk: float = 0.5
    theta: float = 0.3
    sink: Optional[bool] = None


@dataclass
class BlockRule:
    """What the rule gives: the map, the visible tiles, and the rows in which float32 may decide otherwise."""
    map: np.ndarray        # (B, H, Tq, Tk) bool, tiles to compute
    visible: np.ndarray    # (B, H, Tq, Tk) bool, eligible tiles
    ambiguous: np.ndarray  # (B, H, Tq) bool
    notes: dict = field(default_factory=dict)

    @property
    def sparsity(self):
        return 1.0 - self.map.sum() / max(1, self.visible.sum())


def summarise(x, size):
    """Of each block of (N, D): mean vector, self-similarity |mean unit vector|^2, and whether all its tokens are zero.

    A zero token has a zero unit vector, and is counted.
    """
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    starts = range(0, len(x), size)
    mean = np.array([x[i:i + size].mean(axis=0) for i in starts])
    sim = np.array([(unit[i:i + size].mean(axis=0) ** 2).sum() for i in starts])
    zero = np.array([not unit[i:i + size].any() for i in starts])
    return mean, sim, zero


def near(sim, theta, zero):
    """Too close to call in float32; but the similarity of zero tokens is exactly 0 in any arithmetic."""
    return (np.abs(sim - theta) < NEAR_THETA) & ~zero


def rank(score):
    """Indices by falling score, ties by index."""
    return np.lexsort((np.arange(len(score)), -score))


def choose_cdf(score, tau):
    """Smallest leading set with mass >= tau. Returns the chosen indices and whether float32 might disagree."""
    if tau >= 1.0:
        return np.arange(len(score)), False
    order = rank(score)
    mass = np.exp(score[order] - score[order[0]])
    running = np.cumsum(mass / mass.sum())
    count = min(len(score), 1 + int((running < tau).sum()))
    close = bool((np.abs(running[:-1] - tau) < NEAR_TAU).any())
    return order[:count], close or tied(score, order, count)


def choose_topk(score, topk, visible_count):
    """The max(1, ceil(topk * visible)) best of the scored blocks."""
    exact = topk * visible_count
    order = rank(score)
    count = min(len(score), max(1, int(np.ceil(exact))))
    inexact = np.float32(topk) != topk and abs(exact - round(exact)) < NEAR_TAU
    return order[:count], inexact or tied(score, order, count)


def tied(score, order, count):
    """Is the last block taken as good as the first one left out?"""
    if count >= len(score):
        return False
    gap = score[order[count - 1]] - score[order[count]]
    return bool(gap < NEAR_SCORE * max(1.0, np.abs(score).max()))


def block_rule(p: Problem, s: Selection) -> BlockRule:
    """Stage 1 by brute force."""
    batch, heads, nq, nk = p.shape
    tq, tk = blocks(nq, BLOCK_Q), blocks(nk, BLOCK_K)
    result = BlockRule(*(np.zeros((batch, heads, tq, tk), bool) for _ in range(2)), np.zeros((batch, heads, tq), bool))
    sink = p.causal if s.sink is None else s.sink
    gates = {"q_dissimilar": 0, "k_dissimilar": 0}
    for b in range(batch):
        for h in range(heads):
            visible = any_per_tile(p.visible(b, h))
            result.visible[b, h] = visible
            if s.select == "all":
                result.map[b, h] = visible
                continue
            k = p.k[b, p.kv_head(h)].astype(np.float64)
            qbar, qsim, qzero = summarise(p.q[b, h].astype(np.float64), BLOCK_Q)
            kbar, ksim, kzero = summarise(k - k.mean(axis=0), BLOCK_K)
            score = qbar @ kbar.T * p.sigma
            similar = ksim > s.theta
            near_theta = near(ksim, s.theta, kzero)
            gates["q_dissimilar"] += int((qsim <= s.theta).sum())
            gates["k_dissimilar"] += int((~similar).sum())
            diagonal = diagonal_tiles(nq, nk, p.offset) if p.causal else np.zeros((tq, tk), bool)
            for i in range(tq):
                row = np.full(tk, qsim[i] <= s.theta)
                candidates = np.flatnonzero(visible[i] & similar)
                doubt = bool((near_theta & visible[i]).any())
                if len(candidates):
                    if s.select == "cdf":
                        chosen, close = choose_cdf(score[i, candidates], s.tau)
                    else:
                        chosen, close = choose_topk(score[i, candidates], s.topk, int(visible[i].sum()))
                    row[candidates[chosen]] = True
                    doubt |= close
                row[~similar] = True
                row |= diagonal[i]
                row[0] |= sink
                result.map[b, h, i] = row & visible[i]
                q_doubt = near(qsim[i], s.theta, qzero[i])
                q_forced = qsim[i] <= s.theta and not q_doubt  # all visible tiles, so nothing else can matter
                result.ambiguous[b, h, i] = q_doubt or (doubt and not q_forced)
    result.notes = gates
    return result


def diagonal_tiles(nq, nk, offset):
    """(Tq, Tk) bool: tiles with a pair key == query + offset."""
    tiles = np.zeros((blocks(nq, BLOCK_Q), blocks(nk, BLOCK_K)), bool)
    i = np.arange(nq)
    i = i[(i + offset >= 0) & (i + offset < nk)]
    tiles[i // BLOCK_Q, (i + offset) // BLOCK_K] = True
    return tiles


def relative_l1(got, want):
    """sum|got - want| / sum|want|; 0 for two all-zero arrays; inf if anything is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    error, size = np.abs(got - want).sum(), np.abs(want).sum()
    return 0.0 if error == 0 else error / size if size > 0 else np.inf

"""What is measured: cases (shape, mask, kept tiles, input type), their inputs, and the true answer on sampled rows."""

from dataclasses import dataclass

import numpy as np

from sparge_ctypes import BLOCK_K, BLOCK_Q

# A float64 reference of all rows would take longer than the measurement; errors of a kernel do not hide in a few rows.
SAMPLED_ROWS = 24


@dataclass(frozen=True)
class Case:
    group: str  # one of GROUPS
    queries: int
    keys: int
    dim: int
    heads: int
    threads: int
    causal: bool = False
    kept: float = 1.0  # share of 128 x 64 tiles in a random map; 1 = no map

    @property
    def label(self):
        shape = f"N={self.queries}" if self.queries == self.keys else f"{self.queries} x {self.keys}"
        kept = f" {100 * self.kept:g} %" if self.kept < 1 else ""
        return f"{self.group}{kept} {shape} d={self.dim} heads={self.heads} threads={self.threads}"

    def seed(self):
        return [self.queries, self.keys, self.dim, self.heads]

    def gmacs(self):
        """Multiply-adds in billions of dense attention: QK and PV."""
        return 2e-9 * self.heads * self.queries * self.keys * self.dim * (0.5 if self.causal else 1.0)


class Inputs:
    """q, k, v as float32 (heads, tokens, dim), the map, and rows of the answer in float64.

    Values are white noise: time does not depend on them, because every library computes exactly the named tiles."""

    def __init__(self, case):
        random = np.random.default_rng(case.seed())
        self.case = case
        self.q = self._tensor(random, case.queries)
        self.k = self._tensor(random, case.keys)
        self.v = self._tensor(random, case.keys)
        self.map = random_map(random, case) if case.kept < 1 else None
        self.rows = np.unique(np.linspace(0, case.queries - 1, SAMPLED_ROWS).astype(np.int64))
        self._answers = {}

    def _tensor(self, random, tokens):
        return random.standard_normal((self.case.heads, tokens, self.case.dim), dtype=np.float32)

    def answer(self, dense=False):
        """Float64 attention of the sampled rows; dense=True leaves the map out, for peers that cannot use one."""
        if dense not in self._answers:
            self._answers[dense] = self._attend(None if dense else self.map)
        return self._answers[dense]

    def _attend(self, block_map):
        scores = self.q[:, self.rows].astype(np.float64) @ self.k.astype(np.float64).transpose(0, 2, 1)
        scores /= np.sqrt(self.case.dim)
        if self.case.causal:
            shift = self.case.keys - self.case.queries
            scores[:, np.arange(self.case.keys)[None, :] > self.rows[:, None] + shift] = -np.inf
        if block_map is not None:
            tiles = np.repeat(block_map[:, self.rows // BLOCK_Q], BLOCK_K, axis=2)[:, :, : self.case.keys]
            scores[tiles == 0] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return weights @ self.v.astype(np.float64)

    def error(self, output, dense=False):
        """Relative L1 of a whole (heads, queries, dim) output on the sampled rows."""
        truth = self.answer(dense)
        return float(np.abs(output[:, self.rows].astype(np.float64) - truth).sum() / np.abs(truth).sum())


def random_map(random, case):
    """The same number of tiles in every row of blocks: the kept share is exact, and threads have equal work."""
    rows, columns = -(-case.queries // BLOCK_Q), -(-case.keys // BLOCK_K)
    keep = max(1, round(case.kept * columns))
    order = np.argsort(random.random((case.heads, rows, columns)), axis=2)
    return np.ascontiguousarray((order < keep).astype(np.uint8))


def bf16_bits(values):
    """Round to nearest even, as hardware does. No NaN among our inputs."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------------------------------------- the lists

LEVELS = ("quick", "default", "full")
TOKENS = {"quick": (1024, 2048), "default": (1024, 2048, 4096, 8192), "full": (1024, 2048, 4096, 8192)}
SHORT = {"quick": (128,), "default": (64, 256, 512), "full": (64, 128, 256, 512)}
SHARES = {"quick": (0.5, 0.1), "default": (0.75, 0.5, 0.25, 0.1, 0.05), "full": (0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.02)}
BAR_SHARES = (0.5, 0.1)  # of these there are bars, and they are measured with every number of threads
ODD_DIMS = (40, 72, 80, 96, 160, 256)
GROUPS = {
    "dense": "every query sees every key",
    "causal": "query i sees keys up to i",
    "kept": "random block map with this share of 128 x 64 tiles kept",
    "inputs": "inputs and output in fp32, fp16, bf16",
    "scaling": "one thread against all that were asked for",
    "short": "few tokens, 8 heads",
    "decode": "one query, 4096 keys, 8 heads",
    "dims": "other head sizes",
}


def make_cases(level, tokens, dims, threads, heads, groups):
    """Cases in order; all of one thread count together, because changing it makes torch.compile start again."""
    cases = []
    for count in threads:
        for dim in dims:
            for length in tokens:
                shares = SHARES[level] if level == "full" or count == max(threads) else BAR_SHARES
                cases += _square((length, length, dim, heads, count), level == "full" or length == max(tokens), shares)
            cases += [Case("short", n, n, dim, 8, count) for n in SHORT[level]]
            cases.append(Case("decode", 1, 4096, dim, 8, count))
            if count == max(threads) and count > 1:
                cases.append(Case("scaling", max(tokens), max(tokens), dim, heads, count))
        if count == min(threads):
            length = min(max(tokens), 4096 if level == "full" else 2048)
            cases += [Case("dims", length, length, dim, heads, count) for dim in (64, 128, *ODD_DIMS)]
    return [case for case in cases if case.group in groups]


def _square(shape, everything, shares):
    cases = [Case("dense", *shape)]
    if everything:  # at every length only in a full run: the bars ask for the longest
        cases.append(Case("causal", *shape, causal=True))
        cases += [Case("kept", *shape, kept=share) for share in shares]
        cases.append(Case("inputs", *shape))
    return cases

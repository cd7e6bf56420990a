#!/usr/bin/env python3
"""The numerical parts of docs/studies/tiles.md, on recorded causal heads, in fp32 and without rounding.

group  one selection for the query heads that share keys, against one per head
skip   PV skip: thresholds that depend on the number of keys, against one that does not

FILE is a capture of sparge.Capture: tensors q (H, N, D), k and v (Hkv, N, D); N a multiple of 1024. Rows are groups of
8 neighbours, spread evenly over the queries. Needs torch and safetensors.
"""
import argparse
import math

import torch
from safetensors.torch import load_file

GROUP, BLOCK_Q, BLOCK_K, POOL = 8, 128, 64, 64
ROOM = 1.25  # what the bound with PV skip is of the one without
INF = math.inf


class Rows:
    """The sampled rows of a length: which tiles they see, and which are always computed."""

    def __init__(self, tokens, groups):
        start = torch.arange(groups) * (tokens // groups)
        start += torch.randint(0, tokens // groups // GROUP, (groups,)) * GROUP
        self.rows = (start[:, None] + torch.arange(GROUP)).flatten()
        self.tiles = torch.arange(tokens // BLOCK_K)[None]
        block = self.rows // BLOCK_Q
        self.visible = (block + 1) * (BLOCK_Q // BLOCK_K)
        self.seen = self.tiles < self.visible[:, None]
        self.forced = self.seen & (self.tiles >= (self.visible - BLOCK_Q // BLOCK_K)[:, None])
        self.forced[:, 0] = True
        self.blocks = block.unique()
        self.at = torch.searchsorted(self.blocks, block)

    def pooled(self, q):
        """The pooled queries of these rows' blocks."""
        return q.view(-1, BLOCK_Q // POOL, POOL, q.shape[-1]).mean(2)[self.blocks]

    def masses(self, pooled, k):
        """Per row the masses of its block's tiles, as the predictor `keys` sees them."""
        last = self.blocks[:, None] * BLOCK_Q + (torch.arange(BLOCK_Q // POOL) + 1) * POOL - 1
        scores = k.shape[-1] ** -0.5 * pooled @ k.T
        scores.masked_fill_(torch.arange(len(k)) > last[..., None], -INF)
        return scores.softmax(-1).unflatten(-1, (-1, BLOCK_K)).sum(-1).mean(1)[self.at]

    def kept(self, masses, eps):
        return self.forced | (self.seen & (masses >= eps / self.visible[:, None].sqrt()))


class Head:
    """A head's sampled rows, tile by tile: maximum, sum and product of the exponentials."""

    def __init__(self, rows, q, k, v):
        scores = k.shape[-1] ** -0.5 * q[rows.rows] @ k.T
        scores.masked_fill_(torch.arange(len(k))[None] > rows.rows[:, None], -INF)
        tiles = scores.unflatten(1, (-1, BLOCK_K))
        self.top = tiles.amax(2)
        p = (tiles - scores.amax(1)[:, None, None]).exp()
        self.sum = p.sum(2)
        self.out = torch.einsum("rtk,tkd->rtd", p, v.view(-1, BLOCK_K, v.shape[-1]))
        self.log_sum = self.sum.log() + scores.amax(1)[:, None]
        self.seen = rows.seen
        self.dense = self.result(rows.seen)
        self.size = self.dense.abs().sum(1)

    def result(self, keep):
        weight = keep.float()
        return torch.einsum("rt,rtd->rd", weight, self.out) / (weight * self.sum).sum(1, keepdim=True)

    def errors(self, keep):
        return (self.result(keep) - self.dense).abs().sum(1)

    def error(self, keep):
        return (self.errors(keep).sum() / self.size.sum()).item()


def heads_of(path):
    """(k, v, the queries of the heads that share them) of a capture."""
    tensors = load_file(path)
    q, k, v = (tensors[name].float() for name in "qkv")
    return [(k[g], v[g], part) for g, part in enumerate(q.split(len(q) // len(k)))]


# ------------------------------------------------------------------ group

FLOORS = torch.logspace(-4.5, -0.02, 48)


def frontier(rows, head, masses, bound):
    """Index of the largest floor within the bound (-1: none), and the sparsity at every floor up to it and beyond."""
    last, sparsity = -1, []
    for i, eps in enumerate(FLOORS):
        keep = rows.kept(masses, eps)
        sparsity.append(1 - (keep.sum() / rows.seen.sum()).item())
        if last == i - 1 and head.error(keep) <= bound:
            last = i
    return last, sparsity


def group(path, found, bound):
    for k, v, queries in heads_of(path):
        rows = Rows(len(k), 32)
        pooled = [rows.pooled(q) for q in queries]
        own = torch.stack([rows.masses(p, k) for p in pooled])
        shared = {"max": own.amax(0), "mean": own.mean(0), "one pooled query": rows.masses(torch.stack(pooled).mean(0), k)}
        heads = [Head(rows, q, k, v) for q in queries]
        for name in ("own", *shared):
            curves = [frontier(rows, head, shared.get(name, own[i]), bound) for i, head in enumerate(heads)]
            least = min(last for last, _ in curves)
            for last, sparsity in curves:
                found.setdefault(name, []).append(sparsity[last] if last >= 0 else 0.0)
                if name != "own":
                    found.setdefault(f"{name}, one floor", []).append(sparsity[least] if least >= 0 else 0.0)


# ------------------------------------------------------------------ skip

BANDS = {"all rows": (0, 1 << 30), "0-2K keys": (0, 2048), "2-4K keys": (2048, 4096), "4-8K keys": (4096, 8192)}
REFERENCE = 4096


def crossing(grid, errors, costs, bound):
    """Threshold and cost where the error, which falls along the grid, meets the bound; between its points."""
    i = len(errors)
    while i > 0 and errors[i - 1] <= bound:
        i -= 1
    if i in (0, len(errors)):
        i = min(i, len(errors) - 1)
        return grid[i], costs[i]
    x = (errors[i - 1] - bound) / max(errors[i - 1] - errors[i], 1e-12)
    return grid[i - 1] + x * (grid[i] - grid[i - 1]), costs[i - 1] + x * (costs[i] - costs[i - 1])


def distances(head, keep, before, now, shift):
    """How far each kept tile lies below what came before it; -inf for a row's first tile, inf for what is not kept."""
    first = torch.full((len(keep), 1), -INF)
    below = torch.cat([first, before[:, :-1]], 1) - now - shift[:, None]
    below = below.masked_fill(head.top == -INF, INF).masked_fill(~keep, INF)
    return below.masked_fill(keep & (keep.cumsum(1) == 1), -INF)


def skip(path, found, bound):
    grid = [0.5 + 0.25 * i for i in range(41)]
    for k, v, queries in heads_of(path):
        for q in queries:
            rows = Rows(len(k), 64)
            head, masses = Head(rows, q, k, v), rows.masses(rows.pooled(q), k)
            keep = rows.seen
            for eps in FLOORS:
                tighter = rows.kept(masses, eps)
                if head.error(tighter) > bound:
                    break
                keep = tighter
            grouped = keep.unflatten(0, (-1, GROUP)).any(1)
            top = head.top.masked_fill(~keep, -INF)
            log_sum = head.log_sum.masked_fill(~keep, -INF)
            away = (rows.rows + 1.0).div(REFERENCE).log()
            rules = {f"lambda {c:+g} log(keys / {REFERENCE})": distances(head, keep, top.cummax(1).values, head.top, c * away)
                     for c in (-1, -0.5, 0, 0.5, 1)}  # fmt: skip
            rules["mass of the tile against the mass so far"] = distances(
                head, keep, log_sum.logcumsumexp(1), head.log_sum, 0 * away)  # fmt: skip
            before = head.errors(keep)
            for name, rows_below in rules.items():
                below = rows_below.unflatten(0, (-1, GROUP)).amin(1)
                kept = [below < x for x in grid]
                errors = [head.errors(g.repeat_interleave(GROUP, 0) & keep) for g in kept]
                plain = " +0 " in name
                for band, (begin, end) in BANDS.items() if plain else [("all rows", BANDS["all rows"])]:
                    mine = (rows.rows >= begin) & (rows.rows < end)
                    size, groups = head.size[mine].sum(), mine[::GROUP]
                    # Of a band its own error without the skip, and the same room on top.
                    most = ROOM * bound if band == "all rows" else (before[mine].sum() / size).item() + (ROOM - 1) * bound
                    costs = [((g & grouped)[groups].sum() / grouped[groups].sum()).item() for g in kept]
                    at = crossing(grid, [(e[mine].sum() / size).item() for e in errors], costs, most)
                    found.setdefault(f"{name}, {band}", []).append(at)
                if plain:  # rows that decide alone, as samples do: the threshold they ask for, and what groups do with it
                    alone = [head.error((rows_below < x) & keep) for x in grid]
                    at = crossing(grid, alone, grid, ROOM * bound)[0]
                    share = ((below < at) & grouped).sum() / grouped.sum()
                    found.setdefault("lambda by rows that decide alone", []).append((at, share.item()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("group", "skip"))
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--bound", type=float, default=0.015, help="relative L1 per head; default 0.015")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found = {}
    for path in options.files:
        {"group": group, "skip": skip}[options.study](path, found, options.bound)
    for name, values in found.items():
        if options.study == "group":
            lost = [mine - own for mine, own in zip(values, found["own"])]
            more = f"lose over .02: {sum(x < -0.02 for x in lost)}, gain: {sum(x > 0.02 for x in lost)}, worst {min(lost):+.3f}"
            print(f"{name:28} heads {len(values)}  sparsity {sum(values) / len(values):.3f}  {more}")
        else:
            lambdas = sorted(x for x, _ in values)
            print(f"{name:50} heads {len(values)}  threshold {sum(lambdas) / len(lambdas):.2f} (median {lambdas[len(lambdas) // 2]:.2f})"
                  f"  PV kept {sum(y for _, y in values) / len(values):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()

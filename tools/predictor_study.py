#!/usr/bin/env python3
"""Which tiles matter? Compares ways to predict the attention mass of tiles (128 queries x 64 keys) on captured heads.

Needs:  pip install torch safetensors numba      (heads: data/*.safetensors, or tools/capture_heads.py --full)
Usage:  predictor_study.py FILE.safetensors ... --json out.json [--only NAME,NAME] [--fine]
        predictor_study.py --table out.json ...  [--only NAME,NAME] [--rule cdf,eps,floor] [--match TEXT] [--base means]
        predictor_study.py --table out.json ...  --transfer SAMPLE,SAMPLE   (parameters from these, used on the others)

For every head and predictor: the largest sparsity (1 - kept tiles / visible tiles) at which the relative L1 error
sum|o_sparse - o_dense| / sum|o_dense| of the head stays within .02 / .05 / .08. One parameter per head, every value of
it is tried. fp32, nothing is quantised. Causal heads keep the tiles on the diagonal and the first key block.

How it is searched: a predictor ranks the visible tiles of each row of tiles, and every rule keeps a beginning of that
ranking. So the error of each row of tiles is computed once for each length of the beginning; a rule only says in which
order the tiles of the whole head are added as its parameter grows.

Rules (the parameter of the head is tau or eps):
  cdf    per row of tiles the smallest set with mass >= tau; forced tiles are added to it
  fcdf   the same, but forced tiles are taken first and their mass counts
  eps    a tile is kept if its mass >= eps
  floor  a tile is kept if its mass >= eps / sqrt(visible tiles of its row)
  epsn   a tile is kept if its mass >= eps / (visible tiles of its row)
Predictors:
  means    softmax over blocks of mean query x mean key (the paper; centring keys does not change it)
  poolP    P pooled queries per block (means of 128/P neighbours) against every key, log-sum-exp in the key block,
           normalised over visible keys; the block's mass is the mean of its pooled queries' masses
  kmP      as poolP, but queries are pooled by likeness: P clusters (k-means, 3 rounds), masses weighted by cluster size
  kwP      as kmP, likeness measured as difference of scores: in the metric of the keys' second moment
  samP     P real queries, evenly spaced, as poolP
  true     mean of the exact masses of the 128 queries
  A+x      variants of A: var = half the variance of the block's scores added (diagonal covariance); max = largest
           instead of mean mass; tX = scores times X; vc / v = mass times mean |v - mean v| / |v| of the key block;
           vo = mass times the distance (root mean square) of the block's values from the predicted output
  A@X      theta: rows of tiles whose query self-similarity is <= X are computed in full
"""
import argparse
import json
import math
import sys
import time

import numba
import numpy as np
import torch
from safetensors import safe_open

BQ, BOUNDS = 128, (0.02, 0.05, 0.08)
INF = float("inf")
GRID = torch.logspace(-5, 0, 61, dtype=torch.float64)                    # values of eps and of 1 - tau for curves


# ---------------------------------------------------------------- pooling queries

def neighbours(q, parts):
    """q (T, BQ, D) -> centres (T, parts, D), weights (T, parts), last position of each part in its block."""
    t, b, d = q.shape
    c = q.view(t, parts, b // parts, d)
    last = torch.arange(1, parts + 1) * (b // parts) - 1
    var = c.var(2, unbiased=False)
    return c.mean(2), torch.full((t, parts), 1.0 / parts), last.expand(t, parts), var


def clusters(q, parts, metric=None, rounds=3):
    """As neighbours, by k-means; the start is a split into neighbours' means, spread along the main direction."""
    t, b, d = q.shape
    x = q if metric is None else q @ metric
    y = x - x.mean(1, keepdim=True)
    u = y[torch.arange(t), y.square().sum(-1).argmax(1)][:, :, None]   # power iteration from the farthest query
    for _ in range(4):
        u = y.transpose(1, 2) @ (y @ u)
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-30)
    rank = (y @ u)[:, :, 0].argsort(1).argsort(1)
    label = rank * parts // b
    for step in range(rounds + 1):
        hot = torch.nn.functional.one_hot(label, parts).float()        # (T, BQ, P)
        size = hot.sum(1)
        if step < rounds:
            centre = hot.transpose(1, 2) @ x / size.clamp_min(1)[:, :, None]
            far = centre.square().sum(-1)[:, None, :] - 2 * x @ centre.transpose(1, 2)
            label = far.masked_fill(size[:, None, :] == 0, INF).argmin(-1)
    mean = hot.transpose(1, 2) @ q / size.clamp_min(1)[:, :, None]
    var = (hot.transpose(1, 2) @ q.square() / size.clamp_min(1)[:, :, None] - mean.square()).clamp_min(0)
    last = (hot * torch.arange(b)[None, :, None]).amax(1).long()
    return mean, size / b, last, var


def samples(q, parts):
    t, b, d = q.shape
    at = torch.arange(parts) * (b // parts) + b // parts // 2
    return q[:, at], torch.full((t, parts), 1.0 / parts), at.expand(t, parts), None


# ---------------------------------------------------------------- masses of tiles

def pooled_mass(head, pooled, heat=1.0, use_var=False, merge="mean"):
    """(T, Tk) masses: softmax of the pooled queries over visible keys, summed per key block."""
    centre, weight, last, var = pooled
    t, p, d = centre.shape
    s = (centre.reshape(-1, d) @ head.k.T).view(t, p, -1) * (head.scale * heat)
    if use_var:
        s += 0.5 * head.scale ** 2 * (var.reshape(-1, d) @ head.k.square().T).view(t, p, -1)
    if head.causal:
        limit = torch.arange(t)[:, None] * BQ + last + head.offset
        s.masked_fill_(torch.arange(head.k.shape[0]) > limit[:, :, None], -INF)
    m = torch.softmax(s, -1).view(t, p, -1, head.bk).sum(-1)
    return (m * weight[:, :, None]).sum(1) if merge == "mean" else m.amax(1)


def means_mass(head):
    s = head.qb.mean(1) @ head.k.view(-1, head.bk, head.k.shape[1]).mean(1).T * head.scale
    return torch.softmax(s.masked_fill(~head.visible, -INF), -1)


def value_weight(head, kind, mass):
    vb = head.v.view(-1, head.bk, head.v.shape[1])
    if kind == "v":
        return vb.norm(dim=-1).mean(1)
    if kind == "vc":
        return (vb - head.v.mean(0)).norm(dim=-1).mean(1)
    mean = vb.mean(1)
    spread = (vb - mean[:, None]).square().sum(-1).mean(1)
    return (torch.cdist(mass @ mean, mean).square() + spread).sqrt()


class Head:
    def __init__(self, q, k, v, scale, causal, bk):
        n, nk = q.shape[0], k.shape[0]
        if n % BQ or nk % BQ:
            sys.exit("predictor_study: lengths must be multiples of %d" % BQ)
        self.k, self.v, self.scale, self.causal, self.bk, self.offset = k, v, scale, causal, bk, nk - n
        self.qb = q.view(-1, BQ, q.shape[1])
        t = self.qb.shape[0]
        end = torch.arange(1, t + 1) * BQ + self.offset
        j = torch.arange(nk // bk)
        self.visible = (j * bk < end[:, None]) if causal else torch.ones(t, len(j), dtype=torch.bool)
        self.forced = self.visible & ((j >= (end[:, None] - BQ) // bk) | (j == 0)) if causal else ~self.visible
        self.alike = torch.nn.functional.normalize(self.qb, dim=-1).mean(1).square().sum(-1)

    def mass(self, name, cache):
        """Mass of all tiles by a predictor's name, without its @theta."""
        if name in cache:
            return cache[name]
        base, *mods = name.split("+")
        if mods and mods[-1] in ("v", "vc", "vo"):
            m = self.mass("+".join([base] + mods[:-1]), cache)
            m = m * value_weight(self, mods[-1], m)
        elif base == "means":
            m = means_mass(self)
        else:
            kind, parts = base.rstrip("0123456789"), int(base.lstrip("abcdefghijklmnopqrstuvwxyz"))
            if base not in cache.setdefault("pools", {}):
                if kind == "kw":
                    w, e = torch.linalg.eigh(self.k.T.cov(correction=0))
                    pools = clusters(self.qb, parts, e * w.clamp_min(0).sqrt())
                else:
                    pools = {"pool": neighbours, "km": clusters, "sam": samples}[kind](self.qb, parts)
                cache["pools"][base] = pools
            heat = math.prod(float(x[1:]) for x in mods if x[0] == "t")
            m = pooled_mass(self, cache["pools"][base], heat, "var" in mods, "max" if "max" in mods else "mean")
        cache[name] = m.masked_fill(~self.visible, 0)
        return cache[name]

    def tiles(self, t):
        """Exact shares of the visible key blocks in row of tiles t: masses (Tv, BQ), parts of outputs (Tv, BQ, D)."""
        keys = int(self.visible[t].sum()) * self.bk
        s = self.qb[t] @ self.k[:keys].T * self.scale
        if self.causal:
            s.masked_fill_(torch.arange(keys) > torch.arange(BQ)[:, None] + t * BQ + self.offset, -INF)
        p = torch.softmax(s, -1).view(BQ, -1, self.bk).transpose(0, 1)
        return p.sum(-1), p @ self.v[:keys].view(-1, self.bk, self.v.shape[1])


# ---------------------------------------------------------------- frontier

@numba.njit(fastmath=True, nogil=True, cache=True)
def prefix_errors(part, m, dense, order, first, err):
    """err[p, n] = sum |output of the first n tiles of order[p] - dense|, for n = first .. all but one."""
    tiles, rows, d = part.shape
    for p in range(order.shape[0]):
        for i in range(rows):
            acc = np.zeros(d, np.float32)
            den = np.float32(1e-30)
            for n in range(tiles - 1):
                j = order[p, n]
                den += m[j, i]
                x = part[j, i]
                if n + 1 < first:
                    acc += x
                    continue
                inv = np.float32(1) / den
                e = np.float32(0)
                for c in range(d):
                    acc[c] += x[c]
                    e += abs(acc[c] * inv - dense[i, c])
                err[p, n + 1] += e


def study(head, names):
    """{name: {rule: {best: [sparsity at each bound], row: [largest error of a row of tiles there],
    curve: [[L1, sparsity] for each parameter of GRID]}}}"""
    rows, width = head.visible.shape
    plain = list(dict.fromkeys(n.split("@")[0] for n in names))
    exact = torch.zeros(rows, width)
    shares = [head.tiles(t) for t in range(rows)]
    for t, (m, _) in enumerate(shares):
        exact[t, :len(m)] = m.mean(1)
    cache = {"true": exact}
    mass = torch.stack([head.mass(n, cache) for n in plain])             # (P, T, Tk)
    key = mass.masked_fill(head.forced, INF).masked_fill(~head.visible, -1)
    order = key.argsort(dim=-1, descending=True, stable=True)
    first = head.forced.sum(1).clamp_min(1).tolist()                     # tiles that are kept whatever the parameter
    start = torch.arange(width) < torch.tensor(first)[:, None]
    err = torch.zeros(len(plain), rows, width + 1)                       # by number of kept tiles
    total = 0.0
    for t, (m, part) in enumerate(shares):
        dense = part.sum(0)
        total += dense.abs().sum().item()
        prefix_errors(part.numpy(), m.numpy(), dense.numpy(), order[:, t].numpy(), first[t], err[:, t].numpy())
    scale = torch.stack([part.sum(0).abs().sum() for _, part in shares])
    out = {}
    for name in names:
        base, _, theta = name.partition("@")
        i = plain.index(base)
        w = mass[i].double()
        own = w.gather(1, order[i])
        whole = own.sum(-1, keepdim=True)
        ranked, rank = w.sort(dim=-1, descending=True, stable=True)
        before = torch.zeros_like(w).scatter(1, rank, ranked.cumsum(-1) - ranked)
        step = err[i].diff(dim=-1).masked_fill(start, 0)                 # change of error by taking tile n of a row
        for t in range(rows):
            step[t, first[t] - 1] = err[i, t, first[t]]
        begin = start | (head.alike <= float(theta))[:, None] if theta else start
        seen = head.visible.gather(1, order[i])
        out[name] = {}
        # a rule keeps the tiles whose price is below its parameter
        visible = seen.sum(-1, keepdim=True).double()
        prices = dict(cdf=before.gather(1, order[i]) / whole, fcdf=(own.cumsum(-1) - own) / whole, eps=-own,
                      floor=-own * visible.sqrt(), epsn=-own * visible)
        for rule, price in prices.items():
            price = price.masked_fill(begin, -INF)
            border, how = price[seen].sort(stable=True)
            left = step[seen].double()[how].cumsum(0) / total            # relative L1 with so many tiles
            least = int((begin & seen).sum())
            left[:least - 1] = INF
            left[-1] = 0
            count = [int((left <= b).nonzero()[0]) + 1 for b in BOUNDS]
            best = [1 - n / len(how) for n in count]
            worst = []
            for n in count:
                per_row = torch.bincount(torch.arange(rows)[:, None].expand(rows, width)[seen][how][:n], minlength=rows)
                worst.append((err[i].gather(1, per_row[:, None])[:, 0] / scale).max().item())
            mass_rule = rule in ("eps", "floor", "epsn")
            param = -GRID if mass_rule else 1 - GRID
            at = torch.searchsorted(border, param, right=mass_rule).clamp(least, len(how))
            curve = [[round(left[n - 1].item(), 5), round(1 - n / len(how), 5)] for n in at.tolist()]
            out[name][rule] = dict(best=best, row=worst, curve=curve)
    return out


def predictors(fine):
    names = ["means", "pool1", "pool2", "pool4", "sam2", "sam4", "sam8", "true"]
    if fine:
        return ["means", "pool2", "km2", "true"]
    names += [a + x for a in ("means", "pool2", "true") for x in ("@.3", "@.5")]
    names += [a + x for a in ("pool2", "true") for x in ("+v", "+vc", "+vo")] + ["pool4+vo", "kw4+vo"]
    names += ["pool1+var", "pool2+var", "kw2+var", "pool2+max", "pool2+t0.8", "pool2+t1.25"]
    names += ["km2", "km4", "kw2", "kw4"]
    return names


# ---------------------------------------------------------------- tables

def table(results, only, rules, base):
    names = [n for n in results[0]["found"] if (not only or n in only) and all(n in r["found"] for r in results)]
    ref = [r["found"][base]["cdf"]["best"] for r in results]

    def mean(x):
        return sum(x) / len(x)

    low = mean([x[1] for x in ref])
    high = mean([r["found"]["true"]["cdf"]["best"][1] for r in results]) if "true" in results[0]["found"] else low
    print("%d heads; sparsity at L1 %s; gap closed at .05; heads below %s by > .005 at each bound (worst)\n"
          % (len(results), " / ".join("%g" % b for b in BOUNDS), base))
    print("| predictor | rule | sparsity | gap closed | heads that lose | worst row |\n|---|---|---|---|---|---|")
    for n in names:
        for rule in rules:
            mine = [r["found"][n][rule]["best"] for r in results]
            row = mean([r["found"][n][rule]["row"][1] for r in results])
            sp = [mean([x[b] for x in mine]) for b in range(3)]
            gap = (sp[1] - low) / (high - low) if high > low else 0
            lose = []
            for b in range(3):
                d = [x[b] - y[b] for x, y in zip(mine, ref)]
                lose.append("%d (%.3f)" % (sum(x < -0.005 for x in d), min(0, min(d))))
            print("| %s | %s | %s | %.0f %% | %s | %.2f |"
                  % (n, rule, " / ".join("%.3f" % x for x in sp), 100 * gap, ", ".join(lose), row))


def transfer(results, only, rules, tuned_on):
    """Each head takes the sparsest parameter that holds the bound on the samples tuned_on; figures of the others."""
    heads = {}
    for r in results:
        layer, sample = r["file"].split("/")
        part = 0 if sample.split(".")[0] in tuned_on else 1
        heads.setdefault((layer, r["head"]), ([], []))[part].append(r["found"])
    heads = {x: y for x, y in heads.items() if y[0] and y[1]}
    print("tuned on %s, %d other heads; mean sparsity / mean L1 (largest), share of heads above the bound\n"
          % (", ".join(tuned_on), sum(len(x[1]) for x in heads.values())))
    print("| predictor | rule | L1 %s |\n|---|---|---|---|---|" % " | L1 ".join("%g" % b for b in BOUNDS))
    names = [n for n in results[0]["found"] if (not only or n in only) and all(n in r["found"] for r in results)]
    for n in names:
        for rule in rules:
            cells = []
            for bound in BOUNDS:
                got = []
                for tune, rest in heads.values():
                    curves = [f[n][rule]["curve"] for f in tune]
                    fit = [g for g in range(len(GRID)) if all(c[g][0] <= bound for c in curves)]
                    best = max(fit, key=lambda g: sum(c[g][1] for c in curves))
                    got += [f[n][rule]["curve"][best] for f in rest]
                l1 = [x[0] for x in got]
                kept, over = sum(x[1] for x in got) / len(got), sum(x > bound for x in l1) / len(l1)
                cells.append("%.3f / %.3f (%.3f), %.0f %%" % (kept, sum(l1) / len(l1), max(l1), 100 * over))
            print("| %s | %s | %s |" % (n, rule, " | ".join(cells)))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="*")
    ap.add_argument("--json", help="write results here")
    ap.add_argument("--table", action="store_true", help="the files are results: print their table")
    ap.add_argument("--only", default="", help="these predictors, in this order")
    ap.add_argument("--heads", default="", help="only these heads of each file")
    ap.add_argument("--rule", default="cdf,fcdf,eps,floor,epsn")
    ap.add_argument("--match", default="", help="with --table: only inputs whose name contains one of these")
    ap.add_argument("--base", default="means", help="with --table: the predictor to compare with")
    ap.add_argument("--transfer", default="", metavar="SAMPLES",
                    help="with --table: parameters of each head from these samples, figures of the others")
    ap.add_argument("--fine", action="store_true", help="key blocks of 32, kept tiles counted in 32 keys")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    only = [x for x in a.only.split(",") if x]
    if a.table:
        results = [r for f in a.files for r in json.load(open(f))]
        if a.match:
            results = [r for r in results if any(m in r["file"] for m in a.match.split(","))]
        if a.transfer:
            transfer(results, only, a.rule.split(","), a.transfer.split(","))
        else:
            table(results, only, a.rule.split(","), a.base)
        return
    torch.set_num_threads(a.threads)
    results, t0 = [], time.time()
    for path in a.files:
        with safe_open(path, "pt") as f:
            q, k, v = (f.get_tensor(x).float() for x in "qkv")
            meta = f.metadata()
        group = q.shape[0] // k.shape[0]
        for h in [int(x) for x in a.heads.split(",")] if a.heads else range(q.shape[0]):
            kv = h // group
            head = Head(q[h], k[kv], v[kv], float(meta["scale"]), meta["causal"] == "true", 32 if a.fine else 64)
            with torch.inference_mode():
                found = study(head, only or predictors(a.fine))
            results.append(dict(file="/".join(path.split("/")[-2:]), head=h, found=found))
            print("%s  head %d  %.0f s, cpu %.0f s" % (path, h, time.time() - t0, time.process_time()), file=sys.stderr)
        if a.json:
            with open(a.json, "w") as f:
                json.dump(results, f)
    if not a.json:
        table(results, only, a.rule.split(","), a.base)


if __name__ == "__main__":
    main()

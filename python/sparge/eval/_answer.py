"""time per token of an answer against depth: dense and sparse, with transformers' caches and with ours

A text of our own is read once per depth, sparsely, and copied into each kind of cache. Then tokens are written greedily, one by
one; the first four are not timed (the second step packs the keys), of the others the median counts. The last column says how
many of the tokens are, from the first on, those of dense attention in a dynamic cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from ._common import Failed, add_model_argument, attend_by, attention, load_model, numbers, progress, said, say, set_threads, table
from ._reading import compose

_CACHES = ("dynamic", "static", "sparge")
_UNTIMED = 4
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--depths", default="512,4096,8000", help="tokens before the answer; default 512,4096,8000")
    parser.add_argument("--tokens", type=int, default=24, help=f"of the answer, more than {_UNTIMED}; default 24")
    parser.add_argument("--dtype", choices=tuple(_TYPES), default="float32", help="of model and cache")


def _make_cache(model: Any, kind: str, tokens: int) -> Any:
    import transformers

    from ..integrations.transformers import Cache

    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)
    return transformers.DynamicCache(config=model.config) if kind == "dynamic" else Cache(model.config)


def _copied(read: Any, model: Any, kind: str, tokens: int) -> Any:
    cache = _make_cache(model, kind, tokens)
    for i, layer in enumerate(read.layers):
        cache.update(layer.keys, layer.values, i)
    return cache


@torch.inference_mode()
def write(model: Any, cache: Any, token: int, count: int) -> tuple[list[int], list[float]]:
    """The tokens after this one, and the seconds of each."""
    tokens, seconds = [], []
    for _ in range(count):
        begin = time.perf_counter()
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        token = int(output.logits[0, -1].argmax())
        seconds.append(time.perf_counter() - begin)
        tokens.append(token)
    return tokens, seconds


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, depth: int, count: int) -> dict[str, dict[str, dict[str, float]]]:
    """By attention and cache."""
    ids = torch.tensor([compose(tokenizer, depth, 0, depth, []).ids])
    read = _make_cache(model, "sparge", depth)
    attend_by(model, "sparse")
    first = int(model(ids, past_key_values=read, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    figures: dict[str, dict[str, dict[str, float]]] = {"dense": {}, "sparse": {}}
    expected: list[int] | None = None
    for attends, by_cache in figures.items():
        attend_by(model, attends)
        for kind in _CACHES:
            cache = _copied(read, model, kind, depth + count)
            tokens, seconds = write(model, cache, first, count)
            expected = expected or tokens
            same = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), count)
            by_cache[kind] = {"token_ms": 1e3 * statistics.median(seconds[_UNTIMED:]), "same_tokens": same}
            say(f"depth {depth}, {attends}, {kind} cache: {by_cache[kind]['token_ms']:.1f} ms per token")
    return figures


def run(options: argparse.Namespace) -> dict[str, Any]:
    depths = numbers("--depths", options.depths, int, 1, 2**20)
    if options.tokens <= _UNTIMED:
        raise Failed(f"--tokens {options.tokens}: the first {_UNTIMED} are not timed")
    set_threads(options)
    model, tokenizer = load_model(options.model)
    model.to(_TYPES[options.dtype])
    with attention(model, "sparse", options):
        found = {depth: measure(model, tokenizer, depth, options.tokens) for depth in progress(depths, "depths")}
    rows = [("ms per token (same tokens)", *(f"depth {depth}" for depth in depths))]
    for attends in ("dense", "sparse"):
        for kind in _CACHES:
            of = [found[depth][attends][kind] for depth in depths]
            rows.append((f"{attends}, {kind} cache", *(f"{f['token_ms']:.1f} ({f['same_tokens']:.0f})" for f in of)))
    say(table(rows))
    say(f"{options.tokens} tokens, {options.dtype}, {torch.get_num_threads()} threads")
    return {"verb": "answer", "model": options.model, "dtype": options.dtype, "tokens": options.tokens, **said(options),
            "depths": found}  # fmt: skip

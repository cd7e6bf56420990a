"""time to read a prompt: whole model, and attention alone

Dense (sdpa) and sparse take turns in one process; the shortest time of the rounds counts. The first sparse round also
calibrates, as it would for a user's first prompt: it is reported by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any, Callable, Iterator

import torch

from ._common import (
    Failed, add_model_argument, attend_by, attention, load_model, progress, said, say, set_threads, sparsity, table, token_ids,
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt; default 8192")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind; default 3")


@contextlib.contextmanager
def _stopwatch(kind: str) -> Iterator[list[float]]:
    """Seconds spent in the attention function of this kind, added up in a list of one number."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "sdpa" if kind == "dense" else "sparge"
    original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
    spent = [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        spent[0] += time.perf_counter() - begin
        return result

    AttentionInterface.register(name, timed)
    try:
        yield spent
    finally:
        AttentionInterface.register(name, original)


@torch.inference_mode()
def time_once(model: Any, ids: torch.Tensor, kind: str) -> tuple[float, float]:
    """(whole forward pass, attention) in seconds."""
    with _stopwatch(kind) as spent:
        begin = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin, spent[0]


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 1 or options.length < 1:
        raise Failed(f"--rounds {options.rounds} or --length {options.length} is not positive")
    set_threads(options)
    model, tokenizer = load_model(options.model)
    ids = token_ids(tokenizer, options.text, options.length)[0]
    times: dict[str, list[tuple[float, float]]] = {"dense": [], "sparse": []}
    with attention(model, "sparse", options):  # one configuration for all rounds
        for _ in progress(range(options.rounds), "rounds"):
            for kind in times:
                attend_by(model, kind)
                times[kind].append(time_once(model, ids, kind))
    best = {kind: (min(t[0] for t in all), min(t[1] for t in all)) for kind, all in times.items()}
    best["sparse, first prompt"] = times["sparse"][0]
    rows: list[tuple[Any, ...]] = [("attention", "prefill s", "faster", "attention s", "faster")]
    for kind, (whole, part) in best.items():
        rows.append((kind, f"{whole:.2f}", f"{best['dense'][0] / whole:.2f}x", f"{part:.2f}", f"{best['dense'][1] / part:.2f}x"))
    say(table(rows))
    say(f"sparsity {sparsity(model):.1%}, {options.length} tokens, {torch.get_num_threads()} threads")
    seconds = {kind.replace(", ", "_").replace(" ", "_"): {"prefill_s": b[0], "attention_s": b[1]} for kind, b in best.items()}
    return {"verb": "prefill", "model": options.model, "length": options.length, **said(options),
            "rounds": options.rounds, "sparsity": sparsity(model), **seconds}  # fmt: skip

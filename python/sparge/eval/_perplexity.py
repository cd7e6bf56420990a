"""perplexity of a language model on a text file

Every token is predicted from all tokens before it in its window, in one forward pass; exp of the mean negative log
likelihood. Beside it the Kullback-Leibler divergence of the predictions from the dense ones, in nats per token: the
perplexity of one text may rise or fall by chance, a divergence is 0 only if nothing has changed.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from .._harm import divergence, hidden_states
from ._common import Failed, add_model_argument, attention, load_model, progress, said, say, set_threads, sparsity, table, token_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8")
    parser.add_argument("--length", type=int, default=8192, help="tokens per window; default 8192")
    parser.add_argument("--windows", type=int, default=1, help="how many windows of the text; default 1")


@torch.inference_mode()
def negative_log_likelihood(model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> float:
    """Sum over all tokens but the first. Logits are made for a few hundred tokens at a time: all of them together would
    be gigabytes."""
    hidden = hidden[0]
    head = model.get_output_embeddings()
    total = 0.0
    for begin in range(0, ids.shape[1] - 1, 512):
        end = min(begin + 512, ids.shape[1] - 1)
        logits = head(hidden[begin:end]).float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, begin + 1 : end + 1], reduction="sum").item()
    return total


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.length < 2 or options.windows < 1:
        raise Failed(f"--length {options.length} or --windows {options.windows} is too small")
    set_threads(options)
    model, tokenizer = load_model(options.model)
    windows = token_ids(tokenizer, options.text, options.length, options.windows)
    figures: dict[str, Any] = {"verb": "perplexity", "model": options.model, "length": options.length,
                               "windows": len(windows), **said(options)}  # fmt: skip
    states = {}
    for kind in ("dense", "sparse"):
        with attention(model, kind, options), torch.inference_mode():
            states[kind] = [hidden_states(model, ids) for ids in progress(windows, kind)]
        losses = [negative_log_likelihood(model, ids, hidden) for ids, hidden in zip(windows, states[kind])]
        figures[kind] = math.exp(sum(losses) / (len(windows) * (options.length - 1)))
    figures["change"] = figures["sparse"] / figures["dense"] - 1
    with torch.inference_mode():
        all_tokens = torch.ones(options.length, dtype=torch.bool)
        parts = [divergence(model, *pair, all_tokens) for pair in zip(states["dense"], states["sparse"])]
    figures["divergence"] = sum(parts) / len(parts)
    figures["sparsity"] = sparsity(model)
    rows = [("attention", "perplexity", "change", "divergence", "sparsity"), ("dense", f"{figures['dense']:.4f}", "", "", ""),
            ("sparse", f"{figures['sparse']:.4f}", f"{figures['change']:+.2%}", f"{figures['divergence']:.5f}",
             f"{figures['sparsity']:.1%}")]  # fmt: skip
    say(table(rows))
    return figures

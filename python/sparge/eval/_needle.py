"""needle in a haystack: one sentence hidden in a long text, over depth and length

The text is our own (sentences about nothing in particular); the needle is a number that the model is asked for at the
end. A cell counts the needles that the model repeats in its greedy answer, and has the probability it gave to the right one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
from dataclasses import dataclass
from typing import Any

import torch

from ._common import Failed, add_model_argument, attention, load_model, progress, said, say, set_threads, sparsity, table
from ._haystack import sentences

_NEEDLE = "The secret number of the blue house is {number}. Remember it: the secret number of the blue house is {number}."
_QUESTION = "What is the secret number of the blue house?"
_ANSWER = "The secret number of the blue house is"


@dataclass(frozen=True)
class Cell:
    length: int
    depth: float
    number: str
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="tokens; default 1024,2048,4096,8192")
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="0 = at the beginning; default 0,0.25,0.5,0.75,1")
    parser.add_argument("--needles", type=int, default=1, help="per cell, each in another text; default 1")
    parser.add_argument("--png", metavar="FILE", help="heat maps of both, side by side (needs matplotlib)")


def _numbers(name: str, text: str, kind: type, low: float, high: float) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise Failed(f"{name} {text}: is no list of numbers") from None
    if not values or any(not low <= value <= high for value in values):
        raise Failed(f"{name} {text}: is outside {low:g}..{high:g}")
    return values


def prompt_ids(tokenizer: Any, cell: Cell) -> torch.Tensor:
    """(1, length): the haystack with the needle, the question, and the beginning of the answer, as a chat if the model
    has chats."""
    needle = " " + _NEEDLE.format(number=cell.number)
    if getattr(tokenizer, "chat_template", None):
        frame = tokenizer.apply_chat_template(
            [{"role": "user", "content": "@@TEXT@@\n\n" + _QUESTION}], tokenize=False, add_generation_prompt=True
        )
    else:
        frame = "@@TEXT@@\n\n" + _QUESTION + "\n"
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (frame + _ANSWER).split("@@TEXT@@"))
    hidden = tokenizer(needle, add_special_tokens=False).input_ids
    room = cell.length - len(before) - len(after) - len(hidden)
    if room < 0:
        raise Failed(f"--lengths {cell.length}: the question alone has {cell.length - room} tokens")
    hay: list[list[int]] = []
    have = 0
    for sentence in sentences(cell.seed):
        ids = tokenizer(" " + sentence, add_special_tokens=False).input_ids
        if have + len(ids) > room:
            break
        hay.append(ids)
        have += len(ids)
    hay.insert(round(cell.depth * len(hay)), hidden)
    return torch.tensor([before + [token for ids in hay for token in ids] + after])


@torch.inference_mode()
def ask(model: Any, tokenizer: Any, ids: torch.Tensor, number: str) -> tuple[bool, float]:
    """Whether the greedy answer begins with the number, and the probability of the number as a whole."""
    wanted = tokenizer(" " + number, add_special_tokens=False).input_ids
    output = model(ids, use_cache=True, logits_to_keep=1)
    cache, probability, right = output.past_key_values, 1.0, True
    for i, token in enumerate(wanted):
        chances = torch.softmax(output.logits[0, -1].float(), -1)
        probability *= chances[token].item()
        right = right and int(chances.argmax()) == token
        if i + 1 < len(wanted):
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    return right, probability


def _check_picture(path: str) -> None:
    """Before minutes of work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Failed("--png: matplotlib is missing: pip install matplotlib")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        raise Failed(f"--png {path}: cannot be written")


def _draw(path: str, kinds: dict[str, list[list[float]]], lengths: list[int], depths: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(kinds), figsize=(1.6 + 3.2 * len(kinds), 3.4), sharey=True, layout="constrained")
    for panel, (kind, rows) in zip(panels, kinds.items()):
        image = panel.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_title(kind)
        panel.set_xlabel("tokens")
        panel.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        panel.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black", fontsize=8)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=panels, label="probability of the right number")
    figure.savefig(path, dpi=120)


def run(options: argparse.Namespace) -> dict[str, Any]:
    lengths = _numbers("--lengths", options.lengths, int, 1, 2**20)
    depths = _numbers("--depths", options.depths, float, 0, 1)
    if options.needles < 1:
        raise Failed(f"--needles {options.needles} is not positive")
    if options.png:
        _check_picture(options.png)
    set_threads(options)
    model, tokenizer = load_model(options.model)
    digits = random.Random(0)
    cells = [
        Cell(length, depth, str(digits.randrange(10000, 100000)), seed)
        for length in lengths for depth in depths for seed in range(options.needles)
    ]  # fmt: skip
    answers: dict[str, list[tuple[bool, float]]] = {}
    for kind in ("dense", "sparse"):
        with attention(model, kind, options):
            answers[kind] = [ask(model, tokenizer, prompt_ids(tokenizer, c), c.number) for c in progress(cells, kind)]
    mean = {kind: _grid(cells, [p for _, p in all], lengths, depths) for kind, all in answers.items()}
    found = {kind: _grid(cells, [float(r) for r, _ in all], lengths, depths) for kind, all in answers.items()}
    rows = [("found (probability)", *(f"{kind} {n}" for kind in answers for n in lengths))]
    for y, depth in enumerate(depths):
        cellsof = (f"{found[k][y][x]:.2f} ({mean[k][y][x]:.2f})" for k in answers for x in range(len(lengths)))
        rows.append((f"depth {depth:.0%}", *cellsof))
    say(table(rows))
    say(f"sparsity {sparsity(model):.1%}")
    if options.png:
        _draw(options.png, mean, lengths, depths)
    return {"verb": "needle", "model": options.model, "lengths": lengths, "depths": depths, "needles": options.needles,
            **said(options), "sparsity": sparsity(model), "found": found, "probability": mean}  # fmt: skip


def _grid(cells: list[Cell], values: list[float], lengths: list[int], depths: list[float]) -> list[list[float]]:
    """Means per (depth, length)."""
    def mean(length: int, depth: float) -> float:
        here = [v for c, v in zip(cells, values) if (c.length, c.depth) == (length, depth)]
        return sum(here) / len(here)

    return [[mean(length, depth) for length in lengths] for depth in depths]

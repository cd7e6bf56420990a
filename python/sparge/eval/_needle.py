"""needles in a haystack: numbers hidden in a long text, over depth and length, read and answered densely and sparsely

The text is our own (sentences about nothing in particular), with the number of a house of another colour at every depth. It is
read once; then the model is asked for each number, from the cache. A cell counts the numbers that the greedy answer begins
with, and has the probability of the right one. "sparse prompt" is asked densely, "sparse" with our decoding. A question is
read from the cache, where the last queries of a prompt would see everything, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
from typing import Any, Sequence

import torch

from ._common import Failed, add_model_argument, load_model, numbers, said, say, set_threads, sparsity, table
from ._reading import KINDS, ROOM, Prompt, Question, ask_all, compose, frame, ids_of, time_table

_HOUSES = ("blue", "red", "green", "yellow", "white", "black", "brown", "grey", "pink", "orange", "purple", "golden")
_NEEDLE = "The secret number of the {house} house is {number}. Remember it: the secret number of the {house} house is {number}."
_QUESTION = "What is the secret number of the {house} house?"
_ANSWER = "The secret number of the {house} house is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="tokens; default 1024,2048,4096,8192")
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="0 = at the beginning; default 0,0.25,0.5,0.75,1")
    parser.add_argument("--needles", type=int, default=1, help="per cell, each in another text; default 1")
    parser.add_argument("--png", metavar="FILE", help="heat maps, side by side (needs matplotlib)")


def make_text(tokenizer: Any, length: int, depths: Sequence[float], seed: int) -> tuple[Prompt, list[Question]]:
    """A text with a needle at each depth, and the question for each."""
    choose = random.Random(seed)
    _, ask, reply = frame(tokenizer)
    houses = choose.sample(_HOUSES, len(depths))
    wanted = [str(choose.randrange(10000, 100000)) for _ in depths]
    needles = [_NEEDLE.format(house=house, number=number) for house, number in zip(houses, wanted)]
    questions = [
        Question(ids_of(tokenizer, ask + _QUESTION.format(house=house) + reply + _ANSWER.format(house=house)),
                 ids_of(tokenizer, " " + number))
        for house, number in zip(houses, wanted)
    ]  # fmt: skip
    return compose(tokenizer, length, ROOM, seed, list(zip(depths, needles))), questions


def judge(logits: torch.Tensor, answer: list[int]) -> tuple[bool, float]:
    """Whether the greedy answer begins with the right one, and the probability of that as a whole."""
    chances = torch.softmax(logits, -1)
    right = chances.argmax(-1).tolist() == answer
    return right, chances[torch.arange(len(answer)), answer].prod().item()


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
    lengths = numbers("--lengths", options.lengths, int, 1, 2**20)
    depths = numbers("--depths", options.depths, float, 0, 1)
    if len(depths) > len(_HOUSES):
        raise Failed(f"--depths {options.depths}: are more than {len(_HOUSES)}")
    if options.needles < 1:
        raise Failed(f"--needles {options.needles} is not positive")
    if options.png:
        _check_picture(options.png)
    set_threads(options)
    model, tokenizer = load_model(options.model)
    # Texts of one length differ, and so do the numbers of two lengths.
    texts = [make_text(tokenizer, n, depths, n * options.needles + i) for n in lengths for i in range(options.needles)]
    logits, spent = ask_all(model, options, texts)
    found: dict[str, list[list[float]]] = {}
    mean: dict[str, list[list[float]]] = {}
    for kind in KINDS:
        judged = [[judge(l, q.answer) for l, q in zip(of_text, text[1])] for of_text, text in zip(logits[kind], texts)]
        found[kind] = _grid([[float(r) for r, _ in of_text] for of_text in judged], len(lengths))
        mean[kind] = _grid([[p for _, p in of_text] for of_text in judged], len(lengths))
    rows = [("found (probability)", *(f"{kind} {n}" for kind in KINDS for n in lengths))]
    for y, depth in enumerate(depths):
        cells = (f"{found[k][y][x]:.2f} ({mean[k][y][x]:.2f})" for k in KINDS for x in range(len(lengths)))
        rows.append((f"depth {depth:.0%}", *cells))
    say(table(rows))
    say(time_table(spent))
    say(f"sparsity {sparsity(model):.1%}")
    if options.png:
        _draw(options.png, mean, lengths, depths)
    times = {kind: {n: times.figures() for n, times in by_length.items()} for kind, by_length in spent.items()}
    return {"verb": "needle", "model": options.model, "lengths": lengths, "depths": depths, "needles": options.needles,
            **said(options), "sparsity": sparsity(model), "found": found, "probability": mean, "times": times}  # fmt: skip


def _grid(texts: list[list[float]], lengths: int) -> list[list[float]]:
    """Means per (depth, length), of texts in the order of their lengths."""
    of_length = len(texts) // lengths
    columns = [texts[i * of_length : (i + 1) * of_length] for i in range(lengths)]
    return [[sum(text[y] for text in column) / of_length for column in columns] for y in range(len(texts[0]))]

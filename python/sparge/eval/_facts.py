"""facts spread over a long text, asked for one by one, several at once, and in two steps; read and answered densely and sparsely

The text is our own (sentences about nothing in particular). Spread over it are eight facts of one kind ("Anna keeps a fox."),
and eight that lead to them ("The neighbour of Paul is Anna."). `one` asks what somebody keeps; `three` asks for three of them in
one answer; `two steps` asks what somebody's neighbour keeps. The model chooses among the eight: by chance 12.5 % are right.
"sparse prompt" is asked densely, "sparse" with our decoding. Small models fail at the later ones however they attend: then
the last column tells, how often the choice is that of dense attention.
"""

from __future__ import annotations

import argparse
import random
from typing import Any, Iterable, Sequence

import torch

from ._common import Failed, add_model_argument, load_model, numbers, said, say, set_threads, sparsity, table
from ._reading import KINDS, Prompt, Question, ask_all, compose, frame, ids_of, time_table

_KEEPERS = ("Anna", "Peter", "Maria", "John", "Laura", "David", "Susan", "Mark")
_OTHERS = ("Paul", "Helen", "George", "Alice", "Simon", "Emma", "Robert", "Julia")
_PETS = ("fox", "horse", "parrot", "rabbit", "goat", "snake", "duck", "pig", "cat", "dog", "lion", "bear", "sheep", "turtle")
_FACT = "{who} keeps a {pet}. Everybody knows that {who} keeps a {pet}."
_LINK = "The neighbour of {who} is {keeper}."
_TASKS = ("one", "three", "two steps")
_RESERVE = 96  # tokens for question and answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--lengths", default="2048,8192", help="tokens; default 2048,8192")
    parser.add_argument("--texts", type=int, default=2, help="per length, each with other facts; default 2")


def _pets(tokenizer: Any) -> list[tuple[str, int]]:
    """Words that can be told apart by their first token, with it."""
    found: dict[int, str] = {}
    for pet in _PETS:
        found.setdefault(ids_of(tokenizer, " " + pet)[0], pet)
    if len(found) < len(_KEEPERS):
        raise Failed(f"--model: its tokens tell only {len(found)} of {len(_PETS)} words apart; {len(_KEEPERS)} are needed")
    return [(pet, token) for token, pet in found.items()][: len(_KEEPERS)]


class Facts:
    """A text, its questions, and which tokens are the choice."""

    def __init__(self, tokenizer: Any, length: int, seed: int) -> None:
        choose = random.Random(seed)
        pets = _pets(tokenizer)
        self.choice = [token for _, token in pets]
        choose.shuffle(pets)
        self._tokenizer, self._kept = tokenizer, dict(zip(_KEEPERS, pets))
        neighbours = dict(zip(_OTHERS, choose.sample(_KEEPERS, len(_KEEPERS))))
        sentences = [_FACT.format(who=who, pet=pet) for who, (pet, _) in self._kept.items()]
        sentences += [_LINK.format(who=who, keeper=keeper) for who, keeper in neighbours.items()]
        choose.shuffle(sentences)
        places = [(i + 0.5) / len(sentences) for i in range(len(sentences))]
        self.prompt: Prompt = compose(tokenizer, length, _RESERVE, seed, list(zip(places, sentences)))
        self.questions: list[tuple[str, Question]] = []
        self._places: list[list[int]] = []  # of the animals in the answers
        for who in _KEEPERS:
            self._add("one", f"What animal does {who} keep?", [(f"{who} keeps a", who)])
        for i in range(0, len(_KEEPERS), 2):
            three = [_KEEPERS[(i + step) % len(_KEEPERS)] for step in (0, 3, 5)]
            steps = [(f"{three[0]} keeps a", three[0]), (f", {three[1]} keeps a", three[1]), (f" and {three[2]} keeps a", three[2])]
            self._add("three", f"What animals do {three[0]}, {three[1]} and {three[2]} keep?", steps)
        for who, keeper in neighbours.items():
            self._add("two steps", f"What animal does the neighbour of {who} keep?", [(f"The neighbour of {who} keeps a", keeper)])

    def _add(self, task: str, asked: str, steps: Sequence[tuple[str, str]]) -> None:
        """steps: what the answer says before each animal, and whose it is."""
        _, ask, reply = frame(self._tokenizer)
        question = ids_of(self._tokenizer, ask + asked + reply + steps[0][0])
        answer: list[int] = []
        places = []
        for i, (said_before, who) in enumerate(steps):
            if i:
                answer += ids_of(self._tokenizer, said_before)
            places.append(len(answer))
            answer += ids_of(self._tokenizer, " " + self._kept[who][0])
        self.questions.append((task, Question(question, answer)))
        self._places.append(places)

    def choices(self, logits: torch.Tensor, which: int) -> Iterable[tuple[int, int, float]]:
        """(right, chosen, probability of the right one among all) for each animal of the answer to a question."""
        for place in self._places[which]:
            chances = torch.softmax(logits[place, self.choice], -1)
            right = self.choice.index(self.questions[which][1].answer[place])
            yield right, int(chances.argmax()), chances[right].item()


def _scores(
    texts: Sequence[Facts], logits: dict[str, list[list[torch.Tensor]]], kind: str, task: str, length: int
) -> dict[str, float]:
    right = same = total = 0
    chance = 0.0
    for i, text in enumerate(texts):
        if text.prompt.length != length:
            continue
        for j, (of_task, _) in enumerate(text.questions):
            if of_task != task:
                continue
            pairs = zip(text.choices(logits[kind][i][j], j), text.choices(logits["dense"][i][j], j))
            for (wanted, chosen, p), (_, dense, _) in pairs:
                total += 1
                right += chosen == wanted
                same += chosen == dense
                chance += p
    return {"right": right / total, "probability": chance / total, "as_dense": same / total, "asked": total}


def run(options: argparse.Namespace) -> dict[str, Any]:
    lengths = numbers("--lengths", options.lengths, int, 1, 2**20)
    if options.texts < 1:
        raise Failed(f"--texts {options.texts} is not positive")
    set_threads(options)
    model, tokenizer = load_model(options.model)
    texts = [Facts(tokenizer, n, n * options.texts + i) for n in lengths for i in range(options.texts)]
    logits, spent = ask_all(model, options, [(text.prompt, [question for _, question in text.questions]) for text in texts])
    scores = {
        n: {task: {kind: _scores(texts, logits, kind, task, n) for kind in KINDS} for task in _TASKS} for n in lengths
    }
    rows: list[tuple[str, ...]] = [("right (probability), as dense", "asked", *KINDS)]
    for n in lengths:
        for task in _TASKS:
            found = scores[n][task]
            cells = (f"{s['right']:.0%} ({s['probability']:.2f}), {s['as_dense']:.0%}" for s in found.values())
            rows.append((f"{task}, {n} tokens", str(found["dense"]["asked"]), *cells))
    say(table(rows))
    say(time_table(spent))
    say(f"sparsity {sparsity(model):.1%}")
    times = {kind: {n: times.figures() for n, times in by_length.items()} for kind, by_length in spent.items()}
    return {"verb": "facts", "model": options.model, "lengths": lengths, "texts": options.texts, **said(options),
            "sparsity": sparsity(model), "scores": scores, "times": times}  # fmt: skip

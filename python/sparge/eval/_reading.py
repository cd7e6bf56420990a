"""A text that a model has read once, with questions to it from the cache: dense and sparse, prompt and answer."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from ._common import Failed, attend_by, attention, progress, say, table
from ._haystack import sentences

# Who read the text, and who answers from the cache that this left.
KINDS = {"dense": ("dense", "dense"), "sparse prompt": ("sparse", "dense"), "sparse": ("sparse", "sparse")}


@dataclass
class Spent:
    """Seconds for texts, and for tokens that came one by one."""

    read_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    def figures(self) -> dict[str, float]:
        return {"prompt_s": self.read_s, "token_ms": 1e3 * self.step_s / max(self.steps, 1)}


@dataclass(frozen=True)
class Question:
    """Ids of what is asked from the cache, and of the answer that would be right."""

    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Prompt:
    """Token ids of the whole text up to the question, which comes from the cache."""

    length: int  # that was asked for
    ids: list[int]


def frame(tokenizer: Any) -> tuple[list[int], str, str]:
    """Of a chat if the model has chats: ids before the text, and strings before and after the question."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": "@@TEXT@@\n\n@@ASK@@"}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        whole = "@@TEXT@@\n\n@@ASK@@\n"
    before, rest = whole.split("@@TEXT@@")
    ask, answer = rest.split("@@ASK@@")
    return ids_of(tokenizer, before), ask, answer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def compose(tokenizer: Any, length: int, reserve: int, seed: int, hidden: Sequence[tuple[float, str]]) -> Prompt:
    """Sentences about nothing, with those of `hidden` among them, each at its place (0 = at the beginning, 1 = at the end).
    As many as leave `reserve` of the tokens for question and answer."""
    before, _, _ = frame(tokenizer)
    own = [(place, ids_of(tokenizer, " " + text)) for place, text in hidden]
    room = length - reserve - len(before) - sum(len(ids) for _, ids in own)
    if room < 0:
        raise Failed(f"--lengths {length}: what is asked for has {length - room} tokens")
    hay: list[list[int]] = []
    have = 0
    for sentence in sentences(seed):
        ids = ids_of(tokenizer, " " + sentence)
        if have + len(ids) > room:
            break
        hay.append(ids)
        have += len(ids)
    # From the last to the first, so that no place moves another.
    for place, ids in sorted(own, key=lambda entry: entry[0], reverse=True):
        hay.insert(round(place * len(hay)), ids)
    return Prompt(length, before + [token for ids in hay for token in ids])


ROOM = 64  # tokens for a question and its answer


class Reading:
    """A model with a text in its cache. Every question sees the text, and none of the questions before it."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: Prompt) -> None:
        from ..integrations.transformers import Cache

        self._model = model
        self._cache = Cache(model.config, tokens=prompt.length + ROOM)
        begin = time.perf_counter()
        model(torch.tensor([prompt.ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.seconds = time.perf_counter() - begin

    @torch.inference_mode()
    def ask(self, question: list[int], answer: list[int], spent: Spent) -> torch.Tensor:
        """Logits before each token of the answer, (answer, vocabulary). The question comes at once, the answer token by
        token: those that it should have."""
        logits = [self._read(question)]
        begin = time.perf_counter()
        logits += [self._read([token]) for token in answer[:-1]]
        spent.step_s += time.perf_counter() - begin
        spent.steps += len(answer) - 1
        self._cache.crop(-(len(question) + len(answer) - 1))
        return torch.stack(logits)

    def _read(self, ids: list[int]) -> torch.Tensor:
        output = self._model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        last: torch.Tensor = output.logits[0, -1].float()
        return last


def ask_all(
    model: Any, options: argparse.Namespace, texts: Sequence[tuple[Prompt, Sequence[Question]]]
) -> tuple[dict[str, list[list[torch.Tensor]]], dict[str, dict[int, Spent]]]:
    """For each of KINDS the logits of each text's questions, and what the texts of each length took. A text is read once
    densely and once sparsely; both kinds of answers come from what the sparse one left."""
    logits: dict[str, list[list[torch.Tensor]]] = {kind: [] for kind in KINDS}
    spent = {kind: {prompt.length: Spent() for prompt, _ in texts} for kind in KINDS}
    for reader in ("dense", "sparse"):
        kinds = {kind: answers for kind, (reads, answers) in KINDS.items() if reads == reader}
        with attention(model, reader, options):
            for prompt, questions in progress(texts, reader):
                attend_by(model, reader)
                reading = Reading(model, prompt)
                say(f"{reader}: {len(prompt.ids)} tokens in {reading.seconds:.1f} s, {len(questions)} questions")
                for kind, answers in kinds.items():
                    attend_by(model, answers)
                    times = spent[kind][prompt.length]
                    times.read_s += reading.seconds
                    logits[kind].append([reading.ask(q.question, q.answer, times) for q in questions])
    return logits, spent


def time_table(spent: dict[str, dict[int, Spent]]) -> str:
    lengths = list(next(iter(spent.values())))
    rows: list[tuple[str, ...]] = [("prompt s (ms per token of the answer)", *(str(n) for n in lengths))]
    for kind, times in spent.items():
        figures = [times[n].figures() for n in lengths]
        rows.append((kind, *(f"{f['prompt_s']:.2f} ({f['token_ms']:.1f})" for f in figures)))
    return table(rows)

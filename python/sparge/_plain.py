"""From a call of attention in a model to the problems that a capture can hold: causal or not, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterator, Sequence

if TYPE_CHECKING:
    import torch

_ROWS = 1024  # of a mask that are looked at together: a mask of many tokens is large
_BLOCKED = -1e4  # additive masks: this much and less is "may not attend", as no fp16 score is larger


class Inexpressible(Exception):
    """The reason why a call cannot be captured."""


@dataclass(frozen=True)
class Call:
    """What a model asked for, beside q, k and v."""

    mask: torch.Tensor | None
    causal: bool
    query_offset: int
    window: int
    softcap: float
    sinks: torch.Tensor | None
    grid: Sequence[int] | None


@dataclass(frozen=True)
class Part:
    """The tokens of a sequence that take part, and whether they attend causally: the last query sees all keys."""

    queries: slice
    keys: slice
    causal: bool


def plain(call: Call, item: int, queries: int, keys: int) -> Part:
    """What sequence `item` of the batch computes, less padding. Raises Inexpressible."""
    if call.softcap:
        raise Inexpressible(f"softcap {call.softcap:g}")
    if call.sinks is not None:
        raise Inexpressible("sink logits")
    if call.window and call.window < queries + call.query_offset:
        raise Inexpressible(f"a window of {call.window} tokens")
    mask = None if call.mask is None else _of_item(call.mask, item)
    if mask is None:
        part = _aligned(Part(slice(0, queries), slice(0, keys), call.causal), call.query_offset)
    elif mask.shape[-2] == 1:  # the same for all queries: padding
        part = _without_padding(_allowed(mask)[0], queries, keys, call)
    else:
        part = _of_matrix(mask, queries, keys, call)
    if call.grid is not None and (part.causal or (part.queries, part.keys) != (slice(0, queries), slice(0, keys))):
        raise Inexpressible("a grid of tokens under a mask")
    return part


def _of_item(mask: torch.Tensor, item: int) -> torch.Tensor:
    """(queries or 1, keys) of a mask that broadcasts to (batch, heads, queries, keys)."""
    import torch

    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask[item if mask.shape[0] > 1 else 0]
    for head in mask[1:]:
        if not torch.equal(head, mask[0]):
            raise Inexpressible("a mask that differs between heads")
    return mask[0]


def _allowed(rows: torch.Tensor) -> torch.Tensor:
    """Which keys the queries may see."""
    import torch

    if not rows.is_floating_point():
        return rows != 0
    allowed = rows == 0
    if not bool(torch.all(allowed | (rows <= _BLOCKED))):
        raise Inexpressible("a mask with values to add (a bias)")
    return allowed


def _span(allowed: torch.Tensor) -> slice:
    """The keys that a row of a mask lets through."""
    places = allowed.nonzero().flatten()
    if len(places) == 0:
        raise Inexpressible("a mask that hides everything")
    begin, end = int(places[0]), int(places[-1]) + 1
    if end - begin != len(places):
        raise Inexpressible("a mask with holes")
    return slice(begin, end)


def _cropped(span: slice, queries: int, keys: int) -> slice:
    """The queries that go with the keys `span`: those of padding attend to nothing that matters."""
    return span if queries == keys else slice(0, queries)


def _aligned(part: Part, query_offset: int) -> Part:
    """Without the keys that no query sees, so that the last query sees the last key."""
    if not part.causal:
        return part
    queries, keys = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
    seen = queries + query_offset
    if queries < 2 or not 0 < seen <= keys:
        raise Inexpressible(f"a causal offset of {query_offset} with {queries} queries and {keys} keys")
    return Part(part.queries, slice(part.keys.start, part.keys.start + seen), True)


def _without_padding(allowed: torch.Tensor, queries: int, keys: int, call: Call) -> Part:
    span = slice(0, keys) if len(allowed) == 1 and bool(allowed[0]) else _span(allowed)
    kept = _cropped(span, queries, keys)
    # Positions count from the first that is left.
    return _aligned(Part(kept, span, call.causal), call.query_offset + kept.start - span.start)


def _of_matrix(mask: torch.Tensor, queries: int, keys: int, call: Call) -> Part:
    """A mask that is written out is often one of the two that need not be."""
    last = next(_visible(mask, slice(queries - 1, queries), keys, call))[1][0]
    span = _span(last)
    kept = _cropped(span, queries, keys)
    full = causal = True
    offset = (span.stop - span.start) - (kept.stop - kept.start)
    for row, visible in _visible(mask, kept, keys, call):
        full = full and bool(visible[:, span].all())
        causal = causal and _is_causal(visible[:, span], row - kept.start + offset)
        outside = bool(visible[:, : span.start].any()) or bool(visible[:, span.stop :].any())
        if outside or not (full or causal):
            raise Inexpressible("a mask that is neither full nor causal")
    return Part(kept, span, not full)


def _visible(mask: torch.Tensor, rows: slice, keys: int, call: Call) -> Iterator[tuple[int, torch.Tensor]]:
    """Some rows at a time: the first one's number, and what they see under the mask and causality."""
    import torch

    for begin in range(rows.start, rows.stop, _ROWS):
        end = min(begin + _ROWS, rows.stop)
        visible = _allowed(mask[begin:end]).expand(end - begin, keys)
        if call.causal:
            visible = visible & torch.ones(end - begin, keys, dtype=torch.bool).tril_(begin + call.query_offset)
        yield begin, visible


def _is_causal(visible: torch.Tensor, offset: int) -> bool:
    """Whether row i sees keys j <= i + offset."""
    import torch

    return torch.equal(visible, torch.ones_like(visible).tril_(offset))

"""Keys and values on their way as the 8-bit integers that everybody computes with, and their scales: half of what fp16 takes.
Whoever owns them rounds them once, by the survey of all keys, so that they are the integers of one rank; what is small
beside them goes deflated. Heads of other precisions travel in their own type.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from .. import _arrays, _core
from ._call import Call, cut
from ._shards import Segment, count_tokens

Codes = dict[str, np.ndarray[Any, Any]]
_BLOCK = _core.BLOCK_K
_HEAD = 3  # int64 numbers before all else


class Ways:
    """How the keys and values of each kv head travel."""

    def __init__(self, call: Call, how: dict[str, Any]) -> None:
        precision = how.get("precision") or "int8"
        heads = call.q.shape[1]
        per_head = [precision] * heads if isinstance(precision, str) else list(precision)
        rounds = np.array([p == "int8" for p in per_head]).reshape(call.k.shape[1], -1)
        if not call.same_integers or min(call.q_tokens, call.k_tokens) <= _core.FEW_QUERIES:  # they take keys as they are
            rounds[:] = False
        self.all_coded = bool(rounds.all())
        self.coded: list[int] = np.flatnonzero(rounds.any(1)).tolist()
        self.plain: list[int] = np.flatnonzero(~rounds.all(1)).tolist()
        """A head may be in both, if its query heads differ."""

    def count(self, call: Call) -> dict[str, int]:
        own = str(call.k.dtype)[6:]
        return {"int8": len(self.coded), own: len(self.plain)}


def blocks_of(tokens: int) -> int:
    return -(-tokens // _BLOCK)


def row_of(dim: int) -> int:
    """Bytes of a row of integers: rotation fills the last four."""
    return -(-dim // 4) * 4


def _empty(shape: tuple[int, int, int], qk_dim: int, v_dim: int) -> Codes:
    """As sparge_key_codes has them; shape: batch, kv heads, tokens. Blocks that nobody fills need no second half."""
    of_blocks = (*shape[:2], blocks_of(shape[2]))
    return {
        "keys": np.empty((*shape, row_of(qk_dim)), np.int8), "key_scales": np.empty(shape, np.float32),
        "values": np.empty((*shape, v_dim), np.int8), "value_scales": np.empty((*of_blocks, v_dim), np.float32),
        "fine_values": np.empty((*shape, v_dim), np.int8), "fine": np.zeros(of_blocks, np.uint8),
        "not_finite": np.zeros(of_blocks, np.uint64),
    }  # fmt: skip


def leave(call: Call, survey: np.ndarray[Any, Any]) -> Codes:
    """Of all keys and values of this rank. Segments are whole blocks, so that their blocks are those of the whole."""
    batch, heads, tokens, dim = call.k.shape
    codes = _empty((batch, heads, tokens), dim, call.v.shape[3])
    if tokens == 0:
        return codes
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (call.k, call.v))
    views: Any = [_arrays.torch_view(name, t) for name, t in (("k", k), ("v", v))]
    options = {"select": "all", "precision": "int8", "threads": call.threads, "all_queries": call.k_tokens, "all_keys": call.k_tokens}
    _core.predict_part(views[0], views[0], views[1], options, {"key_survey": survey, "key_codes_out": codes})
    return codes


def cut_codes(codes: Codes, part: Segment) -> Codes:
    """Those of a segment."""
    first, blocks = part.at // _BLOCK, blocks_of(part.count)
    per_block = ("value_scales", "fine", "not_finite")
    return {
        name: np.ascontiguousarray(
            array[:, :, first : first + blocks] if name in per_block else array[:, :, part.at : part.at + part.count]
        )
        for name, array in codes.items()
    }


def _steps(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The largest integer of each channel in each block: so many steps is its largest value."""
    starts = np.arange(0, values.shape[2], _BLOCK)
    return np.maximum.reduceat(np.abs(values), starts, axis=2).astype(np.float32)


def _v_unit(survey: np.ndarray[Any, Any], shape: tuple[int, ...], heads: list[int]) -> np.ndarray[Any, Any]:
    """A power of two beside which values are numbers of their own type; any would do that both sides know."""
    largest = survey.reshape(shape[0], shape[1], -1)[:, heads, -1]
    return np.ldexp(np.float32(1), np.frexp(largest)[1] - 1)[:, :, None, None].astype(np.float32)


def _of_tops(tops: torch.Tensor, unit: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scales as packing makes them: the largest value of a channel over its steps."""
    return np.divide(tops.float().numpy() / unit, steps, out=np.zeros_like(steps), where=steps > 0)


Bytes = np.ndarray[Any, Any]


def _split(numbers: np.ndarray[Any, Any]) -> tuple[Bytes, Bytes]:
    """The lower bytes of numbers, and their upper ones, sign and most of the exponent, which are nearly all alike."""
    each = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.dtype.itemsize)
    return np.ascontiguousarray(each[:, :-1]).reshape(-1), each[:, -1]


def _join(lower: Bytes, upper: Bytes, dtype: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([lower.reshape(len(upper), -1), upper[:, None]], 1).reshape(-1).view(dtype)


def pack(call: Call, codes: Codes, ways: Ways, survey: np.ndarray[Any, Any]) -> torch.Tensor:
    """Bytes that travel, of the heads that travel so; nothing if there are none."""
    if not ways.coded or call.k.shape[2] == 0:
        return torch.empty(0, dtype=torch.uint8)
    c = {name: np.ascontiguousarray(array[:, ways.coded]) for name, array in codes.items()}
    of_keys, of_values = _split(c["key_scales"]), _split(_narrow_scales(call, c, ways, survey))
    notes = zlib.compress(b"".join(part.tobytes() for part in (of_keys[1], of_values[1], c["fine"], c["not_finite"])))
    fine = c["fine_values"][_needs_fine(c)]
    head = np.array([len(notes), of_values[0].size, fine.size], np.int64)
    parts = [head, c["keys"], c["values"], of_keys[0], of_values[0], fine, np.frombuffer(notes, np.uint8)]
    return torch.from_numpy(np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts]))


def _narrow_scales(call: Call, c: Codes, ways: Ways, survey: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The largest value of each channel as 16 bits in the type of the values, if the scales come back from them to the
    bit."""
    scales = c["value_scales"]
    if call.v.dtype == torch.float32:
        return scales
    steps, unit = _steps(c["values"]), _v_unit(survey, call.k.shape, ways.coded)
    tops = torch.from_numpy(scales.astype(np.float64) * steps * unit).to(call.v.dtype)
    return tops.view(torch.int16).numpy() if np.array_equal(_of_tops(tops, unit, steps), scales) else scales


def _needs_fine(c: Codes) -> np.ndarray[Any, Any]:
    """Per token, whether its block has a second half of bits."""
    return np.repeat(c["fine"] > 0, _BLOCK, axis=2)[:, :, : c["values"].shape[2]]


class _Reader:
    """Bytes in the order of `pack`."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def take(self, count: int, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
        found, self.data = self.data[:count], self.data[count:]
        return found.copy().view(dtype)


def unpack(call: Call, packed: torch.Tensor, ways: Ways, survey: np.ndarray[Any, Any], tokens: int) -> Codes:
    """What `pack` was given, of the heads that travelled."""
    batch, heads = call.k.shape[:2]
    codes = _empty((batch, heads, tokens), call.k.shape[3], call.v.shape[3])
    if not ways.coded or tokens == 0:
        return codes
    c = _empty((batch, len(ways.coded), tokens), call.k.shape[3], call.v.shape[3])
    read = _Reader(packed.numpy())
    size_of_notes, size_of_scales, size_of_fine = read.take(8 * _HEAD, np.int64).tolist()
    for name in ("keys", "values"):
        c[name] = read.take(c[name].size, np.int8).reshape(c[name].shape)
    of_keys, of_values = read.take(3 * c["key_scales"].size), read.take(size_of_scales)
    fine = read.take(size_of_fine, np.int8)
    notes = _Reader(np.frombuffer(zlib.decompress(read.take(size_of_notes).tobytes()), np.uint8))
    c["key_scales"] = _join(of_keys, notes.take(c["key_scales"].size), np.float32).reshape(c["key_scales"].shape)
    of_blocks = c["value_scales"].shape
    narrow = size_of_scales == c["value_scales"].size
    found = _join(of_values, notes.take(c["value_scales"].size), np.int16 if narrow else np.float32).reshape(of_blocks)
    if narrow:
        tops = torch.from_numpy(found).view(call.v.dtype)
        found = _of_tops(tops, _v_unit(survey, call.k.shape, ways.coded), _steps(c["values"]))
    c["value_scales"] = found
    c["fine"] = notes.take(c["fine"].size).reshape(c["fine"].shape)
    c["not_finite"] = notes.take(8 * c["fine"].size, np.uint64).reshape(c["fine"].shape)
    c["fine_values"][_needs_fine(c)] = fine.reshape(-1, call.v.shape[3])
    if len(ways.coded) == heads:
        return c
    for name, array in c.items():
        codes[name][:, ways.coded] = array
    return codes


class Part:
    """Keys and values of a rank, for whoever computes with them: tensors for the heads that travel as they are, codes
    for the others."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, codes: Codes | None) -> None:
        self.k, self.v, self.codes = k, v, codes

    def cut(self, part: Segment) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Of a segment: keys, values, and arrays for the library."""
        arrays = {} if self.codes is None else {"key_codes": cut_codes(self.codes, part)}
        return cut(self.k, part), cut(self.v, part), arrays


class Parcels:
    """The messages of a ring: what a rank sends of its own, and how it understands what comes."""

    def __init__(self, call: Call, how: dict[str, Any], survey: np.ndarray[Any, Any]) -> None:
        self.call, self.survey, self.ways = call, survey, Ways(call, how)
        codes = leave(call, survey) if self.ways.coded else None
        self.own = Part(call.k, call.v, codes)

    def first(self) -> list[torch.Tensor]:
        """Own keys and values, as they travel; all ranks learn how many bytes come from whom."""
        call, plain = self.call, self.ways.plain
        codes = self.own.codes
        packed = torch.empty(0, dtype=torch.uint8) if codes is None else pack(call, codes, self.ways, self.survey)
        size = torch.tensor([packed.numel()])
        sizes = call.links.all_gather(size, [1] * call.links.ranks, "sizes of messages") if self.ways.coded else [size] * call.links.ranks
        self._sizes = [int(of) for of in sizes]
        everything = len(plain) == call.k.shape[1]
        return [packed, *((t if everything else t[:, plain]).contiguous() for t in (call.k, call.v))]

    def room_for(self, owner: int) -> list[torch.Tensor]:
        call = self.call
        tokens = count_tokens(call.k_segments[owner])
        shapes = [(t.shape[0], len(self.ways.plain), tokens, t.shape[3]) for t in (call.k, call.v)]
        packed = torch.empty(self._sizes[owner], dtype=torch.uint8)
        return [packed, *(t.new_empty(shape) for t, shape in zip((call.k, call.v), shapes))]

    def understand(self, parcel: list[torch.Tensor], owner: int) -> Part:
        call, plain = self.call, self.ways.plain
        if owner == call.links.rank:
            return self.own
        tokens = count_tokens(call.k_segments[owner])
        codes = unpack(call, parcel[0], self.ways, self.survey, tokens) if self.ways.coded else None
        found = []
        for mine, came in zip((call.k, call.v), parcel[1:]):
            batch, heads, _, dim = mine.shape
            if len(plain) == heads:
                found.append(came)
            elif not plain:  # a shape, which is not read
                found.append(mine.new_zeros(dim).expand(batch, heads, tokens, dim))
            else:
                found.append(mine.new_empty((batch, heads, tokens, dim)))
                found[-1][:, plain] = came
        return Part(found[0], found[1], codes)

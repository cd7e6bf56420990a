"""Attention over several machines or processes (context parallelism), with the tiles of one. docs/distributed.md.

    import torch.distributed as dist
    import sparge.distributed as sd

    dist.init_process_group("gloo")
    q, k, v = (sd.shard(t, shard="zigzag") for t in (q, k, v))          # (batch, heads, tokens, dim): this rank's tokens
    out = sd.attention(q, k, v, shard="zigzag", causal=True)            # of this rank's queries, to all keys
    whole = sd.unshard(out, shard="zigzag")
"""

from __future__ import annotations

import json
import numbers
import time
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from .. import _attention, _core
from .._layers import Settings
from ._call import Asked, Call, Stats, Tiles, check_alike, check_tensor
from ._choose import Kept, standing
from ._links import Links, close, links_of
from ._schedules import SCHEDULE
from ._shards import Segment, Shard, check_shard, count_tokens, segments
from ._watch import RankError

__all__ = ["Layer", "RankError", "Stats", "Tiles", "attention", "close", "positions", "shard", "unshard"]

TIMEOUT_S = 60.0
LONGEST_S = 86400.0  # nobody waits for longer than a day
_TEXT_BYTES = 3000  # of a refusal in a message to all


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    schedule: str = "ring",
    shard: str = "contiguous",
    timeout: float = TIMEOUT_S,
    return_lse: bool = False,
    return_stats: bool = False,
    return_map: bool = False,
    **options: Any,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks; `options` are those of sparge.attention.

    q, k, v: this rank's tokens, as `shard` cuts them. All ranks of `group` (torch.distributed with gloo) call with the same
    arguments. schedule: "ring" (memory of a part; int8 heads send keys and values as 8-bit integers), "all_gather" (fewest
    steps; the bits of one rank), "ulysses" (heads are split; as many kv heads as ranks, or more). With `return_lse`,
    `return_stats` and `return_map` a tuple of what was asked for: the natural log-sum-exp, `Stats`, and the block map of
    this rank's queries.

    timeout: seconds after which a rank that gives no sign of life, or does not come, is a RankError on all others.
    """
    asked = Asked(schedule, shard, return_lse, return_stats, return_map, options)
    return _attend(q, k, v, group, timeout, asked, None)


def _attend(q: Any, k: Any, v: Any, group: Any, timeout: float, asked: Asked, kept: Kept | None) -> Any:
    began = time.perf_counter()
    links = _begun(group, timeout)
    try:
        call = _agreed(q, k, v, links, asked, kept)
        if asked.map:
            blocks = -(-call.q.shape[2] // _core.BLOCK_Q), -(-call.k_tokens // _core.BLOCK_K)
            call.map = torch.zeros((*call.q.shape[:2], *blocks), dtype=torch.uint8)
        out, lse = SCHEDULE[asked.schedule](call, kept)
        stats = _stats(call, began) if asked.stats else None
    except _Refused as refusal:
        links.end()
        raise refusal.error from None
    except BaseException as error:
        links.fail(error)
        raise
    links.end()
    return _returned(call, q, out, lse, stats)


class _Refused(Exception):
    """All ranks refuse the call alike, before anything is computed: the group goes on."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _begun(group: Any, timeout: float) -> Links:
    if not isinstance(timeout, numbers.Real) or not 0 < timeout <= LONGEST_S:
        raise ValueError(f"timeout={timeout!r} is no number of seconds above 0, and up to {LONGEST_S:g} (a day)")
    links = links_of(group, timeout)
    links.begin(timeout)
    return links


def _told(links: Links, what: str, own: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What all ranks ask, if they ask for the same call; `own` says it for this one, or refuses."""
    own_error: Exception | None = None
    try:
        header = own()
        header["alike"]["call"] = what
    except (ValueError, TypeError) as error:
        own_error = error
        header = {"refused": _cut(str(error))}
    headers = links.tell_all(header, "what is asked")
    if own_error is not None:
        raise _Refused(own_error)
    try:
        check_alike(headers)
    except ValueError as error:
        raise _Refused(error) from None
    return headers


def _cut(text: str) -> str:
    """As much of it as a message takes."""
    while len(json.dumps(text)) > _TEXT_BYTES:
        text = text[: len(text) * 3 // 4]
    return text


def _agreed(q: Any, k: Any, v: Any, links: Links, asked: Asked, kept: Kept | None) -> Call:
    made: list[Call] = []

    def own() -> dict[str, Any]:
        made.append(Call(q, k, v, links, asked))
        return {**made[0].header(), "choice": standing(made[0], kept)}

    headers = _told(links, "attention", own)
    (call,) = made
    try:
        call.agree(headers)
    except ValueError as error:
        raise _Refused(error) from None
    choices = {header["choice"] for header in headers}
    call.measures = choices != {headers[0]["choice"]} or "" in choices
    return call


def _stats(call: Call, began: float) -> Stats:
    links = call.links
    waited, sent = links.waited_s, dict(links.bytes_of)
    ranks = [Tiles(**of) for of in links.tell_all(vars(call.tiles), "statistics")]
    return Stats(call.tiles, ranks, sent, call.travelled, waited, time.perf_counter() - began, links.trace)


def _returned(call: Call, q: torch.Tensor, out: Any, lse: Any, stats: Stats | None) -> Any:
    tiles = None if call.map is None else call.map.bool()
    if q.dim() == 3:
        out, lse = out[0], lse[0]
        tiles = None if tiles is None else tiles[0]
    if call.options.get("layout") == "NHD":
        out = out.transpose(-2, -3)
    found = [out, *(value for value, asked in zip((lse, stats, tiles), call.asked.wanted) if asked)]
    return found[0] if len(found) == 1 else tuple(found)


# ------------------------------------------------------------------ tokens and ranks


def _rank_of(group: Any) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: torch.distributed has no process group; call torch.distributed.init_process_group first")
    return dist.get_rank(group), dist.get_world_size(group)


def _order(tokens: int, grid: Sequence[int] | None, text_tokens: int, text_after: bool) -> torch.Tensor | None:
    """Where the i-th token of the sequence that is cut stands in the caller's."""
    if grid is None:
        if text_tokens or text_after:
            raise ValueError(f"text_tokens={text_tokens}, text_after={text_after} have no effect without grid")
        return None
    curve = torch.from_numpy(_attention.token_order(grid))
    if tokens != len(curve) + text_tokens:
        raise ValueError(f"grid={tuple(grid)} and text_tokens={text_tokens} make {len(curve) + text_tokens} tokens, not {tokens}")
    if text_after:
        return torch.cat([curve, torch.arange(len(curve), tokens)])
    return torch.cat([torch.arange(text_tokens), curve + text_tokens])


def _check_dim(tensor: torch.Tensor, dim: int) -> None:
    if not isinstance(dim, numbers.Integral) or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim={dim!r} is none of the {tensor.dim()} dimensions of tensor")


def shard(
    tensor: torch.Tensor,
    *,
    group: Any = None,
    shard: str = "contiguous",
    dim: int = -2,
    grid: Sequence[int] | None = None,
    text_tokens: int = 0,
    text_after: bool = False,
) -> torch.Tensor:
    """This rank's tokens, along `dim`, of a tensor that has all of them. "zigzag" (for causal attention) gives each rank a
    piece of the beginning and one of the end. grid (T, H, W): tokens of images or videos in raster order are put in the
    order of a Hilbert curve first, as sparge.attention(grid=...) does; text_tokens stay before them, or after them."""
    rank, ranks = _rank_of(group)
    _check_dim(tensor, dim)
    tokens = tensor.shape[dim]
    order = _order(tokens, grid, text_tokens, text_after)
    places = torch.cat([torch.arange(s.first, s.end) for s in segments(tokens, rank, ranks, shard)] or [torch.arange(0)])
    return tensor.index_select(dim, places if order is None else order[places])


def positions(tokens: int, *, group: Any = None, shard: str = "contiguous") -> torch.Tensor:
    """Where this rank's tokens stand in a sequence of `tokens`: for position embeddings, and to choose by."""
    rank, ranks = _rank_of(group)
    return torch.cat([torch.arange(s.first, s.end) for s in segments(tokens, rank, ranks, shard)] or [torch.arange(0)])


def unshard(
    tensor: torch.Tensor,
    *,
    group: Any = None,
    shard: str = "contiguous",
    dim: int = -2,
    grid: Sequence[int] | None = None,
    text_tokens: int = 0,
    text_after: bool = False,
    timeout: float = TIMEOUT_S,
) -> torch.Tensor:
    """The whole sequence, on every rank, from the tokens of all: the way back of `shard`."""
    links = _begun(group, timeout)
    try:
        headers = _told(links, "unshard", lambda: _gathers(tensor, shard, dim, grid, text_tokens, text_after))
        local = tensor.detach().transpose(0, dim).contiguous()
        row = local.shape[1:]
        counts = [header["tokens"] for header in headers]
        its = [segments(sum(counts), r, links.ranks, shard) for r in range(links.ranks)]
        order = _whole_order(counts, its, grid, text_tokens, text_after)
        parts = links.all_gather(local, [count * row.numel() for count in counts], "tokens")
    except _Refused as refusal:
        links.end()
        raise refusal.error from None
    except BaseException as error:
        links.fail(error)
        raise
    links.end()
    found = local.new_empty((sum(counts), *row))
    for part, of, count in zip(parts, its, counts):
        part = part.view(count, *row)
        for segment in of:
            found[segment.first : segment.end] = part[segment.at : segment.at + segment.count]
    if order is not None:
        raster = torch.empty_like(found)
        raster[order] = found
        found = raster
    return found.transpose(0, dim)


def _gathers(
    tensor: Any, shard: Any, dim: Any, grid: Sequence[int] | None, text_tokens: int, text_after: bool
) -> dict[str, Any]:
    """What all ranks must say alike of an `unshard`, and, under `tokens`, what may differ."""
    check_tensor("tensor", tensor)
    check_shard(shard)
    _check_dim(tensor, dim)
    others = list(tensor.detach().transpose(0, dim).shape[1:])
    alike = {
        "version": _core.version(), "dtype": str(tensor.dtype)[6:], "other dimensions": others, "shard": shard,
        "grid": None if grid is None else [int(side) for side in grid], "text_tokens": int(text_tokens), "text_after": bool(text_after),
    }  # fmt: skip
    return {"tokens": tensor.shape[dim], "alike": alike}


def _whole_order(
    counts: list[int], its: list[list[Segment]], grid: Sequence[int] | None, text_tokens: int, text_after: bool
) -> torch.Tensor | None:
    """As _order, if these are the parts of one sequence."""
    for rank, (count, of) in enumerate(zip(counts, its)):
        if count != count_tokens(of):
            raise _Refused(ValueError(f"rank {rank} has {count} tokens, but its part of all is {count_tokens(of)}"))
    try:
        return _order(sum(counts), grid, text_tokens, text_after)
    except (ValueError, TypeError) as error:
        raise _Refused(error) from None


# ------------------------------------------------------------------ a layer of a model


class Layer:
    """One attention layer of a model over several ranks: `attention` with the settings of sparge.Settings, and calibrations
    that stay. Each rank keeps those of the heads that it measures. As in sparge.Layer, fewer keys than `min_keys` skip
    nothing, and the last `dense_tail` queries of a causal prompt have every tile. Not with a preset.

    measure_every: samples cost bytes (docs/distributed.md). With more than 1, only each so many-th call of a kind is
    sampled, and the others take its choice unseen: for calls that are like one another."""

    def __init__(self, name: str = "", settings: Settings | None = None, *, measure_every: int = 1) -> None:
        if measure_every < 1:
            raise ValueError(f"measure_every={measure_every} is less than 1")
        self.name = name
        self.measure_every = measure_every
        self.settings = Settings() if settings is None else settings
        if self.settings.preset is not None:
            raise ValueError(f"layer {name}: preset is not for several ranks")
        self._kept = Kept()

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        group: Any = None,
        schedule: str = "ring",
        shard: str = "contiguous",
        timeout: float = TIMEOUT_S,
        return_lse: bool = False,
        return_stats: bool = False,
        return_map: bool = False,
        **options: Any,
    ) -> Any:
        """As sparge.distributed.attention, with the options that say what is computed."""
        how = {"precision", "select", "theta", "tau", "pv_skip", "target_l2", "target_l1", "pv_l2", "pv_l1", "round_l1", "seed"}
        for name in sorted({*how, "dense_tail"} & set(options)):
            raise ValueError(f"{name} is the layer's to choose")
        s = self.settings
        bounds = {name: getattr(s, name) for name in ("target_l2", "pv_l2", "target_l1", "pv_l1", "round_l1", "precision")}
        options.update({name: value for name, value in bounds.items() if value is not None})
        if s.seed and 0 not in (s.target_l2, s.target_l1):
            options["seed"] = s.seed
        asked = Asked(schedule, shard, return_lse, return_stats, return_map, options, (s.min_keys, s.dense_tail), self.measure_every)
        return _attend(q, k, v, group, timeout, asked, self._kept)

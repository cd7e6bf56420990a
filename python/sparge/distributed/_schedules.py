"""The three ways round: keys and values to everybody (all_gather), from neighbour to neighbour (ring), or heads instead of
tokens (ulysses). docs/distributed.md has the protocol in one picture.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from .. import _arrays, _core
from ._call import Call, by_heads, by_tokens, cut, whole
from ._choose import Kept, choose
from ._codes import Parcels, Part, row_of
from ._shards import Segment, count_tokens

Result = tuple[torch.Tensor, torch.Tensor]


def _view(name: str, tensor: torch.Tensor) -> Any:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor, _arrays.torch_view(name, tensor)


def run_part(
    call: Call, how: dict[str, Any], q: Segment, k: Segment | None, tensors: tuple[torch.Tensor, ...],
    arrays: dict[str, Any], dtype: torch.dtype, heads: slice | None = None,
) -> Result:  # fmt: skip
    """Attention of some queries to some keys; k None: to all."""
    of_q, of_k, of_v = tensors
    out = of_q.new_empty((*of_q.shape[:3], of_v.shape[3]), dtype=dtype)
    lse = of_q.new_empty(of_q.shape[:3], dtype=torch.float32)
    blocks = [-(-of_q.shape[2] // _core.BLOCK_Q), -(-of_k.shape[2] // _core.BLOCK_K)]
    tiles = None if call.map is None else torch.zeros((*of_q.shape[:2], *blocks), dtype=torch.uint8)
    views = [_view(name, t) for name, t in (("q", of_q), ("k", of_k), ("v", of_v), ("out", out), ("lse", lse))]
    options = {**call.scores(heads), **how, **call.place(q, k)}
    if k is not None:
        options.pop("sink_logits", None)
    map_view = None if tiles is None else _arrays.torch_view("map", tiles)
    q_view, k_view, v_view, out_view, lse_view = (view for _, view in views)
    stats = _core.run_part(q_view, k_view, v_view, out_view, lse_view, map_view, options, arrays)
    call.tiles.add(stats)
    if call.map is not None and tiles is not None:
        first = (q.at if heads is None else q.first) // _core.BLOCK_Q
        column = 0 if k is None else k.first // _core.BLOCK_K
        call.map[:, :, first : first + blocks[0], column : column + blocks[1]] = tiles
    return out, lse


def _own(call: Call, results: list[Result]) -> Result:
    """Of all queries of this rank, from those of its segments."""
    if not results:
        shape = call.q.shape
        return call.q.new_empty((*shape[:2], 0, call.v.shape[3])), call.q.new_empty((*shape[:2], 0), dtype=torch.float32)
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def all_gather(call: Call, kept: Kept | None, how: dict[str, Any] | None = None) -> Result:
    how = how or call.how or choose(call, kept)
    gathered = []
    for name, tensor in (("keys", call.k), ("values", call.v)):
        shapes = [(*tensor.shape[:2], count_tokens(its), tensor.shape[3]) for its in call.k_segments]
        sizes = [int(np.prod(shape)) for shape in shapes]
        parts = call.links.all_gather(tensor, sizes, name)
        parts = [part.view(shape) for part, shape in zip(parts, shapes)]
        gathered.append(whole(call, parts, call.k_segments, call.k_tokens))
    began = time.perf_counter()
    results = [run_part(call, how, q, None, (cut(call.q, q), *gathered), {}, call.q.dtype) for q in call.own_queries]
    call.timed("compute all", began)
    return _own(call, results)


def ulysses(call: Call, kept: Kept | None) -> Result:
    q = by_heads(call, call.q, call.q_segments, call.q_tokens, "queries")
    k = by_heads(call, call.k, call.k_segments, call.k_tokens, "keys")
    v = by_heads(call, call.v, call.k_segments, call.k_tokens, "values")
    how = dict(call.how or choose(call, kept, (q, k, v)))
    per_kv = call.q.shape[1] // call.k.shape[1]
    first = call.links.rank * call.k.shape[1] // call.links.ranks * per_kv
    heads = slice(first, first + q.shape[1])
    for name in ("theta", "tau", "pv_skip", "precision"):
        if isinstance(how.get(name), (list, tuple)):
            how[name] = list(how[name])[heads]
    began = time.perf_counter()
    everything = Segment(0, call.q_tokens, 0)
    out, lse = run_part(call, how, everything, None, (q, k, v), {}, call.q.dtype, heads)
    call.timed("compute heads", began)
    out = by_tokens(call, out, call.q.shape[1], "results")
    return out, by_tokens(call, lse.unsqueeze(-1), call.q.shape[1], "log-sum-exps").squeeze(-1)


def _survey(call: Call) -> np.ndarray[Any, Any]:
    """Sums and maxima of all keys and values, in the order of the segments: the same numbers on every rank."""
    batch, heads, _, dim = call.k.shape
    size = batch * heads * (dim + 3)
    mine = []
    for k in call.own_keys:
        found = np.zeros(size)
        own_k, k_view = _view("k", cut(call.k, k))
        own_v, v_view = _view("v", cut(call.v, k))
        place = {"first_query": k.first, "all_queries": call.k_tokens, "first_key": k.first, "all_keys": call.k_tokens}
        _core.predict_part(
            k_view, k_view, v_view, {"select": "all", "threads": call.threads, **place}, {"key_survey_out": found}
        )
        mine.append(torch.from_numpy(found))
    flat = torch.cat(mine) if mine else torch.empty(0, dtype=torch.float64)
    gathered = call.links.all_gather(flat, [size * len(its) for its in call.k_segments], "surveys")
    by_place = {}
    for its, of in zip(call.k_segments, gathered):
        for segment, numbers in zip(its, of.view(len(its), size)):
            by_place[segment.first] = numbers.numpy().reshape(-1, dim + 3)
    total = np.zeros((batch * heads, dim + 3))
    for first in sorted(by_place):
        total[:, : dim + 1] += by_place[first][:, : dim + 1]
        total[:, dim + 1 :] = np.maximum(total[:, dim + 1 :], by_place[first][:, dim + 1 :])
    return total.reshape(-1)


Pools = dict[str, "np.ndarray[Any, Any]"]
"""Arrays of sparge_run_args, per head and pool: floats, or as int8 heads round them, what makes scores of them beside."""


class _Pools:
    """Stage 1 over all keys without moving them: pools of queries go to where keys are, and sums come back."""

    def __init__(self, call: Call, how: dict[str, Any], survey: np.ndarray[Any, Any], own: Part, coded: bool) -> None:
        self.call, self.how, self.survey, self.own, self.coded = call, how, survey, own, coded
        self.rows_of: list[list[tuple[Pools, Any]]] = []  # per rank and segment: rows and counts
        self.used_of: list[list[np.ndarray[Any, Any]]] = []  # which of them mean something

    def _shape(self, q: Segment) -> tuple[int, int]:
        """Per batch entry and head: entries of pool_lse, blocks."""
        return _core.count_pools(q.count), -(-q.count // _core.BLOCK_Q)

    def sums(self) -> list[np.ndarray[Any, Any]]:
        """pool_lse of each segment of this rank's queries."""
        call, links = self.call, self.call.links
        began = time.perf_counter()
        own = [self._pack(q) for q in call.own_queries]
        call.timed("pools", began)
        self._send_pools(own)
        outgoing, incoming = [], []
        began = time.perf_counter()
        own_used = [used.reshape(-1) for used in self.used_of[links.rank]]
        for rank in range(links.ranks):
            its = zip(call.q_segments[rank], self.rows_of[rank], self.used_of[rank])
            parts = [self._against_own(q, rows)[used.reshape(-1)] for q, rows, used in its]
            outgoing.append(torch.from_numpy(np.concatenate(parts) if parts else np.empty(0)))
            incoming.append(torch.empty(sum(int(used.sum()) for used in own_used), dtype=torch.float64))
        call.timed("predict", began)
        links.exchange(outgoing, incoming, "sums of pools")
        joined = np.full(incoming[0].numel(), -np.inf)
        for of in incoming:  # in the order of the ranks: the same everywhere
            joined = np.logaddexp(joined, of.numpy())
        found = []
        for used in own_used:
            found.append(np.full(used.size, -np.inf))
            found[-1][used], joined = joined[: used.sum()], joined[used.sum() :]
        return found

    def _size(self, q: Segment) -> int:
        return int(self.call.q.shape[0] * self.call.q.shape[1] * self._shape(q)[0])

    def _empty(self, q: Segment) -> Pools:
        heads, dim = self.call.q.shape[0] * self.call.q.shape[1], self.call.q.shape[3]
        pools = self._shape(q)[0]
        if not self.coded:
            return {"rows": np.zeros((heads, pools, dim), np.float32)}
        of_pools = [np.zeros((heads, pools), np.float32) for _ in range(2)]
        return {"rows": np.zeros((heads, pools, row_of(dim)), np.int8), "factors": of_pools[0], "shifts": of_pools[1]}

    def _arrays(self, rows: Pools, counts: Any, out: str = "") -> dict[str, Any]:
        """As the library takes them, or with out="_out" leaves them."""
        which = {"pool_codes" + out: rows} if self.coded else {"pool_rows" + out: rows["rows"]}
        return {**which, "pool_counts" + out: counts}

    def _pack(self, q: Segment) -> tuple[Pools, Any]:
        """Pools of own queries; they do not depend on the keys, so that any will do."""
        call = self.call
        batch, heads, _, dim = call.q.shape
        pools, blocks = self._shape(q)
        rows = self._empty(q)
        counts = np.zeros((batch * heads, blocks), np.int32)
        lse = np.zeros(batch * heads * pools)
        own_q, q_view = _view("q", cut(call.q, q))
        one = call.k.new_zeros((batch, call.k.shape[1], min(call.k_tokens, _core.BLOCK_K), dim))
        k = Segment(0, one.shape[2], 0)
        self._predict(q_view, one, q, k, {**self._arrays(rows, counts, "_out"), "pool_lse_out": lse})
        return rows, counts

    def _predict(self, q_view: Any, keys: torch.Tensor, q: Segment, k: Segment, arrays: dict[str, Any]) -> None:
        call = self.call
        options = {**call.scores(), **self.how, **call.place(q, k)}
        options.pop("sink_logits", None)
        own, k_view = _view("k", keys)
        _core.predict_part(q_view, k_view, None, options, {**arrays, "key_survey": self.survey})

    def _used(self, q: Segment, counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which entries of pool_rows mean something."""
        pools, blocks = self._shape(q)
        of_block = pools // blocks
        own = np.where(counts <= of_block - 2, counts, 0)
        index = np.arange(of_block)
        used = (index < 2) | (index < 2 + own[..., None])
        if 0 < q.count % _core.BLOCK_Q <= _core.BLOCK_Q // 2:
            used[:, -1, 1] = False
        return used.reshape(len(counts), -1)

    def _send_pools(self, own: list[tuple[Pools, Any]]) -> None:
        """Counts first: they say how many rows follow."""
        call, links = self.call, self.call.links
        heads, dim = call.q.shape[0] * call.q.shape[1], call.q.shape[3]
        flat = [torch.from_numpy(counts).view(-1) for _, counts in own]
        sizes = [sum(heads * self._shape(q)[1] for q in its) for its in call.q_segments]
        gathered = links.all_gather(torch.cat(flat) if flat else torch.empty(0, dtype=torch.int32), sizes, "counts of pools")
        counts_of = []
        for its, of in zip(call.q_segments, gathered):
            pieces = of.split([heads * self._shape(q)[1] for q in its])
            counts_of.append([piece.numpy().reshape(heads, -1) for piece in pieces])
        used_of = [[self._used(q, c) for q, c in zip(its, counts)] for its, counts in zip(call.q_segments, counts_of)]
        self.used_of = used_of
        packed = [array[used] for (rows, _), used in zip(own, used_of[links.rank]) for array in rows.values()]
        mine = np.concatenate([array.reshape(-1).view(np.uint8) for array in packed] or [np.empty(0, np.uint8)])
        width = row_of(dim) + 8 if self.coded else 4 * dim
        sizes = [sum(int(used.sum()) * width for used in useds) for useds in used_of]
        gathered = links.all_gather(torch.from_numpy(mine), sizes, "pools")
        self.rows_of = []
        for its, counts, useds, of in zip(call.q_segments, counts_of, used_of, gathered):
            data, found = of.numpy(), []
            for q, count, used in zip(its, counts, useds):
                rows = self._empty(q)
                for array in rows.values():
                    size = array[used].nbytes
                    array[used] = data[:size].copy().view(array.dtype).reshape(array[used].shape)
                    data = data[size:]
                found.append((rows, np.ascontiguousarray(count)))
            self.rows_of.append(found)

    def _against_own(self, q: Segment, pools: tuple[Pools, Any]) -> np.ndarray[Any, Any]:
        """The sums of somebody's pools over the keys that this rank has."""
        call = self.call
        rows, counts = pools
        total = np.full(self._size(q), -np.inf)
        shape = (call.q.shape[0], call.q.shape[1], q.count, call.q.shape[3])
        only_shape = torch.zeros(1).expand(shape)
        for k in call.own_keys:
            if not call.sees(q, k):
                continue
            found = np.empty(self._size(q))
            keys, _, codes = self.own.cut(k)
            arrays = {**self._arrays(rows, counts), "pool_lse_out": found}
            if codes:
                arrays["key_codes"] = {name: codes["key_codes"][name] for name in ("keys", "key_scales")}
            self._predict(_arrays.torch_view("q", only_shape), keys, q, k, arrays)
            total = np.logaddexp(total, found)
        return total


def ring(call: Call, kept: Kept | None) -> Result:
    links = call.links
    if links.ranks == 1:
        return all_gather(call, kept)
    how = call.how or choose(call, kept)
    if how["select"] == "floor" and call.q_tokens <= _core.FEW_QUERIES:  # the library has no pools of so few
        return all_gather(call, kept, how)
    survey = _survey(call)
    parcels = Parcels(call, how, survey)
    call.travelled = parcels.ways.count(call)
    held = parcels.first()
    pools = _Pools(call, how, survey, parcels.own, parcels.ways.all_coded)
    sums = pools.sums() if how["select"] == "floor" else [None] * len(call.own_queries)
    results: list[Result | None] = [None] * len(call.own_queries)
    for step in range(links.ranks):
        owner, following = ((links.rank - step - i) % links.ranks for i in (0, 1))
        coming: list[torch.Tensor] = []
        transfers, arriving = [], []
        if step + 1 < links.ranks:
            coming = parcels.room_for(following)
            arriving = [links.receive(t, (links.rank - 1) % links.ranks) for t in coming]
            transfers = arriving + [links.send(t, (links.rank + 1) % links.ranks, "keys and values") for t in held]
        began = time.perf_counter()
        part = parcels.understand(held, owner)
        for i, q in enumerate(call.own_queries):
            results[i] = _with_part(call, how, q, call.k_segments[owner], part, survey, sums[i], results[i])
        call.timed(f"compute {owner}", began)
        links.wait(transfers, f"keys and values of rank {following}")
        if arriving:
            links.trace.append((f"travel {following}", arriving[0].began, max(t.ended for t in arriving)))
        held = coming
    finished = [_finish(call, q, result) for q, result in zip(call.own_queries, results)]
    return _own(call, finished)


def _with_part(
    call: Call, how: dict[str, Any], q: Segment, keys: list[Segment], part: Part,
    survey: np.ndarray[Any, Any], sums: np.ndarray[Any, Any] | None, before: Result | None,
) -> Result | None:  # fmt: skip
    """The result of a segment of queries, with one more part of the keys."""
    parts = [] if before is None else [before]
    arrays: dict[str, Any] = {"key_survey": survey}
    if sums is not None:
        arrays["pool_lse"] = sums
    for k in keys:
        if call.sees(q, k):
            of_k, of_v, codes = part.cut(k)
            parts.append(run_part(call, how, q, k, (cut(call.q, q), of_k, of_v), {**arrays, **codes}, torch.float32))
    return _merged(call, parts) if parts else None


def _merged(call: Call, parts: list[Result]) -> Result:
    if len(parts) == 1:
        return parts[0]
    out, lse = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
    view = _arrays.torch_view
    _core.merge([(view("part", o), view("lse", l)) for o, l in parts], view("out", out), view("lse", lse), call.threads)
    return out, lse


def _finish(call: Call, q: Segment, result: Result | None) -> Result:
    shape = call.q.shape
    if result is None:  # sees nothing
        result = torch.zeros((*shape[:2], q.count, call.v.shape[3])), torch.full((*shape[:2], q.count), -torch.inf)
    sinks = call.options.get("sink_logits")
    if sinks is not None:
        logits = torch.tensor(list(sinks), dtype=torch.float32).view(1, -1, 1)
        result = _merged(call, [result, (torch.zeros_like(result[0]), logits.expand_as(result[1]).contiguous())])
    return result[0].to(call.q.dtype), result[1]


SCHEDULE = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses}

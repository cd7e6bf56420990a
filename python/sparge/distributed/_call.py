"""What a call over several ranks asks: checked here, and agreed with all ranks before anything is computed."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _arrays, _core
from .._attention import _check_names
from .._calibration import Calibration
from ._links import Links
from ._shards import Segment, check_shard, count_tokens, segments

SCHEDULES = ("ring", "all_gather", "ulysses")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUNDS = ("target_l2", "pv_l2", "target_l1", "pv_l1", "round_l1", "seed")
_THRESHOLDS = ("theta", "tau", "pv_skip")
_SCORES = ("causal", "window", "scale", "softcap", "alibi_slopes", "sink_logits", "keep_sink")
_HOW = ("precision", "select", "dense_tail", "threads", "layout")
_REFUSED = {
    "mask": "masks are not sharded",
    "map": "maps are not sharded",
    "topk": "it needs all masses of a row",
    "predictor": "parts are joined by the masses of the default one",
    "grid": "give it to shard() and unshard()",
    "text_tokens": "give them to shard() and unshard()",
    "text_after": "give it to shard() and unshard()",
    "q_offsets": "packed batches are not sharded",
    "kv_offsets": "packed batches are not sharded",
    "calibration": "take a sparge.distributed.Layer",
}


@dataclass
class Tiles:
    """QK tiles and PV row groups, as sparge.Stats counts them."""

    qk_eligible: int = 0
    qk_computed: int = 0
    pv_eligible: int = 0
    pv_computed: int = 0

    def add(self, stats: _core.CallStats) -> None:
        fields = stats.fields()
        self.qk_eligible += fields["qk_tiles"]["eligible"]
        self.qk_computed += fields["qk_tiles"]["computed"]
        self.pv_eligible += fields["pv_tiles"]["eligible"]
        self.pv_computed += fields["pv_tiles"]["computed"]

    @property
    def sparsity(self) -> float:
        return 1 - self.qk_computed / self.qk_eligible if self.qk_eligible else 0.0


@dataclass
class Stats:
    """What a call did here, and how much was done on all ranks."""

    tiles: Tiles
    ranks: list[Tiles]
    bytes_of: dict[str, int]
    """What this rank sent to others, by what it was; "... to measure" and "choices" are samples."""
    travelled: dict[str, int]
    """How many kv heads sent their keys and values in which type, in the ring: "int8" with scales, or their own, which is
    that of heads in other precisions."""
    waited_s: float
    time_s: float
    trace: list[tuple[str, float, float]] = field(repr=False)
    """(what, begin, end) by time.perf_counter of this rank: "compute R" with the keys of rank R, "travel R" until they
    are here, "wait ..."."""

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_of.values())

    @property
    def sparsity(self) -> float:
        """Of all ranks."""
        eligible = sum(t.qk_eligible for t in self.ranks)
        return 1 - sum(t.qk_computed for t in self.ranks) / eligible if eligible else 0.0

    @property
    def imbalance(self) -> float:
        """Tiles computed by the rank that has most, over the mean."""
        computed = [t.qk_computed for t in self.ranks]
        return max(computed) * len(computed) / sum(computed) if sum(computed) else 1.0


@dataclass
class Asked:
    """The arguments beside tensors."""

    schedule: str
    shard: str
    lse: bool
    stats: bool
    map: bool
    options: dict[str, Any]
    policy: tuple[int, int] | None = None
    """Of a layer: min_keys and dense_tail."""
    measure_every: int = 1

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        return self.lse, self.stats, self.map


class Call:
    """One call at work on this rank. Tensors are (batch, heads, tokens, dim)."""

    def __init__(self, q: Any, k: Any, v: Any, links: Links, asked: Asked) -> None:
        self.links, self.asked, self.options = links, asked, asked.options
        self.schedule, self.shard = asked.schedule, asked.shard
        check_shard(self.shard)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if asked.map and self.schedule == "ulysses":
            raise ValueError("return_map is not for schedule='ulysses': a rank has some heads of all queries")
        _check_options(self.options)
        self.q, self.k, self.v = (_four(name, t, self.options) for name, t in (("q", q), ("k", k), ("v", v)))
        self._check_shapes()
        self.tiles = Tiles()
        self.map: torch.Tensor | None = None
        self.travelled: dict[str, int] = {}
        self.how = by_hand(self.options)
        self.measures = True
        """Where bounds decide: samples are taken, on all ranks or on none."""
        self._check_with_library()

    def _check_with_library(self) -> None:
        """What it refuses, it refuses for calls of no tokens, too."""
        q, k, v = self.q[:, :, :0], self.k[:, :, :0], self.v[:, :, :0]
        out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
        views: Any = [_arrays.torch_view(name, t.contiguous()) for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse))]
        how = {"select": "all"} if self.how is None else self.how
        offset = {name: self.options[name] for name in ("query_offset",) if self.options.get(name) is not None}
        done = _core.run_part(views[0], views[1], views[2], views[3], views[4], None, {**self.scores(), **offset, **how}, {})
        self.isa = done.fields()["isa"]
        if self.how is None:
            Calibration(1, **{name: self.options[name] for name in BOUNDS if self.options.get(name) is not None})
            if not isinstance(self.options.get("precision", "int8"), (str, type(None))):
                raise ValueError("precision: one for all heads, where bounds decide")

    def _check_shapes(self) -> None:
        q, k, v = self.q, self.k, self.v
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise ValueError(f"q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
        if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
            raise ValueError(f"k has {k.shape[1]} heads of {k.shape[2]} tokens, v {v.shape[1]} of {v.shape[2]}")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[1] == 0:
            raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} of k")
        if q.shape[3] != k.shape[3]:
            raise ValueError(f"q has head size {q.shape[3]}, k {k.shape[3]}")
        if self.schedule == "ulysses" and k.shape[1] < self.links.ranks:
            raise ValueError(f"schedule='ulysses' splits heads, but {k.shape[1]} kv heads are fewer than {self.links.ranks} ranks")

    def header(self) -> dict[str, Any]:
        """What all ranks must say alike, and, under `tokens`, what may differ."""
        alike: dict[str, Any] = {
            "version": _core.version(), "schedule": self.schedule, "shard": self.shard, "batch": self.q.shape[0],
            "q heads": self.q.shape[1], "kv heads": self.k.shape[1], "head size": self.q.shape[3],
            "head size of v": self.v.shape[3],
        }  # fmt: skip
        alike.update({f"dtype of {name}": str(t.dtype)[6:] for name, t in (("q", self.q), ("k", self.k), ("v", self.v))})
        alike.update({name: _short(value) for name, value in self.options.items() if name != "threads"})
        alike.update({"results": list(self.asked.wanted), "policy": list(self.asked.policy or ()), "measure_every": self.asked.measure_every})
        return {"alike": alike, "isa": self.isa, "tokens": [self.q.shape[2], self.k.shape[2]]}

    def agree(self, headers: list[dict[str, Any]]) -> None:
        """All ranks ask for the same, and each has its part of the sequence. All ranks say so, or none."""
        check_alike(headers)
        self.q_tokens, self.k_tokens = (sum(header["tokens"][i] for header in headers) for i in (0, 1))
        ranks = range(self.links.ranks)
        self.q_segments = [segments(self.q_tokens, r, self.links.ranks, self.shard) for r in ranks]
        self.k_segments = [segments(self.k_tokens, r, self.links.ranks, self.shard) for r in ranks]
        for rank, header in enumerate(headers):
            for name, of, has in zip("qk", (self.q_segments, self.k_segments), header["tokens"]):
                if count_tokens(of[rank]) != has:
                    raise ValueError(
                        f"{name}: rank {rank} has {has} of {sum(h['tokens']['qk'.index(name)] for h in headers)} tokens, but its part "
                        f"(shard={self.shard!r}) is {count_tokens(of[rank])}; use sparge.distributed.shard"
                    )

        # Instruction sets differ in what integers they multiply.
        self.same_integers = len({header["isa"] for header in headers}) == 1
        self._take_policy()

    def _take_policy(self) -> None:
        """Of a layer: few tokens skip nothing, and the end of a prompt has every tile (src/layer/rules.cc)."""
        if self.asked.policy is None:
            return
        min_keys, dense_tail = self.asked.policy
        if self.k_tokens < min_keys or self.q_tokens <= _core.FEW_QUERIES:
            precision = (self.how or {}).get("precision") or self.options.get("precision") or "int8"
            self.how = {"select": "all", "pv_skip": "off", "precision": precision}
        elif self.options.get("causal") and self.q_tokens == self.k_tokens and self.how is None:
            self.options["dense_tail"] = dense_tail

    @property
    def own_queries(self) -> list[Segment]:
        return self.q_segments[self.links.rank]

    @property
    def own_keys(self) -> list[Segment]:
        return self.k_segments[self.links.rank]

    def scores(self, heads: slice | None = None) -> dict[str, Any]:
        """The options that say what is computed, of some query heads."""
        found = {name: self.options[name] for name in _SCORES if self.options.get(name) is not None}
        for name in ("alibi_slopes", "sink_logits"):
            if heads is not None and name in found:
                found[name] = list(found[name])[heads]
        return {**found, "threads": self.threads}

    @property
    def threads(self) -> int:
        given = self.options.get("threads")
        return torch.get_num_threads() if given is None else given  # which the library checks

    def place(self, q: Segment, k: Segment | None) -> dict[str, Any]:
        """Options that say where a part stands; k None: all keys are here."""
        found: dict[str, Any] = {"first_query": q.first, "all_queries": self.q_tokens}
        if k is not None:
            found.update(first_key=k.first, all_keys=self.k_tokens)
        if self.options.get("query_offset") is not None:
            found["query_offset"] = self.options["query_offset"] + q.first
        return found

    def sees(self, q: Segment, k: Segment) -> bool:
        """Whether any of these queries sees any of these keys by its position."""
        if q.count == 0 or k.count == 0:
            return False
        offset = self.options.get("query_offset")
        offset = self.k_tokens - self.q_tokens if offset is None else offset
        if self.options.get("causal") and k.first > q.end - 1 + offset:
            return False
        window = self.options.get("window")
        return not window or k.end - 1 > q.first + offset - window

    def timed(self, what: str, began: float) -> None:
        self.links.trace.append((what, began, time.perf_counter()))


def check_alike(headers: list[dict[str, Any]]) -> None:
    """No rank refuses the call, and all ask for the same; else the first difference."""
    for rank, header in enumerate(headers):
        if "refused" in header:
            raise ValueError(f"rank {rank}: {header['refused']}")
    first = headers[0]["alike"]
    for rank, header in enumerate(headers):
        alike = header["alike"]
        for name in sorted({*first, *alike}, key=lambda name: (name != "version", name != "call", name)):
            if first.get(name) != alike.get(name):
                raise ValueError(f"{name} is {alike.get(name)} on rank {rank} and {first.get(name)} on rank 0")


def check_tensor(name: str, tensor: Any) -> None:
    """What holds for every tensor that goes to other ranks."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of PyTorch")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: is on device {tensor.device}, not on the CPU")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires a gradient, which sparge does not compute; use torch.no_grad()")


def _four(name: str, tensor: Any, options: dict[str, Any]) -> torch.Tensor:
    tensor = _arrays.wrapped(name, tensor)
    check_tensor(name, tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {tensor.dtype} is none of float32, float16, bfloat16")
    if tensor.dim() not in (3, 4):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} is neither (heads, tokens, dim) nor (batch, heads, tokens, dim)")
    if options.get("layout") == "NHD":
        tensor = tensor.transpose(-2, -3)
    return (tensor if tensor.dim() == 4 else tensor.unsqueeze(0)).detach()


def _check_options(options: dict[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} is not for several ranks: {why}")
    _check_names(options)  # type: ignore[arg-type]
    layout, select = options.get("layout"), options.get("select")
    if layout not in (None, "HND", "NHD"):
        raise ValueError(f"layout={layout!r} is none of HND, NHD")
    if select not in (None, "auto", "all", "floor"):
        raise ValueError(f"select={select!r} is not for several ranks: take auto, all or floor")
    unknown = set(options) - {*BOUNDS, *_THRESHOLDS, *_SCORES, *_HOW, *_REFUSED, "query_offset"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is not for several ranks")


def by_hand(o: dict[str, Any]) -> dict[str, Any] | None:
    """What the caller names, as options of a part; None if bounds decide."""
    given: dict[str, Any] = {name: o[name] for name in ("theta", "tau", "pv_skip") if name in o and (o[name] is not None or name == "pv_skip")}
    select = o.get("select") or ("floor" if "tau" in given else "auto")
    bounds = [name for name in BOUNDS if o.get(name) is not None]
    precision, tail = o.get("precision"), o.get("dense_tail") or 0
    rest = {name: value for name, value in (("precision", precision), ("dense_tail", tail)) if value}
    if select == "auto":
        if given:
            raise ValueError("theta, tau and pv_skip have no effect on select='auto'")
        if 0 not in (o.get("target_l2"), o.get("target_l1")):
            return None
        if len(bounds) > 1:
            raise ValueError("a target of 0 is exact: no other bound has an effect")
        rest.setdefault("precision", "fp32")
        return {"select": "all", "pv_skip": "off", **rest}
    if bounds:
        raise ValueError(f"{bounds[0]} is for select='auto'")
    return {"select": select, **given, **rest}


def _short(value: Any) -> str:
    text = repr(list(value)) if isinstance(value, (tuple, torch.Tensor)) else repr(value)
    return text if len(text) <= 60 else "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]


def cut(tensor: torch.Tensor, part: Segment) -> torch.Tensor:
    """The tokens of a segment, of a tensor that has those of its rank."""
    return tensor.narrow(2, part.at, part.count)


def whole(call: Call, parts: list[torch.Tensor], of: list[list[Segment]], tokens: int) -> torch.Tensor:
    """A tensor of the whole sequence from those of all ranks."""
    shape = parts[0].shape
    found = parts[0].new_empty((*shape[:2], tokens, shape[3]))
    for part, its in zip(parts, of):
        for segment in its:
            found.narrow(2, segment.first, segment.count).copy_(cut(part, segment))
    return found


def head_ranges(call: Call) -> list[range]:
    """The kv heads of each rank, where heads are split."""
    kv_heads, ranks = call.k.shape[1], call.links.ranks
    return [range(r * kv_heads // ranks, (r + 1) * kv_heads // ranks) for r in range(ranks)]


def by_heads(call: Call, tensor: torch.Tensor, of: list[list[Segment]], tokens: int, what: str) -> torch.Tensor:
    """This rank's heads of the whole sequence, where it had all heads of its tokens."""
    per_kv = tensor.shape[1] // call.k.shape[1]
    slices = [slice(kv.start * per_kv, kv.stop * per_kv) for kv in head_ranges(call)]
    mine = slices[call.links.rank]
    batch, dim = tensor.shape[0], tensor.shape[3]
    incoming = [tensor.new_empty((batch, mine.stop - mine.start, count_tokens(its), dim)) for its in of]
    call.links.exchange([tensor[:, s].contiguous() for s in slices], incoming, what)
    return whole(call, incoming, of, tokens)


def by_tokens(call: Call, tensor: torch.Tensor, heads: int, what: str) -> torch.Tensor:
    """The way back: all heads of this rank's queries."""
    per_kv = heads // call.k.shape[1]
    own = count_tokens(call.own_queries)
    outgoing = []
    for its in call.q_segments:
        pieces = [tensor.narrow(2, segment.first, segment.count) for segment in its]
        outgoing.append(torch.cat(pieces, 2) if pieces else tensor[:, :, :0])
    incoming = [tensor.new_empty((tensor.shape[0], len(kv) * per_kv, own, tensor.shape[3])) for kv in head_ranges(call)]
    call.links.exchange(outgoing, incoming, what)
    return torch.cat(incoming, 1)

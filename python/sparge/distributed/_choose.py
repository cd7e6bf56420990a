"""How exactly: from bounds to thresholds per head, the same on all ranks. Samples see all keys of all tokens: for this, each
rank gets the whole sequence of some heads, and measures them as one machine would. Which rank that is does not matter:
each kv head is calibrated by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _attention, _core
from .._calibration import Calibration
from ._call import BOUNDS, Call, by_heads, head_ranges

Kind = tuple[Any, ...]


@dataclass
class Kept:
    """What a layer keeps of its calls, by kind of call."""

    calibrations: dict[Kind, dict[int, Calibration]] = field(default_factory=dict)
    """By kv head: those that this rank measures."""
    choices: dict[Kind, list[list[float]]] = field(default_factory=dict)
    """Of all heads, as last measured."""
    calls: dict[Kind, int] = field(default_factory=dict)
    """That the choice served, with the one that measured it."""


_PRECISIONS = ("int8", "int16", "fp32")


def _kind(call: Call) -> Kind:
    return call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3], bool(call.options.get("causal"))


def standing(call: Call, kept: Kept | None) -> str:
    """Names the choice that this rank would take unseen; nothing if it has to measure. All measure unless all name the
    same: a rank may be out of step with others, because it is new, was restored, or was in another group meanwhile."""
    kind = _kind(call)
    if kept is None or kind not in kept.choices or kept.calls[kind] >= call.asked.measure_every:
        return ""
    return hashlib.sha256(repr(kept.choices[kind]).encode()).hexdigest()[:16]


def choose(call: Call, kept: Kept | None, tensors: tuple[torch.Tensor, ...] | None = None) -> dict[str, Any]:
    """By bounds. `tensors`: q, k, v of this rank's heads and the whole sequence, where they are here already."""
    kind = _kind(call)
    kept = Kept() if kept is None else kept
    if call.measures:
        kept.choices[kind] = _measured(call, kept.calibrations.setdefault(kind, {}), tensors)
        kept.calls[kind] = 0
    kept.calls[kind] += 1
    rows = kept.choices[kind]
    tail = call.options.get("dense_tail") or 0
    return {
        "select": "floor", "theta": [row[0] for row in rows], "tau": [row[1] for row in rows],
        "pv_skip": [row[2] for row in rows], "precision": [_PRECISIONS[int(row[3])] for row in rows],
        **({"dense_tail": tail} if tail else {}),
    }  # fmt: skip


def _measured(
    call: Call, calibrations: dict[int, Calibration], tensors: tuple[torch.Tensor, ...] | None
) -> list[list[float]]:
    """theta, tau, lambda and precision of all query heads."""
    if tensors is None:
        tensors = (
            by_heads(call, call.q, call.q_segments, call.q_tokens, "queries to measure"),
            by_heads(call, call.k, call.k_segments, call.k_tokens, "keys to measure"),
            by_heads(call, call.v, call.k_segments, call.k_tokens, "values to measure"),
        )
    per_kv = call.q.shape[1] // call.k.shape[1]
    ranges = head_ranges(call)
    found = [_measure(call, calibrations, tensors, i, kv, per_kv) for i, kv in enumerate(ranges[call.links.rank])]
    mine = torch.tensor(found, dtype=torch.float64).reshape(-1, 4)
    sizes = [len(kv) * per_kv * 4 for kv in ranges]
    return torch.cat([of.view(-1, 4) for of in call.links.all_gather(mine, sizes, "choices")]).tolist()


def _measure(
    call: Call, calibrations: dict[int, Calibration], tensors: tuple[torch.Tensor, ...], i: int, kv: int, per_kv: int
) -> list[list[float]]:
    """theta, tau, lambda and precision of the query heads of a kv head."""
    bounds = {name: call.options[name] for name in BOUNDS if call.options.get(name) is not None}
    seed = bounds.pop("seed", 0)
    if kv not in calibrations:
        calibrations[kv] = Calibration(per_kv, **bounds, seed=(seed * 65537 + kv) % 2**63)
    calibration = calibrations[kv]
    q, k, v = tensors
    heads = slice(i * per_kv, (i + 1) * per_kv)
    options = call.scores(slice(kv * per_kv, (kv + 1) * per_kv))
    if call.options.get("query_offset") is not None:
        options["query_offset"] = call.options["query_offset"]
    asked = call.options.get("precision") or "int8"
    _attention.calibrate(
        q[:, heads], k[:, i : i + 1], v[:, i : i + 1], calibration, effort=_core.EFFORT_OF_RUN, precision=asked, **options
    )  # type: ignore[misc]
    rows = []
    for h in range(per_kv):
        head = calibration.head(h)
        precision = max(_PRECISIONS.index(asked), _PRECISIONS.index(head.precision))
        rows.append([head.theta, head.tau, head.pv_skip, float(precision)])
    return [number for number in rows]

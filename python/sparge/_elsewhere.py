"""Calls of attention that PyTorch computed instead: why, how many, and what to do about it."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterable

from . import _core

if TYPE_CHECKING:
    from ._layers import Layer

REMEDIES = {
    "gradients": "run it under torch.inference_mode()",
    "dropout": "call model.eval()",
    "dtype": "float32, float16 and bfloat16 are computed here",
    "device": "what is on the CPU is computed here, and on a GPU layers that skip nothing, in int8",
    "mask": "a mask must broadcast to (batch, heads, queries, keys), and be bool or floating",
}
"""Of reasons; others have none."""


@dataclass(frozen=True)
class Obstacle:
    """Why a call is not for us."""

    reason: str  # one word, that calls are counted by
    text: str  # of this call


class LayerWarning(UserWarning):
    """What a layer has to say, once."""


def counted(layers: Iterable[Layer]) -> str:
    """ "12 calls: gradients (run it under torch.inference_mode()), 1 call: dtype (...)"; empty if there are none."""
    sums: Counter[str] = Counter()
    for layer in layers:
        sums.update(layer.elsewhere)
    parts = []
    for reason, count in sums.most_common():
        remedy = f" ({REMEDIES[reason]})" if reason in REMEDIES else ""
        parts.append(f"{count} call{'' if count == 1 else 's'}: {reason}{remedy}")
    return ", ".join(parts)


def why_unused(layers: Iterable[Layer]) -> str | None:
    """Why these layers did nothing that PyTorch would not have done, or None if some did, or nothing was asked for."""
    layers = list(layers)
    elsewhere = counted(layers)
    calls = sum(layer.totals.calls for layer in layers)
    if calls == 0:
        return f"PyTorch computed all attention. {elsewhere}" if elsewhere else None
    called = [layer for layer in layers if layer.totals.calls]
    if any(layer.totals.dense_calls < layer.totals.calls or not layer.may_skip for layer in called):
        return None
    least = min(layer.settings.min_keys for layer in called)
    return (
        f"nothing was skipped: of {calls} call{'' if calls == 1 else 's'} none had more than {_core.FEW_QUERIES} queries "
        f"and at least {least} keys (min_keys={least})" + (f"; PyTorch computed {elsewhere}" if elsewhere else "")
    )


def warn_unused(layers: Iterable[Layer], stacklevel: int = 2) -> bool:
    """Says so if these layers were of no use; whether it did. stacklevel: as warnings.warn has it, from the caller on."""
    reason = why_unused(layers)
    if reason is not None:
        warnings.warn(f"sparge: {reason}", LayerWarning, stacklevel=stacklevel + 1)
    return reason is not None

"""Sparse, quantised attention on CPUs: skips what does not matter, within an error that you name.

    out = sparge.attention(q, k, v, causal=True, target_l2=0.05)

Drop-in for PyTorch: `sparge.torch`; for models: `sparge.integrations.transformers` and `.diffusers`. The names below need
NumPy only.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _core
from ._attention import Options, Stats, attention, calibrate, merge, predict, reference, token_order
from ._calibration import Calibration, HeadEstimate
from ._elsewhere import LayerWarning
from ._layers import Layer, Settings

if _TYPE_CHECKING:
    from ._capture import CaptureWarning, capture
    from ._command import CommandError
    from ._loss import LossWarning
    from ._presets import Preset
    from ._report import report
    from ._tune import tune

__version__: str = _core.version()

__all__ = [
    "Calibration",
    "CaptureWarning",
    "CommandError",
    "HeadEstimate",
    "Layer",
    "LayerWarning",
    "LossWarning",
    "Options",
    "Preset",
    "Settings",
    "Stats",
    "attention",
    "calibrate",
    "capture",
    "get_num_threads",
    "isas",
    "merge",
    "predict",
    "reference",
    "report",
    "set_num_threads",
    "token_order",
    "tune",
]

_LATER = {
    "CaptureWarning": "_capture",
    "CommandError": "_command",
    "LossWarning": "_loss",
    "Preset": "_presets",
    "capture": "_capture",
    "report": "_report",
    "tune": "_tune",
}


def __getattr__(name: str) -> object:
    """What not every program needs is imported when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    globals()[name] = found = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    return found


def set_num_threads(threads: int) -> None:
    """Threads of calls that do not say `threads` themselves; 0 = all cores."""
    _core.set_num_threads(threads)


def get_num_threads() -> int:
    """Threads of calls that do not say `threads` themselves."""
    return _core.get_num_threads()


def isas() -> list[dict[str, object]]:
    """Instruction sets compiled into the library, best first; environment SPARGE_ISA chooses another one."""
    return _core.isas()


# A child process has none of its parent's threads.
if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_core.forget_threads)

"""What is kept per attention layer of a model: its calibration or its entry of a preset, and what it did."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Union

from . import _core
from ._attention import Precision
from ._calibration import Calibration
from ._presets import Preset

_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Settings:
    """How exact a model's attention shall be. The defaults fit a model that nothing is known about."""

    target_l1: float = _core.TARGET_L1  # relative L1 error per head that skipping may cause; 0 = exact
    pv_l1: float | None = None  # the same with PV skip; None = as much more as the library's own bounds
    round_l1: float = _core.ROUND_L1  # error of 8-bit arithmetic beyond which a head takes 16 bits
    precision: Precision | None = None  # None = int8, and fp32 where target_l1 is 0
    preset: Union[str, os.PathLike[str], Preset, None] = None  # of `sparge tune`, instead of calibrations
    # Causal attention: the last queries see everything. What a language model says next comes from its last tokens, and a
    # question about something long ago needs tiles that hardly count in the error of a whole head.
    dense_tail: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("target_l1", "pv_l1", "round_l1"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}={value} is outside 0..1")
        if self.dense_tail < 0:
            raise ValueError(f"dense_tail={self.dense_tail} is negative")
        if self.precision not in (None, "fp32", "int16", "int8"):
            raise ValueError(f"precision={self.precision!r} is none of fp32, int16, int8")
        if self.preset is not None:
            object.__setattr__(self, "preset", Preset.read(self.preset))


@dataclass
class Totals:
    """Sums over the calls of a layer."""

    calls: int = 0
    time_ms: float = 0.0
    qk_eligible: int = 0
    qk_computed: int = 0
    pv_eligible: int = 0
    pv_computed: int = 0

    @property
    def sparsity(self) -> float:
        return 1 - self.qk_computed / self.qk_eligible if self.qk_eligible else 0.0

    def add(self, other: Totals) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(eq=False)
class Layer:
    """One attention layer. Operators name it by `handle`, because they take numbers and tensors only."""

    name: str
    settings: Settings = field(default_factory=Settings)
    totals: Totals = field(default_factory=Totals)
    remembers: bool = True  # False: every call calibrates for itself
    dense: bool = False  # for the time being: everything is computed (first denoising steps)
    watchers: list[Callable[..., None]] = field(default_factory=list, repr=False)  # capture
    _calibrations: dict[tuple[int, bool], Calibration] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._enlist()

    def _enlist(self) -> None:
        self.handle = next(_handles)
        self._lock = threading.Lock()
        _by_handle[self.handle] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**{k: v for k, v in self.__dict__.items() if k not in ("handle", "_lock")}, "watchers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enlist()  # copies of a model have layers of their own

    def calibration(self, heads: int, causal: bool) -> Calibration:
        """Made when first needed. A module may attend in two ways (to itself, to others): those are kept apart."""
        with self._lock:
            made = self._calibrations.get((heads, causal))
            if made is None:
                s = self.settings
                made = Calibration(heads, target_l1=s.target_l1, pv_l1=s.pv_l1, round_l1=s.round_l1, seed=s.seed)
                self._calibrations[heads, causal] = made
            return made

    @property
    def calibrations(self) -> list[Calibration]:
        return list(self._calibrations.values())

    def options(
        self, queries: int, q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, causal: bool
    ) -> dict[str, Any]:
        """How exact, as options of sparge.attention."""
        s = self.settings
        dense = self.dense or queries <= _core.FEW_QUERIES  # decoding: packing all keys would cost more than attending
        precision = {} if s.precision is None else {"precision": s.precision}
        if isinstance(s.preset, Preset):
            entry = s.preset.layer(self.name)
            entry.check(q_heads, kv_heads, qk_dim, v_dim, causal)
            if dense:
                return {"precision": entry.options["precision"], "select": "all", "pv_skip": "off", **precision}
            return {**entry.options, **precision}
        if s.target_l1 == 0:
            return {"target_l1": 0.0, **precision}
        if dense:
            return {"select": "all", "pv_skip": "off", **precision}
        if not self.remembers:
            return {"target_l1": s.target_l1, "pv_l1": s.pv_l1, "round_l1": s.round_l1, "seed": s.seed, **precision}
        return {"calibration": self.calibration(q_heads, causal), **precision}

    def record(self, stats: _core.CallStats) -> None:
        with self._lock:
            t = self.totals
            time_ms, qk_eligible, qk_computed, pv_eligible, pv_computed = stats.totals()
            t.calls += 1
            t.time_ms += time_ms
            t.qk_eligible += qk_eligible
            t.qk_computed += qk_computed
            t.pv_eligible += pv_eligible
            t.pv_computed += pv_computed


def by_handle(handle: int) -> Layer | None:
    """None for handles of layers that are gone, and for 0: every call for itself."""
    return _by_handle.get(handle)


def summary(layers: Iterable[Layer]) -> str:
    """A table: what each layer did, and the errors it estimates."""
    lines = [f"{'layer':<40} {'calls':>6} {'ms':>9} {'sparsity':>8} {'l1':>7} {'worst':>7}"]
    total = Totals()
    for layer in layers:
        total.add(layer.totals)
        heads = [c.head(h) for c in layer.calibrations for h in range(c.heads)]
        errors = [h.pv_l1 for h in heads if h.state == "sparse"]
        estimate = f"{sum(errors) / len(errors):7.4f} {max(errors):7.4f}" if errors else f"{'-':>7} {'-':>7}"
        t = layer.totals
        lines.append(f"{layer.name:<40} {t.calls:>6} {t.time_ms:>9.1f} {t.sparsity:>8.1%} {estimate}")
    lines.append(f"{'all':<40} {total.calls:>6} {total.time_ms:>9.1f} {total.sparsity:>8.1%}")
    return "\n".join(lines)

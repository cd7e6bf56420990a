"""What is kept per attention layer of a model: an object of the library, with a name, and what watches it."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Iterable, Union

from . import _attention, _core
from ._attention import Precision
from ._calibration import Calibration, check_numbers
from ._elsewhere import LayerWarning, Obstacle, counted
from ._presets import Preset, PresetError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BOUNDS = ("target_l2", "pv_l2", "target_l1", "pv_l1", "round_l1")
_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Settings:
    """How exact a model's attention shall be. The defaults fit a model that nothing is known about."""

    target_l2: float | None = None  # relative L2 error per head that skipping may cause; 0 = exact; None = the default
    pv_l2: float | None = None  # the same with PV skip; None = as much more as the library's own bounds
    target_l1: float | None = None  # a bound of the relative L1 error instead
    pv_l1: float | None = None
    round_l1: float | None = None  # relative L1 error of 8-bit arithmetic beyond which a head takes 16 bits
    precision: Precision | None = None  # at least; None = int8, and fp32 where the target is 0
    preset: Union[str, os.PathLike[str], Preset, None] = None  # of `sparge tune`, instead of bounds
    # Causal attention: the last queries of a prompt see everything. What a language model says next comes from its last
    # tokens, and a question about something long ago needs tiles that hardly count in the error of a whole head.
    dense_tail: int = _core.DENSE_TAIL
    seed: int = 0
    min_keys: int = _core.MIN_KEYS  # with fewer, everything is computed
    keep_keys: bool = True  # a prompt that comes in parts: keys stay packed from one to the next

    def __post_init__(self) -> None:
        bounds = {name: getattr(self, name) for name in _BOUNDS}
        check_numbers(bounds, {name: getattr(self, name) for name in ("dense_tail", "seed", "min_keys")})
        for name, value in bounds.items():
            if value is not None and not 0 <= float(value) <= 1:
                raise ValueError(f"{name}={value} is outside 0..1")
        if self.preset is not None:
            object.__setattr__(self, "preset", Preset.read(self.preset))
        # What is wrong is said now, not when a layer runs.
        for name in self.preset.layers if isinstance(self.preset, Preset) else [""]:
            self.make(name)

    def lacks(self, name: str) -> bool:
        """Whether there is a preset, and it says nothing of this layer."""
        return isinstance(self.preset, Preset) and name not in self.preset.layers

    def make(self, name: str, remembers: bool = True) -> _core.Layer:
        """The library's layer with these settings; `name` is for presets."""
        if self.lacks(name):  # every tile, in the precision that presets begin with
            dense = replace(self, preset=None, target_l2=0.0, precision=self.precision or "int8")
            return dense.make(name, remembers)
        preset = self.preset.core if isinstance(self.preset, Preset) else None
        return _core.Layer(
            **{bound: getattr(self, bound) for bound in _BOUNDS}, seed=self.seed, precision=self.precision, preset=preset,
            name=name, remembers=remembers, keep_keys=self.keep_keys, min_keys=self.min_keys, dense_tail=self.dense_tail,
        )  # fmt: skip


@dataclass
class Totals:
    """Sums over the calls of a layer."""

    calls: int = 0
    dense_calls: int = 0  # of these, those that could skip nothing: few queries or keys, or because they were told so
    time_ms: float = 0.0
    predict_ms: float = 0.0  # of these: which tiles count
    kernel_ms: float = 0.0
    decode_ms: float = 0.0  # of the kernel: few queries with the keys of earlier calls
    calibrate_ms: float = 0.0
    key_blocks: int = 0
    key_blocks_reused: int = 0  # found packed from an earlier part of a prompt
    qk_eligible: int = 0
    qk_computed: int = 0
    pv_eligible: int = 0
    pv_computed: int = 0

    @property
    def sparsity(self) -> float:
        return 1 - self.qk_computed / self.qk_eligible if self.qk_eligible else 0.0

    @property
    def dense_ms(self) -> float:
        """About what the same calls would have taken with every tile: those left out at the price of the others."""
        left_out = (self.qk_eligible - self.qk_computed) / max(self.qk_computed, 1)
        prompts_ms = self.kernel_ms - self.decode_ms  # answers read every key as it is
        return self.time_ms - self.predict_ms - self.calibrate_ms + prompts_ms * left_out

    def add(self, other: Totals, times: int = 1) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


class Layer:
    """One attention layer of a model: which tiles it computes, what it learned, keys that stay packed, and what it did.

    Copies and pickles have what it learned, and go on by themselves. Operators name it by `handle`, because they take
    numbers and tensors only.
    """

    def __init__(self, name: str = "", settings: Settings | None = None, *, remembers: bool = True) -> None:
        """remembers: False = every call is by itself, as if the layer were new."""
        self.name = name
        self.settings = Settings() if settings is None else settings
        self.remembers = remembers
        self.dense = False  # for the time being: everything is computed (first denoising steps)
        self.elsewhere: Counter[str] = Counter()  # calls that PyTorch computed instead, by reason
        self._before = Totals()  # of the layer that this is a copy of, less those that were cleared
        self._enlist(None)

    def _enlist(self, learned: bytes | None) -> None:
        self.watchers: list[Callable[..., None]] = []  # capture
        self.graders: list[Callable[..., None]] = []  # see the output that gradients are wanted of (sparge.tune, loss)
        self.handle = next(_handles)
        self._learned = learned
        self._core: _core.Layer | None = None  # until it is called: most modules of a model are no attention
        self._lock = threading.Lock()
        _by_handle[self.handle] = self

    def _made(self) -> _core.Layer:
        if self._core is None:
            with self._lock:
                if self._core is None:
                    made = self.settings.make(self.name, self.remembers)
                    self._say_if_lacking()
                    if self._learned is not None:
                        made.restore(self._learned)
                    self._core = made
        return self._core

    def __getstate__(self) -> dict[str, Any]:
        learned = self._learned if self._core is None else self._core.save()
        kept = {name: getattr(self, name) for name in ("name", "settings", "remembers", "dense", "elsewhere")}
        return {**kept, "_before": self.totals, "learned": learned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned = state.pop("learned")
        self.elsewhere = Counter()  # which older pickles lack
        self.__dict__.update(state)
        self._enlist(learned)  # copies of a model have layers of their own

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.settings!r}, remembers={self.remembers})"

    @property
    def totals(self) -> Totals:
        """Of all calls so far, or since `clear_totals`; a copy begins with those of its original."""
        sums = self._own_totals()
        sums.add(self._before)
        return sums

    def _own_totals(self) -> Totals:
        return Totals() if self._core is None else Totals(**self._core.totals())

    def clear_totals(self) -> None:
        """Counting begins anew. What the layer learned stays."""
        self.elsewhere = Counter()
        self._before = Totals()
        self._before.add(self._own_totals(), times=-1)

    @property
    def calibrations(self) -> list[Calibration]:
        """What it knows at this moment, one for each kind of call (heads, head sizes, causal or not)."""
        core = self._core if self._learned is None else self._made()
        return [] if core is None else [Calibration.load(data) for data in core.calibrations()]

    def run(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, with_stats: bool, options: Any
    ) -> _core.CallStats | None:
        """As _core.attention, for views that are ready."""
        core = self._made()
        try:
            stats = core.run(q, k, v, out, lse, with_stats, self.dense, options)
        except ValueError as error:
            raise ValueError(f"layer {self.name}: {error}") from None
        notice = core.notice()
        if notice is not None:
            self._say(notice)
        return stats

    def _say_if_lacking(self) -> None:
        """That the preset has no such layer, and which it has that is called almost so."""
        if self.settings.lacks(self.name):
            try:
                self.settings.preset.layer(self.name)  # type: ignore[union-attr]
            except PresetError as error:
                self._say(f"{error}; this layer skips nothing")

    def _say(self, notice: str) -> None:
        warnings.warn(f"sparge, layer {self.name}: {notice}", LayerWarning, stacklevel=3)

    def pass_by(self, obstacle: Obstacle) -> None:
        """Notes that PyTorch has to compute a call of this layer."""
        self.elsewhere[obstacle.reason] += 1

    @property
    def may_skip(self) -> bool:
        """Whether only the size of its calls decides if anything is left out."""
        settings = self.settings
        if settings.preset is not None:  # whether it is for calls of this kind, the layer says itself
            return False
        return 0 not in (settings.target_l2, settings.target_l1) and not self.dense

    def whole(self) -> _attention.Options:
        """Options of sparge.attention for a layer that computes every tile, without having to measure; else none."""
        settings = self.settings
        exact = 0 in (settings.target_l2, settings.target_l1)
        if settings.preset is not None or not (exact or self.dense):
            return {}
        return {"select": "all", "pv_skip": "off", "precision": settings.precision or ("fp32" if exact else "int8")}

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        return_lse: bool = False,
        return_stats: bool = False,
        **options: Unpack[_attention.Options],
    ) -> Any:
        """As sparge.attention, with those options that say what is computed; how exactly is the layer's to choose. Its
        keys stay packed while a causal prompt comes in parts: the last so many queries, against ever more keys."""
        return _attention.attend(self.run, q, k, v, out, return_lse, return_stats, options)


def by_handle(handle: int) -> Layer | None:
    """None for handles of layers that are gone, and for 0: every call for itself."""
    return _by_handle.get(handle)


def summary(layers: Iterable[Layer]) -> str:
    """A table of the layers that were called: calls, their time, about what they would have taken with every tile, the
    tiles left out, and the errors that are estimated: the mean over a layer's heads, and what none of them is likely to
    exceed. Errors of single heads are known less well (docs/accuracy.md). Then what PyTorch computed instead, and why."""
    layers = [layer for layer in layers if layer.totals.calls or layer.elsewhere]
    lines = [f"{'layer':<40} {'calls':>6} {'ms':>9} {'dense ms':>9} {'skipped':>8} {'error':>7} {'at most':>7}"]
    total, dense_ms = Totals(), 0.0
    for layer in layers:
        t = layer.totals
        total.add(t)
        dense_ms += t.dense_ms
        heads = [c.head(h) for c in layer.calibrations for h in range(c.heads)]
        sparse = [h for h in heads if h.state == "sparse"]
        mean = sum(h.pv_error for h in sparse) / max(len(sparse), 1)
        estimate = f"{mean:7.4f} {max(h.limit for h in sparse):7.4f}" if sparse else f"{'-':>7} {'-':>7}"
        lines.append(f"{layer.name:<40} {_figures(t, t.dense_ms)} {estimate}")
    lines.append(f"{'all':<40} {_figures(total, dense_ms)}")
    elsewhere = counted(layers)
    if elsewhere:
        lines.append(f"PyTorch computed {elsewhere}")
    return "\n".join(lines)


def _figures(t: Totals, dense_ms: float) -> str:
    return f"{t.calls:>6} {t.time_ms:>9.1f} {dense_ms:>9.1f} {t.sparsity:>8.1%}"

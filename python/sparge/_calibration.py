"""Error bounds instead of parameters: one calibration per layer."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from . import _core


def check_numbers(floats: dict[str, Any], integers: dict[str, Any]) -> None:
    """That they are numbers, by name; a bound may be None. What a binding says of others names no argument."""
    for name, value in floats.items():
        if value is not None and not isinstance(value, numbers.Real):
            raise TypeError(f"{name}={value!r} is no float")
    for name, value in integers.items():
        if not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}={value!r} is no int")
    seed = integers.get("seed", 0)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} is outside 0..2^63-1")


@dataclass(frozen=True)
class HeadEstimate:
    """What is in force for a head, and what was measured of it: estimates, with their standard errors (`_se`)."""

    state: str  # "unknown": not measured yet, dense; "sparse"; "dense": nothing faster met the bounds
    precision: str
    theta: float
    tau: float
    pv_skip: float
    samples: int
    measure: str  # "l2" or "l1": of the next four, and of limit
    error: float  # of skipping, without PV skip
    error_se: float
    pv_error: float  # with it
    pv_error_se: float
    known: bool  # whether pv_error is within 1.3 times of the true one; if not, all that is known is
    limit: float  # below which it is, in 19 of 20 heads
    round_l1: float
    round_l1_se: float
    sparsity: float
    work: float


class Calibration(_core.Calibration):
    """What an application keeps per layer: `attention(..., calibration=c)` measures a little beside its work and chooses,
    per head, the fastest setting within the bounds. Safe to use from several threads; can be pickled."""

    def __init__(
        self,
        heads: int,
        *,
        target_l2: float | None = None,
        pv_l2: float | None = None,
        target_l1: float | None = None,
        pv_l1: float | None = None,
        round_l1: float | None = None,
        seed: int = 0,
    ) -> None:
        """heads: query heads. target_l2: relative L2 error per head that skipping may cause; pv_l2: the same with PV skip
        (default 1.25 target_l2); target_l1, pv_l1: bounds of the relative L1 error instead; round_l1: error of 8-bit
        arithmetic beyond which a head takes 16 bits."""
        bounds = {"target_l1": target_l1, "pv_l1": pv_l1, "target_l2": target_l2, "pv_l2": pv_l2, "round_l1": round_l1}
        check_numbers(bounds, {"heads": heads, "seed": seed})
        super().__init__(heads, **bounds, seed=seed)

    @classmethod
    def load(cls, data: bytes, heads: int | None = None) -> Calibration:
        """From the bytes of `save`, which know their number of heads; `heads`, if given, must be that."""
        self = cls.__new__(cls)
        _core.Calibration.__init__(self, data)
        if heads is not None and heads != self.heads:
            raise ValueError(f"heads={heads}: the saved calibration has {self.heads}")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).load, (self.save(),)

    def head(self, head: int) -> HeadEstimate:  # type: ignore[override]
        """What is in force for this query head, and its estimates."""
        return HeadEstimate(**super().head(head))

    def __repr__(self) -> str:
        states = [self.head(h).state for h in range(self.heads)]
        counts = ", ".join(f"{states.count(s)} {s}" for s in ("sparse", "dense", "unknown") if s in states)
        return f"<sparge.Calibration of {self.heads} heads: {counts}>"

"""Presets of `sparge tune` (docs/tuning.md): parameters per layer and head."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Union

from . import _core


class PresetError(ValueError):
    """A preset that cannot be read, or has no such layer."""


@dataclass(frozen=True)
class PresetLayer:
    """What a layer was tuned for, and for each head precision, select, theta, tau and pv_skip."""

    name: str
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    heads: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Preset:
    """Read with `Preset.read`; layers are matched by exact name."""

    path: str
    data: bytes = field(repr=False)  # the file's
    core: _core.Preset = field(init=False, repr=False, compare=False)
    layers: dict[str, PresetLayer] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        try:
            core = _core.Preset(self.data, self.path)
        except ValueError as error:
            raise PresetError(str(error)) from None
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "layers", {name: PresetLayer(name, **core.layer(name)) for name in core.names()})

    def __reduce__(self) -> tuple[Any, ...]:
        return Preset, (self.path, self.data)

    @classmethod
    def read(cls, path: Union[str, os.PathLike[str], Preset]) -> Preset:
        if isinstance(path, Preset):
            return path
        with open(path, "rb") as file:
            return cls(os.fspath(path), file.read())

    def layer(self, name: str) -> PresetLayer:
        """PresetError with the names most like it, if there is none of this name."""
        try:
            return PresetLayer(name, **self.core.layer(name))
        except ValueError as error:
            raise PresetError(str(error)) from None

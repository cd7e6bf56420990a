"""Presets of `sparge tune` (docs/tuning.md): parameters per layer and head."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from typing import Any, Union


class PresetError(ValueError):
    """A preset that cannot be read, or does not fit the model."""


@dataclass(frozen=True)
class PresetLayer:
    name: str
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    options: dict[str, Any]  # of sparge.attention

    def check(self, q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, causal: bool) -> None:
        """Raises unless these shapes are those the layer was tuned for."""
        for field, value in (
            ("q_heads", q_heads),
            ("kv_heads", kv_heads),
            ("qk_dim", qk_dim),
            ("v_dim", v_dim),
            ("causal", causal),
        ):
            if getattr(self, field) != value:
                raise PresetError(f"preset, layer {self.name}: {field}={getattr(self, field)}, the model has {value}")


@dataclass(frozen=True)
class Preset:
    """Read with `Preset.read`; layers are matched by exact name."""

    path: str
    layers: dict[str, PresetLayer]

    @classmethod
    def read(cls, path: Union[str, os.PathLike[str], Preset]) -> Preset:
        if isinstance(path, Preset):
            return path
        name = os.fspath(path)
        try:
            with open(name, encoding="utf-8") as file:
                content = json.load(file)
        except ValueError as error:
            raise PresetError(f"{name}: is no JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != "sparge-preset":
            raise PresetError(f"{name}: is no sparge preset")
        if content.get("version") not in (1, 2):  # what differs between them is not read here
            raise PresetError(f"{name}: version {content.get('version')!r} is neither 1 nor 2")
        if "partial" in content:
            raise PresetError(f"{name}: is not finished; run `sparge tune` again")
        try:
            layers = {key: _layer(key, value, content["predictor"]) for key, value in content["layers"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise PresetError(f"{name}: is damaged ({error!r})") from None
        return cls(name, layers)

    def layer(self, name: str) -> PresetLayer:
        found = self.layers.get(name)
        if found is None:
            similar = difflib.get_close_matches(name, self.layers, 3, 0) or ["none"]
            raise PresetError(f"{self.path}: has no layer {name}; most like it: {', '.join(similar)}")
        return found


def _layer(name: str, content: dict[str, Any], predictor: str) -> PresetLayer:
    heads = content["heads"]
    if len(heads) != content["q_heads"]:
        raise PresetError(f"layer {name}: {len(heads)} heads, q_heads={content['q_heads']}")
    rules = {head["select"] for head in heads} - {"all"}
    if len(rules) > 1:
        raise PresetError(f"layer {name}: selects by more than one rule: {', '.join(sorted(rules))}")
    options: dict[str, Any] = {"precision": [head["precision"] for head in heads]}
    if rules:  # a dense head has tau 1 and no PV skip, which says the same under any rule
        options.update(
            select=rules.pop(),
            predictor=predictor,
            theta=[head["theta"] for head in heads],
            tau=[head["tau"] for head in heads],
            pv_skip=[head["pv_skip"] for head in heads],
        )
    else:
        options.update(select="all", pv_skip="off")
    shape = (content["q_heads"], content["kv_heads"], content["qk_dim"], content["v_dim"], content["causal"])
    return PresetLayer(name, *shape, options)

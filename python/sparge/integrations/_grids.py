"""Where the image or video tokens of diffusers' transformers lie, and their order along a Hilbert curve."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Container, Mapping, Sequence

import torch

from .._attention import token_order


@dataclass(frozen=True)
class Grid:
    """T x H x W tokens in raster order, with text tokens before or after them."""

    sides: tuple[int, int, int]
    texts: Container[int] = (0,)  # numbers of text tokens that a sequence with this grid may have
    after: bool = False  # the text comes after the grid

    @property
    def cells(self) -> int:
        t, h, w = self.sides
        return t * h * w

    def text_tokens(self, tokens: int) -> int | None:
        """Of a sequence of so many tokens; None if the grid is not in it (text alone, part of a sequence)."""
        text = tokens - self.cells
        return text if text in self.texts else None


GridFunction = Callable[[Any, Mapping[str, Any]], "Grid | None"]
"""The grid from a transformer's config and the arguments of its forward, by name; None: not to be found."""


@dataclass(frozen=True)
class Model:
    """What is known of a class of transformers."""

    grid: GridFunction
    ascending: bool = False  # `timestep` goes up while denoising


def raster_sides(places: torch.Tensor) -> tuple[int, int, int] | None:
    """Sides of the grid whose tokens, in raster order, have these places (tokens, 3); None if they are of no grid."""
    t, h, w = (int(torch.unique(places[:, axis]).numel()) for axis in range(3))
    if t * h * w != places.shape[0]:
        return None
    by_axis = places.reshape(t, h, w, 3)
    expected = (by_axis[:, :1, :1, 0], by_axis[:1, :, :1, 1], by_axis[:1, :1, :, 2])
    same = all(bool((by_axis[..., axis] == places_there).all()) for axis, places_there in enumerate(expected))
    return (t, h, w) if same else None


def _text(arguments: Mapping[str, Any]) -> int:
    return int(arguments["encoder_hidden_states"].shape[1])


def _flux(config: Any, arguments: Mapping[str, Any]) -> Grid | None:
    ids = arguments["img_ids"]
    sides = raster_sides(ids[0] if ids.dim() == 3 else ids)
    return None if sides is None else Grid(sides, (_text(arguments),))


def _sd3(config: Any, arguments: Mapping[str, Any]) -> Grid:
    height, width = arguments["hidden_states"].shape[-2:]
    # 0: its second attention of a block (SD3.5) is of the image alone.
    return Grid((1, height // config.patch_size, width // config.patch_size), (0, _text(arguments)), after=True)


def _cogvideox(config: Any, arguments: Mapping[str, Any]) -> Grid:
    frames, _, height, width = arguments["hidden_states"].shape[1:]
    time = getattr(config, "patch_size_t", None) or 1
    return Grid((-(-frames // time), height // config.patch_size, width // config.patch_size), (_text(arguments),))


def _mochi(config: Any, arguments: Mapping[str, Any]) -> Grid:
    frames, height, width = arguments["hidden_states"].shape[2:]
    # Of the text, each prompt of the batch keeps the tokens that its mask shows.
    texts = range(_text(arguments) + 1)
    return Grid((frames, height // config.patch_size, width // config.patch_size), texts, after=True)


def _wan(config: Any, arguments: Mapping[str, Any]) -> Grid:
    frames, height, width = arguments["hidden_states"].shape[2:]
    time, rows, columns = config.patch_size
    return Grid((frames // time, height // rows, width // columns))


def _hunyuan_video(config: Any, arguments: Mapping[str, Any]) -> Grid:
    frames, height, width = arguments["hidden_states"].shape[2:]
    sides = (frames // config.patch_size_t, height // config.patch_size, width // config.patch_size)
    return Grid(sides, (_text(arguments),), after=True)


def _ltx(config: Any, arguments: Mapping[str, Any]) -> Grid | None:
    coordinates = arguments.get("video_coords")
    if coordinates is not None:  # with tokens of given frames among them there may be no grid
        sides = raster_sides(coordinates[0].transpose(0, 1))
        return None if sides is None else Grid(sides)
    return Grid((int(arguments["num_frames"]), int(arguments["height"]), int(arguments["width"])))


MODELS: dict[str, Model] = {
    "FluxTransformer2DModel": Model(_flux),
    "SD3Transformer2DModel": Model(_sd3),
    "CogVideoXTransformer3DModel": Model(_cogvideox),
    "MochiTransformer3DModel": Model(_mochi, ascending=True),
    "WanTransformer3DModel": Model(_wan),
    "HunyuanVideoTransformer3DModel": Model(_hunyuan_video),
    "LTXVideoTransformer3DModel": Model(_ltx),
}


def known_model(transformer: torch.nn.Module) -> Model | None:
    """By name of the class or of one that it is derived from: importing them all would take seconds."""
    return next((MODELS[c.__name__] for c in type(transformer).__mro__ if c.__name__ in MODELS), None)


@functools.lru_cache(maxsize=32)
def hilbert_index(sides: Sequence[int], text: int, after: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices that put a sequence in Hilbert order, text left where it is, and those that undo it."""
    with torch.inference_mode(False):  # kept: must serve outside of the caller's inference mode, too
        order = torch.from_numpy(token_order(sides))
        words = torch.arange(text)
        order = torch.cat([order, words + order.numel()] if after else [words, order + text])
        return order, torch.argsort(order)

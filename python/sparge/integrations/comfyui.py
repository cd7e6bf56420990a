"""ComfyUI: a node that gives a model sparse attention, on the CPU (`--cpu`).

Make a file `custom_nodes/sparge_node.py` in ComfyUI's folder with this line, and start it anew:

    from sparge.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

The node "Sparge Attention" (model_patches) stands between the model and the sampler. What it did is logged whenever a prompt has
brought each layer that it runs four more calls; what it left to ComfyUI's own attention is logged once for each reason.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Tuple

import torch

from .. import torch as sparge_torch
from .. import _core
from .._elsewhere import REMEDIES, Obstacle
from .._layers import Layer, Settings, summary

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "Override", "SpargeAttention"]

_log = logging.getLogger(__name__)
_REPORT_CALLS = 4  # of each layer
Tensors = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v


class Override:
    """transformer_options["optimized_attention_override"]: called with ComfyUI's attention function and its arguments."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layers: dict[tuple[Any, ...], Layer] = {}
        self._said: set[str] = set()
        self._reported: dict[int, int] = {}  # by handle of a layer: its calls when the last table was made
        self._last: dict[int, int] = {}  # the same: which call of all was its last one
        self._calls = 0

    def __call__(
        self,
        attention: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        scale = kwargs.get("scale")
        by_heads = (q, k, v) if skip_reshape else self._by_heads(q, k, v, heads)
        mask_of_scores = _with_heads(mask)
        if kwargs.get("low_precision_attention", True) is False:
            obstacle: Obstacle | None = Obstacle("precision", "the model asks for full precision here")
        else:
            obstacle = sparge_torch._obstacle(*by_heads, mask_of_scores, 0.0, scale, bool(kwargs.get("enable_gqa", False)))
        layer = self._layer(by_heads, kwargs.get("transformer_options") or {})
        if obstacle is not None:
            layer.pass_by(obstacle)
            self._say(obstacle)
            return attention(
                q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape, **kwargs,
            )  # fmt: skip
        out = sparge_torch.attend(*by_heads, mask=mask_of_scores, query_offset=0, scale=scale, layer=layer)
        self._report(layer)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    @staticmethod
    def _by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> Tensors:
        """(batch, tokens, heads * size) as (batch, heads, tokens, size); keys may have fewer heads of the same size."""
        size = q.shape[-1] // heads
        q, k, v = (tensor.unflatten(-1, (-1, size)).transpose(1, 2) for tensor in (q, k, v))
        return q, k, v

    def _layer(self, tensors: Tensors, options: dict[str, Any]) -> Layer:
        """That of the block that is running, which ComfyUI names in its options; of calls without a name nothing is remembered."""
        place = tuple(str(options[name]) for name in ("block", "block_type", "block_index", "transformer_index") if name in options)
        key = (*place, *tensors[0].shape[1:], tensors[1].shape[-2])
        if key not in self.layers:
            name = "/".join(place) or "attention"
            self.layers[key] = Layer(f"{name} {tensors[0].shape[-2]}x{tensors[1].shape[-2]}", self.settings, remembers=bool(place))
        return self.layers[key]

    def _say(self, obstacle: Obstacle) -> None:
        if obstacle.reason in self._said:
            return
        self._said.add(obstacle.reason)
        remedy = f" ({REMEDIES[obstacle.reason]})" if obstacle.reason in REMEDIES else ""
        _log.warning("sparge: attention stays with ComfyUI: %s%s", obstacle.text, remedy)

    def _report(self, layer: Layer) -> None:
        """After a call of this layer. Those that were not called since its call before are not running: they are of pictures
        of another size, which may never come again."""
        before = self._last.get(layer.handle, 0)
        self._calls += 1
        self._last[layer.handle] = self._calls
        calls = {known.handle: known.totals.calls for known in self.layers.values()}
        new = [calls[handle] - self._reported.get(handle, 0) for handle, last in self._last.items() if last > before]
        if min(new) >= _REPORT_CALLS:
            self._reported = calls
            _log.info("sparge\n%s", summary(known for known in self.layers.values() if calls[known.handle]))


def _with_heads(mask: torch.Tensor | None) -> torch.Tensor | None:
    """ComfyUI's masks: (queries, keys), (batch, queries, keys), or with heads."""
    if mask is not None and mask.dim() == 2:
        mask = mask[None]
    return mask[:, None] if mask is not None and mask.dim() == 3 else mask


class SpargeAttention:
    """The node."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"
    DESCRIPTION = "Attention that skips what does not matter, within an error that you name. On the CPU."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        error = {"default": _core.TARGET_L2, "min": 0.0, "max": 1.0, "step": 0.005, "round": False}
        return {
            "required": {
                "model": ("MODEL",),
                "target_l2": ("FLOAT", {**error, "tooltip": "relative L2 error per head that skipping may cause; 0: exact"}),
                "precision": (["int8", "int16", "fp32"], {"tooltip": "of the arithmetic, at least"}),
            }
        }

    def patch(self, model: Any, target_l2: float, precision: Any) -> tuple[Any]:
        patched = model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        if "optimized_attention_override" in options:
            raise ValueError("this model has another node's attention already: use one of them")
        # A copy: clones of ComfyUI share what they do not change.
        override = Override(Settings(target_l2=target_l2, precision=precision))
        patched.model_options["transformer_options"] = {**options, "optimized_attention_override": override}
        return (patched,)


NODE_CLASS_MAPPINGS = {"SpargeAttention": SpargeAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SpargeAttention": "Sparge Attention"}

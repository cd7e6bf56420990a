"""vllm-omni: sparse attention of its diffusion models, as the plugin `sparge` of its backend SPARSE_ATTN.

    vllm-omni serve MODEL --diffusion-attention-config \\
        '{"per_role": {"self": {"backend": "SPARSE_ATTN", "extra": {"backend": "sparge", "params": {"sparge": {"target_l2": 0.05}}}}}}'

Installing this package registers it (entry points, group vllm_omni.sparse_attn). What stands under "sparge" are the fields of
sparge.torch.Settings, and `dense_steps`, the denoising steps that compute everything at first. Models on the CPU only; a call that cannot
be computed here fails, and says why. vllm-omni does not tell a plugin which layer calls, so each call calibrates for itself.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch

from .. import torch as sparge_torch
from .._layers import Layer, Settings

__all__ = ["attention"]


@functools.lru_cache(maxsize=16)
def _layers(settings: str) -> tuple[Layer, Layer, int]:
    """(the layer for these settings, one that computes everything, how many steps do so)."""
    given = json.loads(settings)
    dense_steps = given.pop("dense_steps", 0)
    if not isinstance(dense_steps, int) or isinstance(dense_steps, bool) or dense_steps < 0:
        raise ValueError(f"dense_steps={dense_steps!r} is no number of steps")
    if "preset" in given:
        raise ValueError("preset: layers are matched by name, which vllm-omni does not tell a plugin")
    try:
        sparse = Layer("vllm-omni", Settings(**given), remembers=False)
    except TypeError as error:
        raise TypeError(f"params['sparge']: {error}") from None
    everything = Layer("vllm-omni, dense steps", Settings(**given), remembers=False)
    everything.dense = True
    return sparse, everything, dense_steps


def _largest(value: Any) -> int | None:
    """Of a number, or of one per sample."""
    return None if value is None else int(torch.as_tensor(value).max())


def _grid(params: dict[str, Any], tokens: int) -> tuple[int, int, int, int, int] | None:
    """The sides of the video that the tokens are, if they are one and the framework says so."""
    sides = []
    for latent, patch in zip(_sample(params.get("latent_shape")), _sample(params.get("patch_size"))):
        if patch < 1:
            return None
        sides.append(latent // patch)
    if len(sides) != 3 or math.prod(sides) != tokens:
        return None
    return sides[0], sides[1], sides[2], 0, 0


def _sample(value: Any) -> list[int]:
    """Three numbers, of all samples the same; else nothing."""
    if value is None:
        return []
    rows = torch.as_tensor(value).reshape(-1, 3)
    return [int(side) for side in rows[0]] if bool((rows == rows[0]).all()) else []


def _mask(params: dict[str, Any]) -> torch.Tensor | None:
    """(batch, keys) says which tokens there are; else it has the shape of scores."""
    mask = params.get("attn_mask")
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    return mask if mask.is_floating_point() else mask.bool()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: dict[str, Any], is_causal: bool, softmax_scale: float
) -> torch.Tensor:
    """The plugin's function: tensors and result are (batch, tokens, heads, head size)."""
    sparse, everything, dense_steps = _layers(json.dumps(params.get("sparge") or {}, sort_keys=True))
    step = _largest(params.get("denoise_step_idx"))
    if dense_steps and step is None:
        raise ValueError(f"dense_steps={dense_steps}: this model does not tell its denoising steps")
    layer = everything if step is not None and step < dense_steps else sparse
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = _mask(params)
    obstacle = sparge_torch._obstacle(q, k, v, mask, 0.0, softmax_scale, enable_gqa=True)
    if obstacle is not None:
        raise NotImplementedError(f"sparge: {obstacle.text}")
    if is_causal and mask is not None:
        raise ValueError("attn_mask and is_causal=True exclude each other")
    grid = _grid(params, query.shape[1]) if query.shape[1] == key.shape[1] and not is_causal and mask is None else None
    return sparge_torch.attend(
        query, key, value, mask=mask, causal=is_causal, query_offset=0, scale=softmax_scale, nhd=True, grid=grid, layer=layer
    )


attention.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]

"""The functions of the research packages spas_sage_attn and sageattention, with their names and arguments, for tensors on the CPU
and on NVIDIA GPUs (docs/cuda.md; no mask and no sparsity there yet).

    pip install 'sparge[compat]'                            # modules spas_sage_attn and sageattention, for programs that import them
    from sparge.compat import spas_sage2_attn_meansim_topk_cuda      # or without them

Thresholds are numbers, or tensors with one for each head, in the units of those packages. Different from there: causal means that no query
sees a later key, head sizes and lengths are free, heads of keys may be shared, results have q's type unless `output_dtype` says otherwise,
sparsity is that of the visible tiles, and `attn_mask` counts. `smooth_k` changes nothing: keys are always centred, which softmax does
not see. Better than any threshold is an error: `sparge.attention(q, k, v, target_l2=0.05)`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Union

import torch

from ._attention import attention

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "sageattn",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

Threshold = Union[float, torch.Tensor]
Layout = Literal["HND", "NHD"]
_KERNEL_OPTIONS = {"pv_accum_dtype", "qk_quant_gran", "quantization_backend", "smooth_k", "smooth_v"}


def _number(threshold: Threshold, factor: float = 1.0) -> Any:
    if isinstance(threshold, torch.Tensor):
        return [factor * value for value in threshold.flatten().tolist()]
    return factor * threshold


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    pvthreshd: Threshold,
    attention_sink: bool,
    tensor_layout: Layout,
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
    return_lse: bool,
    **selection: Any,
) -> Any:
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p={dropout_p}: sparge is for inference")
    options: dict[str, Any] = {"layout": tensor_layout, "scale": scale, **selection}
    if is_causal:
        options.update(causal=True, query_offset=0)
    if selection["select"] in ("cdf", "topk"):
        options.update(predictor="paper", keep_sink=attention_sink)
    options["pv_skip"] = _number(pvthreshd, math.log(2))  # theirs counts powers of two
    wants_lse = return_lse and not return_sparsity  # which hides the other there, too
    given = attention(q, k, v, return_stats=return_sparsity, return_lse=wants_lse, **options)
    out, *more = given if return_sparsity or wants_lse else (given,)
    if output_dtype is not None:
        out = out.to(output_dtype)
    if return_sparsity:
        return out, more[0].sparsity
    return (out, *more) if wants_lse else out


def spas_sage2_attn_meansim_topk_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = -0.1,
    cdfthreshd: Threshold | None = None,
    topk: Threshold | None = 0.35,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """Keeps the share `topk` of the tiles; or, with `cdfthreshd` and topk=None, that share of the predicted attention."""
    if (topk is None) == (cdfthreshd is None):
        raise ValueError(f"topk={topk}, cdfthreshd={cdfthreshd}: give one of them, and None for the other")
    selection = {"select": "cdf", "tau": _number(cdfthreshd)} if topk is None else {"select": "topk", "topk": _number(topk)}  # type: ignore[arg-type]
    return _attend(
        q, k, v, dropout_p, is_causal, scale, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity,
        return_lse, theta=_number(simthreshd1), mask=attn_mask, **selection,
    )  # fmt: skip


def spas_sage2_attn_meansim_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = 0.6,
    cdfthreshd: Threshold = 0.98,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """Keeps the tiles that hold the share `cdfthreshd` of the predicted attention."""
    return spas_sage2_attn_meansim_topk_cuda(
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, None, pvthreshd, attention_sink,
        tensor_layout, output_dtype, return_sparsity, return_lse,
    )  # fmt: skip


# What these computed in other types there is the same here.
spas_sage_attn_meansim_topk_cuda = spas_sage2_attn_meansim_topk_cuda
spas_sage_attn_meansim_cuda = spas_sage2_attn_meansim_cuda


def block_sparse_sage2_attn_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_id: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """Computes the tiles of 128 queries x 64 keys whose entry in mask_id (batch, heads, tiles, tiles) is not 0; None: all."""
    if attention_sink and mask_id is not None:
        mask_id = mask_id.clone()
        mask_id[..., 0] = 1
    chosen = {"select": "all"} if mask_id is None else {"select": "map", "map": (mask_id != 0).contiguous()}
    return _attend(
        q, k, v, dropout_p, False, scale, pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity, return_lse,
        **chosen,
    )


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: Layout = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    attn_mask: torch.Tensor | None = None,
    **kernel: Any,
) -> Any:
    """Every tile, in 8-bit integers; with the log of the sum of exponentials (batch, heads, queries) if asked for.
    kernel: options of the kernels there, which change nothing here."""
    for name in kernel.keys() - _KERNEL_OPTIONS:
        raise TypeError(f"sageattn has no argument {name}={kernel[name]!r}")
    causal: dict[str, Any] = {"causal": True, "query_offset": 0} if is_causal else {}
    return attention(
        q, k, v, layout=tensor_layout, scale=sm_scale, mask=attn_mask, select="all", pv_skip="off", precision="int8",
        return_lse=return_lse, **causal,
    )  # fmt: skip

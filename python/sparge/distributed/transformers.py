"""A long prompt over several ranks, with a model of transformers (causal, Llama-like): each rank reads its part.

    import sparge.distributed.transformers as sdt

    read = sdt.prefill(model, input_ids)                     # the same model and ids on all ranks
    model.generate(..., past_key_values=read.cache)          # on any rank: the cache is whole on each
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from .._layers import Settings
from ..integrations import transformers as one_rank
from . import TIMEOUT_S, Layer, Stats, positions, unshard
from . import shard as cut

__all__ = ["Prefill", "prefill"]

_NAME = "sparge_ranks"
_ATTRIBUTE = "_sparge_ranks_layer"


@dataclass
class _Reading:
    """The prompt that is being read in this process."""

    how: dict[str, Any]
    stats: list[Stats]


_reading: _Reading | None = None


@dataclass
class Prefill:
    """What a rank knows of a prompt that all have read."""

    cache: DynamicCache
    """Keys and values of the whole prompt, on every rank."""
    hidden: torch.Tensor
    """Last hidden states of this rank's tokens, (batch, tokens, size)."""
    positions: torch.Tensor
    """Which tokens these are."""
    stats: list[Stats]
    """Per layer."""


def prefill(
    model: Any,
    input_ids: torch.Tensor,
    *,
    group: Any = None,
    schedule: str = "ring",
    shard: str = "zigzag",
    timeout: float = TIMEOUT_S,
    **settings: Any,
) -> Prefill:
    """Reads a prompt with all ranks of a group, which call with the same model and the same ids, (batch, tokens) without
    padding. `settings` (sparge.Settings) begin anew where they differ from those before. schedule="all_gather": the
    result of one rank, choices included; "ring" moves less and holds less, and rounding may lead to other choices."""
    _check(model, input_ids)
    chosen = Settings(**settings)
    for name, module in model.named_modules():
        known = module.__dict__.get(_ATTRIBUTE)
        if one_rank._attends(module) and (known is None or known.settings != chosen):
            setattr(module, _ATTRIBUTE, Layer(name, chosen))
    places = positions(input_ids.shape[1], group=group, shard=shard)
    cache = DynamicCache(config=model.config)
    how = {"group": group, "schedule": schedule, "shard": shard, "timeout": timeout}
    with _attending(model, _Reading(how, [])) as reading, torch.no_grad():
        body = getattr(model, model.base_model_prefix, model)
        ids = cut(input_ids, group=group, shard=shard, dim=1)
        where = places[None].expand(len(ids), -1)
        hidden = body(input_ids=ids, position_ids=where, past_key_values=cache, use_cache=True).last_hidden_state
    for layer in cache.layers:
        layer.keys = unshard(layer.keys, group=group, shard=shard, timeout=timeout)
        layer.values = unshard(layer.values, group=group, shard=shard, timeout=timeout)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = input_ids.shape[1]
    return Prefill(cache, hidden, places, reading.stats)


def _check(model: Any, input_ids: torch.Tensor) -> None:
    config = model.config
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: shape {tuple(input_ids.shape)} is not (batch, tokens)")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"model: attention in chunks of {config.attention_chunk_size} tokens is not for several ranks")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"model: layers of {', '.join(sorted(kinds))} are not for several ranks; full_attention is")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(f"model: a sliding window of {config.sliding_window} tokens is not for several ranks: its cache is cut")
    if not any(one_rank._attends(module) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no module that looks like attention")


@contextlib.contextmanager
def _attending(model: Any, reading: _Reading) -> Iterator[_Reading]:
    global _reading
    if _reading is not None:
        raise RuntimeError("a prompt is being read already in this process")
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    _reading = reading
    try:
        yield reading
    finally:
        _reading = None
        model.set_attn_implementation(before)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Who sees whom is said by positions in the whole prompt, which no rank has."""
    return None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers."""
    if _reading is None:
        raise RuntimeError(f"attn_implementation={_NAME!r} is for sparge.distributed.transformers.prefill alone")
    if attention_mask is not None or dropout > 0 or kwargs.get("position_bias") is not None:
        raise ValueError("a mask, dropout or a position bias is not for several ranks")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None}
    if s_aux is not None:
        options["sink_logits"] = s_aux.tolist()
    out, stats = module.__dict__[_ATTRIBUTE].attention(
        query, key, value, causal=True, return_stats=True, **_reading.how, **options
    )
    _reading.stats.append(stats)
    return out.transpose(1, 2), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)

"""Hugging Face transformers: attn_implementation="sparge".

    import sparge.integrations.transformers as st    # makes the name known
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="sparge")

Each attention module keeps a calibration of its own. Other settings than the default, or a preset:
`st.configure(model, target_l2=0.02)`, `st.configure(model, preset="preset.json")`. What happened: `print(st.summary(model))`.
Long answers: `model.generate(ids, past_key_values=st.Cache(model.config))`, which does not copy all keys for every token.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from .. import torch as sparge_torch
from .._elsewhere import Obstacle, warn_unused
from .._layers import Layer, Settings
from ._cache import Cache

__all__ = ["Cache", "configure", "layers", "register", "summary"]

_log = logging.getLogger(__name__)
_NAME = "sparge"
_ATTRIBUTE = "_sparge_layer"
_defaults = Settings()


def register(**settings: Any) -> None:
    """Makes attn_implementation="sparge" known, as importing this module does, too. **settings (sparge.torch.Settings) are
    those of models that are not configured by themselves; presets go by the names of layers, so they need `configure`."""
    global _defaults
    if settings.get("preset") is not None:
        raise ValueError("preset: layers are matched by name; give it to configure(model, preset=...)")
    _defaults = Settings(**settings)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _make_mask)


def configure(model: torch.nn.Module, **settings: Any) -> dict[str, Layer]:
    """Gives every attention module of the model a new Layer with these settings (sparge.torch.Settings), and returns them
    by module name: calibrations begin anew. With a preset, layers that it does not name skip nothing, and say so."""
    chosen = Settings(**settings)
    made = {}
    for name, module in model.named_modules():
        if _attends(module):
            made[name] = Layer(name, chosen)
            setattr(module, _ATTRIBUTE, made[name])
    if not made:
        raise ValueError(f"{type(model).__name__} has no module that looks like attention")
    return made


def _attends(module: torch.nn.Module) -> bool:
    """Modules that call the attention function: classes named so, without another one inside."""
    inside = (m for m in module.modules() if m is not module)
    return "Attention" in type(module).__name__ and not any("Attention" in type(m).__name__ for m in inside)


def layers(model: torch.nn.Module) -> dict[str, Layer]:
    """The layers that the model's attention modules have so far, by module name."""
    found = {}
    for name, module in model.named_modules():
        layer = module.__dict__.get(_ATTRIBUTE)
        if layer is not None:
            found[name] = layer
    return found


def summary(model: torch.nn.Module) -> str:
    """A table of the layers that were called, as sparge.torch.summary."""
    return sparge_torch.summary(layers(model).values())


# ------------------------------------------------------------------ masks


class Mask(torch.Tensor):
    """A bool mask (batch, 1, queries, keys) by its structure, without an entry for every query and key. Models pass it as
    their `attention_mask` from `_make_mask` to `_attention`; any operation on it is done on the entries, written out."""

    causal: bool
    query_offset: int  # query i sees keys j <= i + query_offset
    window: int  # 0, or also j > i + query_offset - window
    padding: torch.Tensor | None  # bool (batch, keys), false where no token is

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], causal: bool, query_offset: int, window: int, padding: torch.Tensor | None
    ) -> Mask:
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool)
        mask.causal, mask.query_offset, mask.window, mask.padding = causal, query_offset, window, padding
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        padded = "" if self.padding is None else ", padded"
        return f"Mask({tuple(self.shape)}, causal={self.causal}, offset={self.query_offset}, window={self.window}{padded})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Mask, Mask.written_out, (args, kwargs or {}))
        return func(*args, **kwargs)

    def is_lower_triangle(self) -> bool:
        """Whether query i sees the keys up to i, and nothing else is said."""
        aligned = self.query_offset == 0 and self.shape[2] == self.shape[3]
        return self.causal and aligned and self.window == 0 and self.padding is None

    def written_out(self) -> torch.Tensor:
        """The same with all its entries."""
        queries, keys = self.shape[2:]
        behind = torch.arange(queries)[:, None] + self.query_offset - torch.arange(keys)[None, :]
        visible = torch.ones(self.shape, dtype=torch.bool)
        if self.causal:
            visible &= behind >= 0
        if self.window:
            visible &= behind < self.window
        if self.padding is not None:
            visible &= self.padding[:, None, None, :]
        return visible


def _make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask interface of transformers. Structures that the library knows become a Mask; others are written out."""
    arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs,
    )  # fmt: skip
    if q_length is None or torch.compiler.is_compiling():  # tracing cannot look at the values of masks
        return sdpa_mask(**{key: value for key, value in arguments.items() if value is not None})
    offset = int(q_offset) - kv_offset
    causal = mask_function is causal_mask_function
    window = 0
    if local_size is not None and _is_sliding(mask_function, local_size, offset + kv_offset, q_length, kv_offset, kv_length):
        causal, window = True, local_size
    if not causal and mask_function is not bidirectional_mask_function:
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    shape = (batch_size, 1, q_length, kv_length)
    return Mask(shape, causal, offset, window, _padding(attention_mask, kv_length, kv_offset))


def _padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    return None if bool(padding.all()) else padding


def _is_sliding(
    mask_function: Callable[..., Any], size: int, q_begin: int, queries: int, k_begin: int, keys: int
) -> bool:
    """Whether the function is causal with a window of `size`: mask functions do not say what they are, so some rows of
    it are compared (chunked attention, which also has a local size, differs in them)."""
    q = q_begin + torch.linspace(0, max(queries - 1, 0), min(queries, 16)).long()[:, None]
    k = k_begin + torch.arange(keys)[None, :]
    zero = torch.zeros((), dtype=torch.long)
    try:
        visible = mask_function(zero, zero, q, k)
    except Exception:  # made for scalars, or for one batch only: then it is written out
        return False
    return bool(torch.equal(visible.expand(len(q), keys), (k <= q) & (k > q - size)))


# ------------------------------------------------------------------ attention


def _layer_of(module: torch.nn.Module) -> Layer:
    layer = module.__dict__.get(_ATTRIBUTE)
    if layer is None:
        index = getattr(module, "layer_idx", None)
        layer = Layer(type(module).__name__ if index is None else f"{type(module).__name__}.{index}", _defaults)
        setattr(module, _ATTRIBUTE, layer)
    return layer


def _obstacle(
    tensors: dict[str, torch.Tensor], others: dict[str, Any], dropout: float, position_bias: Any, cache: Any
) -> Obstacle | None:
    """Why the original has to do it."""
    if dropout > 0:
        return Obstacle("dropout", f"dropout={dropout}")
    if position_bias is not None:
        return Obstacle("position bias", "position_bias")
    if cache is not None:
        return Obstacle("paged cache", "a paged cache")
    of_any_type = {name: value for name, value in others.items() if isinstance(value, torch.Tensor)}
    return sparge_torch.obstacle_of(tensors) or sparge_torch.obstacle_of(of_any_type, any_type=True)


_warned: set[str] = set()  # reasons


def _pass_by(module: torch.nn.Module, obstacle: Obstacle) -> None:
    """Counts the call, and warns if nothing but such calls came so far: once for each reason, because there is no end of
    use to wait for."""
    layer = _layer_of(module)
    layer.pass_by(obstacle)
    if obstacle.reason not in _warned and not layer.graders and layer.totals.calls == 0 and warn_unused([layer]):
        _warned.add(obstacle.reason)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: query, key, value (batch, heads, tokens, dim)."""
    others = {"attention_mask": attention_mask, "s_aux": s_aux}
    obstacle = _obstacle({"query": query, "key": key, "value": value}, others, dropout, position_bias, cache)
    if obstacle is not None:
        if softcap is not None or s_aux is not None:
            raise NotImplementedError(f"sparge: {obstacle.text} together with softcap or sinks; use attn_implementation='eager'")
        if not torch.compiler.is_compiling():
            _pass_by(module, obstacle)
        dense = attention_mask
        if isinstance(attention_mask, Mask):
            # Without a mask PyTorch skips what is hidden, and needs no entry for every query and key.
            # (A paged cache may bring more keys than the mask knows.)
            is_causal = obstacle.reason == "gradients" and attention_mask.is_lower_triangle()
            dense = None if is_causal else attention_mask.written_out()
        out, _ = sdpa_attention_forward(
            module, query, key, value, dense, dropout, scaling, is_causal, position_bias=position_bias, cache=cache,
            **kwargs,
        )  # fmt: skip
        if obstacle.reason == "gradients":
            _show(module, query, key, value, attention_mask, scaling, is_causal, out)
        return out, None
    if kwargs.get("output_attentions"):
        _log.warning("attn_implementation='sparge' has no attention weights to return (output_attentions=True)")
    key, value, rule = _rule(module, query, key, value, attention_mask, is_causal)
    out = sparge_torch.attend(  # tokens before heads, which is how the result is wanted
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        nhd=True,
        **rule,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        layer=_layer_of(module),
    )
    return out, None


def _rule(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Keys and values that may be seen, and by whom."""
    if attention_mask is None:
        causal, key, value = _without_mask(module, query, key, value, is_causal)
        return key, value, dict(mask=None, causal=causal, query_offset=0, window=0)
    if not isinstance(attention_mask, Mask):  # written out, a mask says everything
        return key, value, dict(mask=attention_mask[..., : key.shape[2]], causal=False, query_offset=0, window=0)
    mask = None if attention_mask.padding is None else attention_mask.padding[:, None, None, :]
    rule = dict(causal=attention_mask.causal, query_offset=attention_mask.query_offset, window=attention_mask.window)
    return key, value, dict(mask=mask, **rule)


def _show(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    out: torch.Tensor,
) -> None:
    """To those who want the gradients of what this layer attends to."""
    layer = module.__dict__.get(_ATTRIBUTE)
    if layer is None or not layer.graders:
        return
    key, value, rule = _rule(module, query, key, value, attention_mask, is_causal)
    for grader in layer.graders:
        grader(layer, query, key, value, out, scale=scaling, softcap=0.0, sinks=None, grid=None, **rule)


def _without_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool | None
) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """What no mask means, as for sdpa: causal if the module is; keys beyond the queries are then places of a static cache
    that nothing was written to."""
    queries = query.shape[2]
    causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[2] > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    return bool(causal), key, value


def is_model(model: object) -> bool:
    """Whether this module is the one for `model` (sparge.capture asks)."""
    return isinstance(model, PreTrainedModel)


register()

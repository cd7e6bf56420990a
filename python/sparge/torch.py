"""PyTorch: a drop-in for torch.nn.functional.scaled_dot_product_attention, as a custom operator.

    from sparge.torch import scaled_dot_product_attention   # the same signature
    with sparge.torch.sparse(model, target_l2=0.05): ...    # a model, or everything, for a while
    sparge.torch.patch()                                    # everything, from now on
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _arrays, _attention, _core
from ._elsewhere import Obstacle, warn_unused
from ._layers import Layer, Settings, by_handle, summary

__all__ = ["Layer", "Settings", "attend", "current_layer", "patch", "scaled_dot_product_attention", "sparse", "summary", "unpatch"]

_original = F.scaled_dot_product_attention
_library = torch.library.Library("sparge", "DEF")
# NHD: (batch, tokens, heads, dim). layer: the handle of a Layer; 0 = default settings, every call for itself.
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, int query_offset, int window, float scale, "
    "float softcap, Tensor? sinks, bool nhd, int[]? grid, int layer) -> Tensor"
)

_nobody = Layer("nobody", remembers=False)  # handle 0


def _options(causal, query_offset, window, scale, softcap, sinks, nhd, grid):  # type: ignore[no-untyped-def]
    """What is asked, as sparge.attention takes it, but for the mask."""
    options: dict[str, Any] = {"scale": scale}
    if nhd:
        options["layout"] = "NHD"
    if causal:
        options["causal"] = True
    if causal or window:
        options["query_offset"] = query_offset
    if window:
        options["window"] = window
    if softcap:
        options["softcap"] = softcap
    if sinks is not None:
        options["sink_logits"] = sinks.tolist()
    if grid is not None:
        options.update(grid=grid[:3], text_tokens=grid[3], text_after=bool(grid[4]))
    return options


def _attention_cpu(q, k, v, mask, causal, query_offset, window, scale, softcap, sinks, nhd, grid, layer):  # type: ignore[no-untyped-def]
    options = _options(causal, query_offset, window, scale, softcap, sinks, nhd, grid)
    options["threads"] = torch.get_num_threads()
    if causal:
        k, v, mask = _without_unseen(q, k, v, mask, query_offset, -3 if nhd else -2)
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32, torch.float16):
            mask = mask.float()
        if mask.shape[-1] != 1 and mask.stride(-1) != 1:
            mask = mask.contiguous()
        options["mask"] = _arrays.torch_view("mask", mask)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    view = _arrays.torch_view
    views = (view("q", q), view("k", k), view("v", v), view("out", out))
    (by_handle(layer) or _nobody).run(*views, None, False, options)
    return out


def _attention_cuda(q, k, v, mask, causal, query_offset, window, scale, softcap, sinks, nhd, grid, layer):  # type: ignore[no-untyped-def]
    options = _options(causal, query_offset, window, scale, softcap, sinks, nhd, grid)
    if causal:
        k, v, mask = _without_unseen(q, k, v, mask, query_offset, -3 if nhd else -2)
    options.update((by_handle(layer) or _nobody).whole())  # else the library says that a GPU does not calibrate
    return _attention.attention(q, k, v, mask=mask, **options)


def _without_unseen(q, k, v, mask, query_offset, tokens):  # type: ignore[no-untyped-def]
    """Less the keys after the last one that causality shows to any query: places of a cache that is not full yet."""
    seen, keys = q.shape[tokens] + query_offset, k.shape[tokens]
    if not 0 < seen < keys:
        return k, v, mask
    if mask is not None and mask.shape[-1] == keys:
        mask = mask[..., :seen]
    return k.narrow(tokens, 0, seen), v.narrow(tokens, 0, seen), mask


def _attention_fake(q, k, v, mask, causal, query_offset, window, scale, softcap, sinks, nhd, grid, layer):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


_library.impl("attention", _attention_cpu, "CPU")
_library.impl("attention", _attention_cuda, "CUDA")
torch.library.register_fake("sparge::attention", _attention_fake, lib=_library)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _observed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether something traces, compiles, transforms or replaces operators, or these are not plain tensors on the CPU:
    subclasses, and views that are to be negated, are PyTorch's to resolve before the function of the CPU sees them."""
    return (
        torch.compiler.is_compiling()
        or any(type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.is_neg() for tensor in tensors)
        or _get_current_dispatch_mode() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    query_offset: int | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    nhd: bool = False,
    grid: Sequence[int] | None = None,
    layer: Layer | None = None,
) -> torch.Tensor:
    """The operator with its defaults; what the integrations call. `grid` is (T, H, W, text tokens, text after)."""
    tokens = -3 if nhd else -2
    if query_offset is None:
        query_offset = k.shape[tokens] - q.shape[tokens]
    if layer is not None and layer.watchers:
        for watcher in layer.watchers:
            watcher(
                layer, q, k, v, mask=mask, causal=causal, query_offset=query_offset, window=window, scale=scale,
                softcap=softcap, sinks=sinks, nhd=nhd, grid=grid,
            )  # fmt: skip
    # PyTorch takes 12 us to call an operator written in Python: with nobody looking on, the function itself will do.
    given = [tensor for tensor in (q, k, v, mask, sinks) if tensor is not None]
    operator = torch.ops.sparge.attention.default if _observed(given) else _attention_cpu
    return operator(
        q, k, v, mask, causal, query_offset, window, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap,
        sinks, nhd, grid, 0 if layer is None else layer.handle,
    )  # fmt: skip


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def obstacle_of(
    tensors: Mapping[str, torch.Tensor | None], any_type: bool = False, gpu: bool = False
) -> Obstacle | None:
    """Why the library cannot take one of these, by name; or None. gpu: they may be on one."""
    gradients = torch.is_grad_enabled()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_cpu and tensor.device.type != "meta" and not (gpu and tensor.is_cuda):
            return Obstacle("device", f"{name} is on {tensor.device}, not on the CPU")
        if gradients and tensor.requires_grad:
            return Obstacle("gradients", f"{name} requires a gradient")
        if tensor.is_nested:
            return Obstacle("nested tensor", f"{name} is a nested tensor")
        if type(tensor).__name__ == "DTensor":  # which needs to be told how an operator is sharded
            return Obstacle("DTensor", f"{name} is a DTensor")
    for name, tensor in tensors.items():
        if tensor is not None and not any_type and tensor.dtype not in DTYPES:
            return Obstacle("dtype", f"{name}: dtype {tensor.dtype} is none of float32, float16, bfloat16")
    return None


def _obstacle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    layer: Layer | None = None,
) -> Obstacle | None:
    """Why the operator cannot do this, or None."""
    if dropout_p > 0:
        return Obstacle("dropout", f"dropout_p={dropout_p} is above 0")
    if scale == 0:
        return Obstacle("scale", "scale=0 is no scale")  # to the operator, 0 is the default
    # A GPU neither calibrates nor takes masks yet.
    gpu = layer is not None and bool(layer.whole()) and attn_mask is None
    found = obstacle_of({"query": query, "key": key, "value": value}, gpu=gpu)
    found = found or obstacle_of({"attn_mask": attn_mask}, any_type=True)
    if found is not None:
        return found
    wrong = _wrong_shapes(query, key, value, enable_gqa)
    if wrong is not None:
        return Obstacle("shape", wrong)
    wrong = None if attn_mask is None else _wrong_mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
    return None if wrong is None else Obstacle("mask", f"attn_mask: {wrong}")


def _wrong_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str | None:
    if query.dim() < 3 or query.shape[:-3] != key.shape[:-3] or key.shape[:-2] != value.shape[:-2]:
        return f"shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} are not those of one batch"
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return f"shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} have nothing to compute"
    if query.shape[-1] != key.shape[-1]:
        return f"head sizes {query.shape[-1]} of query and {key.shape[-1]} of key"
    if query.shape[-3] != key.shape[-3] and not (enable_gqa and query.shape[-3] % key.shape[-3] == 0):
        return f"{query.shape[-3]} heads of query and {key.shape[-3]} of key"
    if max(query.shape[-1], value.shape[-1]) > _core.MAX_HEAD_DIM:
        return f"head size {query.shape[-1]} or {value.shape[-1]} is outside 1..{_core.MAX_HEAD_DIM}"
    return None


def _wrong_mask(mask: torch.Tensor, scores: tuple[int, ...]) -> str | None:
    """Why the operator cannot take this mask for scores of that shape, or None."""
    if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        return f"dtype {mask.dtype} is neither bool nor floating"
    fits = 2 <= mask.dim() <= len(scores) and mask.shape[-1] == scores[-1]
    if not fits or any(side not in (1, whole) for side, whole in zip(mask.shape[::-1], scores[::-1])):
        return f"shape {tuple(mask.shape)} does not fit the scores, {scores}"
    return None


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fallback: bool = True,
    layer: Layer | None = None,
) -> torch.Tensor:
    """As torch.nn.functional.scaled_dot_product_attention: is_causal aligns the first query with the first key.

    What this cannot do (dropout, gradients, other devices and types) goes to the original, or raises with
    fallback=False. `layer` keeps settings and calibration from call to call; without it, the layer of the module that is
    running (`sparse(model)`), or none: then every call calibrates for itself with the default error.
    """
    if layer is None and has_torch_function_variadic(query, key, value):  # as PyTorch's functions: others may intervene
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return handle_torch_function(scaled_dot_product_attention, arguments[:3], *arguments, fallback=fallback)
    obstacle = _obstacle(query, key, value, attn_mask, dropout_p, scale, enable_gqa, layer or current_layer())
    if obstacle is None and is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal=True exclude each other")
    if obstacle is not None:
        if not fallback:
            raise NotImplementedError(f"sparge: {obstacle.text}")
        _pass_by(layer or current_layer(), obstacle)
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    shape = query.shape
    if query.dim() > 4:
        query, key, value = (t.flatten(0, -4) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() >= 4:  # its leading dimension is no longer the last of the batch
            attn_mask = attn_mask.expand(*shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    if layer is None:
        layer = current_layer()
    out = attend(
        query, key, value, mask=attn_mask, causal=is_causal, query_offset=0, scale=scale, layer=layer
    )
    return out if len(shape) <= 4 else out.unflatten(0, shape[:-3])


def _pass_by(layer: Layer | None, obstacle: Obstacle) -> None:
    """Counts it, where counting would not become part of a compiled graph."""
    if layer is not None and not torch.compiler.is_compiling():
        layer.pass_by(obstacle)


# ------------------------------------------------------------------ rerouting


class _Running(threading.local):
    """The layers of the modules that are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []


_running = _Running()


def current_layer() -> Layer | None:
    """Of the module that is running, else the one of `patch`, else none."""
    return _running.layers[-1] if _running.layers else (_patches[-1] if _patches else None)


def _enter(layer: Layer) -> None:
    _running.layers.append(layer)


def _leave(layer: Layer) -> None:
    if _running.layers and _running.layers[-1] is layer:
        _running.layers.pop()


@contextlib.contextmanager
def tracked(
    model: torch.nn.Module, settings: Settings, attends: Callable[[torch.nn.Module], bool] = lambda module: True
) -> Iterator[dict[str, Layer]]:
    """While open, `current_layer` is that of the innermost module that is running, of those that may attend. Gives the
    layers by module name."""
    modules = {name: module for name, module in model.named_modules() if attends(module)}
    # The model itself has no name, and presets need one.
    layers = {name: Layer(name or type(model).__name__, settings) for name in modules}
    # Compiled models leave their graph for these. Not as decorators: that would load the compiler with this module.
    enter, leave = torch.compiler.disable(_enter), torch.compiler.disable(_leave)
    hooks = []
    try:
        for name, module in modules.items():
            layer = layers[name]
            hooks.append(module.register_forward_pre_hook(lambda *_, layer=layer: enter(layer)))
            hooks.append(module.register_forward_hook(lambda *_, layer=layer: leave(layer), always_call=True))
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


_patches: list[Layer] = []  # one per patch in force
_patch_lock = threading.Lock()


def patch(**settings: Any) -> None:
    """From now on, F.scaled_dot_product_attention is ours where it can be, with these `Settings`; for the whole process,
    until `unpatch`. Calls are not told apart by layer, so each one calibrates for itself; see `sparse(model)`."""
    _patch(settings)


def _patch(settings: dict[str, Any]) -> Layer:
    layer = Layer("patch", Settings(**settings), remembers=False)
    with _patch_lock:
        _patches.append(layer)
        F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    return layer


def unpatch() -> None:
    """Undoes the last `patch`."""
    _unpatch(None)


def _unpatch(layer: Layer | None) -> None:
    """Undoes the patch of that layer, wherever it stands (threads may close theirs in any order), or the last one."""
    with _patch_lock:
        if not _patches:
            raise RuntimeError("unpatch without patch")
        _patches.remove(_patches[-1] if layer is None else layer)
        if not _patches:
            F.scaled_dot_product_attention = _original


@contextlib.contextmanager
def sparse(model: torch.nn.Module | None = None, **settings: Any) -> Iterator[dict[str, Layer]]:
    """While open, F.scaled_dot_product_attention is ours where it can be; **settings are those of sparge.torch.Settings.

    With a model, each of its modules that attends has a Layer with a calibration of its own. Gives the layers by module
    name; `summary(layers.values())` is a table of what they did. A LayerWarning at the end says so if that was nothing:
    everything went to PyTorch (gradients, dropout, ...), or was too short.
    """
    layer = _patch(settings)
    try:
        with contextlib.nullcontext({"": layer}) if model is None else tracked(model, layer.settings) as layers:
            yield layers
    finally:
        _unpatch(layer)
    warn_unused({id(used): used for used in (layer, *layers.values())}.values(), stacklevel=3)

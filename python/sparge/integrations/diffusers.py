"""diffusers: sparse attention for its transformers (Flux, SD3, CogVideoX, Mochi, Wan, HunyuanVideo, LTX, and others).

    from sparge.integrations import diffusers as sparge_diffusers
    with sparge_diffusers.enable(pipe.transformer, target_l2=0.05) as enabled:
        pipe(...)
    print(enabled.summary())

or, by diffusers' own name for it:

    sparge_diffusers.register(target_l2=0.05)
    pipe.transformer.set_attention_backend("sparge")
    pipe(...)
    print(sparge_diffusers.enabled(pipe.transformer).summary())
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from typing import Any, Callable, Mapping

import torch
from torch.overrides import TorchFunctionMode

from .. import torch as _torch
from .._elsewhere import Obstacle, warn_unused
from .._layers import Layer, Settings, summary
from . import _parallel
from ._grids import Grid, GridFunction, hilbert_index, known_model

try:
    from diffusers.models import attention_dispatch as _dispatch
except ImportError:  # diffusers before 0.35 has no dispatcher; its models call PyTorch's function
    _dispatch = None  # type: ignore[assignment]

__all__ = ["Enabled", "Grid", "enable", "enabled", "register"]

_NAME = "sparge"


class _Registered:
    """What `register` was told: options of `enable`, and what counts calls from models that are not enabled."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        settings = {k: v for k, v in options.items() if k not in ("cross_attention", "dense_steps", "hilbert", "grid")}
        self.cross_attention = bool(options.get("cross_attention", False))
        self.layer = Layer("diffusers", Settings(**settings), remembers=False)


_registered = _Registered()


class _Running(threading.local):
    """The prepared transformers that are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []

    @property
    def run(self) -> _Run | None:
        return self.runs[-1] if self.runs else None


_running = _Running()


class _Run(TorchFunctionMode):
    """One forward of a prepared transformer. While it is entered, this thread's calls of F.scaled_dot_product_attention
    come here, whoever makes them; text encoders and VAEs, which run before and after, keep theirs."""

    def __init__(self, owner: Enabled, grid: Grid | None) -> None:
        super().__init__()
        self.owner = owner
        self.grid = grid
        self.crossing = -1  # tokens of the running module's input, if it has as many of another input

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _torch._original or func is _torch.scaled_dot_product_attention:
            return _attend(lambda: func(*args, **kwargs), self, *args, **kwargs)
        return func(*args, **kwargs)

    def is_cross(self, q_tokens: int, k_tokens: int) -> bool:
        return q_tokens != k_tokens or q_tokens == self.crossing

    def __enter__(self) -> _Run:
        _running.runs.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        _running.runs.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]


def _hides_nothing(mask: torch.Tensor) -> bool:
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


# Which layer is running is not to be made part of code that the blocks of a model share.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    original: Callable[[], torch.Tensor],
    run: _Run | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> torch.Tensor:
    """As F.scaled_dot_product_attention; `original` does what is not for us."""
    obstacle = _torch._obstacle(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    layer = _torch.current_layer() or _registered.layer
    if obstacle is None and query.dim() != 4:
        obstacle = Obstacle("shape", f"{query.dim()} dimensions")
    if obstacle is None and is_causal and attn_mask is not None:
        obstacle = Obstacle("mask", "attn_mask and is_causal")
    if obstacle is not None:
        layer.pass_by(obstacle)
        return original()
    q_tokens, k_tokens = query.shape[-2], key.shape[-2]
    if run is None:
        grid, cross, cross_attention = None, q_tokens != k_tokens, _registered.cross_attention
    else:
        grid, cross, cross_attention = run.grid, run.is_cross(q_tokens, k_tokens), run.owner.cross_attention
    if cross and not cross_attention:
        layer.pass_by(Obstacle("cross attention", "keys of another input"))
        return original()
    if attn_mask is not None and _hides_nothing(attn_mask):
        attn_mask = None
    text = None if grid is None or cross or is_causal else grid.text_tokens(q_tokens)
    # Tokens before heads: callers flatten heads next, which then needs no copy.
    tensors = [t.transpose(1, 2) for t in (query, key, value)]
    if grid is None or text is None:
        out = _torch.attend(
            *tensors, mask=attn_mask, causal=is_causal, query_offset=0, scale=scale, nhd=True, layer=layer
        )
    elif attn_mask is None:
        where = (*grid.sides, text, int(grid.after))
        out = _torch.attend(*tensors, scale=scale, nhd=True, grid=where, layer=layer)
    else:  # the operator lays out tokens itself only where there is no mask
        order, inverse = hilbert_index(grid.sides, text, grid.after)
        tensors = [t.index_select(1, order) for t in tensors]
        mask = _reordered(attn_mask, order)
        out = _torch.attend(*tensors, mask=mask, scale=scale, nhd=True, layer=layer).index_select(1, inverse)
    return out.transpose(1, 2)


def _reordered(mask: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Keys, and queries if it has them, in another order."""
    mask = mask.index_select(-1, order)
    return mask if mask.shape[-2] == 1 else mask.index_select(-2, order)


# ------------------------------------------------------------------ the dispatcher


def _backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """A backend of diffusers' dispatcher: tokens before heads."""
    if return_lse:
        raise ValueError(f"attention backend {_NAME!r} does not support return_lse={return_lse}")
    if _parallel_config is not None:
        given: dict[str, Any] = dict(query=query, key=key, value=value, attn_mask=attn_mask, dropout_p=dropout_p)
        given.update(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, return_lse=False)
        return _parallel.attend(_dispatch, lambda: _parallel.current_layer(_registered.layer), given, _parallel_config)
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # per batch and key, as in diffusers' native backend
    arguments: dict[str, Any] = {
        **{name: t.transpose(1, 2) for name, t in (("query", query), ("key", key), ("value", value))},
        **{"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale},
        "enable_gqa": enable_gqa,
    }
    out: torch.Tensor = _attend(lambda: _torch._original(**arguments), _running.run, **arguments)
    return out.transpose(1, 2)


def _member() -> Any:
    """The name "sparge" as diffusers knows it. It lists its backends in an Enum, which has no public way to grow."""
    if _dispatch is None:
        raise RuntimeError("diffusers before 0.35 has no attention dispatcher; use `enable` instead of its name")
    names: Any = _dispatch.AttentionBackendName
    registry = _dispatch._AttentionBackendRegistry
    member = names._value2member_map_.get(_NAME)
    if member is None:
        member = str.__new__(names, _NAME)
        member._name_, member._value_ = _NAME.upper(), _NAME
        member.__objclass__, member._sort_order_ = names, len(names)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = member
        names._value2member_map_[_NAME] = member
        type.__setattr__(names, member._name_, member)
    known = registry._backends.get(member)
    if known is None:
        parallel = "supports_context_parallel" in inspect.signature(registry.register).parameters
        registry.register(member, **({"supports_context_parallel": True} if parallel else {}))(_backend)
    elif known is not _backend:
        raise RuntimeError(f"diffusers has an attention backend {_NAME!r} already: {known}")
    return member


def _follow_backend() -> None:
    """Makes `set_attention_backend("sparge")` of a model enable it. The dispatcher is told neither layers nor grids,
    and SD3, CogVideoX and Mochi do not ask it."""
    import diffusers

    models: Any = diffusers.ModelMixin
    if hasattr(models.set_attention_backend, "_sparge"):
        return
    set_backend, reset_backend = models.set_attention_backend, models.reset_attention_backend

    @functools.wraps(set_backend)
    def set_attention_backend(self: Any, backend: str, *args: Any, **kwargs: Any) -> None:
        known = enabled(self)
        if str(backend).lower() == _NAME:  # diffusers would make it the backend of all other models, too
            if known is None:
                enable(self, **_registered.options)
            return
        if known is not None:
            known.disable()
        set_backend(self, backend, *args, **kwargs)

    @functools.wraps(reset_backend)
    def reset_attention_backend(self: Any) -> None:
        known = enabled(self)
        if known is not None:
            known.disable()
        reset_backend(self)

    set_attention_backend._sparge = True  # type: ignore[attr-defined]
    models.set_attention_backend = set_attention_backend
    models.reset_attention_backend = reset_attention_backend


def register(**options: Any) -> Layer:
    """Makes "sparge" one of diffusers' attention backends. From then on, `transformer.set_attention_backend("sparge")`
    enables the transformer with these options of `enable`.

    Calls that come by that name from elsewhere (`attention_backend("sparge")`) have the same settings; but their layers
    and grids are not known, so every call calibrates for itself and tokens stay in raster order. Gives the Layer that
    counts those.
    """
    global _registered
    registered = _Registered(**options)
    _member()
    _follow_backend()
    _registered = registered
    return registered.layer


# ------------------------------------------------------------------ a prepared transformer


class Enabled:
    """A transformer whose attention is ours, until `disable` or the end of a with block."""

    def __init__(
        self,
        transformer: torch.nn.Module,
        settings: Settings,
        cross_attention: bool,
        dense_steps: int,
        hilbert: bool,
        grid: GridFunction | None,
    ) -> None:
        known = known_model(transformer)
        self.cross_attention = cross_attention
        self.dense_steps = dense_steps
        self.step = 0
        """Which denoising step is running, or ran last; the first is 1."""
        self._signature = inspect.signature(transformer.forward)
        if dense_steps and "timestep" not in self._signature.parameters:
            name = type(transformer).__name__
            raise ValueError(f"dense_steps={dense_steps}: {name}.forward has no argument timestep to count steps by")
        self._transformer = transformer
        self._ascending = known is not None and known.ascending
        self._timestep: float | None = None
        self._grid_of = (grid or (known.grid if known else None)) if hilbert else None
        self._warned = not hilbert
        self._looked = False
        self._undo = contextlib.ExitStack()
        self._modules: dict[str, Layer] = {}
        with contextlib.ExitStack() as undo:
            self._modules = undo.enter_context(_torch.tracked(transformer, settings, _attending(transformer)))
            self._hook(undo)
            if _dispatch is not None:
                _redirect_processors(transformer, undo)
            transformer._sparge_enabled = self  # type: ignore[assignment]
            undo.callback(delattr, transformer, "_sparge_enabled")
            self._undo = undo.pop_all()

    @property
    def layers(self) -> dict[str, Layer]:
        """By name of the module: those with an attention processor, and others that have called."""
        modules = dict(self._transformer.named_modules())
        return {n: x for n, x in self._modules.items() if x.totals.calls or hasattr(modules.get(n), "processor")}

    def summary(self) -> str:
        """A table: what each layer did, and the errors it estimates."""
        return summary(self._modules.values())

    def restart(self) -> None:
        """The next forward is the first step of a new image or video. Told by `timestep` else, which jumps back."""
        self._timestep = None

    def when_disabled(self, do: Callable[[], None]) -> None:
        self._undo.callback(do)

    def disable(self) -> None:
        """Puts everything back. Layers keep their statistics."""
        self._undo.close()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.disable()

    def _hook(self, undo: contextlib.ExitStack) -> None:
        hooks = [
            self._transformer.register_forward_pre_hook(self._before, with_kwargs=True),
            self._transformer.register_forward_hook(self._after, always_call=True),
        ]
        for module in self._transformer.modules():
            if hasattr(module, "processor"):
                hooks.append(module.register_forward_pre_hook(_before_attention, with_kwargs=True))
        for hook in hooks:
            undo.callback(hook.remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return  # the transformer will say so itself
        self._count(arguments.get("timestep"))
        _Run(self, self._grid(arguments)).__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, *_: Any) -> None:
        run = _running.run
        if run is not None and run.owner is self:
            run.__exit__(None, None, None)
            if not self._looked and (not self.dense_steps or self.step > self.dense_steps):  # once: forwards are alike
                self._looked = True
                warn_unused(self._modules.values())

    def _count(self, timestep: Any) -> None:
        """Steps are told apart by their timestep: with guidance a step may have two forwards."""
        if timestep is None:
            return
        now = float(torch.as_tensor(timestep).max())  # per token in some models, with 0 for given frames
        if now == self._timestep:
            return
        back = self._timestep is None or (now < self._timestep if self._ascending else now > self._timestep)
        self.step = 1 if back else self.step + 1
        self._timestep = now
        for layer in self._modules.values():
            layer.dense = self.step <= self.dense_steps

    def _grid(self, arguments: Mapping[str, Any]) -> Grid | None:
        grid, reason = None, "is not known"
        if self._grid_of is not None:
            reason = "was not found in the arguments"
            try:
                grid = self._grid_of(self._transformer.config, arguments)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                reason = f"was not found ({error!r})"
        if grid is None and not self._warned:
            self._warned = True
            name = type(self._transformer).__name__
            warnings.warn(f"sparge: the token grid of {name} {reason}; tokens stay in raster order", stacklevel=2)
        return grid


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_attention(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes whether equal numbers of queries and keys can be of two different inputs."""
    run = _running.run
    if run is None:
        return
    hidden = args[0] if args else kwargs.get("hidden_states")
    other = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
    two = isinstance(hidden, torch.Tensor) and isinstance(other, torch.Tensor) and other is not hidden
    run.crossing = hidden.shape[1] if two and hidden.shape[1] == other.shape[1] else -1  # type: ignore[union-attr]


def _attending(transformer: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
    """Which modules attend: those with a processor; if there are none, any may. Each hook breaks a compiled graph, so
    the others shall have none."""
    if any(hasattr(module, "processor") for module in transformer.modules()):
        return lambda module: module is transformer or hasattr(module, "processor")
    return lambda module: True


def _redirect_processors(transformer: torch.nn.Module, undo: contextlib.ExitStack) -> None:
    """Those that ask the dispatcher ask it for us, whatever backend is in force elsewhere."""
    member = _member()
    found: list[Any] = [getattr(module, "processor", None) for module in transformer.modules()]
    for processor in {id(p): p for p in found if hasattr(p, "_attention_backend")}.values():
        if "_attention_backend" in vars(processor):
            undo.callback(setattr, processor, "_attention_backend", processor._attention_backend)
        else:
            undo.callback(delattr, processor, "_attention_backend")
        processor._attention_backend = member


def enable(
    transformer: torch.nn.Module,
    *,
    target_l2: float | None = None,
    cross_attention: bool = False,
    dense_steps: int = 0,
    hilbert: bool = True,
    grid: GridFunction | None = None,
    parallel: Any = None,
    **settings: Any,
) -> Enabled:
    """Runs the attention of a diffusers transformer (`pipe.transformer`) here, until `disable()` of what it gives.

      target_l2        relative L2 error per head that skipping may cause; 0 = exact
      cross_attention  also where the keys are those of the text; it has few keys, so there is little to skip
      dense_steps      so many first denoising steps, which lay out the picture, compute everything
      hilbert          order image and video tokens along a Hilbert curve, so that blocks are alike; same result
      grid             for transformers that are not known: a function (config, arguments of forward by name) -> Grid
      parallel         a ContextParallelConfig of diffusers, for transformers on CPUs that run on several ranks (gloo)
      **settings       as sparge.torch.Settings: target_l1, pv_l2, round_l1, precision, preset, seed

    Each attention module has a Layer with a calibration of its own, which learns from step to step.
    """
    if not isinstance(transformer, torch.nn.Module):
        raise TypeError(f"transformer: {type(transformer).__name__} is no module; of a pipeline, give pipe.transformer")
    if enabled(transformer) is not None:
        raise ValueError(f"transformer: this {type(transformer).__name__} is enabled already; disable() it first")
    if dense_steps < 0:
        raise ValueError(f"dense_steps={dense_steps} is below 0")
    chosen = Settings(target_l2=target_l2, **settings)
    undo = None if parallel is None else _parallel.apply(transformer, parallel)
    try:
        made = Enabled(transformer, chosen, cross_attention, dense_steps, hilbert, grid)
    except BaseException:
        if undo is not None:
            undo()
        raise
    if undo is not None:
        made.when_disabled(undo)
    return made


def enabled(transformer: torch.nn.Module) -> Enabled | None:
    """What `enable` gave for this transformer; None if it is not enabled."""
    return getattr(transformer, "_sparge_enabled", None)

"""Records what the attention layers of a model compute on, as the command line reads it (docs/python-tuning.md)."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Collection, Iterator, Literal, TypeVar, Union

from . import _arrays, _core, _safetensors
from ._plain import Call, Inexpressible, Part, plain

if TYPE_CHECKING:
    import torch

    from ._layers import Layer

Layers = Union[Collection[str], Callable[[str], bool], None]
DType = Literal["float16", "bfloat16", "float32"]

_EXTENSION = ".safetensors"

Self = TypeVar("Self", bound="_Recorder")


class CaptureWarning(UserWarning):
    """Something was not captured, or takes much room."""


class _Recorder:
    """Watches the layers of a model while it is open, and keeps what they are asked; see Capture."""

    MANY_BYTES = 4 << 30  # worth a warning
    where = "the recording"  # what messages call it

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        layers: Layers = None,
        max_samples: int | None = None,
        min_tokens: int = 256,
        every: int = 1,
        dtype: DType | torch.dtype | None = None,
        sample: str = "",
    ) -> None:
        if not hasattr(model, "named_modules"):
            raise TypeError(f"model: {type(model).__name__} is no module; of a pipeline, give pipe.transformer")
        for name, value in (("max_samples", max_samples), ("min_tokens", min_tokens), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below 1")
        if sample.startswith(".") or "/" in sample or "\0" in sample:
            raise ValueError(f"sample={sample!r} is not the beginning of a file name that is not hidden")
        self.files = 0
        self.bytes = 0
        self.skipped: dict[str, str] = {}  # reasons by layer
        self._model = model
        self._layers = layers
        self.max_samples = max_samples
        self.every = every
        self._min_tokens = min_tokens
        self._dtype = _dtype(dtype)
        self._passes = _Passes(every)
        self._prefix = sample
        self._short = 0  # calls of fewer tokens than min_tokens
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._samples: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()

    @property
    def samples(self) -> int:
        """Of the layer that has most of them, this time."""
        return max(self._samples.values(), default=0)

    @property
    def full(self) -> bool:
        """Whether max_samples are there."""
        return self.max_samples is not None and self.samples >= self.max_samples

    def _begin(self) -> int:
        """The number of the first sample."""
        return 0

    def _keep(self, layer: str, name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
        """One sample of a layer. Returns its bytes."""
        raise NotImplementedError

    def _attach(self, layer: Layer, stack: contextlib.ExitStack) -> None:
        """What else is to be seen of a layer that is recorded, until `stack` is closed."""

    # ------------------------------------------------------------------ opening and closing

    def __enter__(self: Self) -> Self:
        self._passes.index = self._begin()
        import torch

        watcher = torch.compiler.disable(self._watch)  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as stack:
            layers = stack.enter_context(_exact_layers(self._model))
            for layer in _chosen(layers, self._layers):
                layer.watchers.append(watcher)
                stack.callback(layer.watchers.remove, watcher)
                self._attach(layer, stack)
            stack.callback(self._model.register_forward_pre_hook(lambda *_: self._passes.begin()).remove)
            end = self._model.register_forward_hook(lambda *_: self._passes.end(), always_call=True)
            stack.callback(end.remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.close()
        if self.files == 0 and kind is None and not self.skipped:
            why = "no attention was seen"
            if self._short:
                why = f"{self._short} calls had fewer than min_tokens={self._min_tokens} queries"
            warnings.warn(
                f"{self.where}: nothing was captured: {why} (gradients, other devices than the CPU and attention that "
                "is not F.scaled_dot_product_attention are not seen)",
                CaptureWarning,
                stacklevel=2,
            )

    # ------------------------------------------------------------------ one call

    def _watch(self, layer: Layer, q: Any, k: Any, v: Any, *, nhd: bool, scale: float | None, **call: Any) -> None:
        """Called by sparge.torch.attend before it attends."""
        import torch

        try:
            q, k, v = (_heads_first(_arrays.wrapped(name, t.detach()), nhd) for name, t in zip("qkv", (q, k, v)))
            if call["mask"] is not None:
                call["mask"] = _arrays.wrapped("mask", call["mask"])
        except ValueError as reason:  # without memory
            return self._skip(layer.name, str(reason))
        with self._lock, torch.inference_mode():
            if q.shape[2] < self._min_tokens:
                self._short += 1
                return
            known = self._samples.get(layer.name, 0)
            if self.max_samples is not None and known >= self.max_samples:
                return
            place = self._passes.place(layer.name)
            if place is None:
                return
            batch = q.shape[0]
            if self.max_samples is not None:
                batch = min(batch, self.max_samples - known)
            for item in range(batch):
                name = f"{self._prefix}{place}" + (f"-{item}" if q.shape[0] > 1 else "")
                try:
                    self._record(layer.name, name, (q[item], k[item], v[item]), scale, Call(**call), item)
                except Inexpressible as reason:
                    self._skip(layer.name, str(reason))

    def _record(
        self, layer: str, name: str, qkv: tuple[Any, Any, Any], scale: float | None, call: Call, item: int
    ) -> None:
        if not layer or "/" in layer or layer.startswith("."):
            raise Inexpressible("a name that cannot be that of a folder")
        q, k, v = qkv
        part = plain(call, item, q.shape[1], k.shape[1])
        q, k, v = q[:, part.queries], k[:, part.keys], v[:, part.keys]
        if q.shape[1] < self._min_tokens:  # the rest was padding
            self._short += 1
            return
        kind = (q.shape[0], k.shape[0], q.shape[2], v.shape[2], part.causal)
        if self._kinds.setdefault(layer, kind) != kind:
            raise Inexpressible(
                f"(query heads, key heads, head size, value size, causal) = {kind}, after {self._kinds[layer]}: one "
                "layer of a preset is of one kind"
            )
        tensors = {label: _stored(label, t, self._dtype) for label, t in (("q", q), ("k", k), ("v", v))}
        self._write(layer, name, tensors, _metadata(scale, q.shape[2], part, call))

    def _write(self, layer: str, name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.bytes < self.MANY_BYTES <= self.bytes + size:
            size_text = f"more than {self.MANY_BYTES / 2**30:.1f} GiB"
            self._warn(f"{self.where}: {size_text}; layers=, max_samples= and every= make it less")
        self.bytes += self._keep(layer, name, tensors, metadata)
        self.files += 1
        self._samples[layer] = self._samples.get(layer, 0) + 1

    def _skip(self, layer: str, reason: str) -> None:
        if layer not in self.skipped:
            self.skipped[layer] = reason
            self._warn(f"layer {layer}: not captured: {reason}")

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(text, CaptureWarning, stacklevel=3)


class Capture(_Recorder):
    """`with sparge.capture(model, "captures/") as c: model(...)` writes captures/LAYER/SAMPLE.safetensors.

    While it is open, attention is exact. One forward pass is one sample, or one for each sequence of its batch;
    numbers go on after those that are in the folder. Calls that a capture cannot hold are skipped, with one warning per
    layer.

    model       a torch.nn.Module; for a pipeline of diffusers, its transformer
    folder      made if missing
    layers      names of modules, or a function of a name; default all that attend
    max_samples stop there; None = never
    min_tokens  fewer queries than this (decoding) are not worth recording
    every       record each `every`-th forward pass of those that are long enough
    dtype       default float16, or the model's own type where values do not fit in it
    sample      the names of samples begin so
    """

    def __init__(self, model: torch.nn.Module, folder: Union[str, os.PathLike[str]], **options: Any) -> None:
        super().__init__(model, **options)
        self.folder = Path(folder)
        self.where = str(folder)

    def __repr__(self) -> str:
        written = f"{self.files} files, {self.bytes / 1e6:.1f} MB"
        return f"<sparge.capture of {len(self._samples)} layers in {self.folder}: {written}>"

    def _begin(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable", str(self.folder))
        return _first_free(self.folder, self._prefix)

    def _keep(self, layer: str, name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
        folder = self.folder / layer
        folder.mkdir(exist_ok=True)
        try:
            return _safetensors.write(folder / (name + _EXTENSION), tensors, metadata)
        except BaseException:
            with contextlib.suppress(OSError):  # the command line refuses layers without samples
                folder.rmdir()
            raise


class _InMemory(_Recorder):
    """The same without files, for sparge.tune."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.recording = _core.Recording()

    def _keep(self, layer: str, name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
        q, k, v = (_arrays.torch_view(label, tensors[label]) for label in "qkv")
        return self.recording.add(layer, name, q, k, v, metadata)


def capture(model: torch.nn.Module, folder: Union[str, os.PathLike[str]], **options: Any) -> Capture:
    return Capture(model, folder, **options)


capture.__doc__ = Capture.__doc__


class _Passes:
    """Numbers the forward passes in which something was recorded."""

    def __init__(self, every: int) -> None:
        self.index = 0
        self._every = every
        self._long = 0  # passes of enough tokens
        self._inside = 0
        self._seen: dict[str, int] = {}  # calls of each layer in this pass
        self._recorded = False

    def begin(self) -> None:
        if self._inside == 0:
            self._next()
        self._inside += 1

    def end(self) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._next()

    def _next(self) -> None:
        if self._seen:
            self._long += 1
            self.index += self._recorded
        self._seen, self._recorded = {}, False

    def place(self, layer: str) -> str | None:
        """The name of this call's sample, None if it shall not be recorded. Outside of any forward pass (an encoder
        that is called by itself) a layer that comes again begins a new one."""
        if self._inside == 0 and layer in self._seen:
            self._next()
        self._seen[layer] = again = self._seen.get(layer, 0) + 1
        if self._long % self._every != 0:
            return None
        self._recorded = True
        return f"{self.index:04d}" + (f"+{again - 1}" if again > 1 else "")


# ------------------------------------------------------------------ tensors


def _dtype(dtype: DType | torch.dtype | None) -> torch.dtype | None:
    import torch

    if dtype is None:
        return None
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={dtype} is none of float16, bfloat16, float32")
    return chosen


def _heads_first(tensor: torch.Tensor, nhd: bool) -> torch.Tensor:
    """As (batch, heads, tokens, dim)."""
    if nhd:
        tensor = tensor.transpose(-3, -2)
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def _stored(label: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """In the type that it is written in."""
    import torch

    largest = float(tensor.abs().max())
    if not largest < float("inf"):
        raise Inexpressible(f"values of {label} that are not finite")
    if dtype is None:
        # Below 2^-14 fp16 has steps of 2^-24, whatever the value: too coarse if nothing is larger than 2^-8.
        fits = largest == 0 or 2**-8 <= largest <= torch.finfo(torch.float16).max
        dtype = torch.float16 if fits else tensor.dtype
    elif largest > torch.finfo(dtype).max:
        raise Inexpressible(f"values of {label} up to {largest:g}, which dtype={dtype} cannot hold")
    return tensor.to(dtype)


def _metadata(scale: float | None, dim: int, part: Part, call: Call) -> dict[str, str]:
    scale = dim**-0.5 if scale is None else float(scale)
    if scale == 0:
        raise Inexpressible("a scale of 0")
    metadata = {"causal": "true" if part.causal else "false", "scale": repr(scale)}
    if call.grid is not None:
        metadata["grid"] = ",".join(str(int(side)) for side in call.grid[:3])
        if call.grid[3]:
            metadata["text_tokens"] = f"{int(call.grid[3])}{',after' if call.grid[4] else ''}"
    return metadata


def _first_free(folder: Path, prefix: str) -> int:
    """The number after those of all samples in the folder that begin with `prefix`."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)[-+\d]*" + re.escape(_EXTENSION))
    found = (pattern.fullmatch(file.name) for file in folder.glob("*/*" + _EXTENSION))
    return max((int(match[1]) + 1 for match in found if match), default=0)


# ------------------------------------------------------------------ the layers of a model


def _chosen(layers: dict[str, Layer], wanted: Layers) -> list[Layer]:
    if isinstance(wanted, str):
        wanted = [wanted]
    if wanted is None or callable(wanted):
        return [layer for name, layer in layers.items() if wanted is None or wanted(name)]
    for name in wanted:
        if name not in layers:
            similar = difflib.get_close_matches(name, layers, 3, 0) or ["none"]
            raise ValueError(f"layers: the model has no {name}; most like it: {', '.join(similar)}")
    return [layers[name] for name in wanted]


@contextlib.contextmanager
def _exact_layers(model: torch.nn.Module) -> Iterator[dict[str, Layer]]:
    """While open, attention of the model goes exactly through layers, which are given by module name."""
    from . import torch as sparge_torch

    with contextlib.ExitStack() as stack:
        layers = None
        for library, of in (("transformers", _transformers_layers), ("diffusers", _diffusers_layers)):
            if layers is None and library in sys.modules:
                layers = stack.enter_context(of(model))
        if layers is None:
            layers = stack.enter_context(sparge_torch.sparse(model, target_l2=0))
        yield layers


@contextlib.contextmanager
def _transformers_layers(model: Any) -> Iterator[dict[str, Layer] | None]:
    """Of a model of transformers, in its own interface for attention. None for others."""
    from .integrations import transformers as ours

    if not ours.is_model(model):
        yield None
        return
    before = ours.layers(model)
    # set_attn_implementation would give the models inside the same one back.
    configs = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        model.set_attn_implementation(ours._NAME)
        switched = model.config._attn_implementation == ours._NAME  # old models do not know how
        yield ours.configure(model, target_l2=0) if switched else None
    finally:
        for config, implementation in configs:
            config._attn_implementation_internal = implementation
        for name, module in model.named_modules():
            module.__dict__.pop(ours._ATTRIBUTE, None)
            if name in before:
                setattr(module, ours._ATTRIBUTE, before[name])


def _configs(model: torch.nn.Module) -> list[Any]:
    """Of the model and of those inside it, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting.extend(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
    return list(found.values())


@contextlib.contextmanager
def _diffusers_layers(model: torch.nn.Module) -> Iterator[dict[str, Layer] | None]:
    """Of a model of diffusers, with its grid of tokens; as it is if it runs on sparge already. None for others."""
    from diffusers import ModelMixin

    from .integrations import diffusers as ours
    from .integrations._grids import known_model

    if not isinstance(model, ModelMixin):
        yield None
        return
    for hook in model._forward_pre_hooks.values():  # by which it runs on sparge already
        enabled = getattr(hook, "__self__", None)
        if isinstance(enabled, ours.Enabled):
            yield enabled._modules
            return
    with ours.enable(model, target_l2=0, hilbert=known_model(model) is not None) as enabled:
        yield enabled._modules

"""sparge.attention for arrays on an NVIDIA GPU. What is computed there goes on after the call has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, _core, _tensors

if TYPE_CHECKING:
    from ._attention import Options

_DLPACK_CUDA = 2


def ordinal_of(array: Any) -> int | None:
    """Number of the GPU that the array is on; None for other devices."""
    if isinstance(array, np.ndarray):
        return None
    if _arrays.is_torch(array):
        return array.device.index if array.is_cuda else None
    ask = getattr(array, "__dlpack_device__", None)
    kind, ordinal = (0, 0) if ask is None else ask()
    return int(ordinal) if int(kind) == _DLPACK_CUDA else None


def _current_stream(device: Any) -> tuple[int, bool]:
    """PyTorch's on that GPU, and whether it captures a CUDA graph."""
    import torch

    with torch.cuda.device(device):
        return torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()


class _Queue:
    """A stream of a GPU, and the arrays of a call that is put into it."""

    def __init__(self, ordinal: int, q: Any, stream: int | None) -> None:
        self.ordinal, self.q, self.captured = ordinal, q, False
        self.stream = 0 if stream is None else stream  # 0: CUDA's default stream
        self._owned: list[Any] = []
        if _arrays.is_torch(q):
            if stream is not None:
                raise ValueError(f"stream={stream}: for PyTorch it is the current one; call it inside torch.cuda.stream(...)")
            self.stream, self.captured = _current_stream(q.device)

    def view(self, name: str, array: Any) -> Any:
        """What the extension module takes for `array`, which is ready when the stream has got so far."""
        if _arrays.is_torch(array) and _arrays.is_torch(self.q):
            array = _tensors.with_memory(name, array)
            if ordinal_of(array) != self.ordinal:
                raise ValueError(f"{name}: is on device {array.device}, not on cuda:{self.ordinal}")
            _arrays.refuse_gradient(name, array)
            return _arrays.torch_view(name, array)
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: {type(array).__name__} is no array with DLPack, and q is on cuda:{self.ordinal}")
        # DLPack calls the default stream 1.
        return array.__dlpack__(stream=self.stream or 1) if ordinal_of(array) is not None else array

    def input(self, name: str, array: Any) -> Any:
        """As `view`; copied on the GPU if the last dimension is not contiguous and PyTorch can do it."""
        if _arrays.is_torch(array) and array.dim() > 0 and array.shape[-1] > 1 and array.stride(-1) != 1:
            array = array.contiguous()
            self._owned.append(array)
        return self.view(name, array)

    def empty(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """New memory of the GPU, of q's library: only it knows when its memory may be used again. dtype: None = q's."""
        if _arrays.is_torch(self.q):
            import torch

            made = self.q.new_empty(shape, dtype=None if dtype is None else getattr(torch, dtype))
        else:
            library = getattr(self.q, "__array_namespace__", None)
            if library is None:
                raise TypeError(f"q: {type(self.q).__name__} is on a GPU and has no __array_namespace__, which would make new arrays")
            namespace = library()
            made = namespace.empty(shape, dtype=self.q.dtype if dtype is None else getattr(namespace, dtype), device=self.q.device)
        self._owned.append(made)
        return made

    def allocate(self, size: int) -> Any:
        return self.view("workspace", self.empty((size,), "uint8"))


def attention(
    ordinal: int, q: Any, k: Any, v: Any, out: Any, return_lse: bool, return_stats: bool, options: Options
) -> Any:
    """As sparge.attention; `ordinal` is the GPU that q is on."""
    queue = _Queue(ordinal, q, options.pop("stream", None))
    for name in ("mask", "map"):
        if options.get(name) is not None:
            options[name] = queue.view(name, options[name])  # type: ignore[literal-required]
    out_shape, lse_shape = _arrays.shapes_of_outputs(tuple(q.shape), tuple(v.shape), options.get("layout") == "NHD")
    result = queue.empty(out_shape) if out is None else out
    lse = queue.empty(lse_shape, "float32") if return_lse else None
    arrays = (
        queue.input("q", q), queue.input("k", k), queue.input("v", v), queue.view("out", result),
        None if lse is None else queue.view("lse", lse),
    )  # fmt: skip
    _core.attention_on_gpu(ordinal, queue.stream, queue.captured, arrays, return_stats, queue.allocate, options)
    return (result, lse) if return_lse else result

"""New arrays of the same library as those given."""

from __future__ import annotations

import sys
from typing import Any, Tuple

import numpy as np

from ._tensors import LOW, with_memory


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


# What the extension module takes beside arrays: address, shape, strides in elements, name of the type as PyTorch has it.
View = Tuple[int, Tuple[int, ...], Tuple[int, ...], str]

_DTYPE_NAMES: dict[Any, str] = {}


def torch_view(name: str, tensor: Any) -> View:
    """A plain PyTorch tensor (`wrapped`) without the microseconds of a DLPack capsule. It must outlive the
    call."""
    dtype, address = tensor.dtype, tensor.data_ptr()
    if address < LOW:
        with_memory(name, tensor)
    of_dtype = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype))
    return (address, tensor.shape, tensor.stride(), of_dtype)


def wrapped(name: str, array: Any, output: bool = False) -> Any:
    """`array` itself if it knows its shape and has memory; else (bare DLPack, ctypes, tensors that stand for others) an
    array on the same memory, or of the same values if it is no output."""
    if is_torch(array):
        return with_memory(name, array, output)
    if output or hasattr(array, "shape"):
        return array
    try:
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(memoryview(array))
    except TypeError:
        raise TypeError(f"{name}: {type(array).__name__} is no array") from None


def _bfloat16_view(name: str, array: np.ndarray[Any, Any]) -> View:
    """An array of the package ml_dtypes, whose type neither DLPack nor the buffer protocol of NumPy can name."""
    strides, odd = zip(*(divmod(stride, array.itemsize) for stride in array.strides)) if array.ndim else ((), ())
    if any(odd):
        raise ValueError(f"{name}: strides {array.strides} are no multiples of its {array.itemsize} bytes per element")
    return (array.__array_interface__["data"][0], array.shape, strides, "torch.bfloat16")


def importable(name: str, array: Any) -> Any:
    """What the extension module takes for `array`, which must outlive the call."""
    if isinstance(array, np.ndarray):
        # Types that are not NumPy's own have kind V; asking for the name takes microseconds.
        foreign = array.dtype.kind == "V" and array.dtype.name == "bfloat16"
        return _bfloat16_view(name, array) if foreign else array
    if not is_torch(array):
        return array
    if not array.is_cpu:
        raise ValueError(f"{name}: is on device {array.device}, not on the CPU")
    refuse_gradient(name, array)
    return torch_view(name, array)


def refuse_gradient(name: str, tensor: Any) -> None:
    if tensor.requires_grad:
        import torch

        if torch.is_grad_enabled():
            raise ValueError(f"{name}: requires a gradient, which sparge does not compute; detach it, or use torch.no_grad()")


def shapes_of_outputs(q: tuple[int, ...], v: tuple[int, ...], nhd: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the result, and of the log-sum-exp, whose heads come before tokens in any layout."""
    rows = q[:-1]
    if nhd and len(rows) >= 2:
        rows = (*rows[:-2], rows[-1], rows[-2])
    return (*q[:-1], *v[-1:]), rows


def empty_like(array: Any, shape: tuple[int, ...], float32: bool = False) -> Any:
    """Memory to write to, that DLPack can hand over: of PyTorch for its tensors, of NumPy else."""
    if is_torch(array):
        import torch

        return torch.empty(shape, dtype=torch.float32 if float32 else array.dtype)
    return np.empty(shape, np.float32 if float32 else numpy_dtype(array))


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """The dtype of `array` as NumPy knows it; bfloat16 comes with the package ml_dtypes."""
    try:
        return np.dtype(array.dtype)
    except (AttributeError, TypeError):
        return (np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)).dtype


def as_kind_of(array: Any, result: Any) -> Any:
    """`result`, made by empty_like for `array`, as an array of the library of `array`."""
    if isinstance(result, np.ndarray) and not isinstance(array, np.ndarray):
        namespace = getattr(array, "__array_namespace__", None)
        if namespace is not None:  # NumPy cannot hand over bfloat16 by DLPack: then a copy
            named = result.dtype.kind != "V"
            return namespace().from_dlpack(result) if named else namespace().asarray(result)
    return result

"""Tensors of PyTorch as memory: waits for what is on its way, and refuses what has no memory of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    import torch

# Tensors without memory have null as the address of their storage, and that plus an offset as their own. Addresses below
# this one are looked at more closely; those of ordinary tensors hardly ever are.
LOW = 1 << 36

# (module, class): what holds the values. Modules that nobody has imported need not be: nobody has such a tensor.
_OPENERS: dict[tuple[str, str], Callable[[Any], torch.Tensor]] = {
    # Result of a collective operation that is perhaps not over; also views of it.
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): lambda tensor: tensor.trigger_wait(),
    ("sparge.integrations.transformers", "Mask"): lambda tensor: tensor.written_out(),
}

_TRACED = "in code that is traced, call sparge.torch.scaled_dot_product_attention"
_REMEDIES: dict[tuple[str, str], str] = {
    ("torch.distributed.tensor", "DTensor"): "give .to_local() or .full_tensor()",
    ("torch._subclasses.fake_tensor", "FakeTensor"): _TRACED,
    ("torch._subclasses.functional_tensor", "FunctionalTensor"): _TRACED,
    ("torch.masked", "MaskedTensor"): "give .get_data(), and .get_mask() as mask",
}


def _known(tensor: torch.Tensor, table: dict[tuple[str, str], Any]) -> Any:
    for (module, name), entry in table.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(tensor, kind):
            return entry
    return None


def _is_ordinary(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() >= LOW and not tensor.is_neg() and not tensor.is_nested
    except RuntimeError:  # some without storage say so
        return False


def with_memory(name: str, tensor: torch.Tensor, output: bool = False) -> torch.Tensor:
    """`tensor` itself, or a plain one of the same values; of the same memory if it is an output. Raises ValueError if it
    has none that the library could read."""
    import torch

    if type(tensor) is torch.Tensor and _is_ordinary(tensor):
        return tensor
    opener = _known(tensor, _OPENERS)
    if opener is not None:
        return with_memory(name, opener(tensor), output)
    obstacle = _obstacle(tensor)
    if obstacle is not None:
        raise ValueError(f"{name}: {obstacle}")
    if tensor.is_neg():  # the imaginary part of conjugates: to be negated when it is read
        if output:
            raise ValueError(f"{name}: is the view of a conjugate, whose values stand negated in memory; give a copy")
        return tensor.resolve_neg()
    return tensor


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Why there is nothing to read at the tensor's address, and what would help; None if there is something."""
    import torch

    kind = type(tensor).__name__
    remedy = _known(tensor, _REMEDIES)
    if remedy is None:
        if tensor.is_nested:
            return f"{kind} is nested; give its .values() with q_offsets and kv_offsets, or .to_padded_tensor(0) with a mask"
        if tensor.layout is not torch.strided:
            return f"{kind} of layout {tensor.layout} is no strided tensor; give .to_dense()"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return f"{kind} is that of a transform (torch.func: vmap, grad, jvp); call sparge.torch.scaled_dot_product_attention"
        # Those of other devices are refused for that.
        if not tensor.is_cpu or tensor.numel() == 0 or _storage_address(tensor) != 0:
            return None
        if torch._is_functional_tensor(tensor):  # type: ignore[attr-defined]
            remedy = _TRACED
        elif type(tensor) is torch.Tensor:
            remedy = "its storage is empty: freed, or never filled"
        else:
            remedy = "give the tensor that it wraps"
    return f"{kind} has no memory of its own; {remedy}"


def _storage_address(tensor: torch.Tensor) -> int:
    """Where the storage begins; 0 if there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0

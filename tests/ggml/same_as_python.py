"""A prompt in batches through a layer of the Python package, against what the ggml backend made of it: same_as_python.py
FOLDER, which prompt_test has written. The same bits, and tiles were skipped."""

import pathlib
import sys

import numpy as np
import sparge

DIM, HEADS, KV_HEADS, BATCH = 64, 4, 2, 512  # as in prompt_test.cc


def main() -> int:
    folder = pathlib.Path(sys.argv[1])

    def read(name: str, dtype: type, heads: int) -> np.ndarray:
        return np.fromfile(folder / name, dtype).reshape(-1, heads, DIM)

    q, out = read("q.f32", np.float32, HEADS), read("out.f32", np.float32, HEADS)
    k, v = read("k.f16", np.float16, KV_HEADS), read("v.f16", np.float16, KV_HEADS)
    layer = sparge.Layer("cache_k_l0")
    for begin in range(0, len(q), BATCH):
        end = begin + BATCH
        have = layer.attention(q[begin:end], k[:end], v[:end], layout="NHD", causal=True, query_offset=begin)
        if have.tobytes() != out[begin:end].tobytes():
            print(f"queries {begin} to {end - 1}: the largest difference is {np.abs(have - out[begin:end]).max():g}")
            return 1
    print(f"ggml and Python: the same bits for {len(q)} queries in batches of {BATCH}, sparsity {layer.totals.sparsity:.1%}")
    return 0 if layer.totals.sparsity > 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())

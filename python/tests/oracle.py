"""What the tests compare with: a dense softmax in double precision, tolerances, noise and captured heads."""

import gc
import json
import os
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data"
# Relative L1 against double precision for noise (docs/numerics.md, "Tolerances in the tests"): the contract of each level.
LEVELS = {"fp32": 1e-5, "int16": 1e-3, "int8": 3e-2}
# What rounding the result adds.
RESULT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def noise(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(q_shape, k_shape, v_dim=None, dtype=np.float32):
    """Different noise for each."""
    return (
        noise(*q_shape, seed=1, dtype=dtype),
        noise(*k_shape, seed=2, dtype=dtype),
        noise(*k_shape[:-1], v_dim or k_shape[-1], seed=3, dtype=dtype),
    )


def relative_l1(result, expected):
    return np.abs(np.float64(result) - expected).sum() / np.abs(expected).sum()


def relative_l2(result, expected):
    return np.sqrt(np.square(np.float64(result) - expected).sum() / np.square(expected).sum())


def visible(q_tokens, k_tokens, causal=False, query_offset=None, window=None, tiles=None):
    """(..., Nq, Nk): what each query sees."""
    offset = k_tokens - q_tokens if query_offset is None else query_offset
    i, j = np.arange(q_tokens)[:, None] + offset, np.arange(k_tokens)
    seen = np.ones((q_tokens, k_tokens), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= j > i - window
    if tiles is not None:
        seen = seen & tiles.repeat(128, -2)[..., :q_tokens, :].repeat(64, -1)[..., :k_tokens]
    return seen


def dense(q, k, v, *, scale=None, softcap=None, mask=None, alibi_slopes=None, sink_logits=None, **what):
    """The oracle: (B, H, N, D) in float64, and its log-sum-exp."""
    q, k, v = (np.float64(x) for x in (q, k, v))
    k, v = (x.repeat(q.shape[-3] // x.shape[-3], -3) if x.ndim > 2 else x for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    seen = visible(*scores.shape[-2:], **what)
    if mask is not None and mask.dtype in (bool, np.uint8):
        seen = seen & (mask != 0)
    elif mask is not None:
        scores = scores + np.float64(mask)
    if alibi_slopes is not None:
        offset = what.get("query_offset")
        offset = scores.shape[-1] - scores.shape[-2] if offset is None else offset
        distance = np.abs(np.arange(scores.shape[-2])[:, None] + offset - np.arange(scores.shape[-1]))
        scores = scores - np.asarray(alibi_slopes)[:, None, None] * distance
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top[np.isinf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    if sink_logits is not None:
        total = total + np.exp(np.asarray(sink_logits)[:, None, None] - top)
        lse = np.log(total) + top
    return weights @ v / np.where(total == 0, 1, total), lse[..., 0]


def assert_near(result, expected, level):
    assert result.shape == expected.shape
    assert relative_l1(result, expected) <= LEVELS[level] + RESULT[result.dtype.name]


def read_head(name):
    """The tensors q, k, v of a file of data/, as float32 (H, N, D), and whether it is causal."""
    raw = (DATA / f"{name}.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    tensors = []
    for part in "qkv":
        first, last = (begin + offset for offset in header[part]["data_offsets"])
        assert header[part]["dtype"] == "F16"
        tensors.append(np.frombuffer(raw[first:last], np.float16).reshape(header[part]["shape"]).astype(np.float32))
    return (*tensors, header["__metadata__"]["causal"] == "true")


def resident():
    """Bytes of memory in use."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

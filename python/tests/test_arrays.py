"""Arrays and options: what sparge.attention takes, and how it refuses what it does not. Needs NumPy only."""

import array
import ctypes

import numpy as np
import pytest

import sparge
from oracle import assert_near, dense, noise, qkv, resident


class Bare:
    """DLPack and nothing else."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack__(self, **options):
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


class Shaped(Bare):
    @property
    def shape(self):
        return self.inner.shape


def from_ctypes(x):
    kind = ctypes.c_float
    for side in reversed(x.shape):
        kind = kind * side
    return kind.from_buffer_copy(np.ascontiguousarray(x))


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def last_strided(x):
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


WRAPPERS = {
    "DLPack only": Bare,
    "DLPack with a shape": Shaped,
    "memoryview": lambda x: memoryview(np.ascontiguousarray(x)),
    "bytes, cast": lambda x: memoryview(array.array("f", x.ravel().tolist())).cast("B").cast("f", x.shape),
    "ctypes": from_ctypes,
    "read-only": read_only,
    "negative strides": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "all strides negative": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
    "last dimension strided": last_strided,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(0, 2)).swapaxes(0, 2),
    "tokens first in memory": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "slice of more": lambda x: np.pad(x, ((1, 1), (2, 0), (0, 3)))[1:-1, 2:, :-3],
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_any_array(wrapper):
    q, k, v = qkv((2, 70, 16), (2, 90, 16))
    wrap = WRAPPERS[wrapper]
    out = sparge.attention(wrap(q), wrap(k), wrap(v), target_l1=0)
    assert isinstance(out, np.ndarray)
    assert out.tobytes() == sparge.attention(q, k, v, target_l1=0).tobytes()
    mask, tiles = np.tri(70, 90, dtype=np.float32)[None], np.ones((1, 1, 2), np.uint8)
    masked = sparge.attention(q, k, v, mask=wrap(mask), target_l1=0)
    assert masked.tobytes() == sparge.attention(q, k, v, mask=mask, target_l1=0).tobytes()
    assert sparge.predict(wrap(q), wrap(k), map=tiles)[0].all()


def test_float16():
    q, k, v = qkv((2, 4, 150, 40), (2, 2, 330, 40), dtype=np.float16)
    out = sparge.attention(q, k, v, target_l1=0)
    assert out.dtype == np.float16
    assert_near(out, dense(q, k, v)[0], "fp32")
    mixed = sparge.attention(q, k.astype(np.float32), v, target_l1=0, out=np.empty(q.shape, np.float32))
    assert_near(mixed, dense(q, k, v)[0], "fp32")


def test_bfloat16():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = qkv((2, 70, 16), (2, 90, 16), dtype=bfloat16)
    out = sparge.attention(q, last_strided(k), v[:, ::-1], target_l1=0)
    assert out.dtype == bfloat16
    assert_near(out, dense(q, k, v[:, ::-1])[0], "fp32")


def test_nothing_is_copied_for_ordinary_strides():
    # Each view is of 16 GB of one row: a copy could not be made.
    row = noise(1, 1, 64)
    one = np.lib.stride_tricks.as_strided(row, (2**20, 64, 64), (0, 0, 4), writeable=False)
    assert one.nbytes > 2**33
    out = sparge.attention(one[:2, :, :], one[-2:], one[5:7], target_l1=0)
    np.testing.assert_allclose(out, np.broadcast_to(row, out.shape), rtol=1e-5)
    before = resident()
    mask = np.broadcast_to(np.ones((1, 4096), bool), (4096, 4096))  # 16 MB if it were whole
    q = noise(1, 4096, 8)
    sparge.attention(q, q, q, mask=mask, precision="fp32", select="map", map=np.eye(32, 64, dtype=np.uint8), pv_skip="off")
    assert resident() - before < 12 * 2**20


@pytest.mark.parametrize("q_tokens, k_tokens", [(0, 10), (10, 0), (0, 0)])
def test_nothing_to_compute(q_tokens, k_tokens):
    q, k, v = qkv((2, 3, q_tokens, 16), (2, 3, k_tokens, 16))
    for options in ({}, {"target_l1": 0}, {"causal": True}):
        out, lse, stats = sparge.attention(q, k, v, return_lse=True, return_stats=True, **options)
        assert out.shape == q.shape and lse.shape == q.shape[:-1]
        assert np.all(out == 0) and np.all(np.isneginf(lse)) and stats.sparsity == 0


def test_out():
    q, k, v = qkv((2, 4, 150, 40), (2, 2, 330, 40))
    expected = sparge.attention(q, k, v)
    room = np.full((2, 150, 4, 48), np.nan, np.float32)  # more than is needed, and tokens before heads
    out = room[..., :40].swapaxes(1, 2)
    assert sparge.attention(q, k, v, out=out) is out
    assert out.tobytes() == expected.tobytes() and np.isnan(room[..., 40:]).all()


# ------------------------------------------------------------------ what is refused

Q = noise(2, 8, 16)
WRONG_ARRAYS = {
    "list": ("k", [[1.0]], TypeError, "k: list"),
    "double": ("q", Q.astype(float), TypeError, "q: dtype float64"),
    "integers": ("v", Q.astype(int), TypeError, "v: dtype int64"),
    "another byte order": ("k", Q.astype(">f4"), TypeError, "k: "),
    "a dimension": ("q", Q[0, 0], ValueError, "q: has 1 dim"),
    "five dimensions": ("k", Q[None, None], ValueError, "k: has 5 dim"),
    "head size": ("k", Q[..., :8], ValueError, "k has head size 8, q has 16"),
    "head size too large": ("q", noise(2, 8, 600), ValueError, "600"),
    "tokens of v": ("v", Q[:, :7], ValueError, "v has tokens 7, k has 8"),
    "heads of v": ("v", Q[:1], ValueError, "v has heads 1, k has 2"),
    "groups": ("q", noise(3, 8, 16), ValueError, "q_heads=3.*kv_heads=2"),
    "batch": ("q", noise(3, 2, 8, 16), ValueError, "k has batch 1, q has 3"),
    "out, shape": ("out", Q[:, :, :15].copy(), ValueError, r"out: .*\(1, 2, 8, 15\), not \(1, 2, 8, 16\)"),
    "out, dtype": ("out", Q.astype(float), TypeError, "out: dtype float64"),
    "out, read-only": ("out", read_only(Q), TypeError, "out: .*writable"),
    "out, strided": ("out", last_strided(Q), ValueError, "out: its last dimension"),
    "out, reversed": ("out", Q.copy()[:, ::-1], ValueError, "stride.*-16"),
    "out, a list": ("out", [1.0], TypeError, "out: list"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_wrong_arrays(case):
    name, value, kind, text = WRONG_ARRAYS[case]
    with pytest.raises(kind, match=text):
        sparge.attention(**{**dict(q=Q, k=Q, v=Q), name: value})


WRONG_OPTIONS = [
    (dict(colour=1), TypeError, "colour"),
    (dict(layout="BHND"), ValueError, "layout='BHND' is none of HND, NHD"),
    (dict(precision="fp16"), ValueError, "precision='fp16'"),
    (dict(precision=["int8"] * 3), ValueError, "precision has 3 values for 2 heads"),
    (dict(select="most"), ValueError, "select='most'"),
    (dict(predictor="x"), ValueError, "predictor='x'"),
    (dict(causal="yes"), TypeError, "causal='yes'"),
    (dict(window=-1), ValueError, "window=-1"),
    (dict(window=1.5), TypeError, "window=1.5"),
    (dict(scale=float("nan")), ValueError, "scale=nan"),
    (dict(softcap=-1.0), ValueError, "softcap=-1"),
    (dict(query_offset=3), ValueError, "query_offset=3"),
    (dict(tau=2.0), ValueError, "tau=2"),
    (dict(tau=[0.9] * 3), ValueError, "tau has 3 values for 2 heads"),
    (dict(tau=["x", "y"]), TypeError, "tau='x'"),
    (dict(topk=-1.0), ValueError, "topk=-1"),
    (dict(theta=0.3), ValueError, "theta.*select='auto'"),
    (dict(select="auto", tau=0.9), ValueError, "tau.*select='auto'"),
    (dict(select="all", target_l1=0.1), ValueError, "target_l1.*select='auto'"),
    (dict(target_l1=-1.0), ValueError, "target_l1=-1"),
    (dict(target_l1=float("nan")), ValueError, "target_l1=nan"),
    (dict(pv_l1=0.001), ValueError, "pv_l1=0.001"),
    (dict(calibration=3), TypeError, "calibration=3"),
    (dict(calibration=sparge.Calibration(3)), ValueError, "q_heads=2.*3"),
    (dict(calibration=sparge.Calibration(2), target_l1=0.1), ValueError, "target_l1.*calibration"),
    (dict(alibi_slopes=[1.0] * 3), ValueError, "alibi_slopes has 3 values, not 2"),
    (dict(sink_logits=[1.0]), ValueError, "sink_logits has 1 values, not 2"),
    (dict(mask=np.ones(8, bool)), ValueError, r"mask: shape \(8,\)"),
    (dict(mask=np.ones((8, 1), bool)), ValueError, r"mask: shape \(8, 1\)"),
    (dict(mask=np.ones((3, 8, 8), bool)), ValueError, r"mask: shape \(3, 8, 8\)"),
    (dict(mask=np.ones((8, 8))), TypeError, "mask: "),
    (dict(mask=[[1]]), TypeError, "mask: list"),
    (dict(select="map"), ValueError, "map"),
    (dict(map=np.ones((2, 2), bool)), ValueError, r"map: shape \(2, 2\)"),
    (dict(map=np.ones((1, 1))), TypeError, "map: "),
    (dict(map=np.ones((1, 1), bool), select="all"), ValueError, "map is for"),
    (dict(q_offsets=[0, 8]), ValueError, "kv_offsets has 0"),
    (dict(q_offsets=[0, 5, 4, 8], kv_offsets=[0, 5, 6, 8]), ValueError, r"q_offsets\[1\]=5"),
    (dict(q_offsets=[1, 8], kv_offsets=[0, 8]), ValueError, r"q_offsets\[0\]=1"),
    (dict(grid=(2, 2)), ValueError, r"grid=\(2, 2\)"),
    (dict(grid=(2, 2, 3)), ValueError, "grid=2,2,3"),
    (dict(grid=(2, 2, 2), causal=True), ValueError, "causal.*grid"),
    (dict(text_tokens=3), ValueError, "text_tokens=3"),
    (dict(threads=-1), ValueError, "threads"),
    (dict(threads="a"), TypeError, "threads='a'"),
]


@pytest.mark.parametrize("options, kind, text", WRONG_OPTIONS, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
def test_wrong_options(options, kind, text):
    with pytest.raises(kind, match=text):
        sparge.attention(Q, Q, Q, **options)


def test_other_refusals():
    out, lse = sparge.attention(Q, Q, Q, return_lse=True)
    for call, kind, text in (
        (lambda: sparge.predict(Q[0, 0], Q), ValueError, "q: has 1"),
        (lambda: sparge.predict(Q, [1]), TypeError, "k: list"),
        (lambda: sparge.merge((out, lse[:1]), (out, lse)), ValueError, r"parts\[0\] lse: is no float32 array \(1, 2, 8\)"),
        (lambda: sparge.merge((out, lse), (out[:, :4], lse)), ValueError, r"parts\[1\]: .*\(1, 2, 4, 16\), not \(1, 2, 8, 16\)"),
        (lambda: sparge.merge((out, lse), ([1], lse)), TypeError, r"parts\[1\]: list"),
        (lambda: sparge.merge((out, lse), (out, lse), (out, lse.astype(float))), ValueError, r"parts\[2\] lse"),
        (lambda: sparge.merge((out, lse), out), TypeError, r"parts\[1\]: ndarray is no pair"),
        (lambda: sparge.merge((out, lse), (out,)), TypeError, r"parts\[1\]: tuple is no pair"),
        (lambda: sparge.merge(), ValueError, "parts is empty"),
        (lambda: sparge.merge((out, lse), threads=5000), ValueError, "threads=5000 is outside 0..4096"),
        (lambda: sparge.token_order((2, 2)), ValueError, "grid"),
        (lambda: sparge.token_order((2.5, 2, 2)), TypeError, "float"),
        (lambda: sparge.token_order((2, 2, 2), "spiral"), ValueError, "order='spiral'"),
        (lambda: sparge.calibrate(Q, Q, Q, None), TypeError, "calibration=None"),
        (lambda: sparge.calibrate(Q, Q, Q, sparge.Calibration(2), effort=3.0), ValueError, "effort=3"),
        (lambda: sparge.Calibration(0), ValueError, "heads=0"),
        (lambda: sparge.Calibration.load(b"abc", 2), ValueError, "saved calibration"),
        (lambda: sparge.Calibration.load(sparge.Calibration(2).save(), 5), ValueError, "heads=5: the saved calibration has 2"),
        (lambda: sparge.Calibration.load(sparge.Calibration(4).save(), heads=2), ValueError, "heads=2: the saved calibration has 4"),
        (lambda: sparge.Calibration(2).head(2), ValueError, "head=2"),
        (lambda: sparge.set_num_threads(-1), ValueError, "threads=-1"),
        (lambda: sparge.colour, AttributeError, "colour"),
    ):
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_give_jax_arrays(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(np.random.default_rng(0).standard_normal((2, 70, 16), dtype=np.float32)).astype(dtype)
    out, lse = sparge.attention(q, q, q, causal=True, target_l1=0, return_lse=True)
    want = sparge.attention(*[np.asarray(q.astype("float32"))] * 3, causal=True, target_l1=0)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array) and out.dtype == q.dtype
    # bfloat16 keeps 8 bits: half a step of the result.
    limit = 1e-5 if dtype == "float32" else 2.0**-8 * np.abs(want).max()
    assert np.abs(np.asarray(out.astype("float32")) - want).max() <= limit

"""The package on a GPU, from Python to the kernels and back. Without a GPU: the kernels' PTX by an interpreter."""

import os

os.environ.setdefault("SPARGE_ISA", "baseline")  # whose packed integers, and so tiles, are the GPU's

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python/tests"))

import sparge
from gpu_arrays import Driver, Namespace, lent
from oracle import dense, noise, qkv, relative_l1
from sparge import _core

# As in gpu_test.cc: twice the root of the sum of squares of the roundings of q and k in int8, p and v in f16.
INT8 = 3.5 / 127 / 12**0.5
TOLERANCE = 2 * (2 * INT8**2 + 2 * (2.0**-10 / 12**0.5) ** 2) ** 0.5
SHAPES = [(2, 150, 40), (1, 140, 40)]  # ragged blocks, a group of two heads


@pytest.fixture(scope="module")
def driver():
    return Driver()


@pytest.fixture
def gpu(driver):
    return Namespace(driver)


def on_gpu(gpu, arrays):
    return [gpu.asarray(array) for array in arrays]


PROBLEMS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=70),
    "softcap": dict(softcap=0.7),
    "scale": dict(scale=0.3),
    "sinks": dict(sink_logits=[1.0, -2.0]),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_dense(gpu, problem):
    arrays = qkv(*SHAPES, v_dim=24)
    out, lse = sparge.attention(*on_gpu(gpu, arrays), select="all", pv_skip="off", return_lse=True, **PROBLEMS[problem])
    expected, expected_lse = dense(*arrays, **PROBLEMS[problem])
    assert relative_l1(out.numpy(), expected) < TOLERANCE
    seen = np.isfinite(expected_lse)
    assert np.all(np.isneginf(lse.numpy()[~seen]))
    # A row's error is a mean of errors of scores, each below 6 standard deviations.
    np.testing.assert_allclose(lse.numpy()[seen], expected_lse[seen], atol=12 * 2**0.5 * INT8)
    gc.collect()
    assert lent() == 0, "what DLPack handed over was given back"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_layouts_types_and_memory_of_the_caller(gpu, dtype):
    arrays = qkv((1, 2, 70, 16), (1, 1, 65, 16), dtype=dtype)
    expected = dense(*arrays)[0]
    swapped = on_gpu(gpu, [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays])
    out = gpu.empty((1, 70, 2, 16), dtype, "gpu 0")
    gpu.made.clear()
    same = sparge.attention(*swapped, out=out, layout="NHD", select="all")
    assert same is out and len(gpu.made) == 1, "the workspace is all that was made"
    assert relative_l1(out.numpy().swapaxes(1, 2), expected) < TOLERANCE + 2.0**-11
    # The same by strides alone.
    strided = on_gpu(gpu, [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays])
    assert np.array_equal(sparge.attention(*strided, select="all").numpy(), out.numpy().swapaxes(1, 2))


RULES = {
    "topk": dict(select="topk", topk=0.3, theta=-1),
    "cdf": dict(select="cdf", tau=0.5, theta=-1),
    "floor": dict(select="floor", tau=0.5, theta=-1),
    "two heads": dict(select="topk", topk=[0.2, 0.6], theta=-1),
}


@pytest.mark.parametrize("rule", RULES)
def test_selections_are_those_of_the_cpu(gpu, rule):
    # Keys of a block lean to one side, so that tiles differ in mass.
    q, k, v = qkv((2, 140, 32), (2, 380, 32))
    k = k + 2 * np.repeat(noise(2, 6, 32, seed=9), 64, 1)[:, :380]
    tiles, stats = sparge.predict(q, k, **RULES[rule])
    assert 0 < stats.sparsity < 1
    out = sparge.attention(*on_gpu(gpu, (q, k, v)), pv_skip="off", **RULES[rule]).numpy()
    # Scores have a standard deviation of their own here; an error of one is an error of its weight.
    spread = max(1.0, float(np.std(q @ k.swapaxes(1, 2)) / 32**0.5))
    assert relative_l1(out, dense(q, k, v, tiles=tiles)[0]) < TOLERANCE * spread
    assert relative_l1(out, dense(q, k, v)[0]) > 2 * TOLERANCE * spread, "another map would be found out"


def test_maps(gpu):
    arrays = qkv((2, 150, 32), (2, 140, 32))
    tiles = np.array([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 1]]], np.uint8)
    out = sparge.attention(*on_gpu(gpu, arrays), select="map", map=gpu.asarray(tiles), pv_skip="off").numpy()
    assert np.all(out[1, :128] == 0)
    assert relative_l1(out, dense(*arrays, tiles=tiles != 0)[0]) < TOLERANCE


def test_streams(gpu, driver):
    arrays = on_gpu(gpu, qkv(*SHAPES))
    sparge.attention(*arrays, select="all")
    assert [array.streams for array in arrays] == [[1]] * 3, "DLPack's name of the default stream"
    import ctypes

    stream = ctypes.c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(stream), 0)
    mine = sparge.attention(*arrays, select="all", stream=stream.value).numpy()
    assert [array.streams[1:] for array in arrays] == [[stream.value]] * 3
    assert np.array_equal(mine, sparge.attention(*arrays, select="all").numpy())
    driver.call("cuStreamDestroy_v2", stream)


def test_plans_are_kept_and_told_apart(gpu, monkeypatch):
    arrays = on_gpu(gpu, qkv(*SHAPES))
    first = [sparge.attention(*arrays, select="all", sink_logits=[0.0, s]).numpy() for s in (1.0, 3.0)]
    assert not np.array_equal(*first)
    # No memory for another plan: calls of a known kind need none.
    monkeypatch.setenv("SPARGE_FAKE_FAILURE", "cuMemcpyHtoD=2")
    for result, sink in zip(first, (1.0, 3.0)):
        assert np.array_equal(sparge.attention(*arrays, select="all", sink_logits=[0.0, sink]).numpy(), result)
    with pytest.raises(MemoryError, match="copying a plan.s tables to the GPU failed: CUDA_ERROR_OUT_OF_MEMORY"):
        sparge.attention(*arrays, select="all", sink_logits=[0.0, 5.0])
    monkeypatch.delenv("SPARGE_FAKE_FAILURE")


def test_plans_come_and_go(gpu, monkeypatch):
    """More kinds of calls than plans are kept: those go that were not used for longest."""
    arrays = on_gpu(gpu, qkv((1, 0, 8), (1, 5, 8)))  # no queries: nothing to compute, but a plan all the same

    def call(kind):
        return sparge.attention(*arrays, select="all", sink_logits=[float(kind)])

    for kind in range(300):
        call(kind)
    monkeypatch.setenv("SPARGE_FAKE_FAILURE", "cuMemcpyHtoD=2")
    call(299), call(100)
    with pytest.raises(MemoryError):
        call(0)
    monkeypatch.delenv("SPARGE_FAKE_FAILURE")
    call(0)


REFUSED = {
    "target_l2": (dict(target_l2=0.05), ValueError, r"select=AUTO \(target_l2, target_l1\): a GPU does not calibrate yet; name what"),
    "nothing": (dict(), ValueError, "a GPU does not calibrate yet"),
    "exact": (dict(target_l2=0), ValueError, "precision=fp32: a GPU computes int8 only"),
    "int16": (dict(select="all", precision="int16"), ValueError, "precision=int16: a GPU computes int8 only"),
    "slopes": (dict(select="all", alibi_slopes=[0.5, 0.5]), ValueError, "alibi_slopes: a GPU does not take them yet"),
    "grid": (dict(select="all", grid=(1, 15, 10)), ValueError, "grid"),
    "stats": (dict(select="all", return_stats=True), ValueError, "stats: on a GPU they would have to be waited for"),
    "threads": (dict(select="all", threads=2), ValueError, "threads=2 has no effect on a GPU"),
    "a rule's thresholds": (dict(select="all", tau=0.5), ValueError, "tau has no effect"),
    "names of others": (dict(is_causal=True), TypeError, "do you mean 'causal'"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_refusals(gpu, refused):
    options, kind, text = REFUSED[refused]
    arrays = on_gpu(gpu, qkv((2, 150, 32), (2, 150, 32)))
    with pytest.raises(kind, match=text):
        sparge.attention(*arrays, **options)


def test_refused_arrays(gpu):
    host = qkv(*SHAPES)
    q, k, v = on_gpu(gpu, host)
    with pytest.raises(ValueError, match="k: is on device type 1, not on the GPU"):
        sparge.attention(q, host[1], v, select="all")
    elsewhere = gpu.asarray(host[2])
    elsewhere.ordinal = 1
    with pytest.raises(ValueError, match="v: is on cuda:1, not on cuda:0"):
        sparge.attention(q, k, elsewhere, select="all")
    with pytest.raises(ValueError, match="k: has 2 dimensions|k has head size|k has heads"):
        sparge.attention(q, gpu.asarray(noise(140, 24)), v, select="all")
    with pytest.raises(ValueError, match=r"mask=1: a GPU takes no masks yet"):
        sparge.attention(q, k, v, select="all", mask=gpu.asarray(np.ones((150, 140), np.uint8)))
    with pytest.raises(ValueError, match="map: is on device type 1, not on the GPU"):
        sparge.attention(q, k, v, select="map", map=np.ones((2, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="v: its last dimension is not contiguous"):
        sparge.attention(q, k, gpu.asarray(np.ascontiguousarray(host[2].swapaxes(1, 2)).swapaxes(1, 2)), select="all")
    with pytest.raises(ValueError, match="stream=7: q is not on a GPU"):
        sparge.attention(*host, select="all", stream=7)
    with pytest.raises(ValueError, match="q: is on device type 2, not on the CPU"):
        sparge.Layer().attention(q, k, v)
    big = on_gpu(gpu, qkv((1, 4, 300), (1, 4, 300)))
    with pytest.raises(ValueError, match="qk_dim=300 v_dim=300: a GPU takes up to"):
        sparge.attention(*big, select="all")


def test_a_gpu_that_is_not_there(gpu):
    arrays = on_gpu(gpu, qkv(*SHAPES))
    for array in arrays:
        array.ordinal = 7
    with pytest.raises(RuntimeError, match="device=cuda:7: this machine has 1 GPUs"):
        sparge.attention(*arrays, out=arrays[0], select="all")


def test_arrays_that_make_no_others(gpu, monkeypatch):
    arrays = on_gpu(gpu, qkv(*SHAPES))
    monkeypatch.setattr(type(arrays[0]), "__array_namespace__", None)
    with pytest.raises(TypeError, match="q: GpuArray is on a GPU and has no __array_namespace__"):
        sparge.attention(*arrays, select="all")


def test_the_extension_checks_the_workspace(gpu):
    q, k, v = on_gpu(gpu, qkv(*SHAPES))
    out = gpu.empty((2, 150, 40), np.float32, "gpu 0")
    arrays = tuple(array.__dlpack__() for array in (q, k, v, out))
    with pytest.raises(ValueError, match="workspace: has not the [0-9]+ bytes"):
        small = gpu.empty((8,), np.uint8, "gpu 0")
        _core.attention_on_gpu(0, 0, False, (*arrays, None), False, lambda size: small.__dlpack__(), {"select": "all"})

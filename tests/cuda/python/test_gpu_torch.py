"""PyTorch's tensors on a GPU. PyTorch itself needs a real one for them; here they are a subclass that says it is on cuda:0
and has memory of the driver that the loader finds."""

import os

os.environ.setdefault("SPARGE_ISA", "baseline")

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python/tests"))

import sparge
import sparge.torch
from gpu_arrays import Driver, Memory
from oracle import dense, qkv, relative_l1
from sparge import _gpu, compat
from test_gpu import SHAPES, TOLERANCE
from torch._subclasses.fake_tensor import FakeTensorMode

DRIVER = Driver()
ATTENTION = torch.ops.sparge.attention.default


class OnGpu(torch.Tensor):
    """A tensor of PyTorch on cuda:0, as far as the package looks at it."""

    made = []  # shapes that were asked for

    @staticmethod
    def __new__(cls, memory, shape, strides, dtype):
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device="cuda:0")
        tensor.memory = memory
        return tensor

    @classmethod
    def of(cls, array):
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        memory = Memory(DRIVER, array.nbytes)
        DRIVER.upload(memory.address, tensor.numpy())
        return cls(memory, tensor.shape, tensor.stride(), tensor.dtype)

    def data_ptr(self):
        return self.memory.address

    def host(self):
        array = np.empty(self.shape, str(self.dtype).removeprefix("torch."))
        DRIVER.download(array, self.memory.address)
        return array

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.new_empty.default:
            shape = tuple(args[1])
            cls.made.append(shape)
            dtype = kwargs.get("dtype") or args[0].dtype
            empty = torch.empty(shape, dtype=dtype)
            return cls(Memory(DRIVER, empty.numel() * empty.element_size()), shape, empty.stride(), dtype)
        if function is torch.ops.aten.transpose.int:
            there = torch.empty_strided(args[0].shape, args[0].stride(), device="meta").transpose(*args[1:])
            return cls(args[0].memory, there.shape, there.stride(), args[0].dtype)
        if function is ATTENTION:  # as the dispatcher would, were this a tensor of its own
            return sparge.torch._attention_cuda(*args, **kwargs)
        raise NotImplementedError(str(function))


@pytest.fixture(autouse=True)
def default_stream(monkeypatch):
    monkeypatch.setattr(_gpu, "_current_stream", lambda device: (0, False))
    OnGpu.made.clear()


def on_gpu(arrays):
    return [OnGpu.of(array) for array in arrays]


def test_tensors(monkeypatch):
    streams = []
    monkeypatch.setattr(_gpu, "_current_stream", lambda device: (streams.append(device) or 0, False))
    arrays = qkv(*SHAPES, v_dim=24)
    out, lse = sparge.attention(*on_gpu(arrays), select="all", causal=True, return_lse=True)
    expected, expected_lse = dense(*arrays, causal=True)
    assert type(out) is OnGpu and out.device == torch.device("cuda:0") and out.shape == (2, 150, 24)
    assert relative_l1(out.host(), expected) < TOLERANCE
    assert lse.dtype is torch.float32 and np.array_equal(np.isfinite(lse.host()), np.isfinite(expected_lse))
    assert streams == [torch.device("cuda:0")], "PyTorch's current stream of that device, asked for once"
    assert len(OnGpu.made) == 3 and OnGpu.made[2][0] > 0, "result, log-sum-exp, workspace"


def test_views_need_no_copy():
    arrays = qkv((1, 2, 70, 16), (1, 2, 65, 16))
    swapped = [OnGpu.of(array.swapaxes(1, 2)).transpose(1, 2) for array in arrays]
    out = sparge.attention(*swapped, select="all")
    assert relative_l1(out.host(), dense(*arrays)[0]) < TOLERANCE


def test_half_types():
    arrays = qkv(*SHAPES, dtype=np.float16)
    out = sparge.attention(*on_gpu(arrays), select="all")
    assert out.dtype is torch.float16 and relative_l1(out.host(), dense(*arrays)[0]) < TOLERANCE + 2.0**-11


def test_what_does_not_fit_is_named():
    host = qkv(*SHAPES)
    q, k, v = on_gpu(host)
    with pytest.raises(ValueError, match="k: is on device cpu, not on cuda:0"):
        sparge.attention(q, torch.from_numpy(host[1]), v, select="all")
    with pytest.raises(ValueError, match="k: is on device cuda:0, not on the CPU"):
        sparge.attention(torch.from_numpy(host[0]), k, v, select="all")
    with pytest.raises(ValueError, match="stream=3: for PyTorch it is the current one"):
        sparge.attention(q, k, v, select="all", stream=3)
    with pytest.raises(ValueError, match=r"target_l2.*: a GPU does not calibrate yet"):
        sparge.attention(q, k, v, target_l2=0.05)
    with pytest.raises(ValueError, match="q: is on device cuda:0, not on the CPU"):
        sparge.predict(q, k)
    with pytest.raises(ValueError, match="requires a gradient"):
        sparge.attention(q.requires_grad_(), k, v, select="all")


# ------------------------------------------------------------------ the operator


def test_the_operator_has_a_function_for_cuda():
    assert torch._C._dispatch_has_kernel_for_dispatch_key("sparge::attention", "CUDA")
    layer = sparge.Layer("a", sparge.Settings(target_l2=0, precision="int8"))
    arrays = qkv((1, 2, 150, 40), (1, 2, 140, 40))
    tensors = on_gpu(arrays)
    out = sparge.torch.attend(*tensors, causal=True, layer=layer)
    assert type(out) is OnGpu and relative_l1(out.host(), dense(*arrays, causal=True)[0]) < TOLERANCE
    with torch.no_grad():
        same = sparge.torch.scaled_dot_product_attention(*tensors, is_causal=True, layer=layer, fallback=False)
    assert relative_l1(same.host(), dense(*arrays, causal=True, query_offset=0)[0]) < TOLERANCE


def test_the_operator_measures_nothing_on_a_gpu():
    tensors = on_gpu(qkv((1, 2, 150, 40), (1, 2, 140, 40)))
    with pytest.raises(ValueError, match="a GPU does not calibrate yet"):
        sparge.torch.attend(*tensors, layer=sparge.Layer("a"))
    with pytest.raises(NotImplementedError, match="query is on cuda:0, not on the CPU"):
        sparge.torch.scaled_dot_product_attention(*tensors, layer=sparge.Layer("a"), fallback=False)
    exact = sparge.Layer("a", sparge.Settings(target_l2=0))
    with pytest.raises(ValueError, match="precision=fp32: a GPU computes int8 only"):
        sparge.torch.attend(*tensors, layer=exact)


def test_traced_tensors_of_a_gpu_have_the_shape_of_the_result():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, tokens, 40, device="cuda:0", dtype=torch.float16) for tokens in (150, 140, 140))
        out = ATTENTION(q, k, v, None, False, -10, 0, 0.1, 0.0, None, False, None, 0)
    assert out.shape == q.shape and out.device == q.device and out.dtype is q.dtype


# ------------------------------------------------------------------ names of the research packages


def test_research_names():
    arrays = qkv((1, 2, 150, 64), (1, 2, 140, 64))
    tensors = on_gpu(arrays)
    assert relative_l1(compat.sageattn(*tensors).host(), dense(*arrays)[0]) < TOLERANCE
    tiles = np.array([[[1, 0, 1], [0, 1, 0]]] * 2, bool)[None]
    chosen = compat.spas_sage2_attn_meansim_topk_cuda(*tensors, topk=0.5)
    map_of_it = sparge.predict(*arrays[:2], select="topk", topk=0.5, theta=-0.1, predictor="paper", keep_sink=False)[0]
    assert 0 < map_of_it.mean() < 1
    assert relative_l1(chosen.host(), dense(*arrays, tiles=map_of_it)[0]) < TOLERANCE
    assert relative_l1(chosen.host(), dense(*arrays, tiles=tiles)[0]) > 2 * TOLERANCE
    with pytest.raises(ValueError, match="stats: on a GPU they would have to be waited for"):
        compat.spas_sage2_attn_meansim_topk_cuda(*tensors, topk=0.5, return_sparsity=True)

"""sparge.torch: the drop-in for scaled_dot_product_attention, the operator beneath it, and rerouting, against PyTorch."""

import pytest

torch = pytest.importorskip("torch")

import gc
import itertools
import pickle
import threading
import time
import weakref

import torch.nn.functional as F

import sparge
import sparge.torch
from oracle import resident
from sparge.torch import Layer, Settings, scaled_dot_product_attention

ORIGINAL = F.scaled_dot_product_attention
OPERATOR = torch.ops.sparge.attention.default
# Relative L1 between two results of that type: each is rounded once, and fp32 sums have another order (docs/numerics.md).
CLOSE = {torch.float32: 1e-5, torch.float16: 2 * 2.0**-11 + 1e-5, torch.bfloat16: 2 * 2.0**-8 + 1e-5}

SKIPPED = sparge._core.PV_ROOM * sparge._core.TARGET_L2  # the default bound with PV skip, relative L2


@pytest.fixture
def exact():
    """A layer that skips nothing and computes in fp32: differences are rounding."""
    return Layer("exact", Settings(target_l1=0))


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


def noise(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(q_shape=(2, 4, 70, 32), k_shape=(2, 4, 90, 32), v_dim=None, dtype=torch.float32):
    k = noise(*k_shape, dtype=dtype)
    return noise(*q_shape, dtype=dtype), k, noise(*k_shape[:-1], v_dim or k_shape[-1], dtype=dtype).flip(-2)


def assert_close(result, expected):
    assert result.shape == expected.shape and result.dtype == expected.dtype
    difference = (result.double() - expected.double()).abs().sum() / expected.double().abs().sum()
    assert difference <= CLOSE[result.dtype]


# ------------------------------------------------------------------ the drop-in


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", [((4, 70, 32), (4, 90, 32)), ((2, 4, 70, 32), (2, 4, 90, 32)), ((2, 4, 90, 32), (2, 4, 70, 32)), ((2, 3, 4, 33, 16), (2, 3, 4, 40, 16))], ids=str)
def test_shapes_types_and_causality(shapes, causal, dtype, exact):
    q, k, v = qkv(*shapes, v_dim=24, dtype=dtype)
    ours = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, fallback=False, layer=exact)
    # In double: the original in 16 bits rounds on its way.
    assert_close(ours, ORIGINAL(q.double(), k.double(), v.double(), is_causal=causal, scale=0.3).to(dtype))


@pytest.mark.parametrize("shape", [(70, 90), (1, 90), (4, 70, 90), (1, 70, 90), (2, 1, 1, 90), (2, 1, 70, 90), (2, 4, 70, 90)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_masks(shape, kind, exact):
    q, k, v = qkv()
    seen = noise(*shape) < 0.5
    seen[..., 0] = True
    mask = seen if kind is torch.bool else torch.where(seen, noise(*shape), -torch.inf).to(kind)
    ours = scaled_dot_product_attention(q, k, v, mask, fallback=False, layer=exact)
    assert_close(ours, ORIGINAL(q, k, v, mask if kind is torch.bool else mask.float()))


@pytest.mark.parametrize("shape", [(33, 40), (4, 33, 40), (3, 4, 33, 40), (3, 1, 33, 40), (2, 1, 1, 1, 40)], ids=str)
def test_masks_of_five_dimensions(shape, exact):
    q, k, v = qkv((2, 3, 4, 33, 16), (2, 3, 4, 40, 16))
    mask = noise(*shape)
    assert_close(scaled_dot_product_attention(q, k, v, mask, fallback=False, layer=exact), ORIGINAL(q, k, v, mask))


def test_groups_of_heads(exact):
    q, k, v = qkv((2, 6, 70, 32), (2, 2, 90, 32))
    ours = scaled_dot_product_attention(q, k, v, enable_gqa=True, fallback=False, layer=exact)
    assert_close(ours, ORIGINAL(q, k, v, enable_gqa=True))


def test_any_strides(exact):
    q, k, v = qkv()
    packed = noise(2, 70, 3, 4, 32)  # what a fused projection gives
    views = {
        "transposed": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        "last strided": [torch.stack((x, x), -1).flatten(-2)[..., ::2] for x in (q, k, v)],
        "expanded": [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)],
        "one projection": packed.permute(2, 0, 3, 1, 4).unbind(0),
    }
    for views_of in views.values():
        ours = scaled_dot_product_attention(*views_of, fallback=False, layer=exact)
        assert_close(ours, ORIGINAL(*views_of))
    mask = noise(2, 90, 70).transpose(1, 2)[:, None]  # strided along the keys
    assert_close(scaled_dot_product_attention(q, k, v, mask, fallback=False, layer=exact), ORIGINAL(q, k, v, mask))


def test_defaults_keep_the_error():
    q, k, v = (noise(1, 2, 600, 64).roll(i, -1) for i in range(3))
    for layer in (None, Layer("x"), Layer("y", Settings(min_keys=0))):
        ours = scaled_dot_product_attention(q, k, v, is_causal=True, layer=layer)
        expected = ORIGINAL(q, k, v, is_causal=True)
        # 8-bit noise (docs/numerics.md: 3e-2) and what may be skipped.
        assert (ours - expected).norm() / expected.norm() < 3e-2 + SKIPPED


FALLBACKS = {
    "dropout": (lambda q, k, v: ((q, k, v, None, 0.5), {}), "dropout_p=0.5"),
    "gradient": (lambda q, k, v: ((q.requires_grad_(), k, v), {}), "query requires a gradient"),
    "gradient of the mask": (lambda q, k, v: ((q, k, v, noise(70, 90).requires_grad_()), {}), "attn_mask requires a gradient"),
    "double": (lambda q, k, v: ((q.double(), k.double(), v.double()), {}), "query: dtype torch.float64"),
    "two dimensions": (lambda q, k, v: ((q[0, 0], k[0, 0], v[0, 0]), {}), "shapes"),
    "no batch": (lambda q, k, v: ((q[:0], k[:0], v[:0]), {}), "nothing to compute"),
    "no queries": (lambda q, k, v: ((q[:, :, :0], k, v), {}), "nothing to compute"),
    "scale of zero": (lambda q, k, v: ((q, k, v), dict(scale=0.0)), "scale=0"),
    "mask of one column": (lambda q, k, v: ((q, k, v, noise(70, 1)), {}), r"attn_mask: shape \(70, 1\)"),
    "large heads": (lambda q, k, v: ((noise(1, 1, 4, 600),) * 3, {}), "600"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_fallbacks(case):
    make, reason = FALLBACKS[case]
    arguments, options = make(*qkv())
    with pytest.raises(NotImplementedError, match=reason):
        scaled_dot_product_attention(*arguments, **options, fallback=False)
    torch.manual_seed(0)
    expected = ORIGINAL(*arguments, **options)
    torch.manual_seed(0)
    result = scaled_dot_product_attention(*arguments, **options)
    assert torch.equal(result, expected) and result.requires_grad == expected.requires_grad


def test_what_the_original_refuses_is_refused():
    q, k, v = qkv()
    for arguments in ((q, k[..., :16], v), (q, k[:, :2], v[:, :2]), (q, k, v[:, :, :5]), (q, k, v, torch.ones(70, 90, dtype=torch.int32))):
        with pytest.raises((RuntimeError, ValueError)):
            scaled_dot_product_attention(*arguments)
    with pytest.raises((RuntimeError, ValueError), match="is_causal"):
        scaled_dot_product_attention(q, k, v, torch.ones(70, 90, dtype=torch.bool), is_causal=True)


def test_gradients_may_be_off():
    q, k, v = qkv()
    q.requires_grad_()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert not scaled_dot_product_attention(q, k, v, fallback=False).requires_grad


# ------------------------------------------------------------------ sparge.attention with tensors


def test_tensors_in_sparge_attention():
    for dtype in CLOSE:
        q, k, v = qkv(dtype=dtype)
        out, lse = sparge.attention(q, k, v, target_l1=0, return_lse=True)
        assert isinstance(lse, torch.Tensor) and lse.dtype == torch.float32
        assert_close(out, ORIGINAL(q.double(), k.double(), v.double()).to(dtype))
        room = torch.empty_like(out)
        assert sparge.attention(q, k, v, target_l1=0, out=room) is room and torch.equal(room, out)
        merged, _ = sparge.merge((out, lse), (torch.zeros_like(out), torch.full_like(lse, -torch.inf)))
        assert torch.equal(merged, out)
    assert isinstance(sparge.reference(q, k, v), torch.Tensor) and sparge.predict(q, k)[0].shape == (2, 4, 1, 2)
    with pytest.raises(ValueError, match="k: is on device meta"):
        sparge.attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="v: requires a gradient"):
        sparge.attention(q, k, v.requires_grad_())


def test_a_temporary_mask_lives_until_the_call_is_over(monkeypatch):
    q, k, v = qkv()
    alive, inner = [], sparge._core.attention

    def watched(*arguments):
        gc.collect()
        alive.append(gone() is not None)
        return inner(*arguments)

    def mask():
        nonlocal gone
        made = noise(70, 90)
        gone = weakref.ref(made)
        return made

    gone = None
    monkeypatch.setattr(sparge._core, "attention", watched)
    sparge.attention(q, k, v, mask=mask())
    assert alive == [True]


# ------------------------------------------------------------------ the operator


def arguments(q, k, v, mask=None, causal=False, window=0, softcap=0.0, sinks=None, nhd=False, grid=None, layer=0):
    offset = k.shape[-3 if nhd else -2] - q.shape[-3 if nhd else -2]
    return (q, k, v, mask, causal, offset, window, q.shape[-1] ** -0.5, softcap, sinks, nhd, grid, layer)


def samples():
    q, k, v = qkv((1, 2, 20, 16), (1, 2, 30, 16), v_dim=8)
    yield arguments(q, k, v)
    yield arguments(q[0], k[0], v[0], causal=True, window=5, softcap=2.0)
    yield arguments(*(x.transpose(1, 2) for x in (q, k, v)), mask=noise(20, 30) < 0, nhd=True)
    yield arguments(q.bfloat16(), k.half(), v, mask=noise(2, 20, 30), sinks=noise(2))
    yield arguments(q[:, :, :12], q[:, :, :12], v[:, :, :12], grid=[1, 3, 4, 0, 0])


@pytest.mark.parametrize("index", range(5))
def test_operator_is_well_formed(index):
    sample = next(itertools.islice(samples(), index, None))
    results = torch.library.opcheck(OPERATOR, sample)
    assert set(results.values()) == {"SUCCESS"}


class Attends(torch.nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def model(layers=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Attends() for _ in range(layers))).eval()


def counting(monkeypatch):
    """How often a layer is called."""
    calls, inner = [], sparge.Layer.run
    monkeypatch.setattr(sparge.Layer, "run", lambda *a: (calls.append(1), inner(*a))[1])
    return calls


def test_compiled_in_one_graph(exact, monkeypatch):
    calls = counting(monkeypatch)

    def attend(q, k, v):
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True, layer=exact) + 1

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (70, 64):
            q, k, v = (x[:, :, :length] for x in qkv())
            assert_close(compiled(q, k, v), ORIGINAL(q * 2, k, v, is_causal=True) + 1)
    assert len(calls) == 2
    torch._dynamo.reset()


def test_compiled_model_that_is_patched(monkeypatch):
    net, x = model(), noise(1, 80, 32)
    with torch.no_grad(), sparge.torch.sparse(target_l1=0):
        calls = counting(monkeypatch)
        result = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(result, net(x))
    assert len(calls) == 2


def test_exported(exact):
    class Ours(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return scaled_dot_product_attention(q, k, v, mask, layer=exact)

    q, k, v = qkv()
    mask = noise(70, 90) < 0.5
    with torch.no_grad():
        program = torch.export.export(Ours(), (q, k, v, mask))
    assert OPERATOR in {node.target for node in program.graph.nodes}
    assert_close(program.module()(q, k, v, mask), ORIGINAL(q, k, v, mask))


# ------------------------------------------------------------------ rerouting


def test_patches_nest_and_end():
    with sparge.torch.sparse(target_l1=0.1) as outer:
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
        assert sparge.torch.current_layer() is outer[""]
        sparge.torch.patch(target_l1=0.3)
        assert sparge.torch.current_layer().settings.target_l1 == 0.3
        sparge.torch.unpatch()
        assert sparge.torch.current_layer() is outer[""]
        with pytest.raises(KeyError), sparge.torch.sparse():
            raise KeyError
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
    assert F.scaled_dot_product_attention is ORIGINAL and sparge.torch.current_layer() is None
    with pytest.raises(RuntimeError, match="unpatch without patch"):
        sparge.torch.unpatch()
    with pytest.raises(TypeError, match="colour"):
        sparge.torch.patch(colour=1)
    with pytest.raises(ValueError, match="target_l1=-1"):
        sparge.torch.patch(target_l1=-1)


def test_patches_may_end_in_any_order():
    first, second = sparge.torch.sparse(target_l1=0.1), sparge.torch.sparse(target_l1=0.2)
    first.__enter__()
    kept = second.__enter__()
    first.__exit__(None, None, None)
    assert sparge.torch.current_layer() is kept[""]
    second.__exit__(None, None, None)


def test_each_layer_of_a_model_has_its_calibration():
    net, x = model(), noise(1, 200, 32)
    with torch.no_grad():
        expected = net(x)
        with sparge.torch.sparse(net, min_keys=0) as layers:
            for _ in range(3):
                result = net(x)
    # Two layers, each with 8-bit noise (docs/numerics.md: 3e-2) and what may be skipped.
    assert (result - expected).norm() / expected.norm() < 2 * (3e-2 + SKIPPED)
    first, second = layers["0"], layers["1"]
    assert (first.totals.calls, second.totals.calls) == (3, 3) and layers[""].totals.calls == 0
    assert len(first.calibrations) == len(second.calibrations) == 1
    assert first.calibrations[0].save() != second.calibrations[0].save() and first.calibrations[0].heads == 2
    assert first.totals.qk_eligible > 0 and first.totals.time_ms > 0
    text = sparge.torch.summary(layers.values())
    assert "0" in text and f"{6:>6}" in text.splitlines()[-1]
    assert not net[0]._forward_hooks and not net[0]._forward_pre_hooks
    copy = pickle.loads(pickle.dumps(first))
    assert copy.handle != first.handle and copy.calibrations[0].save() == first.calibrations[0].save()


def test_a_module_that_raises_leaves_nothing_running():
    net = model()
    with torch.no_grad(), sparge.torch.sparse(net):
        with pytest.raises(RuntimeError):
            net(noise(1, 8, 31))
        assert sparge.torch._running.layers == []
        net(noise(1, 80, 32))


def test_layers_that_are_gone_are_forgotten():
    layer = Layer("x")
    handle = layer.handle
    assert sparge._layers.by_handle(handle) is layer
    del layer
    gc.collect()
    assert sparge._layers.by_handle(handle) is None
    OPERATOR(*arguments(*qkv(), layer=handle))  # every call for itself


def test_threads_run_models_at_once():
    net, x = model(), noise(1, 150, 32)
    with torch.no_grad():
        expected = net(x)
    differences = []

    def run():
        with torch.no_grad():
            differences.extend((net(x) - expected).abs().max().item() for _ in range(5))

    with sparge.torch.sparse(net, target_l1=0) as layers:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(differences) == 20 and max(differences) < 1e-4
    assert layers["0"].totals.calls == layers["1"].totals.calls == 20


# ------------------------------------------------------------------ costs


def best_time(call, enough):
    """Seconds per call: the best of many short rounds, because on a busy machine some of them are not interrupted."""
    best = float("inf")
    for _ in range(400):
        begin = time.perf_counter()
        for _ in range(20):
            call()
        best = min(best, (time.perf_counter() - begin) / 20)
        if best < enough:
            break
    return best


def test_overhead_of_the_operator():
    x = noise(1, 1, 1, 16)
    ready = arguments(x, x, x)
    # PyTorch's own part: the time of an operator in Python that does nothing but make its result.
    library = torch.library.Library("sparge_test", "FRAGMENT")
    library.define(f"nothing{str(OPERATOR._schema).split('attention', 1)[1]}")
    library.impl("nothing", lambda q, *_: q.new_empty(q.shape), "CPU")
    nothing = torch.ops.sparge_test.nothing.default
    with torch.inference_mode():
        base = best_time(lambda: nothing(*ready), 0)
        assert best_time(lambda: OPERATOR(*ready), base + 20e-6) < base + 20e-6
    library._destroy()


def test_no_memory_is_lost():
    x, mask = noise(1, 2, 4, 16), torch.ones(4, 4, dtype=torch.bool)
    layer = Layer("x")

    def calls(count):
        with torch.no_grad():
            for _ in range(count):
                scaled_dot_product_attention(x, x, x, mask, layer=layer)
                sparge.attention(x, x, x, mask=mask, return_lse=True)

    calls(500)
    before = resident()
    calls(2500)
    assert resident() - before < 2 * 2**20  # 400 bytes per call

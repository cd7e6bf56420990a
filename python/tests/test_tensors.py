"""Tensors of PyTorch that stand for others: those on their way are waited for, those without memory are refused by name."""

import pytest

torch = pytest.importorskip("torch")

import warnings

import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_map_only

import sparge
import sparge.torch
from sparge.torch import Layer, Settings, attend, scaled_dot_product_attention

EXACT = dict(target_l1=0)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(scope="module")
def group():
    """One process that talks to itself."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def gathered(group):
    """What a collective operation gives: not to be read before it was waited for."""
    import torch.distributed._functional_collectives as collectives

    def gather(tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions have another name for it
            result = collectives.all_gather_tensor(tensor, 0, group)
        assert type(result).__name__ == "AsyncCollectiveTensor"
        return result

    return gather


Q, K, V = noise(4, 70, 16), noise(4, 90, 16, seed=1), noise(4, 90, 16, seed=2)
# Views of a collective's result: their address is null plus an offset.
VIEWS = {
    "whole": lambda gather, x: gather(x),
    "slice": lambda gather, x: gather(torch.cat([noise(2, *x.shape[1:]), x]))[2:],
    "transposed": lambda gather, x: gather(x.transpose(0, 1).contiguous()).transpose(0, 1),
    "view": lambda gather, x: gather(x.reshape(2, 2, *x.shape[1:])).view(4, *x.shape[1:]),
    "slice of a slice": lambda gather, x: gather(F.pad(x, (0, 0, 3, 5)))[:, 2:][:, 1:-5],
}


@pytest.mark.parametrize("view", VIEWS)
def test_collectives_are_waited_for(gathered, view):
    q, k, v = (VIEWS[view](gathered, x) for x in (Q, K, V))
    out, lse = sparge.attention(q, k, v, return_lse=True, **EXACT)
    expected, expected_lse = sparge.attention(Q, K, V, return_lse=True, **EXACT)
    assert type(out) is torch.Tensor and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    q, k, v = (VIEWS[view](gathered, x) for x in (Q, K, V))
    assert torch.equal(sparge.reference(q, k, v), sparge.reference(Q, K, V))


def test_collectives_everywhere(gathered):
    def late(x):
        return VIEWS["slice"](gathered, x)

    q, k, v = Q, K, V
    mask = noise(4, 70, 90)
    want = sparge.attention(q, k, v, mask=mask, **EXACT)
    assert torch.equal(sparge.attention(q, k, v, mask=late(mask), **EXACT), want)
    tiles = torch.ones(4, 1, 2, dtype=torch.uint8)
    tiles[1, 0, 1] = 0
    by_map = dict(precision="fp32", pv_skip="off")
    late_tiles = gathered(torch.cat([tiles, tiles]))[4:]
    assert torch.equal(sparge.attention(q, k, v, map=late_tiles, **by_map), sparge.attention(q, k, v, map=tiles, **by_map))

    room = late(torch.zeros_like(want))
    assert sparge.attention(q, k, v, mask=mask, out=room, **EXACT) is room and torch.equal(room, want)

    blocks, stats = sparge.predict(late(q), late(k), tau=0.9)
    expected, _ = sparge.predict(q, k, tau=0.9)
    assert (blocks == expected).all() and stats.qk_tiles["eligible"] == 8

    calibrations = [sparge.Calibration(4), sparge.Calibration(4)]
    sparge.calibrate(late(q), late(k), late(v), calibrations[0])
    sparge.calibrate(q, k, v, calibrations[1])
    assert calibrations[0].save() == calibrations[1].save() != sparge.Calibration(4).save()

    parts = [sparge.attention(q, k[:, s], v[:, s], return_lse=True, **EXACT) for s in (slice(0, 40), slice(40, None))]
    merged = sparge.merge(*[(late(o), late(lse)) for o, lse in parts])
    assert all(map(torch.equal, merged, sparge.merge(*parts)))


def test_collectives_in_the_operator(gathered):
    exact = Layer("exact", Settings(target_l1=0))
    mask, sinks = noise(4, 70, 90), noise(4)
    want = attend(Q, K, V, mask=mask, sinks=sinks, layer=exact)
    late = {name: VIEWS["slice"](gathered, x) for name, x in dict(q=Q, k=K, v=V, mask=mask, sinks=sinks).items()}
    plain = dict(q=Q, k=K, v=V, mask=mask, sinks=sinks)
    for names in (["q"], ["k", "v"], ["mask"], ["sinks"], list(plain)):
        out = attend(**{**plain, **{name: late[name] for name in names}}, layer=exact)
        assert torch.equal(out, want), names
    out = scaled_dot_product_attention(late["q"], late["k"], late["v"], late["mask"], fallback=False, layer=exact)
    assert torch.equal(out, scaled_dot_product_attention(Q, K, V, mask, fallback=False, layer=exact))


def test_collectives_can_be_captured(gathered, tmp_path):
    class Attends(torch.nn.Module):
        def forward(self, *inputs):
            return F.scaled_dot_product_attention(*inputs)

    files = []
    for late in (False, True):
        model, inputs = Attends(), [*(x[None] for x in (Q, K, V)), torch.ones(1, 1, 70, 90, dtype=torch.bool)]
        with sparge.capture(model, tmp_path / str(late), min_tokens=1, dtype="float32") as captured:
            model(*[gathered(x) if late else x for x in inputs])
        assert captured.files == 1 and not captured.skipped
        (file,) = (tmp_path / str(late)).glob("*/*.safetensors")
        files.append(file.read_bytes())
    assert files[0] == files[1]
    with pytest.warns(sparge.CaptureWarning, match="mask: Wrapper has no memory"):
        with sparge.capture(model, tmp_path / "wrapped", min_tokens=1) as captured:
            model(*map(Wrapper, inputs))
    assert captured.files == 0


# ------------------------------------------------------------------ what is refused


class Wrapper(torch.Tensor):
    """A tensor that stands for another one, as a user may write it."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), storage_offset=inner.storage_offset()
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def freed(x):
    """As sharded models leave the parameters of layers that do not run."""
    view = torch.cat([x, x])[len(x) :]
    view.untyped_storage().resize_(0)
    return view


def functional(x):
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(x)


def masked(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(x, x > 0)


def nested(x, **layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x[0], x[0, :5]], **layout)


def csr(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x[0].to_sparse_csr()


STANDING_FOR_OTHERS = {
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "FakeTensor has no memory .*sparge.torch"),
    "view of fake": (lambda x: FakeTensorMode().from_tensor(F.pad(x, (0, 0, 1, 0)))[:, 1:], "FakeTensor .*sparge.torch"),
    "functional, Python": (functional, "FunctionalTensor .*sparge.torch"),
    "functional, C++": (torch._to_functional_tensor, "Tensor has no memory .*sparge.torch"),
    "masked": (masked, r"MaskedTensor .*\.get_data\(\)"),
    "nested": (nested, "Tensor is nested.*q_offsets"),
    "jagged": (lambda x: nested(x, layout=torch.jagged), "NestedTensor is nested.*q_offsets"),
    "sparse": (lambda x: x.to_sparse(), r"Tensor of layout torch.sparse_coo .*\.to_dense\(\)"),
    "csr": (csr, r"Tensor of layout torch.sparse_csr .*\.to_dense\(\)"),
    "mkldnn": (lambda x: x.to_mkldnn(), r"Tensor of layout torch._mkldnn .*\.to_dense\(\)"),
    "a user's": (Wrapper, "Wrapper has no memory of its own; give the tensor that it wraps"),
    "a user's, of a view": (lambda x: Wrapper(F.pad(x, (0, 0, 1, 0))[:, 1:]), "Wrapper has no memory of its own"),
    "freed": (freed, "Tensor has no memory of its own; its storage is empty"),
}


@pytest.mark.parametrize("case", STANDING_FOR_OTHERS)
def test_others_are_refused_by_name(case):
    make, text = STANDING_FOR_OTHERS[case]
    wrong = make(V)
    out, lse = sparge.attention(Q, K, V, return_lse=True, **EXACT)
    for name, call in {
        "q": lambda: sparge.attention(wrong, K, V),
        "k": lambda: sparge.predict(Q, wrong),
        "v": lambda: sparge.reference(Q, K, wrong),
        "mask": lambda: sparge.attention(Q, K, V, mask=wrong),
        "map": lambda: sparge.attention(Q, K, V, map=wrong),
        "out": lambda: sparge.attention(Q, K, V, out=wrong),
        r"parts\[1\]": lambda: sparge.merge((out, lse), (wrong, lse)),
        r"parts\[1\] lse": lambda: sparge.merge((out, lse), (out, wrong)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: {text}"):
            call()
    with pytest.raises(ValueError, match=f"^k: {text}"):
        sparge.calibrate(Q, wrong, V, sparge.Calibration(4))


def test_dtensors_are_refused_or_left_to_the_original(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    q, k, v = (DTensor.from_local(x[None], mesh, [Replicate()]) for x in (Q, K, V))
    with pytest.raises(ValueError, match=r"q: DTensor has no memory of its own; give \.to_local\(\) or \.full_tensor\(\)"):
        sparge.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="query is a DTensor"):
        scaled_dot_product_attention(q, k, v, fallback=False)
    out = scaled_dot_product_attention(q, k, v)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.to_local(), F.scaled_dot_product_attention(Q, K, V)[None])
    local = [x.to_local() for x in (q, k, v)]
    torch.testing.assert_close(sparge.attention(*local, **EXACT), out.to_local())


def test_tensors_of_transforms(monkeypatch):
    """Under torch.func the operator works; memory there is none to give to sparge.attention."""
    exact = Layer("exact", Settings(target_l1=0))
    batch = torch.stack([Q, Q.flip(0)])

    def ours(q):
        with pytest.raises(ValueError, match="q: Tensor is that of a transform .*sparge.torch"):
            sparge.attention(q, K, V)
        return scaled_dot_product_attention(q, K, V, layer=exact)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no rule for it, so it runs in a loop
        out = torch.func.vmap(ours)(batch)
    assert torch.equal(out[1], scaled_dot_product_attention(Q.flip(0), K, V, layer=exact))


def test_subclasses_with_memory_are_taken():
    class Named(torch.Tensor):
        pass

    want = sparge.attention(Q, K, V, **EXACT)
    with torch.no_grad():
        for kind in (torch.nn.Parameter, lambda x: x.as_subclass(Named)):
            out = sparge.attention(kind(Q), kind(K), kind(V), **EXACT)
            assert torch.equal(out.as_subclass(torch.Tensor), want)
    assert sparge.attention(Q[:, :0], K, V).shape == (4, 0, 16)  # nothing, with nothing behind it


def test_views_that_stand_negated_in_memory():
    complex_v = torch.complex(noise(4, 90, 16), -V)
    negated = complex_v.conj().imag
    assert negated.is_neg() and torch.equal(negated, V)
    want = sparge.attention(Q, K, V, **EXACT)
    assert torch.equal(sparge.attention(Q, K, negated, **EXACT), want)
    exact = Layer("exact", Settings(target_l1=0))
    assert torch.equal(attend(Q, K, negated, layer=exact), attend(Q, K, V, layer=exact))
    with pytest.raises(ValueError, match="out: is the view of a conjugate"):
        sparge.attention(Q, K, V, out=torch.zeros(4, 70, 16, dtype=torch.complex64).conj().imag)


def test_masks_of_transformers_are_written_out():
    pytest.importorskip("transformers")
    from sparge.integrations.transformers import Mask

    mask = Mask((1, 1, 70, 90), True, 20, 0, None)
    want = sparge.attention(Q[None], K[None], V[None], causal=True, **EXACT)
    torch.testing.assert_close(sparge.attention(Q[None], K[None], V[None], mask=mask, **EXACT), want)
    exact = Layer("exact", Settings(target_l1=0))
    torch.testing.assert_close(attend(Q[None], K[None], V[None], mask=mask, layer=exact), want)

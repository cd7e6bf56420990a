"""Calls that PyTorch computes instead: counted by reason, and said when there were no others."""

import pytest

torch = pytest.importorskip("torch")

import copy
import warnings

import torch.nn.functional as F

import sparge
import sparge.torch
from sparge._elsewhere import REMEDIES, why_unused
from sparge.torch import Layer, Settings, sparse, summary

LONG = sparge._core.MIN_KEYS


class Attends(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inside = torch.nn.Linear(16, 16)
        self.dropout = dropout

    def forward(self, x):
        x = self.inside(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=self.dropout)


def model(**options):
    return torch.nn.Sequential(Attends(**options), torch.nn.GELU(), Attends(**options))


def tokens(count, dtype=torch.float32):
    return torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def quietly(*args):
    """Runs without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return args[0](*args[1:])


def test_gradients_are_named_with_the_remedy():
    net = model()
    with pytest.warns(sparge.LayerWarning, match=r"PyTorch computed all attention. 2 calls: gradients \(.*inference_mode"):
        with sparse(net) as layers:
            net(tokens(LONG))
    assert [dict(layer.elsewhere) for layer in layers.values() if layer.elsewhere] == [{"gradients": 1}] * 2
    table = summary(layers.values()).splitlines()
    assert [line.split()[0] for line in table] == ["layer", "0", "2", "all", "PyTorch"], "layers that attend, and no others"
    assert REMEDIES["gradients"] in table[-1]
    assert copy.deepcopy(layers["0"]).elsewhere == {"gradients": 1}
    layers["0"].clear_totals()
    assert not layers["0"].elsewhere


@pytest.mark.parametrize("reason, options, dtype", [("dropout", dict(dropout=0.5), torch.float32), ("dtype", {}, torch.float64)])
def test_other_reasons(reason, options, dtype):
    net = model(**options).to(dtype)
    with torch.inference_mode(), pytest.warns(sparge.LayerWarning, match=f"2 calls: {reason} "), sparse(net):
        net(tokens(LONG, dtype))


def test_short_calls_are_named():
    net = model()
    with torch.inference_mode(), pytest.warns(sparge.LayerWarning, match=f"of 2 calls none .* at least {LONG} keys"):
        with sparse(net):
            net(tokens(LONG - 1))
    with torch.inference_mode(), pytest.warns(sparge.LayerWarning, match="of 1 call none"), sparse():
        F.scaled_dot_product_attention(tokens(100), tokens(100), tokens(100))


def test_short_calls_and_others_are_named_together():
    short, elsewhere = Layer("a"), Layer("b")
    elsewhere.pass_by(sparge.torch._obstacle(*[tokens(4, torch.float64)] * 3, None, 0.0, None, False))
    sparge.torch.attend(*[tokens(100)] * 3, causal=True, layer=short)
    reason = why_unused([short, elsewhere])
    assert "of 1 call none had more" in reason and "PyTorch computed 1 call: dtype" in reason


def test_nothing_is_said_where_all_is_well():
    net = model()

    def run(**settings):
        with torch.inference_mode(), sparse(net, **settings) as layers:
            net(tokens(LONG))
        return layers

    layers = quietly(run)
    assert "PyTorch computed" not in summary(layers.values())
    assert layers["0"].totals.dense_ms > 0
    quietly(lambda: run(target_l2=0))  # nothing was to be skipped

    def nothing():
        with sparse(net):
            pass

    quietly(nothing)


def test_one_that_computes_is_enough():
    used, not_used = Layer("a"), Layer("b")
    not_used.pass_by(sparge.torch._obstacle(*[tokens(4, torch.float64)] * 3, None, 0.0, None, False))
    assert "1 call: dtype" in why_unused([used, not_used])
    sparge.torch.attend(*[tokens(LONG)] * 3, causal=True, layer=used)
    assert why_unused([used, not_used]) is None


def test_only_size_is_named_as_the_reason_where_it_is_the_only_one():
    assert Layer("a").may_skip and not Layer("a", Settings(target_l1=0)).may_skip
    told = Layer("a")
    told.dense = True
    assert not told.may_skip


# ------------------------------------------------------------------ transformers


def test_transformers():
    transformers = pytest.importorskip("transformers")
    import sparge.integrations.transformers as integration

    assert "sparge" in transformers.AttentionInterface().valid_keys(), "by importing it"
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256
    )
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sparge").eval()
    ids = torch.arange(1, 60)[None]
    integration._warned.clear()
    with pytest.warns(sparge.LayerWarning, match="gradients .*inference_mode"):
        net(ids)
    quietly(net, ids)  # said once
    table = integration.summary(net)
    assert "PyTorch computed 4 calls: gradients" in table
    same = copy.deepcopy(net).double()
    with torch.inference_mode(), pytest.warns(sparge.LayerWarning, match="dtype"):
        integration.configure(same)
        out = same(ids).logits
    theirs = copy.deepcopy(same)
    theirs.set_attn_implementation("sdpa")
    with torch.inference_mode():
        assert (theirs(ids).logits - out).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["attention_mask", "s_aux"])
def test_transformers_keeps_gradients_of_masks_and_sinks(name):
    """Where nothing else is trained: a mask that is written out as floats; sinks, which PyTorch's function has not."""
    pytest.importorskip("transformers")
    import sparge.integrations.transformers as integration

    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(1)).unbind()
    given = {"attention_mask": torch.zeros(1, 1, 40, 40), "s_aux": None}
    given[name] = torch.zeros(2) if name == "s_aux" else given[name]
    given[name].requires_grad_()
    module = torch.nn.Module()
    if name == "s_aux":
        with pytest.raises(NotImplementedError, match="s_aux requires a gradient.*eager"):
            integration._attention(module, q, k, v, **given)
    else:
        integration._attention(module, q, k, v, **given)[0].square().sum().backward()
        assert float(given[name].grad.abs().max()) > 0
    with torch.no_grad():
        integration._attention(module, q, k, v, **given)
    assert module.__dict__[integration._ATTRIBUTE].totals.calls == 1


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_transformers_keeps_every_gradient(trained):
    """As adapters of one projection need it."""
    transformers = pytest.importorskip("transformers")
    import sparge.integrations.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256
    )
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sparge").eval().requires_grad_(False)
    weight = getattr(net.model.layers[0].self_attn, trained).weight.requires_grad_()
    wanted = []
    for implementation in ("sparge", "sdpa"):
        net.set_attn_implementation(implementation)
        weight.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sparge.LayerWarning)
            net(torch.arange(1, 60)[None]).logits.square().mean().backward()
        wanted.append(weight.grad)
    assert wanted[1].abs().max() > 0 and torch.allclose(*wanted, rtol=1e-4, atol=1e-8)


# ------------------------------------------------------------------ names and texts


@pytest.mark.parametrize("given, ours", [("is_causal", "causal"), ("attn_mask", "mask"), ("sm_scale", "scale"), ("targetl2", "target_l2")])
def test_names_of_others(given, ours):
    q = tokens(8)
    for call in (sparge.attention, sparge.reference, Layer().attention):
        with pytest.raises(TypeError, match=f"'{given}'; do you mean '{ours}'"):
            call(q, q, q, **{given: True})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        sparge.attention(q, q, q, zzz=1)


def test_results_fit_on_a_line():
    q = tokens(LONG)
    text = repr(sparge.attention(q, q, q, return_stats=True)[1])
    assert text.startswith("Stats(") and "tiles" in text and len(text) < 120

"""ComfyUI and vllm-omni by their interfaces: what they hand over comes as they hand it over, from stand-ins of their side."""

import copy
import logging
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from sparge.integrations import comfyui, vllm_omni

HEADS, DIM = 4, 64


def tokens(count, heads=HEADS, dtype=torch.float32, seed=0):
    """(batch, tokens, heads, dim) for q, k and v: neighbours are alike, as in models."""
    steps = torch.randn(3, 1, count, heads, DIM, generator=torch.Generator().manual_seed(seed))
    return (steps.cumsum(2) / torch.arange(1, count + 1).sqrt()[:, None, None] * 2).to(dtype).unbind()


def exact(q, k, v, **options):
    """Of and as (batch, tokens, heads, dim)."""
    q, k, v = (tensor.transpose(1, 2).double() for tensor in (q, k, v))
    options = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in options.items()}
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


def error(out, wanted):
    return float((out.double() - wanted).norm() / wanted.norm())


# ------------------------------------------------------------------ vllm-omni


def dispatch(q, k, v, params=None, causal=False, scale=DIM**-0.5, mask=None):
    """What its SPARSE_ATTN does: three tiers of parameters in one dict, a mask only for who says that it counts."""
    params = dict(params or {})
    if mask is not None:
        assert vllm_omni.attention.capabilities["supports_attention_mask"]
        params["attn_mask"] = mask
    return vllm_omni.attention(q, k, v, params, is_causal=causal, softmax_scale=scale)


@pytest.mark.parametrize("causal", [False, True])
def test_plugin_computes_attention(causal):
    q, k, v = tokens(1500)
    out = dispatch(q, k, v, {"sparge": {"target_l2": 0, "precision": "fp32"}}, causal, scale=0.2)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert error(out, exact(q, k, v, is_causal=causal, scale=0.2)) < 1e-4


def test_plugin_skips_within_its_target():
    q, k, v = tokens(4096, dtype=torch.bfloat16)
    before = vllm_omni._layers('{"target_l2": 0.05}')[0].totals.qk_computed
    out = dispatch(q, k, v, {"sparge": {"target_l2": 0.05}})
    layer = vllm_omni._layers('{"target_l2": 0.05}')[0]
    assert layer.totals.qk_computed > before and layer.totals.sparsity > 0.1
    assert error(out, exact(q, k, v)) < 0.1


def test_plugin_takes_masks():
    q, k, v = tokens(1200)
    there = torch.ones(1, 1200, dtype=torch.bool)
    there[:, 900:] = False
    out = dispatch(q, k, v, {"sparge": {"target_l2": 0, "precision": "fp32"}}, mask=there)
    assert error(out, exact(q, k, v, attn_mask=there[:, None, None])) < 1e-4


def test_plugin_knows_steps_and_grids():
    q, k, v = tokens(4 * 16 * 32)
    params = {
        "sparge": {"target_l2": 0.1, "dense_steps": 2}, "denoise_step_idx": torch.tensor([1]), "total_denoise_steps": torch.tensor([9]),
        "latent_shape": torch.tensor([[4, 32, 64]]), "patch_size": torch.tensor([[1, 2, 2]]),
    }  # fmt: skip
    assert vllm_omni._grid(params, 4 * 16 * 32) == (4, 16, 32, 0, 0)
    assert vllm_omni._grid(params, 4 * 16 * 32 + 7) is None  # other tokens among them
    sparse, everything, _ = vllm_omni._layers('{"dense_steps": 2, "target_l2": 0.1}')
    for step, layer, other in ((1, everything, sparse), (2, sparse, everything)):
        before = (layer.totals.calls, other.totals.calls)
        out = dispatch(q, k, v, {**params, "denoise_step_idx": torch.tensor([step])})
        assert (layer.totals.calls, other.totals.calls) == (before[0] + 1, before[1])
        assert error(out, exact(q, k, v)) < 0.2
    assert everything.totals.sparsity == 0


def test_plugin_refuses_by_name():
    q, k, v = tokens(256)
    with pytest.raises(TypeError, match="target_12"):
        dispatch(q, k, v, {"sparge": {"target_12": 0.05}})
    with pytest.raises(ValueError, match="dense_steps=-1"):
        dispatch(q, k, v, {"sparge": {"dense_steps": -1}})
    with pytest.raises(ValueError, match="dense_steps=2"):  # and no step is told
        dispatch(q, k, v, {"sparge": {"dense_steps": 2}})
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        dispatch(q.clone().requires_grad_(), k, v)


def test_plugin_is_registered():
    """By the name and in the group that vllm-omni looks for."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("no pyproject.toml beside the tests")
    found = re.search(r'entry-points\."vllm_omni.sparse_attn"\]\nsparge = "([\w.]+):(\w+)"', project.read_text("utf-8"))
    assert found and (found[1], found[2]) == (vllm_omni.__name__, vllm_omni.attention.__name__)


# ------------------------------------------------------------------ ComfyUI


class Patcher:
    """Its ModelPatcher, as far as nodes go."""

    def __init__(self, options=None):
        self.model_options = options or {"transformer_options": {}}

    def clone(self):
        return Patcher(copy.copy(self.model_options))


def comfy_attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """Its function for PyTorch, which marks what it computed."""
    if not skip_reshape:
        q, k, v = (tensor.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.dim() == 2 else mask
        mask = mask[:, None] if mask.dim() == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"), enable_gqa=kwargs.get("enable_gqa", False))
    comfy_attention.calls += 1
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def node(**settings):
    model = Patcher()
    (patched,) = comfyui.NODE_CLASS_MAPPINGS["SpargeAttention"]().patch(model, **{"target_l2": 0.0, "precision": "fp32", **settings})
    assert "optimized_attention_override" not in model.model_options["transformer_options"]  # the first model stays as it is
    comfy_attention.calls = 0
    return patched.model_options["transformer_options"]


def attend(options, *arguments, **kwargs):
    """As ComfyUI's functions call what overrides them."""
    return options["optimized_attention_override"](
        comfy_attention, *arguments, transformer_options=options, _inside_attn_wrapper=True, **kwargs
    )


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("out_by_heads", [False, True])
def test_node_computes_attention(by_heads, out_by_heads):
    options = node()
    q, k, v = tokens(700)
    mask = torch.zeros(700, 700).masked_fill(torch.rand(700, 700, generator=torch.Generator().manual_seed(1)) < 0.2, -1e4)
    given = [tensor.transpose(1, 2) if by_heads else tensor.flatten(2) for tensor in (q, k, v)]
    out = attend(options, *given, HEADS, mask=mask, skip_reshape=by_heads, skip_output_reshape=out_by_heads, scale=0.1)
    wanted = exact(q, k, v, attn_mask=mask, scale=0.1)
    assert error(out, wanted.transpose(1, 2) if out_by_heads else wanted.flatten(2)) < 1e-4
    assert comfy_attention.calls == 0


def test_node_takes_grouped_heads():
    options = node()
    q, (k, v) = tokens(300)[0], tokens(300, heads=2, seed=1)[1:]
    out = attend(options, q.flatten(2), k.flatten(2), v.flatten(2), HEADS, enable_gqa=True)
    assert error(out, exact(q, k, v).flatten(2)) < 1e-4


def test_node_learns_by_block_and_reports(caplog):
    options = node(target_l2=0.05, precision="int8")
    q, k, v = (tensor.flatten(2) for tensor in tokens(4096))
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            for block in (("double_block", 0), ("double_block", 1)):
                out = attend({**options, "block": block}, q, k, v, HEADS)
    layers = options["optimized_attention_override"].layers.values()
    assert [layer.totals.calls for layer in layers] == [4, 4] and all(layer.remembers for layer in layers)
    assert all(layer.totals.sparsity > 0.1 for layer in layers)
    assert error(out, exact(*tokens(4096)).flatten(2)) < 0.1
    assert len([line for line in caplog.text.splitlines() if line.startswith("('double_block', 1)")]) == 1


def test_node_reports_pictures_of_every_size(caplog):
    options = node()
    tables = []
    with caplog.at_level(logging.INFO):
        for count, rounds in ((128, 3), (256, 8), (128, 4)):
            q, k, v = (tensor.flatten(2) for tensor in tokens(count))
            for _ in range(rounds):
                for block in (("double_block", 0), ("double_block", 1)):
                    attend({**options, "block": block}, q, k, v, HEADS)
                tables.append(caplog.text.count("skipped"))  # of the heading
    # After the fourth and eighth of the larger ones; one of the smaller ones, with the three that came before.
    assert tables == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_node_says_what_it_leaves_out(caplog):
    options = node()
    q, k, v = (tensor.flatten(2) for tensor in tokens(128))
    attend(options, q.double(), k.double(), v.double(), HEADS)
    attend(options, q.double(), k.double(), v.double(), HEADS)
    attend(options, q, k, v, HEADS, low_precision_attention=False)
    assert comfy_attention.calls == 3
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "float64" in said[0] and "full precision" in said[1]


def test_node_has_what_comfyui_asks_for():
    kind = comfyui.NODE_CLASS_MAPPINGS["SpargeAttention"]
    assert set(comfyui.NODE_DISPLAY_NAME_MAPPINGS) == set(comfyui.NODE_CLASS_MAPPINGS)
    required = kind.INPUT_TYPES()["required"]
    assert required["model"] == ("MODEL",) and kind.RETURN_TYPES == ("MODEL",)
    assert callable(getattr(kind(), kind.FUNCTION))
    defaults = {name: extra["default"] if kinds == "FLOAT" else kinds[0] for name, (kinds, extra) in list(required.items())[1:]}
    (patched,) = kind().patch(Patcher(), **defaults)
    with pytest.raises(ValueError, match="another node"):
        kind().patch(patched, **defaults)

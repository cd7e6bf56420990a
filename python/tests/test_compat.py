"""sparge.compat: functions of the research packages, against dense attention and against our own names for the same."""

import pytest

torch = pytest.importorskip("torch")

import inspect
import math
import sys
from pathlib import Path

import torch.nn.functional as F

import sparge
from sparge import compat

COMPAT = Path(__file__).parents[1] / "compat"
INT8 = 0.03  # relative L1 of 8-bit arithmetic (docs/numerics.md)


def qkv(layout="HND", heads=4, kv_heads=2, tokens=1000):
    generator = torch.Generator().manual_seed(3)
    walk = [torch.randn(2, h, tokens, 64, generator=generator).cumsum(2).mul(0.05) for h in (heads, kv_heads, kv_heads)]
    return [t.transpose(1, 2) if layout == "NHD" else t for t in walk]


def dense(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def off(result, expected):
    return float((result - expected).abs().sum() / expected.abs().sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sageattn(layout, causal):
    q, k, v = qkv(layout)
    out, lse = compat.sageattn(q, k, v, tensor_layout=layout, is_causal=causal, return_lse=True)
    wanted = dense(*qkv(), is_causal=causal)
    assert out.shape == q.shape and off(out.transpose(1, 2) if layout == "NHD" else out, wanted) < INT8
    scores = qkv()[0] @ qkv()[1].repeat_interleave(2, 1).transpose(-1, -2) / 8
    if causal:
        scores = scores.masked_fill(torch.ones(1000, 1000, dtype=torch.bool).triu(1), -math.inf)
    assert (lse - scores.logsumexp(-1)).abs().max() < 0.05 and lse.shape == (2, 4, 1000)
    assert torch.equal(compat.sageattn(q, k, v, tensor_layout=layout, is_causal=causal), out)


def test_topk_and_cdf_are_those_of_the_paper():
    q, k, v = qkv()
    out, sparsity = compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=0.3, return_sparsity=True)
    rule = dict(predictor="paper", keep_sink=False, pv_skip=50 * math.log(2))
    assert torch.equal(out, sparge.attention(q, k, v, select="topk", topk=0.3, theta=-0.1, **rule))
    assert 0.5 < sparsity < 0.7
    out, sparsity = compat.spas_sage2_attn_meansim_cuda(q, k, v, is_causal=True, cdfthreshd=0.9, return_sparsity=True)
    ours = sparge.attention(q, k, v, select="cdf", tau=0.9, theta=0.6, causal=True, query_offset=0, **rule)
    assert torch.equal(out, ours) and 0 <= sparsity < 1
    everything = compat.spas_sage2_attn_meansim_cuda(q, k, v, is_causal=True, cdfthreshd=1.0)
    assert off(everything, dense(q, k, v, is_causal=True)) < INT8
    per_head = compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=torch.tensor([0.3, 0.3, 1.0, 1.0]))
    assert torch.equal(per_head[:, :2], compat.spas_sage_attn_meansim_topk_cuda(q, k, v, topk=0.3)[:, :2])
    assert off(per_head[:, 2:], dense(q, k, v)[:, 2:]) < INT8


def test_log_sum_exp_as_there():
    q, k, v = qkv()
    out, lse = compat.sageattn(q, k, v, return_lse=True)
    blocks = torch.ones(2, 4, 8, 16, dtype=torch.int8)
    for function, options in (
        (compat.spas_sage2_attn_meansim_topk_cuda, dict(topk=1.0)),
        (compat.spas_sage2_attn_meansim_cuda, dict(cdfthreshd=1.0)),
        (compat.block_sparse_sage2_attn_cuda, dict(mask_id=blocks)),
    ):
        ours = function(q, k, v, return_lse=True, **options)
        assert (ours[0] - out).abs().max() < 0.01 and (ours[1] - lse).abs().max() < 1e-5
        assert isinstance(function(q, k, v, return_lse=True, return_sparsity=True, **options)[1], float), "sparsity comes first"


def test_options_of_kernels_change_nothing():
    q, k, v = qkv()
    assert torch.equal(compat.sageattn(q, k, v, smooth_k=False, pv_accum_dtype="fp32"), compat.sageattn(q, k, v))
    with pytest.raises(TypeError, match="no argument smooth_q=True"):
        compat.sageattn(q, k, v, smooth_q=True)


def test_block_sparse():
    q, k, v = qkv()
    blocks = torch.zeros(2, 4, 8, 16, dtype=torch.int8)
    blocks[..., ::3] = 1
    out, sparsity = compat.block_sparse_sage2_attn_cuda(q, k, v, blocks, return_sparsity=True)
    mask = (blocks != 0).repeat_interleave(128, -2).repeat_interleave(64, -1)[..., :1000, :1000]
    assert off(out, dense(q, k, v, attn_mask=mask)) < INT8 and sparsity == pytest.approx(1 - 6 / 16)
    blocks[..., 0] = 0
    with_sink = compat.block_sparse_sage2_attn_cuda(q, k, v, blocks, attention_sink=True)
    assert torch.equal(with_sink, out) and not blocks[..., 0].any()
    assert off(compat.block_sparse_sage2_attn_cuda(q, k, v), dense(q, k, v)) < INT8


def test_types_and_refusals():
    q, k, v = (t.bfloat16() for t in qkv())
    assert compat.sageattn(q, k, v).dtype == torch.bfloat16
    assert compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, output_dtype=torch.float16).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="dropout_p=0.5"):
        compat.spas_sage2_attn_meansim_cuda(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="topk=0.35, cdfthreshd=0.9"):
        compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, cdfthreshd=0.9)
    mask = torch.ones(1000, 1000, dtype=torch.bool).tril()
    masked = compat.spas_sage2_attn_meansim_topk_cuda(q, k, v, attn_mask=mask, topk=1.0)
    assert off(masked.float(), dense(q, k, v, attn_mask=mask).float()) < INT8 + 2**-8


def test_modules_by_their_names(monkeypatch):
    if not COMPAT.is_dir():
        pytest.skip("not beside the source")
    monkeypatch.syspath_prepend(str(COMPAT))
    for name in ("spas_sage_attn", "sageattention"):
        sys.modules.pop(name, None)
        module = __import__(name)
        try:
            assert module.__all__ and all(getattr(module, function) is getattr(compat, function) for function in module.__all__)
        finally:
            sys.modules.pop(name, None)
    names = [*inspect.signature(compat.spas_sage2_attn_meansim_topk_cuda).parameters]
    assert names[:7] == ["q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale"]

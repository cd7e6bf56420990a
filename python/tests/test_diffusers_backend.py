"""sparge as an attention backend of diffusers: set_attention_backend and attention_backend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from test_diffusers import EXACT, _difference, _hooks, _is_cross, _watch, each_model, one_thread  # noqa: E402, F401
from tiny_diffusers import Make, flux, made, normal, run, wan  # noqa: E402

from sparge.integrations import diffusers as integration  # noqa: E402


@pytest.fixture
def active_backend() -> Any:
    """set_attention_backend is for the whole process."""
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)
    integration.register()


@each_model
def test_backend_of_a_model(make: Make, active_backend: None) -> None:
    model, inputs = made(make)
    want = run(model, inputs)
    others = integration.register(target_l1=0, dense_steps=1)
    active = dispatch._AttentionBackendRegistry.get_active_backend()
    model.set_attention_backend("sparge")
    enabled = integration.enabled(model)
    assert enabled is not None and enabled.dense_steps == 1
    seen = _watch(enabled)
    assert _difference(run(model, inputs), want) <= EXACT
    assert {name for name, _ in seen} == {name for name in enabled.layers if not _is_cross(make, name)}
    assert others.totals.calls == 0
    assert dispatch._AttentionBackendRegistry.get_active_backend() == active  # other models are not concerned
    model.set_attention_backend("sparge")  # again is no error
    assert integration.enabled(model) is enabled
    model.set_attention_backend("native")
    assert integration.enabled(model) is None and _hooks(model) == 0
    assert torch.equal(run(model, inputs), want)
    model.set_attention_backend("sparge")
    model.reset_attention_backend()
    assert integration.enabled(model) is None
    assert torch.equal(run(model, inputs), want)


def test_backend_as_a_context(active_backend: None) -> None:
    model, inputs = made(flux)
    want = run(model, inputs)
    layer = integration.register()  # counts calls of models that are not enabled
    assert dispatch.AttentionBackendName.SPARGE is dispatch.AttentionBackendName("sparge")
    assert "sparge" in [member.value for member in dispatch.AttentionBackendName]
    with dispatch.attention_backend("sparge"):
        out = run(model, inputs)
    assert layer.totals.calls == 4
    # 8-bit arithmetic in four layers, 1 to 3 % each, and nothing to skip in a few tiles.
    assert 0 < float((out - want).abs().sum() / want.abs().sum()) < 0.1
    assert torch.equal(run(model, inputs), want)


def test_backend_refuses_what_it_cannot(active_backend: None) -> None:
    integration.register()
    model, _ = made(wan)
    with pytest.raises(ValueError, match="parallel: torch.distributed has no process group"):
        integration.enable(model, parallel=object())
    assert integration.enabled(model) is None and _hooks(model) == 0
    q = normal(1, 8, 2, 16)
    with pytest.raises(ValueError, match="return_lse=True"):
        dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True}, backend="sparge")


def test_backend_with_a_mask_per_key(active_backend: None) -> None:
    layer = integration.register(target_l1=0)
    q, k, v = (normal(2, 30, 2, 16, seed=s) for s in range(3))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 20:] = False
    for options in ({"attn_mask": mask}, {"is_causal": True, "scale": 0.5}):
        ours, want = (dispatch.dispatch_attention_fn(q, k, v, backend=b, **options) for b in ("sparge", "native"))
        assert _difference(ours, want) <= EXACT, options
    assert layer.totals.calls == 2

"""sparge.integrations.diffusers: seven tiny transformers with random weights give the same as without it, through us."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import torch.nn.functional as F  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402

import sparge.torch as sparge_torch  # noqa: E402
from sparge import _core  # noqa: E402
from sparge.integrations import _grids  # noqa: E402
from sparge.integrations import diffusers as integration  # noqa: E402

Inputs = "dict[str, Any]"
HEADS, DIM, TEXT, BATCH = 2, 16, 13, 2
INNER = HEADS * DIM


def _seed(model: torch.nn.Module, gain: float = 1.5) -> torch.nn.Module:
    """Random weights, larger than those of the constructor: attention shall matter, or the tests would not see it."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.data.normal_(0, gain / math.sqrt(fan_in), generator=generator)
    return model.eval()


def _normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _time(value: float = 500.0, batch: int = BATCH) -> torch.Tensor:
    return torch.full((batch,), value)


def _text_mask() -> torch.Tensor:
    """The second prompt is shorter."""
    mask = torch.ones(BATCH, TEXT, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


def flux(rows: int = 9, columns: int = 7) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=DIM, num_attention_heads=HEADS,
        joint_attention_dim=24, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    ids = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in (1, rows, columns)), indexing="ij"), -1)
    return model, dict(
        hidden_states=_normal(BATCH, rows * columns, 4), encoder_hidden_states=_normal(BATCH, TEXT, 24),
        pooled_projections=_normal(BATCH, 12), timestep=_time(0.5), img_ids=ids.reshape(-1, 3), txt_ids=torch.zeros(TEXT, 3),
    )  # fmt: skip


def sd3() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=32, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=DIM, num_attention_heads=HEADS,
        joint_attention_dim=24, caption_projection_dim=INNER, pooled_projection_dim=12, pos_embed_max_size=32,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(BATCH, 4, 18, 14), encoder_hidden_states=_normal(BATCH, TEXT, 24),
        pooled_projections=_normal(BATCH, 12), timestep=_time(),
    )  # fmt: skip


def cogvideox() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=24, num_layers=2, sample_width=14, sample_height=10, sample_frames=9, max_text_seq_length=TEXT,
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(BATCH, 3, 4, 10, 14), encoder_hidden_states=_normal(BATCH, TEXT, 24), timestep=_time()
    )


def mochi() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.MochiTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, num_layers=2, pooled_projection_dim=16, in_channels=4,
        text_embed_dim=24, time_embed_dim=8, max_sequence_length=TEXT,
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(BATCH, 4, 3, 10, 14), encoder_hidden_states=_normal(BATCH, TEXT, 24), timestep=_time(),
        encoder_attention_mask=_text_mask().bool(),
    )  # fmt: skip


def wan(frames: int = 3, height: int = 10, width: int = 14, batch: int = BATCH) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(batch, 4, frames, height, width), timestep=_time(batch=batch),
        encoder_hidden_states=_normal(batch, TEXT, 24),
    )  # fmt: skip


def hunyuan_video() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, guidance_embeds=False, text_embed_dim=24, pooled_projection_dim=12,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(BATCH, 4, 3, 10, 14), timestep=_time(), encoder_hidden_states=_normal(BATCH, TEXT, 24),
        encoder_attention_mask=_text_mask(), pooled_projections=_normal(BATCH, 12),
    )  # fmt: skip


def ltx() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, cross_attention_dim=INNER,
        num_layers=2, caption_channels=24,
    )  # fmt: skip
    return model, dict(
        hidden_states=_normal(BATCH, 3 * 5 * 7, 4), encoder_hidden_states=_normal(BATCH, TEXT, 24), timestep=_time(),
        encoder_attention_mask=_text_mask(), num_frames=3, height=5, width=7,
    )  # fmt: skip


Make = Callable[[], "tuple[torch.nn.Module, Inputs]"]
MODELS: list[Make] = [flux, sd3, cogvideox, mochi, wan, hunyuan_video, ltx]
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def _made(make: Make, **arguments: Any) -> tuple[torch.nn.Module, Inputs]:
    torch.manual_seed(0)  # biases and norms are the constructor's
    model, inputs = make(**arguments)
    return _seed(model), inputs


@torch.no_grad()
def _run(model: torch.nn.Module, inputs: Inputs, **changed: Any) -> torch.Tensor:
    return model(**{**inputs, **changed}).sample


class _Instead(torch.overrides.TorchFunctionMode):
    """Every query attends to all keys alike: what a model makes of attention that is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, value = (args[i] if len(args) > i else kwargs[n] for i, n in ((0, "query"), (2, "value")))
            return value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
        return func(*args, **kwargs)



def _is_cross(make: Make, name: str) -> bool:
    return make in (wan, ltx) and name.endswith("attn2")


def _watch(enabled: integration.Enabled) -> list[tuple[str, Any]]:
    """Will have the name and the grid of each call that comes to us."""
    seen: list[tuple[str, Any]] = []
    for layer in enabled.layers.values():
        layer.watchers.append(lambda layer, *_, grid=None, **__: seen.append((layer.name, grid)))
    return seen


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


EXACT = 1e-4  # outputs are about 10; float32 rounds to 1e-6 of that, and some layers and sums over 100 tokens add up


@each_model
def test_exact_is_the_original(make: Make) -> None:
    model, inputs = _made(make)
    want = _run(model, inputs)
    with _Instead():
        assert _difference(_run(model, inputs), want) > 1000 * EXACT  # or the next lines would show nothing
    with integration.enable(model, target_l1=0) as enabled:
        assert _difference(_run(model, inputs), want) <= EXACT
    assert enabled.layers
    for name, layer in enabled.layers.items():
        if _is_cross(make, name):
            assert layer.totals.calls == 0, name
        else:
            assert layer.totals.calls > 0 and layer.totals.qk_eligible > 0, name
            assert layer.totals.qk_computed == layer.totals.qk_eligible, name
            assert name in enabled.summary()


@pytest.mark.parametrize("make", [wan, ltx], ids=lambda make: make.__name__)
def test_cross_attention_if_asked(make: Make) -> None:
    model, inputs = _made(make)
    want = _run(model, inputs)
    with integration.enable(model, target_l1=0, cross_attention=True) as enabled:
        assert _difference(_run(model, inputs), want) <= EXACT
    assert any(_is_cross(make, name) for name in enabled.layers)
    assert all(layer.totals.calls == 1 for layer in enabled.layers.values())


def test_cross_attention_is_told_by_its_inputs_where_lengths_are_equal() -> None:
    model, inputs = _made(wan)
    inputs["encoder_hidden_states"] = _normal(BATCH, 3 * 5 * 7, 24)
    with integration.enable(model, target_l1=0) as enabled:
        _run(model, inputs)
    assert {name: layer.totals.calls for name, layer in enabled.layers.items()} == {
        "blocks.0.attn1": 1, "blocks.0.attn2": 0, "blocks.1.attn1": 1, "blocks.1.attn2": 0
    }  # fmt: skip


GRIDS = {
    flux: {(1, 9, 7, TEXT, 0)},
    sd3: {(1, 9, 7, TEXT, 1), (1, 9, 7, 0, 1)},
    cogvideox: {(3, 5, 7, TEXT, 0)},
    mochi: {(3, 5, 7, TEXT, 1), (3, 5, 7, 8, 1)},
    wan: {(3, 5, 7, 0, 0)},
    hunyuan_video: {(3, 5, 7, TEXT, 1)},
    ltx: {(3, 5, 7, 0, 0)},
}


@each_model
def test_grid_of_tokens(make: Make) -> None:
    model, inputs = _made(make)
    if make is hunyuan_video:  # its mask then hides nothing, and goes
        inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    with integration.enable(model, target_l1=0) as enabled:
        seen = _watch(enabled)
        _run(model, inputs)
    refiner = {name for name, grid in seen if grid is None}
    assert all("refiner" in name for name in refiner), refiner  # of text alone
    assert {tuple(grid) for _, grid in seen if grid is not None} == GRIDS[make]


def test_hilbert_order_is_made_once_per_grid() -> None:
    model, inputs = _made(wan, frames=5, height=22, width=6)  # a size that no other test has
    want = _run(model, inputs)
    with integration.enable(model, target_l1=0) as enabled:
        before = _core.grids_laid()
        _run(model, inputs)
        assert _core.grids_laid() == before + 1
        assert _difference(_run(model, inputs), want) <= EXACT
        assert _core.grids_laid() == before + 1
    with integration.enable(model, target_l1=0, hilbert=False) as enabled:
        seen = _watch(enabled)
        _run(model, inputs)
    assert [grid for _, grid in seen] == [None, None]


def test_hilbert_order_with_masks_is_made_once_per_grid() -> None:
    model, inputs = _made(hunyuan_video)
    _grids.hilbert_index.cache_clear()
    with integration.enable(model, target_l1=0):
        _run(model, inputs)
        _run(model, inputs)
    info = _grids.hilbert_index.cache_info()
    assert (info.misses, info.hits) == (1, 3)  # two layers with video tokens, two forwards
    order, inverse = _grids.hilbert_index((3, 5, 7), TEXT, True)
    assert order[105:].tolist() == list(range(105, 105 + TEXT))
    assert order[inverse].tolist() == list(range(105 + TEXT))
    first = _grids.hilbert_index((3, 5, 7), TEXT, False)[0]
    assert first[:TEXT].tolist() == list(range(TEXT)) and (first[TEXT:] - TEXT).tolist() == order[:105].tolist()
    places = torch.stack(torch.unravel_index(order[:105], (3, 5, 7)), -1)
    steps = (places[1:] - places[:-1]).abs().sum(1)
    assert float(steps.float().mean()) < 1.2  # neighbours on the curve are neighbours in the grid, but for odd sides


def test_raster_sides() -> None:
    def places(*sides: int) -> torch.Tensor:
        return torch.stack(torch.meshgrid(*(torch.arange(n) for n in sides), indexing="ij"), -1).reshape(-1, 3)

    assert _grids.raster_sides(places(1, 9, 7)) == (1, 9, 7)
    assert _grids.raster_sides(places(2, 3, 5) * 0.25 - 7) == (2, 3, 5)
    assert _grids.raster_sides(places(2, 3, 5).flip(0)) == (2, 3, 5)  # backwards is as good an order
    assert _grids.raster_sides(places(2, 3, 5)[:-1]) is None
    assert _grids.raster_sides(places(2, 3, 5)[torch.randperm(30)]) is None
    assert _grids.raster_sides(torch.cat([places(1, 4, 4), places(1, 2, 2) + 9])) is None


def test_flux_with_an_image_beside() -> None:
    model, inputs = _made(flux)
    for ids, grid in ((inputs["img_ids"], (2, 9, 7, TEXT, 0)), (inputs["img_ids"][:14], None)):
        beside = ids + torch.tensor([1.0, 0, 0])
        changed = {"img_ids": torch.cat([inputs["img_ids"], beside])}
        changed["hidden_states"] = _normal(BATCH, 63 + len(ids), 4)
        want = _run(model, inputs, **changed)
        with integration.enable(model, target_l1=0) as enabled, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = _watch(enabled)
            assert _difference(_run(model, inputs, **changed), want) <= EXACT
        assert {grid and tuple(grid) for _, grid in seen} == {grid}
        assert ["raster order" in str(w.message) for w in caught] == [True] * (grid is None)


# ------------------------------------------------------------------ steps


def _steps(enabled: integration.Enabled, model: torch.nn.Module, inputs: Inputs, times: list[float]) -> list[tuple[int, bool]]:
    """Number of the step, and whether it was dense, for each forward."""
    seen = []
    for time in times:
        _run(model, inputs, timestep=torch.full_like(inputs["timestep"], time))
        seen.append((enabled.step, next(x for x in enabled.layers.values() if x.totals.calls).dense))
    return seen


def test_first_steps_dense() -> None:
    model, inputs = _made(wan)
    with integration.enable(model, dense_steps=2) as enabled:
        times = [1000.0, 1000.0, 800.0, 600.0, 600.0, 400.0, 1000.0, 800.0, 600.0]
        want = [(1, True), (1, True), (2, True), (3, False), (3, False), (4, False), (1, True), (2, True), (3, False)]
        assert _steps(enabled, model, inputs, times) == want
        enabled.restart()
        assert _steps(enabled, model, inputs, [500.0, 400.0]) == [(1, True), (2, True)]


def test_first_steps_where_time_goes_up() -> None:
    model, inputs = _made(mochi)
    with integration.enable(model, dense_steps=1) as enabled:
        want = [(1, True), (2, False), (3, False), (1, True)]
        assert _steps(enabled, model, inputs, [0.0, 300.0, 600.0, 0.0]) == want


def test_steps_of_a_pipeline() -> None:
    model, inputs = _made(flux)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, None, None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": inputs["encoder_hidden_states"][:1], "pooled_prompt_embeds": inputs["pooled_projections"][:1]}

    def generate() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        size = {"height": 176, "width": 112}  # 11 x 7 tokens
        return pipe(**prompt, **size, num_inference_steps=4, output_type="latent", generator=generator).images

    want = generate()
    with integration.enable(model, target_l1=0, dense_steps=2) as enabled:
        seen = _watch(enabled)
        assert _difference(generate(), want) <= EXACT
        assert enabled.step == 4
        generate()
        assert enabled.step == 4
    assert {tuple(grid) for _, grid in seen} == {(1, 11, 7, TEXT, 0)}
    assert len(seen) == 2 * 4 * len(enabled.layers)


# ------------------------------------------------------------------ in and out


def _hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@each_model
def test_disable_puts_everything_back(make: Make) -> None:
    model, inputs = _made(make)
    function = F.scaled_dot_product_attention
    want = _run(model, inputs)
    processors = [dict(vars(m.processor)) for m in model.modules() if hasattr(m, "processor")]
    attributes = set(vars(model))
    enabled = integration.enable(model)
    with pytest.raises(ValueError, match="enabled already"):
        integration.enable(model)
    _run(model, inputs)
    calls = {name: layer.totals.calls for name, layer in enabled.layers.items()}
    assert any(calls.values())
    enabled.disable()
    enabled.disable()
    assert torch.equal(_run(model, inputs), want)
    assert {name: layer.totals.calls for name, layer in enabled.layers.items()} == calls
    assert [dict(vars(m.processor)) for m in model.modules() if hasattr(m, "processor")] == processors
    assert set(vars(model)) == attributes and _hooks(model) == 0
    assert F.scaled_dot_product_attention is function
    with integration.enable(model, target_l1=0):
        assert _difference(_run(model, inputs), want) <= EXACT


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model, inputs = _made(wan)
    want = _run(model, inputs)
    with integration.enable(model, target_l1=0):
        with pytest.raises(RuntimeError):
            _run(model, inputs, encoder_hidden_states=_normal(BATCH, TEXT, 23))
        with pytest.raises(TypeError):
            _run(model, inputs, nonsense=1)
        assert not integration._running.runs
        assert not torch.overrides._get_current_function_mode_stack()
        assert _difference(_run(model, inputs), want) <= EXACT


def test_only_the_transformer_is_concerned() -> None:
    model, inputs = _made(sd3)
    q = _normal(1, 2, 64, 16)
    with integration.enable(model, target_l1=0) as enabled:
        F.scaled_dot_product_attention(q, q, q)
        assert not any(layer.totals.calls for layer in enabled.layers.values())
        _run(model, inputs)
        calls = [layer.totals.calls for layer in enabled.layers.values()]
        F.scaled_dot_product_attention(q, q, q)
        assert [layer.totals.calls for layer in enabled.layers.values()] == calls


@pytest.mark.parametrize("make", [sd3, wan], ids=lambda make: make.__name__)
def test_inside_of_sparge_torch_sparse(make: Make) -> None:
    model, inputs = _made(make)
    want = _run(model, inputs)
    with sparge_torch.sparse(target_l1=0), integration.enable(model, target_l1=0) as enabled:
        seen = _watch(enabled)
        assert _difference(_run(model, inputs), want) <= EXACT
    assert {tuple(grid) for _, grid in seen} == GRIDS[make]


def test_threads_have_their_own() -> None:
    made = [_made(make) for make in (cogvideox, flux)]
    wants = [_run(*pair) for pair in made]
    results: list[list[float]] = [[], []]

    def work(i: int) -> None:
        for _ in range(4):
            results[i].append(_difference(_run(*made[i]), wants[i]))

    with integration.enable(made[0][0], target_l1=0) as a, integration.enable(made[1][0], target_l1=0) as b:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(len(r) == 4 and max(r) <= EXACT for r in results), results
    assert all(x.totals.calls == 4 for e in (a, b) for x in e.layers.values())


def test_gradients_go_the_original_way() -> None:
    model, inputs = _made(wan)
    with integration.enable(model) as enabled:
        model(**inputs).sample.square().sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad is not None
    assert not any(layer.totals.calls for layer in enabled.layers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_model
def test_half_precision(make: Make, dtype: torch.dtype) -> None:
    model, inputs = _made(make)
    exact = _run(model, inputs)
    model.to(dtype)
    keep = ("timestep", "encoder_attention_mask", "img_ids", "txt_ids")
    inputs = {k: v.to(dtype) if torch.is_tensor(v) and k not in keep else v for k, v in inputs.items()}
    original = _difference(_run(model, inputs).float(), exact)
    with integration.enable(model, target_l1=0) as enabled:
        out = _run(model, inputs)
    assert out.dtype == dtype
    # Both round as much as the type does, each in its own way; their worst elements differ by less than this.
    assert _difference(out.float(), exact) <= 2 * original
    assert any(layer.totals.calls for layer in enabled.layers.values())


# ------------------------------------------------------------------ the backend alone


@pytest.fixture
def active_backend() -> Any:
    """set_attention_backend is for the whole process."""
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)
    integration.register()


@pytest.mark.parametrize("make", [flux, wan, hunyuan_video, ltx], ids=lambda make: make.__name__)
def test_backend_of_a_model(make: Make, active_backend: None) -> None:
    model, inputs = _made(make)
    want = _run(model, inputs)
    layer = integration.register(target_l1=0)
    model.set_attention_backend("sparge")
    assert _difference(_run(model, inputs), want) <= EXACT
    assert layer.totals.calls == (4 if make is flux else 2)
    layer = integration.register(target_l1=0, cross_attention=True)
    assert _difference(_run(model, inputs), want) <= EXACT
    assert layer.totals.calls == (2 if make is hunyuan_video else 4)
    model.reset_attention_backend()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
    assert torch.equal(_run(model, inputs), want)


def test_backend_as_a_context(active_backend: None) -> None:
    model, inputs = _made(flux)
    want = _run(model, inputs)
    layer = integration.register()
    assert dispatch.AttentionBackendName.SPARGE is dispatch.AttentionBackendName("sparge")
    assert "sparge" in [member.value for member in dispatch.AttentionBackendName]
    with dispatch.attention_backend("sparge"):
        out = _run(model, inputs)
    assert layer.totals.calls == 4
    # 8-bit arithmetic in four layers, 1 to 3 % each, and nothing to skip in a few tiles.
    assert 0 < float((out - want).abs().sum() / want.abs().sum()) < 0.1
    assert torch.equal(_run(model, inputs), want)


def test_backend_refuses_what_it_cannot(active_backend: None) -> None:
    integration.register()
    q = _normal(1, 8, 2, 16)
    with pytest.raises(ValueError, match="return_lse=True"):
        dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True}, backend="sparge")


def test_backend_with_a_mask_per_key(active_backend: None) -> None:
    layer = integration.register(target_l1=0)
    q, k, v = (_normal(2, 30, 2, 16, seed=s) for s in range(3))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 20:] = False
    want = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native")
    assert _difference(dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend="sparge"), want) <= EXACT
    want = dispatch.dispatch_attention_fn(q, k, v, is_causal=True, scale=0.5, backend="native")
    assert _difference(dispatch.dispatch_attention_fn(q, k, v, is_causal=True, scale=0.5, backend="sparge"), want) <= EXACT
    assert layer.totals.calls == 2


# ------------------------------------------------------------------ other transformers, other arguments


class _Unknown(torch.nn.Module):
    """Of no known class, and attends without a processor."""

    config = {"rows": 5}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states)


def test_unknown_transformer() -> None:
    model, x = _Unknown(), _normal(1, 2, 35, 16)
    want = model(x)
    with integration.enable(model, target_l1=0) as enabled:
        with pytest.warns(UserWarning, match="_Unknown is not known; tokens stay in raster order"):
            assert _difference(model(x), want) <= EXACT
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)  # once is enough
    assert [layer.totals.calls for layer in enabled.layers.values()] == [2]

    def grid(config: dict[str, int], arguments: Inputs) -> integration.Grid:
        rows = config["rows"]
        return integration.Grid((1, rows, arguments["hidden_states"].shape[2] // rows))

    with integration.enable(model, target_l1=0, grid=grid) as enabled:
        model(x)
        seen = _watch(enabled)
        assert _difference(model(x), want) <= EXACT
    assert [tuple(g) for _, g in seen] == [(1, 5, 7, 0, 0)]


def test_arguments() -> None:
    with pytest.raises(ValueError, match="dense_steps=1: _Unknown.forward has no argument timestep"):
        integration.enable(_Unknown(), dense_steps=1)
    with pytest.raises(ValueError, match="dense_steps=-1"):
        integration.enable(_Unknown(), dense_steps=-1)
    with pytest.raises(ValueError, match="target_l1=-1"):
        integration.enable(_Unknown(), target_l1=-1)
    with pytest.raises(TypeError, match="give pipe.transformer"):
        integration.enable(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nonsense"):
        integration.enable(_Unknown(), nonsense=1)


# ------------------------------------------------------------------ something to skip


def _attend_to_alike(model: torch.nn.Module, sharpness: float = 4.0) -> torch.nn.Module:
    """Keys are what queries are: tokens attend to those that are alike, as in trained models."""
    for block in model.blocks:
        attention = block.attn1
        attention.to_k.load_state_dict(attention.to_q.state_dict())
        attention.norm_q.weight.data.mul_(sharpness)
    return model


def test_smooth_video_is_sparse_and_close() -> None:
    model, inputs = _made(wan, frames=9, height=42, width=42, batch=1)  # 3969 tokens
    _attend_to_alike(model)
    inputs["hidden_states"] = 2 * F.interpolate(_normal(1, 4, 3, 6, 6), size=(9, 42, 42), mode="trilinear")
    want = _run(model, inputs)
    with integration.enable(model, target_l1=0.05, dense_steps=1) as enabled:
        _run(model, inputs)
        assert [x.totals.sparsity for x in enabled.layers.values()] == [0.0] * 4  # dense, and cross-attention
        for time in (400.0, 300.0, 200.0, 500.0):
            out = _run(model, inputs, timestep=_time(time, 1))
        dense = enabled.step == 1
        totals = [x.totals for n, x in enabled.layers.items() if n.endswith("attn1")]
        computed = [(t.qk_eligible, t.qk_computed) for t in totals]
        out = _run(model, inputs, timestep=_time(400.0, 1))
        late = [1 - (t.qk_computed - c) / (t.qk_eligible - e) for t, (e, c) in zip(totals, computed)]
        same_time = _run(model, inputs, timestep=_time(400.0, 1))
    assert dense and all(sparsity > 0.1 for sparsity in late), late
    want = _run(model, inputs, timestep=_time(400.0, 1))
    # Each head may err by 5 % for skipping, and by 1 to 3 % for 8 bits; beside attention there is what goes past it.
    assert 0 < float((out - want).abs().sum() / want.abs().sum()) < 0.05
    assert same_time.isfinite().all()

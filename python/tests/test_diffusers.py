"""sparge.integrations.diffusers: seven tiny transformers with random weights, the same results, and through us."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import torch.nn.functional as F  # noqa: E402
from tiny_diffusers import (  # noqa: E402
    BATCH, MODELS, TEXT, Inputs, Make, Unknown, Wrong, attend_to_alike, cogvideox, flux, hunyuan_video, ltx, made, mochi,
    normal, run, sd3, times, wan,
)  # fmt: skip

import sparge.torch as sparge_torch  # noqa: E402
from sparge.integrations import _grids  # noqa: E402
from sparge.integrations import diffusers as integration  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """On tensors as small as these, threads would wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


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
    model, inputs = made(make)
    want = run(model, inputs)
    with Wrong():
        assert _difference(run(model, inputs), want) > 1000 * EXACT  # or the next lines would show nothing
    with integration.enable(model, target_l1=0) as enabled:
        assert _difference(run(model, inputs), want) <= EXACT
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
    model, inputs = made(make)
    want = run(model, inputs)
    with integration.enable(model, target_l1=0, cross_attention=True) as enabled:
        assert _difference(run(model, inputs), want) <= EXACT
    assert any(_is_cross(make, name) for name in enabled.layers)
    assert all(layer.totals.calls == 1 for layer in enabled.layers.values())


def test_cross_attention_is_told_by_its_inputs_where_lengths_are_equal() -> None:
    model, inputs = made(wan)
    inputs["encoder_hidden_states"] = normal(BATCH, 3 * 5 * 7, 24)
    with integration.enable(model, target_l1=0) as enabled:
        run(model, inputs)
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
    model, inputs = made(make)
    if make is hunyuan_video:  # its mask then hides nothing, and goes
        inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
    with integration.enable(model, target_l1=0) as enabled:
        seen = _watch(enabled)
        run(model, inputs)
    refiner = {name for name, grid in seen if grid is None}
    assert all("refiner" in name for name in refiner), refiner  # of text alone
    assert {tuple(grid) for _, grid in seen if grid is not None} == GRIDS[make]


def test_hilbert_order_is_the_grids_own() -> None:
    model, inputs = made(wan, frames=5, height=22, width=6)
    want = run(model, inputs)
    with integration.enable(model, target_l1=0):
        assert _difference(run(model, inputs), want) <= EXACT
    with integration.enable(model, target_l1=0, hilbert=False) as enabled:
        seen = _watch(enabled)
        run(model, inputs)
    assert [grid for _, grid in seen] == [None, None]


def test_hilbert_order_with_masks_is_made_once_per_grid() -> None:
    model, inputs = made(hunyuan_video)
    _grids.hilbert_index.cache_clear()
    with integration.enable(model, target_l1=0):
        run(model, inputs)
        run(model, inputs)
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
    model, inputs = made(flux)
    for ids, grid in ((inputs["img_ids"], (2, 9, 7, TEXT, 0)), (inputs["img_ids"][:14], None)):
        beside = ids + torch.tensor([1.0, 0, 0])
        changed = {"img_ids": torch.cat([inputs["img_ids"], beside])}
        changed["hidden_states"] = normal(BATCH, 63 + len(ids), 4)
        want = run(model, inputs, **changed)
        with integration.enable(model, target_l1=0) as enabled, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = _watch(enabled)
            assert _difference(run(model, inputs, **changed), want) <= EXACT
        assert {grid and tuple(grid) for _, grid in seen} == {grid}
        assert ["raster order" in str(w.message) for w in caught] == [True] * (grid is None)


# ------------------------------------------------------------------ steps


def _steps(model: torch.nn.Module, inputs: Inputs, timesteps: list[float]) -> list[tuple[int, bool]]:
    """Number of the step, and whether it was dense, for each forward."""
    enabled, seen = integration.enabled(model), []
    for time in timesteps:
        run(model, inputs, timestep=torch.full_like(inputs["timestep"], time))
        seen.append((enabled.step, next(x for x in enabled.layers.values() if x.totals.calls).dense))
    return seen


def test_first_steps_dense() -> None:
    model, inputs = made(wan)
    with integration.enable(model, dense_steps=2) as enabled:
        times = [1000.0, 1000.0, 800.0, 600.0, 600.0, 400.0, 1000.0, 800.0, 600.0]
        want = [(1, True), (1, True), (2, True), (3, False), (3, False), (4, False), (1, True), (2, True), (3, False)]
        assert _steps(model, inputs, times) == want
        enabled.restart()
        assert _steps(model, inputs, [500.0, 400.0]) == [(1, True), (2, True)]


def test_first_steps_where_time_goes_up() -> None:
    model, inputs = made(mochi)
    with integration.enable(model, dense_steps=1):
        want = [(1, True), (2, False), (3, False), (1, True)]
        assert _steps(model, inputs, [0.0, 300.0, 600.0, 0.0]) == want


def test_steps_of_a_pipeline() -> None:
    model, inputs = made(flux)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, None, None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    text, pooled = inputs["encoder_hidden_states"][:1], inputs["pooled_projections"][:1]
    prompt = {"prompt_embeds": text, "pooled_prompt_embeds": pooled}

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
    model, inputs = made(make)
    function = F.scaled_dot_product_attention
    want = run(model, inputs)
    processors = [dict(vars(m.processor)) for m in model.modules() if hasattr(m, "processor")]
    attributes = set(vars(model))
    enabled = integration.enable(model)
    with pytest.raises(ValueError, match="enabled already"):
        integration.enable(model)
    run(model, inputs)
    calls = {name: layer.totals.calls for name, layer in enabled.layers.items()}
    assert any(calls.values())
    enabled.disable()
    enabled.disable()
    assert torch.equal(run(model, inputs), want)
    assert {name: layer.totals.calls for name, layer in enabled.layers.items()} == calls
    assert [dict(vars(m.processor)) for m in model.modules() if hasattr(m, "processor")] == processors
    assert set(vars(model)) == attributes and _hooks(model) == 0
    assert F.scaled_dot_product_attention is function
    with integration.enable(model, target_l1=0):
        assert _difference(run(model, inputs), want) <= EXACT


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model, inputs = made(wan)
    want = run(model, inputs)
    with integration.enable(model, target_l1=0):
        with pytest.raises(RuntimeError):
            run(model, inputs, encoder_hidden_states=normal(BATCH, TEXT, 23))
        with pytest.raises(TypeError):
            run(model, inputs, nonsense=1)
        assert not integration._running.runs
        assert not torch.overrides._get_current_function_mode_stack()
        assert _difference(run(model, inputs), want) <= EXACT


def test_only_the_transformer_is_concerned() -> None:
    model, inputs = made(sd3)
    q = normal(1, 2, 64, 16)
    with integration.enable(model, target_l1=0) as enabled:
        F.scaled_dot_product_attention(q, q, q)
        assert not any(layer.totals.calls for layer in enabled.layers.values())
        run(model, inputs)
        calls = [layer.totals.calls for layer in enabled.layers.values()]
        F.scaled_dot_product_attention(q, q, q)
        assert [layer.totals.calls for layer in enabled.layers.values()] == calls


@pytest.mark.parametrize("make", [sd3, wan], ids=lambda make: make.__name__)
def test_inside_of_sparge_torch_sparse(make: Make) -> None:
    model, inputs = made(make)
    want = run(model, inputs)
    with sparge_torch.sparse(target_l1=0), integration.enable(model, target_l1=0) as enabled:
        seen = _watch(enabled)
        assert _difference(run(model, inputs), want) <= EXACT
    assert {tuple(grid) for _, grid in seen} == GRIDS[make]


def test_threads_have_their_own() -> None:
    pairs = [made(make) for make in (cogvideox, flux)]
    wants = [run(*pair) for pair in pairs]
    results: list[list[float]] = [[], []]

    def work(i: int) -> None:
        for _ in range(4):
            results[i].append(_difference(run(*pairs[i]), wants[i]))

    with integration.enable(pairs[0][0], target_l1=0) as a, integration.enable(pairs[1][0], target_l1=0) as b:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(len(r) == 4 and max(r) <= EXACT for r in results), results
    assert all(x.totals.calls == 4 for e in (a, b) for x in e.layers.values())


def test_gradients_go_the_original_way() -> None:
    model, inputs = made(wan)
    with integration.enable(model) as enabled:
        model(**inputs).sample.square().sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad is not None
    assert not any(layer.totals.calls for layer in enabled.layers.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_model
def test_half_precision(make: Make, dtype: torch.dtype) -> None:
    model, inputs = made(make)
    exact = run(model, inputs)
    model.to(dtype)
    keep = ("timestep", "encoder_attention_mask", "img_ids", "txt_ids")
    inputs = {k: v.to(dtype) if torch.is_tensor(v) and k not in keep else v for k, v in inputs.items()}
    original = _difference(run(model, inputs).float(), exact)
    with integration.enable(model, target_l1=0) as enabled:
        out = run(model, inputs)
    assert out.dtype == dtype
    # Both round as much as the type does, each in its own way; their worst elements differ by less than this.
    assert _difference(out.float(), exact) <= 2 * original
    assert any(layer.totals.calls for layer in enabled.layers.values())


# ------------------------------------------------------------------ other transformers, other arguments


def test_unknown_transformer() -> None:
    model, x = Unknown(), normal(1, 2, 35, 16)
    want = model(x)
    with integration.enable(model, target_l1=0) as enabled:
        with pytest.warns(UserWarning, match="Unknown is not known; tokens stay in raster order"):
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
        for mask in (normal(35, 35) > 0, normal(1, 2, 35, 35), normal(1, 35), torch.zeros(1, 35)):
            want = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            assert _difference(model(x, mask), want) <= EXACT, mask.shape
    # The last mask hides nothing.
    assert [g and tuple(g) for _, g in seen] == [(1, 5, 7, 0, 0), None, None, None, (1, 5, 7, 0, 0)]


def test_arguments() -> None:
    with pytest.raises(ValueError, match="dense_steps=1: Unknown.forward has no argument timestep"):
        integration.enable(Unknown(), dense_steps=1)
    with pytest.raises(ValueError, match="dense_steps=-1"):
        integration.enable(Unknown(), dense_steps=-1)
    with pytest.raises(ValueError, match="target_l1=-1"):
        integration.enable(Unknown(), target_l1=-1)
    with pytest.raises(TypeError, match="give pipe.transformer"):
        integration.enable(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nonsense"):
        integration.enable(Unknown(), nonsense=1)


# ------------------------------------------------------------------ something to skip


def test_smooth_video_is_sparse_and_close() -> None:
    model, inputs = made(wan, frames=9, height=42, width=42, batch=1)  # 3969 tokens
    attend_to_alike(model)
    inputs["hidden_states"] = 2 * F.interpolate(normal(1, 4, 3, 6, 6), size=(9, 42, 42), mode="trilinear")
    want = run(model, inputs)

    def sparsity(time: float) -> float:
        """Of the layers together, in one forward."""
        for layer in layers:
            layer.clear_totals()
        run(model, inputs, timestep=times(time, 1))
        totals = [layer.totals for layer in layers]
        return 1 - sum(t.qk_computed for t in totals) / sum(t.qk_eligible for t in totals)

    with integration.enable(model, target_l1=0.05, dense_steps=1) as enabled:
        layers = list(enabled.layers.values())
        assert sparsity(800.0) == 0  # the first step
        later = [sparsity(time) for time in (700.0, 600.0, 500.0)]
        assert later[-1] > 0.1, later
        out = run(model, inputs)
        assert sparsity(800.0) == 0  # the first step of the next video: dense though the layers know better
    # Each head may err by 5 % for skipping and by 1 to 3 % for 8 bits; what goes past attention has no error.
    assert 0 < float((out - want).abs().sum() / want.abs().sum()) < 0.05


def test_compiled_blocks() -> None:
    model, inputs = made(wan)
    want = run(model, inputs)
    with integration.enable(model, target_l1=0) as enabled:
        seen = _watch(enabled)
        model.compile_repeated_blocks(backend="eager")  # traces as any backend, without the minutes of a compiler
        for _ in range(2):
            assert _difference(run(model, inputs), want) <= EXACT
    # Both blocks run the same code, and are still told apart.
    assert seen == [("blocks.0.attn1", (3, 5, 7, 0, 0)), ("blocks.1.attn1", (3, 5, 7, 0, 0))] * 2

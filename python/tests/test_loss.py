"""sparge.tune(loss=...): what a language model may lose, spread over its heads, kept, and verified."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any, Iterator

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sparge  # noqa: E402
import sparge.integrations.transformers as integration  # noqa: E402
from sparge import _harm  # noqa: E402
from sparge._choice import Option, choose, hull  # noqa: E402

LOSS = 0.002
TOKENS, TOPICS, WIDTH, HEADS = 1152, 8, 64, 4
UNHEARD = 2  # the head of both layers whose output nothing is made of


def text(seed: int) -> torch.Tensor:
    """Stretches of one topic after the other, so that keys of the own topic lie together."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randperm(TOPICS, generator=generator).repeat_interleave(TOKENS // TOPICS)
    return (topics * 8 + torch.randint(8, (TOKENS,), generator=generator))[None]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for one another most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    """Heads attend to their own topic, each the more sharply the higher its number."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8 * TOPICS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=TOKENS,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    size = WIDTH // HEADS
    with torch.no_grad():
        topics = torch.randn(TOPICS, WIDTH).repeat_interleave(8, 0)
        made.model.embed_tokens.weight.copy_(topics + torch.randn(8 * TOPICS, WIDTH))
        made.lm_head.weight.normal_(std=0.3)
        for layer in made.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.normal_(std=WIDTH**-0.5)
            sharpness = 1.0 + torch.arange(HEADS).repeat_interleave(size)[:, None]
            attention.q_proj.weight.copy_(sharpness * attention.k_proj.weight)
            attention.v_proj.weight.normal_(std=WIDTH**-0.5)
            attention.o_proj.weight.normal_(std=WIDTH**-0.5)
            attention.o_proj.weight[:, UNHEARD * size : (UNHEARD + 1) * size] = 0
    return made


def tune(model: Any, out: Path, loss: float = LOSS, **options: Any) -> dict[str, Any]:
    """The preset's file."""
    preset = sparge.tune(model, [text(1), {"input_ids": text(2)}, (text(3),)], loss=loss, out=out, progress=False, **options)
    assert preset.core.bounds()["loss"] == loss
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tuned(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A file and what is in it; the model is as it was."""
    model.lm_head.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    wants = [p.requires_grad for p in model.parameters()]
    out = tmp_path_factory.mktemp("tuned") / "p.json"
    preset = tune(model, out)
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wants and not all(wants)
    assert all(p.grad is None for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return out, preset


@contextlib.contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def floors(preset: dict[str, Any]) -> list[list[float]]:
    """1 - tau of each layer and head."""
    return [[1 - head["tau"] for head in layer["heads"]] for layer in preset["layers"].values()]


# ------------------------------------------------------------------ the choice


def test_hull_leaves_out_what_a_mixture_beats() -> None:
    options = [Option(10, 0), Option(9, 5), Option(4, 1), Option(3, 1), Option(1, 9), Option(2, 9)]
    assert hull(options) == [0, 3, 4]
    assert hull([Option(1, 1), Option(1, 0)]) == [1]


@pytest.mark.parametrize("seed", range(8))
def test_choice_is_within_one_step_of_the_best(seed: int) -> None:
    draw = random.Random(seed)
    heads = [[Option(draw.uniform(0, 10), draw.uniform(0, 1)) for _ in range(4)] for _ in range(4)]
    budget = sum(min(o.harm for o in options) for options in heads) + draw.uniform(0, 1)

    def total(indices: Any) -> Option:
        chosen = [options[i] for options, i in zip(heads, indices)]
        return Option(sum(o.cost for o in chosen), sum(o.harm for o in chosen))

    found = total(choose(heads, budget))
    best = min(total(i).cost for i in itertools.product(range(4), repeat=4) if total(i).harm <= budget)
    steps = [options[a].cost - options[b].cost for options in heads for a, b in zip(hull(options), hull(options)[1:])]
    assert found.harm <= budget
    assert best <= found.cost <= best + max(steps)


def test_choice_at_the_ends() -> None:
    heads = [[Option(4, 0.0), Option(2, 1.0), Option(1, 5.0)], [Option(4, 0.5), Option(3, 0.6)]]
    assert choose(heads, 0) == [0, 0]
    assert choose(heads, float("inf")) == [2, 1]
    assert choose(heads, 0.7) == [0, 1]


# ------------------------------------------------------------------ the model


def test_loss_holds_on_the_held_out_input(model: Any, tuned: Any) -> None:
    out, preset = tuned
    assert sorted(preset["layers"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    layer = preset["layers"]["model.layers.0.self_attn"]
    held_out = [int(name) for name in layer["held_out"]]
    assert sorted(held_out + [int(name.split(".")[0]) for name in layer["samples"]]) == [0, 1, 2] and len(held_out) == 1
    ids = text(1 + held_out[0])
    integration.register()
    with torch.inference_mode():
        exact = model(ids).logits[0].log_softmax(-1)
        model.set_attn_implementation("sparge")
        try:
            layers = integration.configure(model, preset=out)
            sparse = model(ids).logits[0].log_softmax(-1)
        finally:
            model.set_attn_implementation("sdpa")
    divergence = float((exact.exp() * (exact - sparse)).sum(-1).mean())
    # Sums of a few thousand fp32 numbers in another order.
    assert divergence == pytest.approx(preset["bounds"]["measured_loss"], rel=0.01)
    assert 0 < divergence <= LOSS
    assert all(made.totals.sparsity > 0.1 for made in layers.values())


def test_heads_that_do_not_matter_skip_most(tmp_path: Path, model: Any, tuned: Any) -> None:
    small, large = tuned[1], tune(model, tmp_path / "p.json", 10 * LOSS)
    for preset in (small, large):
        for layer in floors(preset):
            assert layer[UNHEARD] == pytest.approx(_harm.FLOORS[-1])
    assert max(min(layer) for layer in floors(small)) < _harm.FLOORS[-1]

    def work(preset: dict[str, Any]) -> float:
        return sum(head["measured"]["work"] for layer in preset["layers"].values() for head in layer["heads"])

    assert work(large) < work(small)
    assert large["bounds"]["measured_loss"] > LOSS  # which is no idle bound for this model


def test_harm_of_a_small_change_is_the_divergence_that_it_causes(model: Any) -> None:
    """One row of one head, so that nothing has to be independent; many draws of the labels, one in each sequence."""
    draws, row, head, size = 512, 5, 1, WIDTH // HEADS
    ids = text(1)[:, :32].repeat(draws, 1)
    change = 0.05 * torch.randn(size, generator=torch.Generator().manual_seed(3))
    graded = _harm.Graded(model, min_tokens=1)
    with _harm.differentiable(model), graded:
        graded.run(ids, seed=0)
    samples = [sample for layer, _, sample in graded.take() if layer == "model.layers.0.self_attn"]
    assert len(samples) == draws and samples[0].gradient.shape == (HEADS, 32, size)
    changes = torch.zeros(HEADS, 32, size)
    changes[head, row] = change
    harms = [_harm._harm(sample.gradient, changes)[head] for sample in samples]

    def moved(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        given[0][:, row, head * size : (head + 1) * size] += change
        return given

    with torch.inference_mode():
        exact = _harm.hidden_states(model, ids[:1])
        with _removed(model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(moved)):
            other = _harm.hidden_states(model, ids[:1])
        divergence = 32 * _harm.divergence(model, exact, other, torch.ones(32, dtype=torch.bool))
    # A square of something like a normal variable: its mean over n draws has a relative error of sqrt(2 / n) = 6 %. Four
    # of these, and a tenth for what is not quadratic.
    assert sum(harms) / draws == pytest.approx(divergence, rel=0.35)
    assert divergence > 1e-6


def test_stops_and_goes_on(tmp_path: Path, model: Any, tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    measure = _harm.measure

    def counted(*given: Any) -> Any:
        calls.append("stopped" if len(calls) == 3 else "measured")
        if calls[-1] == "stopped":
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(_harm, "measure", counted)
    out = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        tune(model, out)
    assert not out.exists() and (tmp_path / "p.json.partial").exists()
    with pytest.raises(ValueError, match="p.json.partial: was begun with other options: loss 0.002.*restart=True"):
        tune(model, out, loss=0.003)
    with pytest.raises(ValueError, match="another model or other inputs"):
        sparge.tune(model, [text(1), text(9)], loss=0.002, out=out, progress=False)
    assert tune(model, out) == tuned[1]
    assert calls.count("measured") == 4  # two layers of two inputs, none of them twice
    assert sorted(file.name for file in tmp_path.glob("p.json*")) == ["p.json"]


def test_damaged_work_is_refused(tmp_path: Path, model: Any) -> None:
    for content in ("", "[]", json.dumps({"format": "sparge-preset", "version": 3})):
        (tmp_path / "p.json.partial").write_text(content)
        with pytest.raises(ValueError, match="is no unfinished work of loss=.*restart=True"):
            tune(model, tmp_path / "p.json")


def test_says_that_nothing_is_held_out_and_what_cannot_be_reached(tmp_path: Path, model: Any) -> None:
    with pytest.warns(sparge.LossWarning) as said:
        sparge.tune(model, [text(1)], loss=1e-12, out=tmp_path / "p.json", progress=False)
    texts = " ".join(str(one.message) for one in said)
    assert "nothing is held out" in texts and "loss=1e-12 is not reached" in texts
    preset = json.loads((tmp_path / "p.json").read_text())
    assert preset["layers"]["model.layers.0.self_attn"]["held_out"] == []
    assert preset["bounds"]["measured_loss"] > 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 0}, "loss=0 is no number"),
        ({"loss": float("nan")}, "loss=nan is no number"),
        ({"target_l2": 0.1}, "target_l2=0.1 has no effect with loss="),
        ({"captures": "captures"}, "captures=captures has no effect with loss="),
        ({"every": 2}, "every=2 has no effect with loss="),
        ({"inputs": []}, "needs a model and inputs"),
        ({"model": torch.nn.Linear(2, 2)}, "Linear is none; .* target_l2="),
        ({"inputs": [text(1)[:, :600]] * 2}, "fewer than 1024 tokens skip nothing"),
        ({"inputs": [text(1)] + [text(2)[:, :600]] * 9}, "the input to verify on has 600 tokens"),  # one of these
    ],
)
def test_refusals(tmp_path: Path, model: Any, options: dict[str, Any], message: str) -> None:
    given = {"model": model, "inputs": [text(1), text(2)], "loss": 0.002, "out": tmp_path / "p.json", **options}
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        warnings.simplefilter("ignore")  # a recording that saw nothing says so, too
        sparge.tune(progress=False, **given)
    assert list(tmp_path.iterdir()) == []


def test_scaled_logits_are_refused(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=4.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a softcap or a scale of logits"):
        sparge.tune(transformers.GraniteForCausalLM(config).eval(), [text(1)], loss=0.01, out=tmp_path / "p.json")

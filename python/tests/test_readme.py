"""The Python of the README runs as it stands, with small models in place of those to be named."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import sparge

README = Path(__file__).parents[2] / "README.md"
if not README.is_file():
    pytest.skip("no README beside the tests", allow_module_level=True)
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def block(text):
    (found,) = [block for block in BLOCKS if text in block]
    return found


def test_all_are_here():
    assert len(BLOCKS) == 3


def test_transformers(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=4096
    )

    def model(name, attn_implementation):
        assert name == "a name"
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()

    class Tokens:
        def __init__(self, name):
            pass

        def __call__(self, text, return_tensors):
            assert return_tensors == "pt"
            return {"input_ids": torch.randint(1, 97, (1, 2048), generator=torch.Generator().manual_seed(len(text)))}

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(transformers, "AutoTokenizer", type("AutoTokenizer", (), {"from_pretrained": Tokens}))
    exec(block("attn_implementation"), {"name": "a name", "text": "a text"})
    out = capsys.readouterr().out
    assert re.search(r"^LlamaAttention.1 +1 ", out, re.MULTILINE) and "PyTorch computed" not in out


def test_pytorch(capsys):
    torch.manual_seed(0)
    exec(block("sparge.torch.sparse"), {})
    total = capsys.readouterr().out.splitlines()[-1].split()
    assert total[:2] == ["all", "1"] and float(total[-1].rstrip("%")) > 50


def test_diffusers(capsys):
    pytest.importorskip("diffusers")
    from tiny_diffusers import flux, run

    model, inputs = flux()

    class Pipe:
        transformer = model

        def __call__(self, prompt):
            with torch.inference_mode():
                run(model, inputs)

    with pytest.warns(sparge.LayerWarning, match="nothing was skipped"):  # a handful of tokens
        exec(block("sd.enable"), {"pipe": Pipe(), "prompt": "a prompt"})
    assert capsys.readouterr().out.splitlines()[-1].startswith("all ")

"""sparge.capture: what is written is what the model attended with, and what cannot be written is skipped aloud."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import sparge  # noqa: E402
import sparge.torch  # noqa: E402
from sparge import _program  # noqa: E402

HEADS, DIM, TOKENS = 2, 32, 300
# fp16 has 11 bits: each of q, k and v is off by at most 2^-11 of itself, and so is, at first order, an average of
# values; scores of order 1 shift weights by a few times that.
FP16 = 4e-3


class Attention(torch.nn.Module):
    """Self-attention that remembers what it computed."""

    def __init__(self, causal: bool = True, **options: Any) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.causal = causal
        self.options = options
        self.results: list[Any] = []

    def forward(self, x: Any, mask: Any = None) -> Any:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        causal = self.causal and mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **self.options)
        self.results.append(out)
        return out.transpose(1, 2).reshape(batch, tokens, width)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(causal=True)
        self.second = Attention(causal=False, scale=0.3)

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.second(x + self.first(x, mask))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(1)
    with torch.inference_mode():
        yield


def tokens(batch: int = 1, count: int = TOKENS) -> Any:
    return torch.randn(batch, count, HEADS * DIM)


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and metadata, by the format's own reader."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def recompute(path: Path) -> Any:
    t, metadata = read(path)
    q, k, v = (t[name].float() for name in "qkv")
    causal = metadata["causal"] == "true"
    scale = float(metadata["scale"])
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal, scale=scale, enable_gqa=True)[0]


def accepts(folder: Path) -> None:
    """The command line reads every file and finds it as exact as its arithmetic is."""
    exact = ["--precision", "fp32", "--select", "all", "--max-l1", "1e-3"]
    done = subprocess.run([_program.path(), "check", folder, *exact], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------ what is written


def test_holds_what_the_model_attended_with(tmp_path: Path) -> None:
    model = Model()
    with sparge.capture(model, tmp_path / "c") as captured:
        model(tokens())
        model(tokens(batch=2))
    samples = ("0000", "0001-0", "0001-1")
    assert names(captured.folder) == [f"{layer}/{s}.safetensors" for layer in ("first", "second") for s in samples]
    assert captured.files == 6
    assert captured.bytes == sum(path.stat().st_size for path in captured.folder.rglob("*.safetensors"))
    for name, layer in (("first", model.first), ("second", model.second)):
        for sample, wanted in zip(samples, torch.cat(layer.results)):
            found = recompute(captured.folder / name / f"{sample}.safetensors")
            torch.testing.assert_close(found, wanted, rtol=FP16, atol=FP16)
    assert read(captured.folder / "second/0000.safetensors")[1] == {"causal": "false", "scale": "0.3"}
    accepts(captured.folder)


def test_is_exact_with_float32(tmp_path: Path) -> None:
    model = Model()
    with sparge.capture(model, tmp_path, dtype="float32"):
        model(tokens())
    # The same fp32 numbers, summed in another order.
    found = recompute(tmp_path / "first/0000.safetensors")
    torch.testing.assert_close(found, model.first.results[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "factor", "stored"),
    [
        (torch.float32, 1, torch.float16),
        (torch.bfloat16, 1, torch.float16),
        (torch.float32, 1e6, torch.float32),
        (torch.bfloat16, 1e6, torch.bfloat16),
        (torch.float32, 1e-6, torch.float32),  # fp16 has no bits left there
    ],
)
def test_type_is_half_where_values_fit(tmp_path: Path, dtype: Any, factor: float, stored: Any) -> None:
    layer = sparge.torch.Layer("x", sparge.torch.Settings(target_l1=0))

    class Direct(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return F.scaled_dot_product_attention(q, q, q * factor)

    model = Direct()
    with sparge.capture(model, tmp_path):
        model(torch.randn(1, HEADS, TOKENS, DIM, dtype=dtype))
    (path,) = tmp_path.rglob("*.safetensors")
    assert path.parent.name == "Direct"  # the model itself attends
    assert read(path)[0]["v"].dtype == stored
    assert layer.totals.calls == 0


def test_counts_go_on_and_can_be_limited(tmp_path: Path) -> None:
    model = Model()
    for _ in range(2):
        with sparge.capture(model, tmp_path, sample="text-", layers=["second"]):
            model(tokens())
            model(tokens(count=100))  # too short
            model(tokens())
    with sparge.capture(model, tmp_path, layers=lambda name: name == "first", max_samples=3, every=2) as captured:
        for _ in range(5):
            model(tokens())
        model(tokens(batch=4))
    assert captured.full
    assert names(tmp_path) == ["first/0000.safetensors", "first/0001.safetensors", "first/0002.safetensors"] + [
        f"second/text-{i:04d}.safetensors" for i in range(4)
    ]


def test_grid_and_text_are_written_down(tmp_path: Path) -> None:
    class Video(torch.nn.Module):
        def forward(self, x: Any, grid: list[int]) -> Any:
            return sparge.torch.attend(x, x, x, nhd=True, grid=grid, layer=sparge.torch.current_layer())

    model = Video()
    with sparge.capture(model, tmp_path):
        model(torch.randn(1, 4 * 8 * 9, HEADS, DIM), [4, 8, 9, 0, 0])
        model(torch.randn(1, 4 * 8 * 9 + 12, HEADS, DIM), [4, 8, 9, 12, 1])
    metadata = [read(path)[1] for path in sorted(tmp_path.rglob("*.safetensors"))]
    assert [m.get("grid") for m in metadata] == ["4,8,9", "4,8,9"]
    assert [m.get("text_tokens") for m in metadata] == [None, "12,after"]
    accepts(tmp_path)


# ------------------------------------------------------------------ masks


def test_skipped_layers_are_named_once(tmp_path: Path) -> None:
    model = Model()
    bias = torch.randn(TOKENS, TOKENS)
    with pytest.warns(sparge.CaptureWarning) as caught, sparge.capture(model, tmp_path) as captured:
        model(tokens(), bias)
        model(tokens(), bias)
    assert [str(w.message) for w in caught] == ["layer first: not captured: a mask with values to add (a bias)"]
    assert list(captured.skipped) == ["first"]
    assert {path.parent.name for path in tmp_path.rglob("*.safetensors")} == {"second"}


def test_padded_batch_gives_the_samples_without_padding(tmp_path: Path) -> None:
    model = Model()
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask = causal.repeat(2, 1, 1, 1)
    mask[0, ..., :20] = False
    with sparge.capture(model, tmp_path, layers="first"):
        model(tokens(batch=2), mask)
    shapes = [tuple(read(tmp_path / f"first/0000-{i}.safetensors")[0]["q"].shape) for i in range(2)]
    assert shapes == [(HEADS, TOKENS - 20, DIM), (HEADS, TOKENS, DIM)]
    found = recompute(tmp_path / "first/0000-0.safetensors")
    torch.testing.assert_close(found, model.first.results[0][0][:, 20:], rtol=FP16, atol=FP16)


def test_values_that_are_not_finite_are_skipped(tmp_path: Path) -> None:
    model = Model()
    x = tokens()
    x[0, 7] = float("nan")
    with pytest.warns(sparge.CaptureWarning, match="layer first: not captured: values of q that are not finite"):
        with sparge.capture(model, tmp_path, layers="first"):
            model(x)
    assert names(tmp_path) == []


def test_a_layer_of_two_kinds_keeps_the_first(tmp_path: Path) -> None:
    model = Model()
    captured = sparge.capture(model, tmp_path, layers="first")
    with pytest.warns(sparge.CaptureWarning, match="layer first: not captured: .*one kind"), captured:
        model(tokens())
        model(tokens(), torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    assert names(tmp_path) == ["first/0000.safetensors"]


# ------------------------------------------------------------------ what goes wrong


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_exception_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Model()
    original = F.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="stop"), sparge.capture(model, tmp_path):
        assert hooks(model) > 0
        model(tokens())
        raise RuntimeError("stop")
    assert hooks(model) == 0
    assert F.scaled_dot_product_attention is original
    assert names(tmp_path) == ["first/0000.safetensors", "second/0000.safetensors"]


def test_nothing_captured_is_said(tmp_path: Path) -> None:
    model = Model()
    with (
        pytest.warns(sparge.CaptureWarning, match="1 calls had fewer than min_tokens=256"),
        sparge.capture(model, tmp_path),
    ):
        model.first(tokens(count=10))
    with pytest.warns(sparge.CaptureWarning, match="no attention was seen"), sparge.capture(Model(), tmp_path):
        pass


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    misspelt = sparge.capture(Model(), tmp_path, layers=["frist"])
    with pytest.raises(ValueError, match="no frist; most like it: first"), misspelt:
        pass
    with pytest.raises(ValueError, match="max_samples=0"):
        sparge.capture(Model(), tmp_path, max_samples=0)
    with pytest.raises(ValueError, match="dtype=int8"):
        sparge.capture(Model(), tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="sample='a/b'"):
        sparge.capture(Model(), tmp_path, sample="a/b")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    model = Model()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), sparge.capture(model, tmp_path / "file" / "captures"):
        pass
    assert hooks(model) == 0


def test_full_disk_leaves_no_broken_file(tmp_path: Path) -> None:
    model = Model()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The file system says no in the middle of the file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
        with pytest.raises(OSError) as caught, sparge.capture(model, tmp_path):
            model(tokens())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "first/0000.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert hooks(model) == 0


def test_killed_half_way_leaves_whole_files(tmp_path: Path) -> None:
    code = f"""
import sys, torch, sparge
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_capture import Model, tokens
model = Model()
with torch.inference_mode(), sparge.capture(model, {str(tmp_path)!r}):
    while True:
        model(tokens())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(sparge.__file__).parents[1])}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 600  # imports take their time on a busy machine
        while len(names(tmp_path)) < 20:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    for path in tmp_path.rglob("*.safetensors"):
        assert set(read(path)[0]) == {"q", "k", "v"}
    accepts(tmp_path)


def test_much_data_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparge._capture.Capture, "MANY_BYTES", 200_000)
    model = Model()
    with pytest.warns(sparge.CaptureWarning, match="max_samples") as caught, sparge.capture(model, tmp_path):
        for _ in range(3):
            model(tokens())
    assert len(caught) == 1


def test_import_does_not_need_torch() -> None:
    code = "import sys; from sparge import Preset, capture, report, tune; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(sparge.__file__).parents[1])})


# ------------------------------------------------------------------ transformers


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_transformers_model_keeps_its_attention(tmp_path: Path) -> None:
    model = llama()
    ids = torch.randint(0, 50, (1, 600))
    before = model(ids).logits
    with sparge.capture(model, tmp_path) as captured:
        during = model(ids, use_cache=False).logits
        model.generate(ids[:, :300], max_new_tokens=3, do_sample=False)
    # Exact attention in fp32, summed in another order.
    torch.testing.assert_close(during, before, rtol=1e-3, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)
    assert captured.skipped == {}
    # Decoding steps are too short: two samples of each layer.
    assert names(tmp_path) == [f"model.layers.{i}.self_attn/{n:04d}.safetensors" for i in range(2) for n in range(2)]
    tensors, metadata = read(tmp_path / "model.layers.1.self_attn/0000.safetensors")
    assert [tuple(tensors[name].shape) for name in "qkv"] == [(4, 600, 16), (2, 600, 16), (2, 600, 16)]
    assert metadata["causal"] == "true"
    accepts(tmp_path)


def test_transformers_padding_is_cut_off(tmp_path: Path) -> None:
    model = llama()
    ids = torch.randint(0, 50, (2, 400))
    padding = torch.ones(2, 400, dtype=torch.long)
    padding[0, :50] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", sparge.CaptureWarning)
        with sparge.capture(model, tmp_path):
            model(ids, attention_mask=padding)
    files = sorted((tmp_path / "model.layers.0.self_attn").iterdir())
    assert [read(path)[0]["k"].shape[1] for path in files] == [350, 400]


def test_transformers_layers_of_the_caller_stay(tmp_path: Path) -> None:
    model = llama()
    integration = pytest.importorskip("sparge.integrations.transformers")
    integration.register()
    model.set_attn_implementation("sparge")
    mine = integration.configure(model, target_l1=0.03)
    with pytest.raises(KeyError), sparge.capture(model, tmp_path):
        assert integration.layers(model) != mine
        raise KeyError
    assert integration.layers(model) == mine
    assert model.config._attn_implementation == "sparge"
    assert all(layer.watchers == [] for layer in mine.values())


# ------------------------------------------------------------------ diffusers


def video() -> tuple[Any, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8,
        num_layers=1, sample_width=24, sample_height=16, sample_frames=9, patch_size=2, max_text_seq_length=10,
    )  # fmt: skip
    x, text = torch.randn(1, 3, 4, 16, 24), torch.randn(1, 10, 8)
    return model.eval(), dict(hidden_states=x, encoder_hidden_states=text, timestep=torch.tensor([5]))


def test_diffusers_model_has_its_grid(tmp_path: Path) -> None:
    model, inputs = video()
    before = model(**inputs).sample
    with sparge.capture(model, tmp_path) as captured:
        during = model(**inputs).sample
    torch.testing.assert_close(during, before, rtol=1e-3, atol=1e-4)  # exact, in another order
    assert captured.skipped == {}
    assert names(tmp_path) == ["transformer_blocks.0.attn1/0000.safetensors"]
    tensors, metadata = read(tmp_path / "transformer_blocks.0.attn1/0000.safetensors")
    assert tuple(tensors["q"].shape) == (2, 10 + 3 * 8 * 12, 16)
    assert (metadata["grid"], metadata["text_tokens"], metadata["causal"]) == ("3,8,12", "10", "false")
    assert hooks(model) == 0
    accepts(tmp_path)


def test_diffusers_model_that_is_enabled_stays_so(tmp_path: Path) -> None:
    model, inputs = video()
    integration = pytest.importorskip("sparge.integrations.diffusers")
    with integration.enable(model, target_l1=0.05) as enabled:
        before = hooks(model)
        with sparge.capture(model, tmp_path):
            model(**inputs)
        assert hooks(model) == before
        assert enabled.layers["transformer_blocks.0.attn1"].totals.calls == 1
    assert names(tmp_path) == ["transformer_blocks.0.attn1/0000.safetensors"]


def test_pipelines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="give pipe.transformer"):
        sparge.capture(object(), tmp_path)  # type: ignore[arg-type]


def test_header_is_that_of_the_format(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from sparge import _safetensors

    path = tmp_path / "x.safetensors"
    size = _safetensors.write(path, {"a": numpy.arange(6, dtype=numpy.float16).reshape(2, 3)}, {"why": "ünïcode"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (size, length % 8) == (len(data), 0)
    assert json.loads(data[8 : 8 + length])["a"] == {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}
    assert read(path)[0]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError, match="tensor b: dtype int64"):
        _safetensors.write(path, {"b": numpy.arange(3)}, {})
    assert path.read_bytes() == data

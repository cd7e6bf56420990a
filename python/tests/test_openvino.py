"""bench/studies/openvino_attention.py: attention of a tiny stateful language model, in OpenVINO's CPU plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

openvino = pytest.importorskip("openvino")
from openvino import opset13 as ops  # noqa: E402

STUDIES = Path(__file__).parents[2] / "bench" / "studies"
if not STUDIES.is_dir():
    pytest.skip("no bench beside the tests", allow_module_level=True)
sys.path.insert(0, str(STUDIES))
import openvino_attention as so  # noqa: E402

VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE = 50, 48, 4, 2, 16


def whole(*values):
    return ops.constant(np.array(values, np.int64))


def length_of(port):
    return ops.gather(ops.shape_of(port), ops.constant(1), ops.constant(0))


def remembered(name, new, beam_idx, sinks):
    """Keys or values of all tokens so far, repeated for the query heads, as exporters write it."""
    state = ops.read_value(ops.constant(np.zeros((1, KV_HEADS, 0, SIZE), np.float32)), name, openvino.Type.f32, openvino.PartialShape([-1, KV_HEADS, -1, SIZE]))
    every = ops.concat([ops.gather(state, beam_idx, ops.constant(0)), new], 2)
    sinks.append(ops.assign(every, name))
    grown = ops.broadcast(ops.unsqueeze(every, whole(2)), whole(1, 1, HEADS // KV_HEADS, 1, 1), broadcast_spec="BIDIRECTIONAL")
    return ops.reshape(grown, whole(0, HEADS, -1, SIZE), True)


def causal_mask(queries, keys, window):
    """0 where a query sees a key; of the last queries of so many keys."""
    columns = ops.range(ops.constant(np.int64(0)), keys, ops.constant(np.int64(1)), "i64")
    rows = ops.unsqueeze(ops.range(ops.subtract(keys, queries), keys, ops.constant(np.int64(1)), "i64"), whole(1))
    seen = ops.less_equal(columns, rows)
    if window:
        seen = ops.logical_and(seen, ops.greater(columns, ops.subtract(rows, ops.constant(np.int64(window)))))
    mask = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-np.inf)))
    return ops.unsqueeze(mask, whole(0, 1))


def model(window=0, scale=None, seed=1):
    r = np.random.default_rng(seed)
    ids, there, places = (ops.parameter([1, -1], np.int64, name=name) for name in ("input_ids", "attention_mask", "position_ids"))
    beam_idx = ops.parameter([-1], np.int32, name="beam_idx")
    # Tokens of a kind attend to each other, so that there is something to skip.
    x = ops.gather(ops.constant(r.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)), ids, ops.constant(0))

    def projected(heads):
        weights = ops.constant((r.standard_normal((WIDTH, heads * SIZE)) * 2.5 / np.sqrt(WIDTH)).astype(np.float32))
        return ops.transpose(ops.reshape(ops.matmul(x, weights, False, False), whole(0, 0, heads, SIZE), True), whole(0, 2, 1, 3))

    sinks = []
    q, k, v = projected(HEADS), projected(KV_HEADS), projected(KV_HEADS)
    keys, values = remembered("keys", k, beam_idx, sinks), remembered("values", v, beam_idx, sinks)
    arguments = [q, keys, values, causal_mask(length_of(ids), length_of(there), window)]
    if scale is not None:
        arguments.append(ops.constant(np.float32(scale)))
    attention = ops.scaled_dot_product_attention(*arguments)
    out = ops.reshape(ops.transpose(attention, whole(0, 2, 1, 3)), whole(0, 0, HEADS * SIZE), True)
    result = ops.result(ops.add(out, ops.multiply(ops.convert(ops.unsqueeze(places, whole(2)), "f32"), ops.constant(np.float32(0)))))
    made = openvino.Model([result], sinks, [ids, there, places, beam_idx], "tiny")
    for parameter in made.get_parameters():
        parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
    return made


class Session:
    """Prompts and steps of one sequence."""

    def __init__(self, made):
        core = openvino.Core()
        core.add_extension(so.Attention)
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # its own keys would be in 8 bits otherwise
        self.request = core.compile_model(made, "CPU", exact).create_infer_request()
        self.seen = 0

    def __call__(self, ids, there=None):
        self.seen += ids.size
        given = {
            "input_ids": ids[None], "position_ids": np.arange(self.seen - ids.size, self.seen)[None], "beam_idx": np.zeros(1, np.int32),
            "attention_mask": np.ones((1, self.seen), np.int64) if there is None else there,
        }  # fmt: skip
        return next(iter(self.request.infer(given).values()))[0].copy()


def prompt(tokens, seed=3):
    """Runs of alike tokens."""
    r = np.random.default_rng(seed)
    return np.repeat(r.integers(0, VOCABULARY, tokens // 40 + 1), 40)[:tokens].astype(np.int64)


def error(out, wanted):
    return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)


@pytest.fixture(autouse=True)
def fresh():
    so.configure()
    yield
    so.configure()


@pytest.mark.parametrize("scale", [None, 0.1])
def test_computes_attention_of_prompts_and_steps(scale):
    so.configure(target_l2=0, precision="fp32")
    patched = model(scale=scale)
    assert so.patch(patched) == 1
    dense, ours = Session(model(scale=scale)), Session(patched)
    for ids in (prompt(700), prompt(1), prompt(90, seed=4)):
        assert error(ours(ids), dense(ids)) < 1e-5
    (layer,) = so.layers().values()
    assert layer.totals.calls == 3 and "ScaledDotProductAttention" in so.summary()


def test_skips_within_its_target():
    so.configure(target_l2=0.1)
    patched = model()
    so.patch(patched)
    ids = prompt(4096)
    out = Session(patched)(ids)
    (layer,) = so.layers().values()
    assert layer.totals.sparsity > 0.1
    assert error(out, Session(model())(ids)) < 0.2


def test_converted_folder(tmp_path):
    so.configure(target_l2=0, precision="fp32")
    (tmp_path / "a").mkdir()
    openvino.save_model(model(scale=0.2), tmp_path / "a" / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "a" / "config.json").write_text("{}")
    assert so.convert(tmp_path / "a", tmp_path / "b") == 1
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == ["config.json", "openvino_model.bin", "openvino_model.xml"]
    core = openvino.Core()
    core.add_extension(so.Attention)
    ids = prompt(300)
    assert error(Session(core.read_model(tmp_path / "b" / "openvino_model.xml"))(ids), Session(model(scale=0.2))(ids)) < 1e-5
    with pytest.raises(FileExistsError):
        so.convert(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        so.convert(tmp_path / "nowhere", tmp_path / "c")


def test_refuses_what_it_would_compute_wrongly():
    for window in (20, 5000):  # which short prompts do not show
        windowed = model(window=window)
        with pytest.raises(NotImplementedError, match="not causal over all"):
            so.patch(windowed)
        assert any(node.get_type_name() == "ScaledDotProductAttention" for node in windowed.get_ops())
    patched = model()
    so.patch(patched)
    with pytest.raises(ValueError, match="no ScaledDotProductAttention"):
        so.patch(patched)
    padded = np.ones((1, 100), np.int64)
    padded[0, :10] = 0
    with pytest.raises(RuntimeError, match="attention_mask"):
        Session(patched)(prompt(100), padded)

"""Layers: what is the library's policy reaches Python whole, and is kept in copies. Needs NumPy only."""

import copy
import json
import pickle
import threading
import warnings

import numpy as np
import pytest

import sparge
from oracle import LEVELS, assert_near, dense, qkv, read_head, relative_l1, relative_l2


@pytest.fixture(scope="module")
def head():
    """Queries, keys and values of a prompt of 2048 tokens."""
    q, k, v, causal = read_head("smollm2-local")
    assert causal and q.shape[1] >= 2048
    return q[:, :2048], k[:, :2048], v[:, :2048]


def in_parts(layer, head, size, **options):
    """A prompt that comes in parts, against ever more keys, as with a key-value cache."""
    q, k, v = head
    ends = [*range(size, q.shape[1], size), q.shape[1]]
    parts = [
        layer.attention(q[:, begin:end], k[:, :end], v[:, :end], causal=True, return_stats=True, **options)
        for begin, end in zip([0, *ends], ends)
    ]
    return np.concatenate([out for out, _ in parts], 1), [stats for _, stats in parts]


def test_keys_stay_packed_between_the_parts_of_a_prompt(head):
    keeps, packs = sparge.Layer("keeps"), sparge.Layer("packs", sparge.Settings(keep_keys=False))
    for layer in (keeps, packs):
        out, _ = in_parts(layer, head, 300)
        whole = dense(*head, causal=True)[0]
        assert relative_l2(out, whole) < LEVELS["int8"] + sparge._core.PV_ROOM * sparge._core.TARGET_L2
    assert packs.totals.key_blocks_reused == 0 < packs.totals.key_blocks
    # Not those that are new, nor when their number has doubled and with it their mean has changed.
    assert keeps.totals.key_blocks_reused > 0.5 * keeps.totals.key_blocks
    # Another prompt of the same lengths: what is kept belongs to the keys, not to their places.
    other = tuple(np.ascontiguousarray(x[:, ::-1]) for x in head)
    out, _ = in_parts(keeps, other, 300)
    assert relative_l2(out, dense(*other, causal=True)[0]) < LEVELS["int8"] + sparge._core.PV_ROOM * sparge._core.TARGET_L2


def test_few_queries_and_few_keys_skip_nothing(head):
    q, k, v = head
    layer = sparge.Layer("x", sparge.Settings(target_l1=0.5))
    few, least = sparge._core.FEW_QUERIES, sparge._core.MIN_KEYS
    for queries, keys, nothing in ((few, 2048, True), (few + 1, least - 1, True), (few + 1, least, False), (few + 1, 2048, False)):
        before = layer.totals.dense_calls
        layer.attention(q[:, -queries:], k[:, :keys], v[:, :keys])
        assert layer.totals.dense_calls - before == int(nothing), (queries, keys)
    layer.dense = True
    layer.attention(q, k, v)
    assert layer.totals.dense_calls == 3 and layer.totals.calls == 5


def test_last_queries_of_a_prompt_see_everything(head):
    """At once or in parts; the others skip. In 16 bits, so that rounding, which differs in parts, does not count."""
    settings = sparge.Settings(target_l1=0.3, precision="int16")
    layer = sparge.Layer("x", settings)
    q, k, v = head
    for _ in range(4):
        layer.attention(q, k, v, causal=True)
    whole = sparge.attention(q, k, v, causal=True, select="all", pv_skip="off", precision="int16")
    tail, rest = slice(-sparge._core.BLOCK_Q, None), slice(600, -sparge._core.BLOCK_Q)

    def costs(out):
        return [relative_l1(out[:, rows], np.float64(whole[:, rows])) for rows in (tail, rest)]

    out, stats = layer.attention(q, k, v, causal=True, return_stats=True)
    assert stats.sparsity > 0.3 and layer.totals.calibrate_ms > 0
    of_tail, of_rest = costs(out)
    assert of_tail < 0.2 * of_rest
    layer = sparge.Layer("parts", settings)
    for _ in range(4):
        out, parts = in_parts(layer, head, 600)
    assert parts[-2].sparsity > 0.3
    of_tail, of_rest = costs(out)
    assert of_tail < 0.2 * of_rest
    layer = sparge.Layer("without", sparge.Settings(target_l1=0.3, precision="int16", dense_tail=0))
    for _ in range(5):
        out = layer.attention(q, k, v, causal=True)
    of_tail, of_rest = costs(out)
    assert of_tail > 0.2 * of_rest


def test_exact_and_precision():
    q, k, v = qkv((2, 200, 32), (2, 300, 32))
    expected = dense(q, k, v)[0]
    assert_near(sparge.Layer("x", sparge.Settings(target_l1=0)).attention(q, k, v), expected, "fp32")
    for level in LEVELS:
        assert_near(sparge.Layer("x", sparge.Settings(target_l1=0, precision=level)).attention(q, k, v), expected, level)


def test_without_memory_every_call_is_the_first(head):
    layer = sparge.Layer("x", sparge.Settings(target_l1=0.3), remembers=False)
    once = layer.attention(*head, causal=True)
    assert once.tobytes() == layer.attention(*head, causal=True).tobytes()
    assert layer.calibrations == [] and layer.totals.calls == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_know_what_the_original_knew(head, duplicate):
    layer = sparge.Layer("x", sparge.Settings(target_l1=0.04, seed=5))
    unused = duplicate(layer)
    assert unused.calibrations == [] and unused.totals == layer.totals
    for _ in range(3):
        layer.attention(*head, causal=True)
    layer.dense = True
    twin, third = duplicate(layer), duplicate(duplicate(layer))
    assert twin.handle != layer.handle and twin.dense and twin.totals == layer.totals and third.totals == layer.totals
    before = layer.__getstate__()
    del before["elsewhere"]  # as in older pickles
    older = sparge.Layer.__new__(sparge.Layer)
    older.__setstate__(before)
    assert not older.elsewhere and older.totals == layer.totals
    layer.dense = twin.dense = third.dense = False
    results = [x.attention(*head, causal=True).tobytes() for x in (layer, twin, third)]
    assert len(set(results)) == 1
    assert [c.save() for c in twin.calibrations] == [c.save() for c in layer.calibrations] != []
    assert unused.attention(*head, causal=True).tobytes() != results[0]
    layer.attention(*head, causal=True)
    assert (layer.totals.calls, twin.totals.calls) == (5, 4)


def test_kinds_of_calls_are_kept_apart(head):
    q, k, v = head
    layer = sparge.Layer("x")
    layer.attention(q, k, v, causal=True)
    layer.attention(q, k, v)
    layer.attention(q[:1], k[:1], v[:1])
    layer.attention(q, k, v, causal=True)
    assert sorted(c.heads for c in layer.calibrations) == [1, 2, 2]


def test_what_is_the_layers_to_choose_is_refused():
    q, k, v = qkv((2, 100, 16), (2, 100, 16))
    layer = sparge.Layer("mine")
    wrong = dict(precision="fp32", select="all", theta=0.1, tau=0.5, topk=0.5, pv_skip=1.0, predictor="keys", dense_tail=3,
                 target_l1=0.1, pv_l1=0.1, round_l1=0.1, seed=1, calibration=sparge.Calibration(2),
                 map=np.ones((1, 2), bool))  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"layer mine: {name} is the layer's to choose"):
            layer.attention(q, k, v, **{name: value})
    with pytest.raises(ValueError, match="layer mine: k has head size 8, q has 16"):
        layer.attention(q, k[..., :8], v)
    with pytest.raises(TypeError, match="colour"):
        layer.attention(q, k, v, colour=1)
    assert layer.totals.calls == 0


@pytest.mark.parametrize("settings, kind, text", [
    (dict(target_l1=-1), ValueError, "target_l1=-1"),
    (dict(target_l1="x"), TypeError, "target_l1='x' is no float"),
    (dict(target_l1=0.1, pv_l1=0.05), ValueError, "pv_l1=0.05"),
    (dict(pv_l1=-0.5), ValueError, "pv_l1=-0.5 is outside"),
    (dict(round_l1=-1.0), ValueError, "round_l1=-1"),
    (dict(target_l1=0, round_l1=0.1), ValueError, "round_l1=0.1 has no effect"),
    (dict(precision="fp16"), ValueError, "precision='fp16' is none of fp32, int16, int8"),
    (dict(dense_tail=-1), ValueError, "dense_tail=-1"),
    (dict(dense_tail=1.5), TypeError, "dense_tail=1.5 is no int"),
    (dict(min_keys=-1), ValueError, "min_keys=-1"),
    (dict(seed=-1), ValueError, "seed=-1"),
], ids=str)  # fmt: skip
def test_settings_are_refused_when_they_are_made(settings, kind, text):
    with pytest.raises(kind, match=text):
        sparge.Settings(**settings)


def preset(path, **changes):
    measured = dict(sparsity=0.5, work=0.5, l1=0.01, l2=0.01, round_l1=0.01, verified_on=1)
    head = dict(precision="int16", select="floor", theta=0.3, tau=0.9, pv_skip="off", measured=measured)
    layer = dict(q_heads=2, kv_heads=1, qk_dim=64, v_dim=64, causal=True, samples=[], held_out=[],
                 heads=[dict(head, head=0), dict(head, head=1, precision="fp32", select="all", tau=1)])  # fmt: skip
    layer.update(changes)
    content = dict(format="sparge-preset", version=1, made_by="test", bounds=dict(l1=0.05, l2=0.06, round_l1=0.05),
                   predictor="keys", seed=0, layers={"a.b": layer})  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def test_presets(head, tmp_path):
    settings = sparge.Settings(preset=preset(tmp_path / "p.json"))
    layer = sparge.Layer("a.b", settings)
    entry = settings.preset.layer("a.b")
    assert [h["precision"] for h in entry.heads] == ["int16", "fp32"] and entry.heads[1]["pv_skip"] == np.inf
    out, stats = layer.attention(*head, causal=True, return_stats=True)
    rule = dict(select="floor", predictor="keys", tau=[0.9, 1.0], theta=0.3, pv_skip="off", precision=["int16", "fp32"])
    tail = dict(dense_tail=sparge._core.DENSE_TAIL)
    assert out.tobytes() == sparge.attention(*head, causal=True, **rule, **tail).tobytes()
    assert stats.head_sparsity[0] > 0.1 and stats.head_sparsity[1] == 0 and layer.calibrations == []
    for duplicate in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert duplicate.attention(*head, causal=True).tobytes() == out.tobytes()
    # Another kind of call than it was tuned on: said once, and nothing skipped.
    with pytest.warns(sparge.LayerWarning, match="layer a.b: the preset is for causal calls"):
        assert layer.attention(*head, return_stats=True)[1].sparsity == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.attention(*head)
    q, k, v = head
    with pytest.raises(ValueError, match="layer a.b: q_heads=1 is not the 2 of the preset"):
        layer.attention(q[:1], k[:1], v[:1])
    # A layer that the preset does not have computes every tile, and says so.
    other = sparge.Layer("a.c", settings)
    with pytest.warns(sparge.LayerWarning, match="p.json: has no layer .a.c.; most like it: .a.b..*; this layer skips nothing"):
        out, stats = other.attention(q, k, v, causal=True, return_stats=True)
    assert stats.sparsity == 0 and other.totals.dense_calls == 1 and other.calibrations == []
    assert out.tobytes() == sparge.attention(q, k, v, causal=True, select="all", precision="int8").tobytes()
    with pytest.raises(ValueError, match="target_l1=0.1 has no effect with a preset"):
        sparge.Settings(target_l1=0.1, preset=tmp_path / "p.json")
    for changes, text in ((dict(qk_dim=0), "qk_dim"), (dict(heads=[]), "heads")):
        with pytest.raises(sparge._presets.PresetError, match=f"q.json: layer .a.b.: field '{text}'"):
            sparge.Settings(preset=preset(tmp_path / "q.json", **changes))
    (tmp_path / "q.json").write_bytes(b"\xff{")
    with pytest.raises(sparge._presets.PresetError, match="q.json"):
        sparge.Preset.read(tmp_path / "q.json")
    with pytest.raises(FileNotFoundError):
        sparge.Settings(preset=tmp_path / "nothing.json")


def test_threads_share_a_layer(head):
    layer = sparge.Layer("x", sparge.Settings(target_l1=0))
    expected, wrong = dense(*head, causal=True)[0], []

    def compute():
        out, _ = in_parts(layer, head, 500)
        wrong.extend([1] * int(relative_l1(out, expected) > LEVELS["fp32"]))

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and layer.totals.calls == 4 * 5


def test_tensors_of_pytorch_give_the_same_bits(head):
    torch = pytest.importorskip("torch")
    import sparge.torch

    arrays, tensors = sparge.Layer("x", sparge.Settings(seed=1)), sparge.Layer("y", sparge.Settings(seed=1))
    q, k, v = map(torch.from_numpy, head)
    for begin, end in ((0, 1100), (1100, 1700), (1700, 2048)):
        a = arrays.attention(*(x[:, s] for x, s in zip(head, (slice(begin, end), slice(end), slice(end)))), causal=True)
        # A cache that is not full yet: its last places are seen by nobody.
        b = sparge.torch.attend(q[:, begin:end], k, v, causal=True, query_offset=begin, layer=tensors)
        assert a.tobytes() == b.numpy().tobytes()
    assert arrays.totals.key_blocks_reused == tensors.totals.key_blocks_reused > 0
    assert [c.save() for c in arrays.calibrations] == [c.save() for c in tensors.calibrations]

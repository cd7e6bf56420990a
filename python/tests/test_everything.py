"""Every public function, class, method and property of the package is called, in whatever way the extension was linked.

Names are found by looking at the package: one that is new fails `test_nothing_is_left_out` until an exercise below has it.
What the exercises compute is checked elsewhere in more depth; here everything must return, and do something.
"""

import copy
import faulthandler
import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import sys
import webbrowser

import numpy as np
import pytest

import sparge
from sparge import _elsewhere, ggml
from oracle import qkv, read_head

PUBLIC = ["sparge", "sparge.compat", "sparge.ggml", "sparge.torch", "sparge.integrations.transformers", "sparge.integrations.diffusers"]
# Libraries that modules need, beside NumPy; in sparge.eval the command line is the interface (test_eval.py), and
# sparge.distributed needs several ranks (test_distributed.py).
NEEDED = {"sparge.compat": "torch", "sparge.torch": "torch", "sparge.integrations": "torch", "sparge.integrations.transformers": "transformers",
          "sparge.integrations.diffusers": "diffusers"}  # fmt: skip
SECONDS = 600  # a call that does not return ends the tests, with a stack; all of it takes a few seconds


def has(library):
    return importlib.util.find_spec(library) is not None


def modules():
    """All that can be imported here, less the extension: what users see of it comes through the others."""
    names = ["sparge", *(m.name for m in pkgutil.walk_packages(sparge.__path__, "sparge."))]
    for name in names:
        needed = [library for module, library in NEEDED.items() if name == module or name.startswith(module + ".")]
        if not name.startswith(("sparge.eval", "sparge._core", "sparge.distributed")) and all(map(has, needed)):
            yield importlib.import_module(name)


def public_name(thing):
    parts = f"{thing.__module__}.{thing.__qualname__}".split(".")
    return ".".join(part for part in parts if not part.startswith("_"))


def is_ours(thing):
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "sparge"


def members(cls):
    """Methods and properties, also those of bases that are ours."""
    for base in cls.__mro__:
        for name, member in vars(base).items() if is_ours(base) else ():
            if not name.startswith("_") and (callable(member) or hasattr(member, "__get__")):
                yield f"{public_name(cls)}.{name}", member


def everything():
    """Functions of the public modules, and what they offer of others; classes of all modules, because users are given their objects; their members."""
    found = {}
    for module in modules():
        for name in {*vars(module), *getattr(module, "__all__", ())}:
            thing = getattr(module, name)
            if name.startswith("_") or not is_ours(thing):
                continue
            if inspect.isclass(thing):
                found[public_name(thing)] = thing
                found.update(members(thing))
            elif module.__name__ in PUBLIC and (name in module.__all__ or thing.__module__ == module.__name__):
                found[public_name(thing)] = thing
    return found


def code_of(thing):
    """What runs when it is called, if that is Python."""
    if inspect.isclass(thing):
        thing = thing.__dict__.get("__init__") or thing.__dict__.get("__new__")
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if isinstance(thing, property):
        thing = thing.fget
    return getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None


EXERCISES = []


def calls(names, needs=()):
    """Marks a function that calls all of these, of libraries that may be missing."""

    def mark(function):
        EXERCISES.append((function, names.split(), [n for n in (needs.split() if needs else ())]))
        return function

    return mark


# ------------------------------------------------------------------ NumPy

Q, K, V = qkv((2, 300, 32), (2, 300, 32))


@calls("""sparge.attention sparge.predict sparge.reference sparge.merge sparge.token_order sparge.isas sparge.Options
          sparge.Stats sparge.Stats.head_sparsity sparge.set_num_threads sparge.get_num_threads""")
def arrays(tmp_path, monkeypatch):
    options: sparge.Options = sparge.Options(causal=True)
    out, lse, stats = sparge.attention(Q, K, V, tau=0.9, return_lse=True, return_stats=True, **options)
    assert isinstance(stats, sparge.Stats) and len(stats.head_sparsity) == 2
    assert sparge.predict(Q, K, tau=0.9, **options)[0].sum() == stats.qk_tiles["computed"]
    assert np.abs(sparge.reference(Q, K, V, **options) - out).mean() < 0.1
    assert np.array_equal(sparge.merge((out, lse))[1], lse)
    assert sorted(sparge.token_order((1, 2, 3))) == list(range(6))
    assert stats.isa in [isa["name"] for isa in sparge.isas()]
    sparge.set_num_threads(2)
    assert sparge.get_num_threads() == 2
    sparge.set_num_threads(0)


@calls("""sparge.Calibration sparge.Calibration.heads sparge.Calibration.head sparge.Calibration.save sparge.Calibration.load
          sparge.Calibration.set_bounds sparge.HeadEstimate sparge.calibrate""")
def calibrations(tmp_path, monkeypatch):
    q, k, v, causal = read_head("smollm2-local")
    calibration = sparge.Calibration(len(q), target_l1=0.1)
    for _ in range(3):
        sparge.calibrate(q, k, v, calibration, causal=causal, effort=1.0)
    before, bytes_before = calibration.head(0), calibration.save()
    assert isinstance(before, sparge.HeadEstimate) and before.state == "sparse"
    assert calibration.heads == sparge.Calibration.load(bytes_before).heads == len(q)
    # Other bounds for the first head: what was measured stays, what is chosen does not.
    others = calibration.head(1)
    calibration.set_bounds(0, 1e-4, 2e-4)
    after = calibration.head(0)
    assert after.error <= 1e-4 < before.error and after.sparsity < before.sparsity and after.samples == before.samples
    assert calibration.save() != bytes_before and calibration.head(1) == others
    calibration.set_bounds(0, 0.1, sparge._core.PV_ROOM * 0.1)
    assert calibration.head(0) == before
    with pytest.raises(ValueError, match="pv_l1"):
        calibration.set_bounds(0, 0.2, 0.1)


@calls("""sparge.Layer sparge.Layer.attention sparge.Layer.totals sparge.Layer.clear_totals sparge.Layer.calibrations
          sparge.LayerWarning sparge.Settings sparge.Settings.make
          sparge.Layer.may_skip sparge.Layer.pass_by sparge.Obstacle sparge.Settings.lacks
          sparge.Totals sparge.Totals.sparsity sparge.Totals.dense_ms sparge.Totals.add""")
def one_layer(tmp_path, monkeypatch):
    layer = sparge.Layer("x", sparge.Settings(min_keys=0))
    out = layer.attention(Q, K, V, causal=True)
    twin = pickle.loads(pickle.dumps(layer))
    assert np.abs(sparge.reference(Q, K, V, causal=True) - out).mean() < 0.1
    assert twin.totals == layer.totals and twin.totals.calls == 1
    twin.attention(Q, K, V, causal=True)
    assert len(twin.calibrations) == 1 and twin.calibrations[0].heads == 2
    sums = twin.totals
    sums.add(layer.totals)
    assert sums.calls == 3 and 0 <= sums.sparsity <= 1 and sums.dense_ms > 0
    twin.clear_totals()
    assert twin.totals == type(sums)()
    assert layer.settings.make("x").totals()["calls"] == 0
    assert issubclass(sparge.LayerWarning, UserWarning)
    idle = sparge.Layer("idle")
    idle.pass_by(_elsewhere.Obstacle("dtype", "float64"))
    assert idle.elsewhere == {"dtype": 1} and idle.may_skip and not idle.settings.lacks("x")
    assert _elsewhere.counted([idle]).startswith("1 call: dtype (") and _elsewhere.why_unused([idle])
    with pytest.warns(sparge.LayerWarning):
        assert _elsewhere.warn_unused([idle])


@calls("sparge.ggml.load sparge.ggml.path")
def backend(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", str(tmp_path / "backend.so"))
    (tmp_path / "backend.so").touch()
    assert ggml.path() == tmp_path / "backend.so"
    monkeypatch.setattr(ggml, "_libraries_of_ggml", list)
    monkeypatch.setattr(ggml, "HOSTS", ())
    with pytest.raises(RuntimeError, match="installed"):  # test_ggml.py has more
        ggml.load()


# ------------------------------------------------------------------ models


def small_model():
    import torch
    import torch.nn.functional as F

    class Attends(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    return torch.nn.Sequential(Attends(), Attends()), torch.from_numpy(Q)[None]


@calls("""sparge.compat.block_sparse_sage2_attn_cuda sparge.compat.sageattn sparge.compat.spas_sage2_attn_meansim_cuda
          sparge.compat.spas_sage2_attn_meansim_topk_cuda""", "torch")
def names_of_others(tmp_path, monkeypatch):
    from sparge import compat

    _, x = small_model()
    for function in map(compat.__dict__.get, compat.__all__):
        assert function(x, x, x).shape == x.shape  # test_compat.py has what they compute


@calls("""sparge.torch.attend sparge.torch.scaled_dot_product_attention sparge.torch.sparse sparge.torch.patch
          sparge.torch.unpatch sparge.torch.current_layer sparge.torch.tracked sparge.torch.obstacle_of
          sparge.summary sparge.Layer.run sparge.Layer.whole""", "torch")
def layers(tmp_path, monkeypatch):
    import sparge.torch as st

    model, x = small_model()
    layer = st.Layer("x", st.Settings(target_l1=0.1, min_keys=0))
    want = sparge.attention(x, x, x, target_l1=0)
    assert layer.whole() == {} and st.Layer("y", st.Settings(target_l1=0)).whole()["select"] == "all"
    for out in (st.attend(x, x, x, layer=layer), st.scaled_dot_product_attention(x, x, x, layer=layer)):
        assert (out - want).abs().mean() < 0.1
    assert layer.totals.calls == 2 and layer.totals.sparsity >= 0 and layer.calibrations[0].heads == 2
    with st.sparse(model) as named:
        model(x)
    total = copy.copy(named["0"].totals)
    total.add(named["1"].totals)
    assert total.calls == 2 and "all" in st.summary(named.values())
    st.patch(target_l1=0.2)
    assert st.current_layer().settings.target_l1 == 0.2
    st.unpatch()
    assert st.obstacle_of({"query": x.detach()}) is None and st.obstacle_of({"query": x.double()}) is not None
    with st.tracked(model, st.Settings()) as named:
        assert sorted(named) == ["", "0", "1"]


@calls("""sparge.capture sparge.Capture sparge.Capture.samples sparge.Capture.full sparge.CaptureWarning
          sparge.tune sparge.Preset sparge.Preset.read sparge.Preset.layer sparge.PresetLayer
          sparge.PresetError sparge.CommandError sparge.Bar sparge.Bar.at sparge.Bar.finish sparge.Bar.restart
          sparge.report sparge.Report sparge.Report.html sparge.Report.save sparge.Report.open
          sparge.Call sparge.Part sparge.Inexpressible""", "torch")
def recordings(tmp_path, monkeypatch):
    model, x = small_model()
    import torch

    monkeypatch.setattr(webbrowser, "open", lambda address: address.startswith("file:"))
    with torch.inference_mode(), sparge.capture(model, tmp_path / "captures", max_samples=1) as captured:
        model(x)
    assert captured.samples == 1 and captured.full
    with pytest.warns(sparge.CaptureWarning), sparge.capture(model, tmp_path / "nothing"):
        pass
    preset = sparge.tune(None, None, captures=captured.folder, out=tmp_path / "preset.json", progress=False)
    layer = sparge.Preset.read(tmp_path / "preset.json").layer("0")
    assert preset.layers["0"] == layer
    assert (layer.q_heads, layer.causal, len(layer.heads)) == (2, True, 2)
    with pytest.raises(sparge._presets.PresetError, match="most like it"):
        preset.layer("2")
    with sparge._command.Bar("recording", 3) as bar:
        bar.at(1)
        bar.restart("tuning")
        bar.finish()
    page = sparge.report(captured, preset, progress=False)
    assert page.html == page.save(tmp_path / "page.html").read_text(encoding="utf-8") and page.open()
    with pytest.raises(sparge.CommandError):
        sparge.report(tmp_path / "missing", progress=False)
    sequence = sparge._plain.Call(None, True, -5, 0, 0.0, None, None)
    with pytest.raises(sparge._plain.Inexpressible):
        sparge._plain.plain(sequence, 0, 4, 4)


@calls("""sparge.integrations.transformers.register sparge.integrations.transformers.configure
          sparge.integrations.transformers.layers sparge.integrations.transformers.summary
          sparge.integrations.transformers.is_model sparge.integrations.transformers.Mask
          sparge.integrations.transformers.Mask.written_out
          sparge.integrations.transformers.Mask.is_lower_triangle
          sparge.integrations.Cache sparge.integrations.RoomyLayer sparge.integrations.RoomyLayer.update
          sparge.integrations.RoomyLayer.reset""", "transformers")
def models_of_transformers(tmp_path, monkeypatch):
    import torch
    import transformers

    import sparge.integrations.transformers as st

    st.register(target_l1=0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sparge")).eval()
    assert st.is_model(model) and not st.is_model(model.lm_head)
    made = st.configure(model, target_l1=0.05)
    with torch.inference_mode():
        model(torch.ones(1, 80, dtype=torch.long))
    assert st.layers(model) == made and next(iter(made)) in st.summary(model)
    mask = st.Mask((1, 1, 3, 3), True, 0, 0, None)
    assert mask.written_out().sum() == 6 and mask.is_lower_triangle()
    cache = st.Cache(model.config, tokens=8)
    with torch.inference_mode():
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    (layer,) = cache.layers
    assert layer.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16))[0].shape[2] == 4
    layer.reset()
    assert layer.keys is None or not layer.keys.any()


@calls("""sparge.LossWarning sparge.Graded sparge.Graded.run sparge.Graded.take sparge.Graded.samples sparge.Graded.full
          sparge.Sample sparge.Setting sparge.Setting.tau sparge.Setting.pv_skip sparge.HeadTable sparge.LayerTable
          sparge.LayerTable.json sparge.LayerTable.of_json sparge.Option sparge.Option.cost sparge.Option.harm
          sparge.Offers sparge.Offers.preset""", "transformers")
def loss_of_a_model(tmp_path, monkeypatch):
    import torch
    import transformers

    from sparge import _harm, _loss

    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    ids = torch.arange(1024)[None] % 9
    with pytest.warns(sparge.LossWarning):
        preset = sparge.tune(model, [ids], loss=0.01, out=tmp_path / "p.json", progress=False)
    assert preset.core.bounds()["loss"] == 0.01
    assert _harm.Setting(0.25).tau == 0.75 and _harm.Setting(None).pv_skip == float("inf")
    graded = _harm.Graded(model)
    with _harm.differentiable(model), graded:
        graded.run(ids, 0)
    assert graded.samples == 1 and not graded.full
    table = _harm.measure(next(graded.take())[2], None)
    assert _harm.LayerTable.of_json(table.json()) == table and len(table.heads) == 2
    offers = _loss.Offers({"x": {"0": table}}, {"0": 1024}, [], 0)
    assert offers.preset((0, 0), 0.01, 0.0).layers["x"].heads[0]["select"] == "all"


@calls("""sparge.integrations.diffusers.enable sparge.integrations.diffusers.enabled sparge.integrations.diffusers.register
          sparge.integrations.diffusers.Enabled sparge.integrations.diffusers.Enabled.layers
          sparge.integrations.diffusers.Enabled.summary sparge.integrations.diffusers.Enabled.restart
          sparge.integrations.diffusers.Enabled.disable sparge.integrations.diffusers.Enabled.when_disabled
          sparge.integrations.Grid sparge.integrations.Grid.cells sparge.integrations.Grid.text_tokens
          sparge.integrations.Model""", "diffusers")
def models_of_diffusers(tmp_path, monkeypatch):
    import sparge.integrations.diffusers as sd
    from sparge.integrations._grids import Model
    from tiny_diffusers import made, run, wan

    assert sd.Grid((2, 3, 4)).cells == 24 and sd.Grid((2, 3, 4), (5,)).text_tokens(29) == 5
    assert Model(lambda config, arguments: None).ascending is False
    assert sd.register().totals.calls == 0
    model, inputs = made(wan)
    on = sd.enable(model)
    run(model, inputs)
    assert sd.enabled(model) is on and on.step == 1 and next(iter(on.layers)) in on.summary()
    on.restart()
    run(model, inputs)
    assert on.step == 1
    undone = []
    on.when_disabled(lambda: undone.append(True))
    on.disable()
    assert sd.enabled(model) is None and undone == [True]


@calls("""sparge.integrations.comfyui.SpargeAttention sparge.integrations.comfyui.SpargeAttention.INPUT_TYPES
          sparge.integrations.comfyui.SpargeAttention.patch sparge.integrations.comfyui.Override""", "torch")
def nodes_of_comfyui(tmp_path, monkeypatch):
    import torch

    from sparge.integrations import comfyui

    class Patcher:
        model_options: dict = {}

        def clone(self):
            return copy.deepcopy(self)

    node = comfyui.SpargeAttention()
    assert list(node.INPUT_TYPES()["required"]) == ["model", "target_l2", "precision"]
    (patched,) = node.patch(Patcher(), 0.0, "fp32")
    override = patched.model_options["transformer_options"]["optimized_attention_override"]
    q = torch.ones(1, 80, 64)
    with torch.inference_mode():
        assert override(None, q, q, q, heads=2).shape == q.shape


# ------------------------------------------------------------------ the test


@pytest.mark.parametrize("exercise, names, needs", EXERCISES, ids=[e[0].__name__ for e in EXERCISES])
def test_calls(exercise, names, needs, tmp_path, monkeypatch):
    for library in needs:
        pytest.importorskip(library)
    found, called = everything(), set()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code) if event == "call" else None)
    try:
        exercise(tmp_path, monkeypatch)
    finally:
        sys.setprofile(None)
        faulthandler.cancel_dump_traceback_later()
    assert [name for name in names if code_of(found[name]) not in {None, *called}] == []


def test_nothing_is_left_out():
    for library in {library for _, _, needs in EXERCISES for library in needs}:  # without them some exercises do not run
        pytest.importorskip(library)
    covered = [name for _, names, needs in EXERCISES for name in names if all(map(has, needs))]
    assert len(covered) == len(set(covered))
    assert set(covered) ^ set(everything()) == set()
    assert len(covered) > 20


def test_calibrations_in_pickles_of_before():
    """They came with their number of heads."""
    calibration = sparge.Calibration(3)
    load, arguments = sparge.Calibration.load, (calibration.save(), 3)
    assert load(*arguments).save() == pickle.loads(pickle.dumps(calibration)).save() == calibration.save()

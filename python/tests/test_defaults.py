"""Numbers of the library: Python takes them from the extension, and what its texts quote is what they are."""

import inspect
import re
import tokenize
from pathlib import Path

import pytest

import sparge
from sparge import _core

PACKAGE = Path(sparge.__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
BOUNDS = {"target_l2": _core.TARGET_L2, "pv_l2": _core.PV_ROOM * _core.TARGET_L2, "round_l1": _core.ROUND_L1}


def test_defaults_of_signatures():
    from sparge._layers import Settings

    settings = Settings()
    assert (settings.dense_tail, settings.min_keys) == (_core.DENSE_TAIL, _core.MIN_KEYS)
    # What is not said is as if it had been said, to the last bit.
    assert sparge.Calibration(2).save() == sparge.Calibration(2, **BOUNDS).save()
    assert sparge.Calibration(2).save() != sparge.Calibration(2, **{**BOUNDS, "pv_l2": 0.5}).save()
    assert sparge.Layer("x").__getstate__()["learned"] == sparge.Layer("x", Settings(**BOUNDS)).__getstate__()["learned"]


def doc(function):
    return inspect.getdoc(function) or ""


# A text, what in it quotes numbers, and these numbers. All places where it matches count; there must be one.
QUOTED = {
    "attention, target_l2": (lambda: doc(sparge.attention), r"target_l2 .*default ([\d.]+)\)", [_core.TARGET_L2]),
    "attention, pv_l2": (lambda: doc(sparge.attention), r"pv_l2 .*default ([\d.]+) target_l2", [_core.PV_ROOM]),
    "attention, round_l1": (lambda: doc(sparge.attention), r"round_l1 .*default ([\d.]+)\)", [_core.ROUND_L1]),
    "Calibration": (lambda: doc(sparge.Calibration.__init__), r"default ([\d.]+) target_l2", [_core.PV_ROOM]),
    "tune, target_l2": (lambda: doc(sparge.tune), r"target_l2 .*default ([\d.]+)\n", [_core.TUNE_TARGET_L2]),
    "tune, pv_l2": (lambda: doc(sparge.tune), r"pv_l2 .*default ([\d.]+) target_l2", [_core.TUNE_PV_ROOM]),
    "tune, round_l1": (lambda: doc(sparge.tune), r"round_l1 .*default ([\d.]+)\n", [_core.TUNE_ROUND_L1]),
    "Stats": (lambda: doc(sparge.Stats), r"(\d+) queries x (\d+) keys", [_core.BLOCK_Q, _core.BLOCK_K]),
    "predict": (lambda: doc(sparge.predict), r"Nq/(\d+)\).*Nk/(\d+)\)", [_core.BLOCK_Q, _core.BLOCK_K]),
    "python.md, target_l2": (lambda: text("python.md"), r"within ([\d.]+) per head", [_core.TARGET_L2]),
    "python.md, few queries": (lambda: text("python.md"), r"up to (\d+) queries \(decoding\)", [_core.FEW_QUERIES]),
    "python.md, last queries": (lambda: text("python.md"), r"the last (\d+) queries \(`dense_tail`", [_core.DENSE_TAIL]),
    "python.md, few keys": (lambda: text("python.md"), r"fewer than (\d+) keys", [_core.MIN_KEYS]),
    "diffusers.md": (lambda: text("diffusers.md"), r"`target_l2` \| ([\d.]+) ", [_core.TARGET_L2]),
}


def text(name):
    if not (DOCS / name).exists():
        pytest.skip("needs the documents beside the tests")
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("place", QUOTED)
def test_what_texts_quote(place):
    read, pattern, expected = QUOTED[place]
    found = re.findall(pattern, read())
    assert found
    for numbers in found:
        numbers = [numbers] if isinstance(numbers, str) else numbers
        assert [float(number) for number in numbers] == expected


def test_numbers_of_the_library_stand_nowhere_else():
    """In the code of the package; what its comments and texts say is for people, and above."""
    own = {"0.015", "0.01875", "1.25", "576", "128", "64", "1024"}
    # The head size of a model; rows of a mask at a time; tokens of a question.
    allowed = {("_denoise.py", "64"), ("_plain.py", "1024"), ("_reading.py", "64")}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        with tokenize.open(path) as file:
            found |= {(path.name, t.string) for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.NUMBER and t.string in own}
    assert found == allowed

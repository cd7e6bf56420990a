"""sparge.report: the page of the command line as an object that notebooks show."""

from __future__ import annotations

import html
import os
import signal
import subprocess
import sys
import textwrap
import time
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparge
from sparge import _safetensors
from sparge._report import _flags


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of one sample each, of which the second has a name that HTML has to escape."""
    folder = tmp_path_factory.mktemp("captures")
    random = np.random.default_rng(1)
    for layer in ("model.layers.0", 'odd & "quoted" <layer>'):
        (folder / layer).mkdir()
        tensors = {name: random.standard_normal((2, 256, 16)).astype(np.float16) for name in "qkv"}
        _safetensors.write(folder / layer / "0000.safetensors", tensors, {"causal": "true", "scale": "0.25"})
    return folder


class Frame(HTMLParser):
    """The attributes of the one element that there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_notebook_shows_the_page_in_a_frame(captures: Path, tmp_path: Path) -> None:
    report = sparge.report(captures, progress=False)
    page = report.html
    assert page.lstrip().startswith("<!DOCTYPE html>")
    assert "model.layers.0" in page
    ((tag, attributes),) = Frame(report._repr_html_()).elements
    assert tag == "iframe"
    assert attributes["srcdoc"] == page
    assert f"height: {report.height}px" in attributes["style"]
    assert html.escape(page) in report._repr_html_()
    copy = report.save(tmp_path / "copy.html")
    assert copy.read_text(encoding="utf-8") == page
    path = report.path
    assert path.exists()
    del report
    assert not path.exists()  # nobody can ask for it any more
    assert copy.exists()


def test_file_and_browser(captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.chdir(tmp_path)
    files = sorted(captures.rglob("*.safetensors"))
    report = sparge.report(files[:1], out="page.html", tau=0.9, select="cdf", pv_skip="off", sink=False, progress=False)
    assert report.path == Path("page.html")
    assert report.open()
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert "0.9" in report.html
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_preset(captures: Path, tmp_path: Path) -> None:
    preset = sparge.tune(None, None, captures=captures, out=tmp_path / "preset.json", progress=False)
    for given in (preset, preset.path, Path(preset.path)):
        assert str(preset.path) in sparge.report(captures, given, progress=False).html


def test_report_of_a_capture(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()

        def forward(self, x: Any) -> Any:
            return self.inner(x, x, x, need_weights=False)[0]

    torch.manual_seed(1)
    model = Model()
    with sparge.capture(model, tmp_path / "c") as captured, torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)  # it does not ask for attention by its name
        try:
            model(torch.randn(1, 300, 32))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert "inner" in sparge.report(captured, progress=False).html


def test_options_become_flags() -> None:
    options = dict(tau=0.5, pv_skip="off", causal=True, sink=False, grid=(1, 2, 3), mask=None, png=Path("maps"))
    assert _flags(options) == [
        "--tau", "0.5", "--pv-skip", "off", "--causal", "--no-sink", "--grid", "1,2,3", "--png", "maps",
    ]  # fmt: skip


def test_errors_are_those_of_the_program(captures: Path, tmp_path: Path) -> None:
    with pytest.raises(sparge.CommandError, match="^sparge report: .*--tauu"):
        sparge.report(captures, tauu=1, progress=False)
    with pytest.raises(sparge.CommandError, match="nothing"):
        sparge.report(tmp_path / "nothing", progress=False)
    with pytest.raises(sparge.CommandError, match="page.txt"):
        sparge.report(captures, out=tmp_path / "page.txt", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_missing_program(captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARGE_PROGRAM", str(tmp_path / "missing"))
    with pytest.raises(sparge.CommandError, match="missing: cannot be started"):
        sparge.report(captures, progress=False)


PATIENCE_S = 600  # on a busy machine an import may take minutes

INTERRUPTED = """
import pathlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore Ctrl-C
import sparge, sparge._command
sparge._command.Bar.at = lambda *_: pathlib.Path("listening").touch()  # to what the child says
sparge.report("captures", out="page.html", progress=False)
"""


def test_interrupted_ends_the_child(tmp_path: Path) -> None:
    """A program that tells its process number, and how far it is, and then waits stands for one that is at work."""
    program = tmp_path / "program"
    pid = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\necho 'reading: 1 of 2, 00:01 left' >&2\nexec sleep {PATIENCE_S}\n")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(sparge.__file__).parents[1]),
        "SPARGE_PROGRAM": str(program),
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "listening").exists():
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child = int(pid.read_text())
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=PATIENCE_S)
    assert said.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)

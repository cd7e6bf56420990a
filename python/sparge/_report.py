"""sparge.report: the page of `sparge report`, in a notebook, a browser or a file."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import webbrowser
from pathlib import Path
from typing import Any, Iterable, Union

from ._capture import Capture
from ._command import Bar, argument, run
from ._presets import Preset

PathLike = Union[str, os.PathLike[str]]


class Report:
    """A page about attention heads. A notebook shows it inline; without `out` it lives as long as this object."""

    height = 800  # pixels of the frame in a notebook; the page scrolls in it

    def __init__(self, path: Path, keeper: object = None) -> None:
        self.path = path
        self._keeper = keeper  # of a temporary folder

    @property
    def html(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def save(self, path: PathLike) -> Path:
        """A copy that stays."""
        return Path(shutil.copyfile(self.path, path))

    def open(self) -> bool:
        """In a browser; whether there is one."""
        return webbrowser.open(self.path.absolute().as_uri())

    def _repr_html_(self) -> str:
        # A frame keeps the page's style and script from those of the notebook. The page loads nothing from elsewhere.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="Sparse attention report" '
            f'style="width: 100%; height: {self.height}px; border: 1px solid #d9d9d4"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<sparge.report {self.path}>"


def report(
    captures: Union[PathLike, Capture, Iterable[PathLike]],
    preset: Union[PathLike, Preset, None] = None,
    out: PathLike | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Runs the heads of captures and shows attention maps, computed tiles and errors on one page (docs/report.md).

    captures    a folder, a .safetensors file, several of them, or what sparge.capture returned
    preset      of `tune`; else the parameters in `options`
    out         the page, .html; default a temporary file
    options     those of `sparge report`, with _ for -: tau=0.95, pv_skip="off", grid=(1, 64, 64), causal=True
    """
    if isinstance(captures, Capture):
        captures = captures.folder
    paths = [captures] if isinstance(captures, (str, os.PathLike)) else list(captures)
    if preset is not None:
        options["preset"] = preset.path if isinstance(preset, Preset) else preset
    keeper = tempfile.TemporaryDirectory(prefix="sparge-report-") if out is None else None
    path = Path(keeper.name, "report.html") if keeper is not None else Path(out or "")
    with Bar("measuring heads", show=progress) as bar:
        run(["report", *map(argument, paths), *_flags(options), "-o", str(path)], bar)
        bar.finish()
    return Report(path, keeper)


def _flags(options: dict[str, Any]) -> list[str]:
    """Keyword arguments as the command line has them."""
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False and name == "sink":  # the one flag with an opposite
            flags.append("--no-sink")
        elif value is not None and value is not False:
            flags += [flag, ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)]
    return flags

"""Runs the packaged command line as a child process, with its progress as a bar."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import deque
from typing import Any, Sequence, Union

from . import _program

_PROGRESS = re.compile(r"^(?P<what>.+): (?P<done>\d+) of (?P<total>\d+), [\d:]+ left$")
_PATIENCE = 10.0  # seconds that a child has to put its affairs in order


class CommandError(RuntimeError):
    """The command line refused, or failed; the text is what it said."""


class Bar:
    """A tqdm bar, or nothing where tqdm is not installed or not wanted."""

    def __init__(self, what: str, total: int | None = None, show: bool = True) -> None:
        self._bar: Any = None
        if not show:
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, desc=what)

    def restart(self, what: str, total: int | None = None) -> None:
        """The same bar for the next part of the work."""
        if self._bar is not None:
            self._bar.reset()
            self._bar.total = total
            self._bar.set_description(what)

    def at(self, done: int, total: int | None = None) -> None:
        if self._bar is None:
            return
        if total is not None:
            self._bar.total = total
        self._bar.n = done
        self._bar.refresh()

    def finish(self) -> None:
        """All of it is done, though quick work says nothing before its end."""
        if self._bar is not None:
            self.at(self._bar.total or 1, self._bar.total or 1)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _stop(child: subprocess.Popen[str]) -> None:
    """Politely first: `tune` then ends between two steps of its work."""
    child.terminate()
    try:
        child.wait(_PATIENCE)
    except BaseException:  # a second Ctrl-C does not wait, either
        child.kill()
        child.wait()


def argument(path: Union[str, os.PathLike[str]]) -> str:
    """A path that the command line does not take for a flag."""
    text = os.fspath(path)
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def run(arguments: Sequence[str], bar: Bar) -> str:
    """Runs `sparge ARGUMENTS` and returns what it printed. Raises CommandError unless it exits with 0; an exception
    that arrives meanwhile (Ctrl-C) ends the child."""
    program = _program.path()
    said: deque[str] = deque(maxlen=20)
    # A file for stdout, because only one pipe can be read to its end line by line.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        try:
            child = subprocess.Popen(
                [str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
        except OSError as error:
            raise CommandError(f"{program}: cannot be started: {error.strerror}") from None
        assert child.stderr is not None
        with child.stderr:
            try:
                for line in child.stderr:
                    progress = _PROGRESS.match(line.rstrip())
                    if progress:
                        bar.at(int(progress["done"]), int(progress["total"]))
                    elif line.strip():
                        said.append(line.strip())
                code = child.wait()
            except BaseException:
                _stop(child)
                raise
        if code != 0:
            ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise CommandError(said[-1] if said and code > 0 else f"sparge {arguments[0]}: {ended}")
        printed.seek(0)
        return printed.read()

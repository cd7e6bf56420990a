"""The command line `sparge` that comes with the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def path() -> Path:
    """Where the program is: in the package, or where SPARGE_PROGRAM says."""
    chosen = os.environ.get("SPARGE_PROGRAM")
    return Path(chosen) if chosen else Path(__file__).parent / "bin" / "sparge"


def main() -> None:
    """Becomes the program, with this process's arguments."""
    program = str(path())
    os.execv(program, [program, *sys.argv[1:]])

"""llama-cpp-python, xllamacpp, pywhispercpp, and other packages that bring a ggml: their attention here.

    import sparge.ggml
    sparge.ggml.load()                                      # before the first model is made
    model = llama_cpp.Llama("model.gguf", n_ctx=8192, flash_attn=True)

It works if a line "sparge ...: attention for ggml ..." comes on stderr; docs/ggml.md has what the environment may say. Programs
(llama-cli, llama-server) need no Python: `sparge llama`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Union

__all__ = ["load", "path"]

HOSTS = ("llama_cpp", "xllamacpp", "_pywhispercpp")  # modules whose import brings a ggml into the process
_loaded: set[str] = set()  # of which ggml


def path() -> Path:
    """The backend's file: in the package, or where SPARGE_BACKEND says."""
    chosen = os.environ.get("SPARGE_BACKEND")
    file = Path(chosen).absolute() if chosen else Path(__file__).parent / "lib" / "libggml-sparge.so"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; wheels have it, `pip install .` has it with CMAKE_ARGS=-DSPARGE_GGML=ON")
    return file


def load(backend: Union[str, os.PathLike[str], None] = None) -> Path:
    """Makes the ggml of this process load the backend, and gives the file of that ggml. If none is there yet, the first of
    llama_cpp, xllamacpp and pywhispercpp that is installed is imported. Once is enough, and more does nothing. Of two ggml in a process only
    the first is told: symbols of both would mix."""
    file = path() if backend is None else Path(backend).absolute()
    if not file.is_file():
        raise FileNotFoundError(f"backend={str(file)!r}: no such file")
    libraries = _libraries_of_ggml()
    if not libraries:
        _import_host()
        libraries = _libraries_of_ggml()
    # Python keeps the symbols of a library to the one who brought it, and the backend needs ggml's: those of ggml-base, or, where ggml
    # is part of another library, of that.
    for library in [file for file in libraries if "ggml-base" in file.name] or libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for library in libraries:
        if _load_into(library, file):
            return library
    found = ", ".join(map(str, libraries)) or "no library of that name"
    raise RuntimeError(f"no ggml in this process that loads backends ({found})")


def _load_into(library: Path, backend: Path) -> bool:
    """False if this library has no such function."""
    ggml = ctypes.CDLL(str(library))
    if not hasattr(ggml, "ggml_backend_load"):
        return False
    if str(library) not in _loaded:
        ggml.ggml_backend_load.restype = ctypes.c_void_p
        ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
        if not ggml.ggml_backend_load(os.fsencode(backend)):
            raise RuntimeError(f"{library} did not load {backend}; the line before this one on stderr has the reason")
        _loaded.add(str(library))
    return True


def _import_host() -> None:
    for name in HOSTS:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
            return
    raise RuntimeError("none of llama-cpp-python, xllamacpp and pywhispercpp is installed, and nothing else brought a ggml")


def _libraries_of_ggml() -> list[Path]:
    """Shared objects of this process that have ggml in their name, or what contains it. Those with a number after .so first:
    the other libraries of llama-cpp-python use them, and what has the same name without is a copy that nobody else uses."""
    mapped = set(re.findall(r"(/.*\.so[^\n]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    files = [Path(file) for file in mapped if re.search(r"ggml|llama|whisper", Path(file).name)]
    files = [file for file in files if file.exists() and "sparge" not in file.name]
    return sorted(files, key=lambda file: (re.search(r"\.so\.\d", file.name) is None, str(file)))

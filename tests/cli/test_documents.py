"""What stands in the README and in docs/ works when it is pasted: shell and C++. (Python: python/tests/test_documents.py.)

Shell blocks run whole, in a folder that has small files by the names they use. `sparge` is the program; what would install, build
or fetch something (pip, cmake, llama.cpp) is a stand-in that says whether the files, presets and flags it is given exist."""

import os
import re
import stat
import subprocess
import sys
import unittest
from pathlib import Path

from captures import Model, tensors, write_capture
from cases import Case, Config, noise, rng, smooth, write_safetensors

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TAGS = ("sh", "python", "cpp", "c", "cmake", "json", "text")  # c: tests/mpi/install.sh; text is to look at
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
STAND_INS = ("pip", "sudo", "apt-get", "zcat", "cmake", "llama-cli", "llama-completion", "llama-server", "llama-bench", "cc", "mpicc", "mpirun", "vllm-omni")

# Of programs that a test cannot call: `stand_in NAME ARGUMENTS...` fails if what they name is not there.
STAND_IN = r'''
import json, os, re, sys
root, name, arguments = sys.argv[1], os.path.basename(sys.argv[2]), sys.argv[3:]
if name == "cmake":
    presets = {p["name"] for p in json.load(open(os.path.join(root, "CMakePresets.json")))["configurePresets"]}
    for flag, value in zip(arguments, arguments[1:]):
        if flag == "--preset" and value not in presets:
            sys.exit("no such preset: " + value)
        if flag == "--build" and os.path.basename(value) not in presets:
            sys.exit("no preset builds there: " + value)
if name == "pip":
    project = open(os.path.join(root, "pyproject.toml")).read()
    for extra in re.findall(r"(?:\.|sparge)\[(\w+)\]", " ".join(arguments)):
        if not re.search(r"(?m)^%s = \[" % extra, project):
            sys.exit("no such extra: " + extra)
if name.endswith((".py", ".sh")):
    said = open(os.path.join(root, sys.argv[2])).read()
    for flag in arguments:
        if flag.startswith("--") and flag.split("=")[0] not in said:
            sys.exit("%s has no %s" % (name, flag))
if name == "eval":
    said = "".join(open(os.path.join(root, "python/sparge/eval", f)).read() for f in os.listdir(os.path.join(root, "python/sparge/eval")) if f.endswith(".py"))
    for flag in arguments[1:]:
        if flag.startswith("--") and '"%s"' % flag not in said:
            sys.exit("sparge.eval has no " + flag)
    if not os.path.exists(os.path.join(root, "python/sparge/eval/_%s.py" % arguments[0])):
        sys.exit("sparge.eval has no " + arguments[0])
if name == "zcat":
    print("1. About this manual")
'''


def blocks(tag):
    """(page, line, text) of all blocks with this tag."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in FENCE.finditer(text):
            if found[2] == tag:
                inside = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
                yield page.relative_to(ROOT).as_posix(), text[: found.start()].count("\n") + 1, inside


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Shell(Case):
    def setUp(self):
        super().setUp()
        self.bin = self.path("bin")
        stand_in = self.path("stand_in.py")
        stand_in.write_text(STAND_IN)
        call = f'"{sys.executable}" "{stand_in}" "{ROOT}"'
        backend = self.path("libggml-sparge.so")  # `sparge llama` hands it on to stand-ins; not every build has the real one
        backend.touch()
        for name in STAND_INS:
            executable(self.bin / name, f'#!/bin/sh\nexec {call} {name} "$@"\n')
        executable(self.bin / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        executable(self.bin / "sparge", f'#!/bin/sh\ncase "$*" in *--once*) ;; bench*) set -- "$@" --rounds 1 ;; llama*) shift; set -- llama --backend "{backend}" "$@" ;; esac\nexec "{Config.sparge}" "$@"\n')
        executable(self.bin / "python", f'#!/bin/sh\n[ "$2" = sparge.eval ] || exit 3\nshift 2\nexec {call} eval "$@"\n')
        executable(self.bin / "valgrind", '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')

    def checkout(self, name, text):
        """A folder as its reader has one: a checkout, where model, captures and tensors are."""
        at = self.path(name)
        at.mkdir()
        for script in re.findall(r"(?<![\w/.])((?:\./)?(?:scripts/|tools/|bench/)?[\w]+\.(?:sh|py))\b", text):
            if (ROOT / script).is_file() and os.access(ROOT / script, os.X_OK):
                call = f'"{sys.executable}" "{self.path("stand_in.py")}" "{ROOT}" {script}'
                executable(at / script, f'#!/bin/sh\nexec {call} "$@"\n')
        for sample in (ROOT / "data").glob("*.safetensors"):
            self.small_sample(at / "data" / sample.name)
        model = Model(rng("documents"))
        for folder in re.findall(r"(?<![\w/.-])([\w-]*(?:captures|texts?))(?=[/ \n])", text):
            for layer in {"11", "model.layers.0", *re.findall(r"--layer ([\w.]+)", text)}:
                for sample in "ab":
                    write_capture(at / folder / layer / f"{sample}.safetensors", *model.sample(rng(folder, layer, sample), 320))
        write_capture(at / "x.safetensors", *model.sample(rng("x"), 320))
        (at / "model.gguf").touch()
        (at / "prompt.txt").touch()
        if "--grid 13,30,52" in text:
            for tensor in "qkv":
                np.save(at / f"{tensor}.npy", noise(rng(tensor), 1, 226 + 13 * 30 * 52, 16))
        return at

    def small_sample(self, path):
        path.parent.mkdir(exist_ok=True)
        if "video" in path.name:
            named = {n: ("F32", x.shape, x.tobytes()) for n, x in zip("qkv", smooth(rng("video"), 3, 1, 2 * 8 * 16, 16))}
            write_safetensors(path, named, {"causal": "false", "grid": "2,8,16"})
        else:
            write_capture(path, *tensors(rng(path.name), 1280), causal=True)

    def test_blocks(self):
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.path("home"))}
        count = 0
        for page, line, text in blocks("sh"):
            with self.subTest(page=page, line=line):
                count += 1
                at = self.checkout(f"{page}-{line}".replace("/", "_"), text)
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=at, env=environment, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                self.assertEqual(done.returncode, 0, done.stdout[-2000:])
        self.assertGreater(count, 12)

    def test_stand_ins_notice(self):
        """A preset, an extra, a flag or a verb that is not there fails."""
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        for wrong in ("cmake --preset nosuch", "pip install 'sparge[nosuch]'", "python -m sparge.eval perplexity --nosuch",
                      "bench/compare.py --nosuch", "sparge nosuch", "scripts/nosuch.sh", "sparge check data --nosuch"):
            at = self.checkout("wrong" + re.sub(r"\W", "", wrong), wrong)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", wrong], cwd=at, env=environment, capture_output=True)
            self.assertNotEqual(done.returncode, 0, wrong)


class Tags(unittest.TestCase):
    def test_every_block_has_one(self):
        for page in PAGES:
            for found in FENCE.finditer(page.read_text("utf-8")):
                self.assertIn(found[2], TAGS, f"{page}: {found[3][:60]!r}")


CPP = r'''#include <sparge/sparge.hpp>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>
[[maybe_unused]] static void Snippet%d([[maybe_unused]] sparge::Context& context, [[maybe_unused]] sparge::PlanDesc& desc,
                                       [[maybe_unused]] sparge::RunArgs& args, [[maybe_unused]] int64_t heads) {
  {  // what a block declares itself hides what it may take from others
%s
  }
}
'''


class Cpp(Case):
    def test_compiles(self):
        compiler = os.environ.get("CXX", "c++")
        count = 0
        for page, line, text in blocks("cpp"):
            with self.subTest(page=page, line=line):
                file = self.path(f"{count}.cc")
                file.write_text(text if "int main" in text else CPP % (count, text))
                done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'include'}", file], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr[-2000:])
                count += 1
        self.assertGreater(count, 3)

#!/usr/bin/env python3
"""bench/prompt.py with stand-ins for llama.cpp, and nobody else: what it calls, adds up, leaves out and refuses."""

import contextlib
import importlib.util
import io
import json
import math
import os
import stat
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import prompt  # noqa: E402
import prompt_peers as peers  # noqa: E402
import prompt_report  # noqa: E402

# What the "compiler" makes: reads like bench/llama_prompt.cc, and says what it was asked.
PROGRAM = r'''#!/usr/bin/env python3
import json, os, sys
verb, model, file = sys.argv[1:4]
with open(os.environ["ASKED"], "a") as log:
    log.write(json.dumps([sys.argv[1:], os.environ.get("GGML_BACKEND_PATH"), os.environ.get("SPARGE_TARGET_L2")]) + "\n")
if verb == "tokens":
    count = int(sys.argv[4])
    if count > 5000:
        sys.exit("llama_prompt: the text has 5000 tokens")
    print(*range(count))
    sys.exit()
tokens = len(open(file).read().split())
flash, threads, rounds = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
backend = os.environ.get("GGML_BACKEND_PATH")
if backend:
    if os.path.getsize(backend):
        print("sparge 0.4.0: attention for ggml 0.25.3", file=sys.stderr)
    print(json.dumps({verb: [4.0, 2.0, 2.5][:rounds] if verb == "time" else [2.01, 2.02][:rounds]}))
else:
    print(json.dumps({verb: [10.0 if flash == "off" else 8.0] * rounds if verb == "time" else [2.0] * rounds}))
'''
COMPILER = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "$PROGRAM" "$2"\n'
QUANTISE = '#!/bin/sh\n[ "$1" = --allow-requantize ] && [ "$4" != Q9 ] || { echo "invalid ftype" >&2; exit 1; }\ncp "$2" "$3"\n'


class Runs(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = Path(self.temporary.name)
        self.program("c++", COMPILER)
        self.program("program", PROGRAM)
        self.program("llama-quantize", QUANTISE)
        (self.folder / "libllama.so").touch()
        (self.folder / "m.gguf").touch()
        (self.folder / "text.txt").write_text("a text")
        (self.folder / "backend.so").write_text("not empty")
        environment = {"CXX": str(self.folder / "c++"), "PROGRAM": str(self.folder / "program"), "ASKED": str(self.folder / "asked"),
                       "GGML_BACKEND_PATH": "/nowhere", "SPARGE_TARGET_L2": "0.5"}
        patched = mock.patch.dict(os.environ, environment)
        patched.start()
        self.addCleanup(patched.stop)

    def program(self, name, text):
        file = self.folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run_prompt(self, *arguments):
        at = self.folder
        given = ["--llama", at, "--llama-source", at, "--model", at / "m.gguf", "--text", at / "text.txt", "--work", at / "work", "--out",
                 at / "out", "--backend", at / "backend.so", "--threads", 2, *arguments]
        said, told = io.StringIO(), io.StringIO()
        with mock.patch.object(sys, "argv", ["prompt.py", *map(str, given)]), contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            try:
                code = prompt.main()
            except SystemExit as stopped:  # of the parser
                code = stopped.code
        return code, said.getvalue(), told.getvalue()

    def entries(self):
        return {(e["weights"], e["tokens"], e["name"]): e for e in json.loads((self.folder / "out/prompt.json").read_text())["entries"]}

    def asked(self):
        return [json.loads(line) for line in (self.folder / "asked").read_text().splitlines()]

    def test_llama(self):
        code, said, told = self.run_prompt("--only", "llama.cpp -fa,with sparge", "--weights", "Q4_0", "--tokens", "1024")
        self.assertEqual(code, 0, told)
        entries = self.entries()
        ours = entries["Q4_0", 1024, "llama.cpp with sparge"]
        self.assertEqual((ours["time"], ours["loss"]), ([[4.0, 2.0]], [[2.01, 2.02]]))
        off = entries["Q4_0", 1024, "llama.cpp -fa off"]
        self.assertEqual((off["time"], off["loss"]), ([[10.0, 10.0]], [[2.0]]))
        # The backend takes part where it should, and nowhere else; nobody's settings do.
        for (verb, *_, flash, threads, rounds), backend, target in (row for row in self.asked() if row[0][0] != "tokens"):
            self.assertIn(backend, (None, str(self.folder / "backend.so")))
            self.assertIsNone(target)
            self.assertEqual(threads, "2")
        self.assertEqual(sum(backend is not None for _, backend, _ in self.asked()), 2)
        # Against the faster of llama.cpp's own, which is -fa on: 1024 / 8 tokens/s.
        (row,) = [line for line in said.splitlines() if "llama.cpp with sparge" in line]
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        self.assertEqual(cells[1:5], ["256", "2.00x", "512", "4.00x"])
        self.assertEqual(cells[5:], [f"{math.exp(2.01):.3f}", f"{math.exp(2.02):.3f}", "+1.01 %"])
        if importlib.util.find_spec("matplotlib"):
            self.assertGreater((self.folder / "out/prompt.png").stat().st_size, 10000)
        else:
            self.assertIn("missing: the picture", told)

    def test_pieces_add_up(self):
        for measured in ("time", "loss"):
            self.assertEqual(self.run_prompt("--only", "-fa on", "--weights", "as-is", "--tokens", "64", "--measure", measured)[0], 0)
        self.assertEqual(self.run_prompt("--only", "-fa on", "--weights", "as-is", "--tokens", "64", "--measure", "time", "--repeat", 2)[0], 0)
        (entry,) = self.entries().values()
        self.assertEqual((len(entry["time"]), entry["loss"]), (3, [[2.0]]))
        code, _, told = self.run_prompt("--only", "-fa on", "--threads", 1, "--tokens", "64")
        self.assertEqual((code, "another threads" in told), (2, True))
        self.assertEqual(self.run_prompt("--only", "-fa on", "--threads", 1, "--tokens", "64", "--fresh", "--weights", "as-is")[0], 0)
        self.assertEqual(len(self.entries()), 1)

    def test_who_is_missing_is_named(self):
        (self.folder / "backend.so").write_text("")  # loads, and does not say so
        with mock.patch.object(sys, "executable", "/nowhere/python"):
            code, said, told = self.run_prompt("--weights", "as-is", "--tokens", "64", "--measure", "time")
        self.assertEqual(code, 0, told)
        missing = {name for (_, _, name), entry in self.entries().items() if "missing" in entry}
        self.assertEqual(missing, {reader.name for reader in peers.READERS} - {"llama.cpp -fa off", "llama.cpp -fa on"})
        for name in missing:
            self.assertRegex(said, rf"\[\d+\] {name}: ")
        self.assertIn("was not loaded", self.entries()["as-is", 64, "llama.cpp with sparge"]["missing"]["time"])

    def test_what_is_missing_hides_nothing_else(self):
        """A loss that fails leaves the times; a time that works leaves the reason of the loss."""
        given = ("--only", "llama.cpp with sparge", "--weights", "as-is", "--tokens", "64", "--measure")
        with mock.patch.object(prompt_report, "draw", side_effect=ImportError("no picture")):
            self.run_prompt(*given, "time")
            (self.folder / "backend.so").write_text("")  # loads, and does not say so
            self.run_prompt(*given, "loss")
            (self.folder / "backend.so").write_text("not empty")
            _, said, _ = self.run_prompt(*given, "time")
        entry = self.entries()["as-is", 64, "llama.cpp with sparge"]
        self.assertEqual((len(entry["time"]), list(entry["missing"])), (2, ["loss"]))
        (row,) = [line for line in said.splitlines() if line.startswith("| llama.cpp with sparge")]
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        self.assertEqual((cells[1], cells[3]), ("16", "32"))  # 64 tokens in 4 and 2 s
        self.assertRegex(cells[5], r"missing \[\d+\]")

    def test_what_prints_nothing_is_missing(self):
        for printed in ("", "no json", "5", "{}", '{"time": null}', '{"time": ["x"]}'):
            with self.assertRaisesRegex(peers.Missing, "time is not in what came"):
                peers.figures(printed, "time")
        self.assertEqual(peers.figures('a line\n{"time": [1, 2.5]}\n', "time"), [1.0, 2.5])

    def test_refusals(self):
        for arguments, says in ((("--only", "nobody"), "nobody"), (("--tokens", "12"), "12"), (("--rounds", "0"), "--rounds 0"),
                                (("--measure", "size"), "size"), (("--model", "nowhere.gguf"), "nowhere.gguf"),
                                (("--weights", "Q9"), "invalid ftype"), (("--tokens", "8192", "--weights", "as-is"), "5000 tokens")):
            code, _, told = self.run_prompt(*arguments)
            self.assertEqual(code, 2, arguments)
            self.assertIn(says, told)
            self.assertTrue(told.splitlines()[-1].startswith("prompt.py: "), told)


class Report(unittest.TestCase):
    def test_dense_of_each_program(self):
        """XAttention is compared with OpenVINO's own dense attention, and bf16 with bf16."""
        readers = {reader.name: reader for reader in peers.READERS}
        for name, dense in (("OpenVINO XAttention .9", "OpenVINO dense"), ("transformers with sparge bf16", "transformers sdpa bf16")):
            entries = [{"weights": "w", "tokens": 100, "name": n, "dense": readers[n].dense, "time": [[t, t]], "loss": [[loss]]}
                       for n, t, loss in ((dense, 2.0, 1.0), (name, 1.0, 1.5), ("transformers sdpa fp32", 0.1, 0.5))]
            row = prompt_report.row(entries[1], entries, prompt_report.report.Notes())
            self.assertEqual((row[2], row[-1]), ("2.00x", f"{100 * (math.exp(0.5) - 1):+.2f} %"))

    def test_every_reader_has_a_colour(self):
        self.assertEqual(set(prompt_report.STYLE), {reader.name for reader in peers.READERS})


if __name__ == "__main__":
    unittest.main()

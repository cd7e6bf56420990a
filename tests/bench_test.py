#!/usr/bin/env python3
"""bench/ without its peers: the ctypes binding against NumPy, the writers on made-up results: bench_test.py LIBRARY"""

import contextlib
import io
import json
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import bars  # noqa: E402
import cases  # noqa: E402
import compare  # noqa: E402
import depth  # noqa: E402
import measure  # noqa: E402
import parallel  # noqa: E402
import peers  # noqa: E402
import long_prompt as prompt  # noqa: E402
import report  # noqa: E402
import setup_env  # noqa: E402
import sparge_ctypes as sparge  # noqa: E402

LIBRARY = None


class Binding(unittest.TestCase):
    """Every contestant of ours goes through the same path as in a measurement."""

    def check(self, case, who):
        inputs = cases.Inputs(case)
        run = peers.SpargePeer(LIBRARY).open(case, inputs, who)
        run.run()
        self.assertLess(inputs.error(run.output()), who.bound)
        self.assertGreater(sum(run.stages().values()), 0)
        return inputs, run

    def test_dense(self):
        for mode in sparge.PRECISIONS:
            self.check(cases.Case("dense", 200, 300, 64, 2, 1), peers.ours(mode))

    def test_causal(self):
        self.check(cases.Case("causal", 200, 200, 40, 2, 2, causal=True), peers.ours("int8"))

    def test_short_inputs(self):
        for dtype in ("f16", "bf16"):
            self.check(cases.Case("inputs", 130, 130, 64, 1, 1), peers.ours("fp32", dtype))

    def test_map_is_used(self):
        inputs, run = self.check(cases.Case("kept", 512, 512, 64, 2, 1, kept=0.25), peers.ours("fp32"))
        self.assertEqual(inputs.map.mean(), 0.25)
        self.assertGreater(inputs.error(run.output(), dense=True), 0.1)  # dense attention is something else

    def test_a_prompt_in_batches(self):
        library = sparge.Library(LIBRARY)
        context = sparge.Context(library, 1)
        result = prompt.measure(library, context, prompt.noise(640), 640, 128)
        tiles = sum(9 * min(2 * (i + 1), 10) for i in range(5))
        self.assertEqual((result["qk_eligible"], result["qk_computed"]), (tiles, tiles))  # below 1024 keys nothing is skipped
        self.assertEqual(result["key_blocks"], sum(3 * 2 * (i + 1) for i in range(5)))
        # The first call keeps nothing; the mean of the second one's four blocks serves until there are twice as many.
        self.assertEqual(result["key_blocks_reused"], 3 * (4 + 6))
        self.assertLess(sum(result["ms"][name] for name in (*prompt.SPENT, "kernel")), 1.01 * result["ms"]["total"])

    def test_reference_and_errors(self):
        library = sparge.Library(LIBRARY)
        context = sparge.Context(library, 1)
        q = np.ones((1, 3, 8), np.float32)
        attention = sparge.Attention(context, q, q, q, "fp32")
        attention.reference()
        np.testing.assert_allclose(attention.output, q, rtol=1e-6)
        with self.assertRaisesRegex(RuntimeError, "sparge_plan_create: .*topk"):
            sparge.Attention(context, q, q, q, "fp32", topk=2.0)


def made_up(case, name, **more):
    return {"case": vars(case) | {}, "label": case.label, "name": name, "peer": name.split()[0].lower(),
            "dense_yardstick": False, "threads": case.threads, "error": 1e-6, "error_bound": 1e-4, "idle_cpu": 0.0,
            "other_cpu": 0.0, **more}


def made_up_results():
    case = cases.Case("dense", 8192, 8192, 64, 2, 1)
    entries = [
        made_up(case, "torch fp32", time_ms=300.0),
        made_up(case, "sparge fp32", time_ms=290.0),
        made_up(case, "sparge int8", time_ms=100.0),
        made_up(case, "ggml f16 K/V", time_ms=50.0, wrong="relative L1 0.5 is above 0.02"),
        {**made_up(case, "OpenVINO fp32"), "missing": "no such package"},
    ]
    measure.add_ratios(entries)
    return {"machine": report.machine(), "isa": "baseline", "versions": {"sparge": "0"}, "command": "compare.py",
            "date": "2026-01-01 00:00:00", "missing": {"openvino": "no such package"}, "entries": entries, "growth": [],
            "bars": bars.judge(entries), "interrupted": True}


class Writers(unittest.TestCase):
    def test_table_names_missing_and_wrong(self):
        text = report.text(made_up_results())
        self.assertIn("missing: openvino: no such package", text)
        self.assertIn("[2] missing: no such package", text)
        self.assertIn("wrong result: relative L1 0.5", text)
        self.assertIn("100 (3.00x)", text)
        self.assertIn("interrupted", text)

    def test_bars(self):
        verdicts = {(item["bar"], item["dim"]): item["verdict"] for item in made_up_results()["bars"]}
        self.assertEqual(verdicts["dense int8", 64], "reached")
        self.assertEqual(verdicts["dense fp32", 64], "missed")
        self.assertEqual(verdicts["dense int8", 128], "not measured")

    def test_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            results = made_up_results()
            report.write_json(results, path)
            read = json.loads(path.read_text())
            self.assertEqual([path], list(Path(folder).iterdir()))
        self.assertEqual(read["entries"][2]["ratio"], 3.0)
        self.assertEqual(read["entries"][4]["missing"], "no such package")
        self.assertNotIn("time_ms", read["entries"][4])

    def test_a_failing_peer_is_reported(self):
        class Broken:
            def open(self, case, inputs, who):
                raise ValueError("two\nlines")

        case = cases.Case("short", 64, 64, 64, 1, 1)
        found = dict.fromkeys(peers.PEER_NAMES, Broken()) | {"sparge": peers.SpargePeer(LIBRARY)}
        entries = {e["name"]: e for e in measure.measure_case(case, found, {"torch": "absent"}, "quick")}
        self.assertEqual(entries["torch fp32"]["missing"], "absent")
        self.assertEqual(entries["OpenVINO fp32"]["missing"], "two lines")
        self.assertGreater(entries["sparge int8"]["time_ms"], 0)


# Twice as fast with the backend, slower with depth.
LLAMA_BENCH = """#!{python}
import json, os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
backend = os.environ.get("GGML_BACKEND_PATH")
if backend and "deaf" not in options["-m"]:
    print("sparge 0: attention for ggml 0", file=sys.stderr)
speed = (2 if backend else 1) * 100.0 / (1 + int(options["-d"]) / 512)
print(json.dumps([dict(avg_ts=speed, stddev_ts=1.0, samples_ts=[speed], cpu_info="x", model_type="y", model_size=1,
                       build_commit="z", n_gen=options["-n"])]))
"""


class Depth(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name in ("model.gguf", "deaf.gguf", "backend.so"):
            (self.folder / name).touch()
        program = self.folder / "llama-bench"
        program.write_text(LLAMA_BENCH.replace("{python}", sys.executable))
        program.chmod(0o755)

    def measure(self, model, *more):
        options = depth.parse(["--llama-bench", str(self.folder / "llama-bench"), "--model", str(self.folder / model),
                               "--backend", str(self.folder / "backend.so"), *more])
        with contextlib.redirect_stderr(io.StringIO()):
            return depth.measure(options, self.folder / "depth.json")

    def test_runs_add_up(self):
        self.measure("model.gguf", "--depths", "0,512")
        results = self.measure("model.gguf", "--depths", "512,1024")
        self.assertEqual(json.loads((self.folder / "depth.json").read_text()), results)
        self.assertEqual(len(results["answers"]), 6)
        self.assertIn("| 512 | 50.0 ± 1.0 | 100.0 ± 1.0 | 2.00x |", depth.table(results))

    def test_a_backend_that_is_not_loaded_is_no_measurement(self):
        with self.assertRaisesRegex(SystemExit, "the backend was not loaded"):
            self.measure("deaf.gguf", "--depths", "0")

    def test_bad_options(self):
        for bad in ([], ["--llama-bench", "x"], ["--sparge", "x", "--depths", "few"], ["--sparge", "x", "--threads", "0"],
                    ["--llama-bench", "x", "--model", "/nowhere", "--backend", "/nowhere"]):
            with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()):
                depth.parse(bad)
            self.assertEqual(stop.exception.code, 2)


class Lists(unittest.TestCase):
    def test_pins(self):
        wheels, sources = setup_env.read_pins()
        self.assertLessEqual({"numpy", "matplotlib", "torch", "onnx", "onnxruntime", "openvino"}, set(wheels))
        self.assertEqual(set(sources), {"llama-cpp-python"})

    def test_names_agree(self):  # compare.py starts without NumPy and so cannot ask the modules
        self.assertEqual(compare.GROUPS, tuple(cases.GROUPS))
        self.assertEqual(compare.PEERS, peers.PEER_NAMES)

    def test_cases_serve_the_bars(self):
        found = cases.make_cases("default", (1024, 8192), (64, 128), (1, 2), 2, compare.GROUPS)
        self.assertEqual(len(found), len(set(found)))
        for _, group, kept, who, required in bars.SPEED:
            for dim in required:
                case = next(c for c in found if (c.group, c.kept, c.dim, c.queries) == (group, kept, dim, 8192))
                self.assertIn(who, [contestant.name for contestant in peers.contestants(case, "default")])

    def test_bad_options_are_one_line(self):
        for bad in (["--tokens", "x"], ["--peers", "tensorflow"], ["--quick", "--full"], ["--threads", "100000"]):
            with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()):
                compare.parse(bad)
            self.assertEqual(stop.exception.code, 2)


class Ranks(unittest.TestCase):
    def test_ranks_that_hang_are_ended(self):
        """Programs that wait stand for the ranks."""
        started, start = [], subprocess.Popen

        def record(*arguments, **options):
            started.append(start(*arguments, **options))
            return started[-1]

        with tempfile.TemporaryDirectory() as folder:
            rank = Path(folder) / "rank"
            rank.write_text("#!/bin/sh\nexec sleep 600\n")
            rank.chmod(0o755)
            with mock.patch.object(sys, "executable", str(rank)), mock.patch.object(subprocess, "Popen", record):
                with mock.patch.object(parallel, "RANKS_S", 0.5), self.assertRaisesRegex(SystemExit, "2 ranks took more than 0.5 s"):
                    parallel.measure(2, 0, 1024)
        self.assertEqual([process.returncode for process in started], [-signal.SIGKILL] * 2)


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    unittest.main()

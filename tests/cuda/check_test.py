#!/usr/bin/env python3
"""What bench/gpu.py says of results, on results that were written for it: faults are found, and an interpreter has no speed."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gpu
import numpy as np

MACHINE = {
    "gpu": "A GPU", "capability_major": 8, "capability_minor": 0, "cuda_driver": "13.0", "sparge": "1", "commit": "abc",
    "isa": "cuda sm_80, PV in f16", "interpreter": False,
}  # fmt: skip
TESTS = {"run": 7, "skipped": 3, "failed": 0, "failures": []}


def row(**other):
    return {"who": "sparge", "case": "some", "kept": 1.0, "ours": True, "error": 0.01, "operations": 8e12, **other}


class Faults(unittest.TestCase):
    def test_none(self):
        self.assertEqual(gpu.faults_of(TESTS, [row()], 0.02), [])

    def test_each(self):
        failed = {**TESTS, "failed": 1, "failures": ["Gpu.One: off by one"]}
        self.assertEqual(gpu.faults_of(failed, [], 0.02), ["test Gpu.One: off by one"])
        self.assertEqual(gpu.faults_of({**TESTS, "run": 0}, [], 0.02), ["no test was run"])
        for error in (0.03, float("nan")):
            self.assertIn("above 0.0200", gpu.faults_of(TESTS, [row(error=error)], 0.02)[0])
        fell = {"who": "sparge", "case": "some", "ours": True, "missing": "no memory"}
        self.assertEqual(gpu.faults_of(TESTS, [fell], 0.02), ["sparge, some: no memory"])
        self.assertEqual(gpu.faults_of(TESTS, [{**fell, "ours": False}], 0.02), [], "a peer may fail")
        self.assertEqual(gpu.faults_of(TESTS, [row(error=0.03, ours=False)], 0.02), [], "peers answer for themselves")

    def test_reports_of_googletest(self):
        suite = {
            "name": "All/Gpu",
            "testsuite": [
                {"name": "A", "status": "RUN", "result": "COMPLETED"},
                {"name": "B", "status": "RUN", "result": "SKIPPED"},
                {"name": "C", "status": "NOTRUN", "result": "SUPPRESSED"},
                {"name": "D", "status": "RUN", "result": "COMPLETED", "failures": [{"failure": "file:1\nvalue"}]},
            ],
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "a.json")
            file.write_text(json.dumps({"testsuites": [suite]}))
            found = gpu.read_tests([file])
        self.assertEqual(found, {"run": 2, "skipped": 2, "failed": 1, "failures": ["All/Gpu.D: file:1 value"]})


class Table(unittest.TestCase):
    def test_a_gpu_has_speeds(self):
        text = gpu.table(MACHINE, TESTS, [row(ms=[3.0, 2.0, 8.0])], [])
        self.assertIn("| some | sparge | 100% | 2.000 | 3.000 | 2667 | 0.0100 |", text)
        self.assertNotIn("FAULT", text)

    def test_an_interpreter_has_none(self):
        text = gpu.table({**MACHINE, "interpreter": True}, TESTS, [row(ms_of_interpreter=[1234.5])], [])
        self.assertNotIn("1234", text)
        self.assertIn("there is nothing to say of speed", text)

    def test_what_is_missing_and_what_is_wrong(self):
        text = gpu.table(MACHINE, TESTS, [{"who": "peers", "case": "some", "missing": "no such package"}], ["bad"])
        self.assertIn("missing: no such package", text)
        self.assertTrue(text.endswith("FAULT: bad\n"))


class Errors(unittest.TestCase):
    def test_the_reference(self):
        for causal in (False, True):
            case = gpu.Case(64, 16, 2, causal)
            q, k, v = (np.float64(a) for a in (case.q, case.k, case.v))
            scores = q @ k.swapaxes(1, 2) / 4
            if causal:
                scores = np.where(np.tril(np.ones((64, 64))) > 0, scores, -np.inf)
            weights = np.exp(scores)
            right = weights @ v / weights.sum(2, keepdims=True)
            self.assertLess(case.error(right), 1e-12)
            self.assertGreater(case.error(right * 1.1), 0.09)
        self.assertEqual(gpu.Case(64, 16, 2, False).operations, 4 * 64 * 64 * 16 * 2)


if __name__ == "__main__":
    unittest.main()

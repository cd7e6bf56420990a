#!/usr/bin/env python3
"""`sparge bench` from outside, with the standard library only: python3 cli_bench_test.py PATH_TO_SPARGE"""
import json
import os
import pathlib
import shlex
import subprocess
import sys
import unittest

SPARGE = ""
SMALL = ("--tokens", "200", "--dim", "16", "--rounds", "3", "--threads", "1")
CASE_FIELDS = {
    "tokens", "queries", "dim", "heads", "kv_heads", "causal", "dtype", "data", "seed", "precision", "select",
    "tau", "topk", "keep", "pv_skip", "threads", "min_ms", "median_ms", "spread", "times_ms", "stages_ms",
    "dense_gflop", "dense_gflops", "computed_gflops", "peak_gops", "peak_share", "kept", "qk_tiles", "pv_tiles",
    "sparsity", "work", "verification", "steady", "passed", "repeat"}
VERIFICATION_FIELDS = {"relative_l1", "bound", "worst_row", "row_bound", "rows_checked", "rows", "passed"}
# What a case is, and what must come out the same when it is repeated.
SAME = ("tokens", "queries", "dim", "heads", "kv_heads", "causal", "dtype", "data", "seed", "precision", "select",
        "tau", "topk", "keep", "pv_skip", "threads", "dense_gflop", "kept", "qk_tiles", "pv_tiles", "verification")


def call(*args, env=None):
    return subprocess.run([SPARGE, "bench", *map(str, args)], capture_output=True, text=True,
                          env={**os.environ, **(env or {})})


class Bench(unittest.TestCase):
    def report(self, *args, env=None):
        done = call(*args, "--json", env=env)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(done.stdout)

    def refused(self, *args, says=()):
        done = call(*args)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for part in says:
            self.assertIn(part, done.stderr)

    def test_json(self):
        report = self.report(*SMALL)
        self.assertEqual(set(report), {"version", "machine", "cases", "passed"})
        self.assertEqual(set(report["machine"]), {"cpu", "isa", "threads", "peaks"})
        self.assertEqual([c["precision"] for c in report["cases"]], ["fp32", "int16", "int8"])
        for case in report["cases"]:
            self.assertEqual(set(case), CASE_FIELDS)
            self.assertEqual(set(case["verification"]), VERIFICATION_FIELDS)
            self.assertEqual(set(case["stages_ms"]), {"pack", "predict", "schedule", "kernel"})
            self.assertEqual(len(case["times_ms"]), 3)
            self.assertEqual(case["min_ms"], min(case["times_ms"]))
            self.assertEqual(case["median_ms"], sorted(case["times_ms"])[1])
            self.assertGreaterEqual(case["median_ms"], sum(case["stages_ms"].values()) * 0.5)
            self.assertEqual(case["dense_gflop"], 4 * 200 * 200 * 16 * 2 * 1e-9)
            self.assertAlmostEqual(case["dense_gflops"], case["dense_gflop"] / case["min_ms"] * 1e3)
            self.assertAlmostEqual(case["computed_gflops"], case["dense_gflops"])
            self.assertEqual((case["kept"], case["pv_skip"], case["select"]), (1, "off", "dense"))
            self.assertEqual(case["verification"]["rows_checked"], 400)
            self.assertTrue(case["passed"] and case["verification"]["passed"] and case["steady"])
            self.assertLess(0, case["verification"]["relative_l1"])
        if report["machine"]["isa"] == "baseline":
            return
        self.assertEqual({(p["threads"], p["precision"]) for p in report["machine"]["peaks"]},
                         {(1, "fp32"), (1, "int16"), (1, "int8")})
        for case in report["cases"]:
            self.assertAlmostEqual(case["peak_share"], case["computed_gflops"] / case["peak_gops"])
            if report["machine"]["isa"] != "neon":  # under an emulator anything may be the fastest
                self.assertLess(case["peak_share"], 1)

    def test_lists_make_cases(self):
        report = self.report("--tokens", "100,200", "--dim", "8,16", "--precision", "int8,fp32", "--rounds", "1",
                             "--select", "dense,cdf,topk,random", "--keep", "0.5,0.1", "--tau", "0.9", "--topk", "0.25",
                             "--threads", "1,2")
        self.assertEqual(len(report["cases"]), 2 * 2 * 2 * 5 * 2)
        kinds = {(c["select"], c["keep"], c["tau"], c["topk"], c["data"], c["pv_skip"]) for c in report["cases"]}
        self.assertEqual(kinds, {("dense", None, None, None, "noise", "off"), ("cdf", None, 0.9, None, "local", 10),
                                 ("topk", None, None, 0.25, "local", 10), ("random", 0.5, None, None, "noise", "off"),
                                 ("random", 0.1, None, None, "noise", "off")})
        self.assertEqual({c["threads"] for c in report["cases"]}, {1, 2})

    def test_sparse_and_causal(self):
        report = self.report("--tokens", "1280", "--dim", "16", "--heads", "1", "--precision", "int8", "--select",
                             "random,cdf", "--keep", "0.1", "--causal", "--rounds", "1", "--threads", "2")
        random, cdf = report["cases"]
        visible = 1280 * 1281 // 2
        self.assertEqual(random["dense_gflop"], 4 * visible * 16 * 1e-9)
        self.assertLess(random["kept"], 0.15)
        self.assertLess(random["computed_gflops"], 0.2 * random["dense_gflops"])
        self.assertEqual(random["qk_tiles"]["eligible"], sum(2 * i for i in range(1, 11)))
        self.assertLess(cdf["kept"], 0.7, "made-up data should be sparse")

    def test_decoding_and_types(self):
        for dtype in ("fp16", "bf16"):
            report = self.report("--tokens", "500", "--queries", "1", "--heads", "4", "--kv-heads", "1", "--dim", "20",
                                 "--dtype", dtype, "--causal", "--rounds", "1", "--threads", "1")
            for case in report["cases"]:
                self.assertEqual((case["queries"], case["kv_heads"], case["dtype"]), (1, 1, dtype))
                self.assertEqual(case["dense_gflop"], 4 * 4 * 500 * 20 * 1e-9)
                self.assertEqual(case["verification"]["rows_checked"], 4)

    def test_repeat_line_gives_the_same_case(self):
        isas = [x["name"] for x in json.loads(subprocess.run([SPARGE, "info", "--json"], capture_output=True,
                                                             text=True).stdout)["isas"] if x["runnable"]]
        env = {"SPARGE_ISA": isas[-1]}
        flags = ("--tokens", "300,150", "--queries", "140", "--dim", "12", "--heads", "4", "--kv-heads", "2",
                 "--select", "cdf,random", "--tau", "0.875", "--keep", "0.3", "--causal", "--dtype", "fp16",
                 "--data", "local", "--seed", "7", "--pv-skip", "12", "--threads", "2,1", "--rounds", "2",
                 "--precision", "int8,fp32")
        cases = self.report(*flags, env=env)["cases"]
        for case in (cases[0], cases[-1]):
            words = shlex.split(case["repeat"])
            self.assertEqual(words[:3], ["SPARGE_ISA=" + isas[-1], "sparge", "bench"])
            again = self.report(*words[3:], env=env)["cases"]
            self.assertEqual(len(again), 1)
            self.assertEqual(again[0]["repeat"], case["repeat"])
            self.assertEqual({k: again[0][k] for k in SAME}, {k: case[k] for k in SAME})
        other = self.report(*shlex.split(cases[0]["repeat"].replace("--seed 7", "--seed 8"))[3:], env=env)["cases"][0]
        self.assertNotEqual(other["verification"], cases[0]["verification"])

    def test_once(self):
        once = (*SMALL[:4], "--threads", "1", "--precision", "int8", "--once")
        report = self.report(*once)
        case = report["cases"][0]
        self.assertEqual((len(case["times_ms"]), case["verification"], case["computed_gflops"]), (1, None, None))
        self.assertEqual(report["machine"]["peaks"], [])
        self.assertIn("--once", case["repeat"])
        self.refused(*SMALL[:4], "--once", says=("--once", "3"))
        self.refused(*once, "--rounds", "2", says=("--rounds", "--once"))

    def test_text(self):
        done = call(*SMALL, "--select", "dense,random")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        before = lines.index("To repeat a case alone:")
        self.assertLessEqual(max(map(len, lines[:before])), 100)
        self.assertEqual(len([line for line in lines[before:] if " sparge bench --tokens 200 " in line]), 6)
        self.assertIn("400 of 400", done.stdout)

    def test_refusals(self):
        for flag, value in (("--tokens", "0"), ("--tokens", "x"), ("--tokens", "99999999999"), ("--dim", "577"),
                            ("--dim", ""), ("--heads", "0"), ("--heads", "1.5"), ("--kv-heads", "3"),
                            ("--precision", "int4"), ("--select", "all"), ("--keep", "1.5"), ("--tau", "nan"),
                            ("--topk", "-0.1"), ("--dtype", "f16"), ("--queries", "0"), ("--threads", "0"),
                            ("--rounds", "0"), ("--seconds", "-1"), ("--seed", "-1"), ("--data", "pink"),
                            ("--pv-skip", "1"), ("--pv-skip", "on")):
            with self.subTest(flag=flag, value=value):
                self.refused(flag, value, says=(flag, value))
        self.refused("--tokens", "64,,128", says=("--tokens", "''"))
        self.refused("--precision", "int8,int4", says=("--precision", "int4"))
        for flag, value in (("--keep", "0.5"), ("--tau", "0.5"), ("--topk", "0.5")):
            self.refused(flag, value, says=(flag, "--select"))
        self.refused("--rounds", "1", "--seconds", "1", says=("--rounds", "--seconds"))
        self.refused("--fly", says=("--fly",))


if __name__ == "__main__":
    SPARGE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()

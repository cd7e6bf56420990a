#!/usr/bin/env python3
"""The program's verbs from outside, with the standard library only: python3 cli_verbs_test.py PATH_TO_SPARGE"""
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

SPARGE = ""


def npy(path, dtype, shape, data):
    text = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (dtype, tuple(shape))
    text += " " * (-(len(text) + 11) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data)


def read_npy(path):
    file = path.read_bytes()
    size = struct.unpack("<H", file[8:10])[0]
    header = eval(file[10:10 + size])  # the test's own output
    return header["descr"], header["shape"], file[10 + size:]


def safetensors(path, tensors, metadata):
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def read_safetensors(path):
    file = path.read_bytes()
    size = struct.unpack("<Q", file[:8])[0]
    return json.loads(file[8:8 + size]), file[8 + size:]


def floats(count, code="f", seed=1):
    r = random.Random(seed)
    return struct.pack("<%d%s" % (count, code), *(r.gauss(0, 1) for _ in range(count)))


def bfloats(count, seed=1):
    return b"".join(floats(count, seed=seed)[4 * i + 2:4 * i + 4] for i in range(count))


def call(*args, env=None):
    return subprocess.run([SPARGE, *map(str, args)], capture_output=True, text=True, env={**os.environ, **(env or {})})


class Folder(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sparge_verbs_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def path(self, name):
        return self.folder / name


class Verbs(Folder):
    def setUp(self):
        super().setUp()
        # 2 query heads on 1 key head, ragged lengths; v is wider than k.
        npy(self.path("q.npy"), "<f4", (2, 150, 16), floats(2 * 150 * 16))
        npy(self.path("k.npy"), "<f4", (1, 170, 16), floats(170 * 16, seed=2))
        npy(self.path("v.npy"), "<f4", (1, 170, 24), floats(170 * 24, seed=3))
        self.inputs = ("--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v", self.path("v.npy"))
        self.attend = ("run", *self.inputs, "--out", self.path("o.npy"))
        self.before = sorted(os.listdir(self.folder))

    def capture(self, name, causal="true", scale="0.25", code="F16"):
        pack = bfloats if code == "BF16" else lambda n, seed: floats(n, "e", seed)
        tensors = {n: (code, (h, 130, 16), pack(h * 130 * 16, seed=h)) for n, h in (("q", 2), ("k", 1), ("v", 1))}
        self.path(name).parent.mkdir(exist_ok=True)
        safetensors(self.path(name), tensors, {"causal": causal, "scale": scale, "title": "a title"})
        return self.path(name)

    def good(self, *args, **more):
        done = call(*args, **more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def refused(self, *args, says=(), **more):
        before = {name: self.path(name).stat().st_mtime_ns for name in os.listdir(self.folder)}
        done = call(*args, **more)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for part in (says,) if isinstance(says, str) else says:
            self.assertIn(part, done.stderr)
        after = {name: self.path(name).stat().st_mtime_ns for name in os.listdir(self.folder)}
        self.assertEqual(before, after, "files were touched")

    # ---------------------------------------------------------------- usage

    def test_help_and_version(self):
        said = self.good("--help").stdout
        self.assertIn("run", said)
        for verb in ("demo", "run", "check", "report", "tune", "llama"):  # each with an example
            self.assertRegex(said, rf"\n  sparge {verb} ?")
        for verb in ("run", "map", "check", "info", "demo", "bench", "llama"):
            self.assertIn("Usage", self.good(verb, "--help").stdout)
        self.assertRegex(self.good("--version").stdout, r"^\d+\.\d+\.\d+")
        self.refused(says="verb")
        self.refused("fly", says="fly")
        self.refused("run", "--fly", says="--fly")
        self.refused(*self.attend, "--q", self.path("q.npy"), says="--q")

    def test_values_out_of_range(self):
        for flag, value in (("--tau", "1.5"), ("--tau", "-0.1"), ("--tau", "nan"), ("--tau", ""), ("--tau", "x"),
                            ("--theta", "inf"), ("--pv-skip", "-1"), ("--pv-skip", "nan"), ("--pv-skip", "on"),
                            ("--scale", "0"), ("--scale", "nan"), ("--scale", "1e999"), ("--window", "0"),
                            ("--window", "1.5"), ("--threads", "0"), ("--threads", "-1"), ("--threads", "99999999999"),
                            ("--query-offset", "99999999999999999999"), ("--precision", "int4"), ("--select", "some"),
                            ("--out", ""), ("--out", "/nowhere/o.npy"), ("--out", self.path("o.txt")),
                            ("--lse", self.path("l.safetensors")), ("--lse", self.folder), ("--out", "/dev/null")):
            with self.subTest(flag=flag, value=value):
                args = self.attend[:-2] if flag == "--out" else self.attend
                self.refused(*args, flag, value, says=(flag, str(value)))
        self.refused(*self.attend, "--select", "topk", "--topk", "2", says=("--topk", "2"))

    def test_contradictions(self):
        npy(self.path("m.npy"), "|u1", (2, 2, 3), bytes([1] * 12))
        m = self.path("m.npy")
        for args in (("--select", "topk", "--tau", "0.9"), ("--query-offset", "3"),
                     ("--select", "cdf", "--map", m), ("--select", "map"), ("--select", "all", "--theta", "0.1"),
                     ("--select", "all", "--sink"), ("--map", m, "--no-sink"), ("--sink", "--no-sink"),
                     ("--tensors", self.path("q.npy")), ("--lse", self.path("o.npy")), ("--lse", self.path("q.npy"))):
            with self.subTest(args):
                named = args[0] not in ("--select", "--map", "--sink")  # else the message may name the other flag
                self.refused(*self.attend, *args, says=args[0] if named else ())
        self.refused("run", *self.inputs, says="--out")
        self.refused("run", "--q", self.path("q.npy"), "--out", self.path("o.npy"), says="--k")
        self.refused("run", "--out", self.path("o.npy"), says="--q")
        self.refused("map", *self.inputs, says="--map-out")
        self.refused("map", *self.inputs, "--map-out", self.path("x.npy"), "--pv-skip", "3", says="--pv-skip")
        self.refused("map", *self.inputs[:4], "--map-out", self.path("x.npy"), says=("--v is missing", "auto", "--tau"))
        tensors = {n: ("F32", (1, 64, 8), floats(512, seed=4)) for n in "qk"}
        safetensors(self.path("qk.safetensors"), tensors, {})
        self.refused("map", "--tensors", self.path("qk.safetensors"), "--map-out", self.path("x.npy"),
                     says=("qk.safetensors", "no tensor v", "auto", "--tau"))
        self.refused("check", *self.inputs, self.folder, says="--q")

    def test_selection_from_flags(self):
        """One rule for run, map, check and report: a parameter means its selection, nothing at all means auto."""
        npy(self.path("m.npy"), "|u1", (2, 2, 3), bytes([1] * 12))
        for flags, want in (((), "auto"), (("--target-l1", "0.1"), "auto"), (("--target-l2", "0.1"), "auto"), (("--seed", "3"), "auto"),
                            (("--round-l1", "0.1"), "auto"), (("--precision", "int16"), "auto"), (("--sink",), "auto"),
                            (("--tau", "0.9"), "cdf"), (("--theta", "0.2"), "cdf"), (("--tau", "0.9", "--theta", "0"), "cdf"),
                            (("--topk", "0.4"), "topk"), (("--topk", "0.4", "--theta", "0.1"), "topk"),
                            (("--map", self.path("m.npy")), "map"), (("--select", "cdf"), "cdf"), (("--select", "all"), "all"),
                            (("--select", "floor", "--tau", "0.9"), "floor"), (("--select", "topk"), "topk")):
            with self.subTest(flags):
                self.assertEqual(json.loads(self.good(*self.attend, *flags, "--json").stdout)["select"], want)
                mapped = self.good("map", *self.inputs, *flags, "--map-out", self.path("x.npy"), "--json").stdout
                self.assertEqual(json.loads(mapped)["select"], want)
                checked = self.good("check", *self.inputs, *flags, "--json").stdout
                self.assertEqual(json.loads(checked)["files"][0]["select"], want)
        report = self.good("report", *self.inputs, "-o", self.path("r.html"), "--json").stdout
        self.assertEqual(json.loads(report)["files"][0]["select"], "auto")
        figures = json.loads(self.good(*self.attend, "--select", "cdf", "--json").stdout)
        self.assertEqual([figures[x] for x in ("tau", "theta", "pv_skip", "topk")], [0.98, 0.3, 10, None])
        self.assertEqual(json.loads(self.good(*self.attend, "--select", "topk", "--json").stdout)["topk"], 0.5)

    def test_flags_of_another_selection(self):
        """Refused, naming the flag that made the choice; nothing that was given is silently left out."""
        npy(self.path("m.npy"), "|u1", (2, 2, 3), bytes([1] * 12))
        for flags, says in ((("--pv-skip", "5"), ("--pv-skip", "--select auto, the default", "--pv-l2", "--tau X")),
                            (("--pv-skip", "off"), ("--pv-skip", "--select auto, the default")),
                            (("--select", "auto", "--pv-skip", "5"), ("--pv-skip", "--select auto")),
                            (("--target-l1", "0.1", "--pv-skip", "5"), ("--pv-skip", "--select auto")),
                            (("--tau", "0.9", "--target-l1", "0.1"), ("--target-l1", "with --tau", "--select auto")),
                            (("--tau", "0.9", "--topk", "0.5"), ("--tau", "with --topk")),
                            (("--map", self.path("m.npy"), "--tau", "0.9"), ("--tau", "with --map")),
                            (("--map", self.path("m.npy"), "--theta", "0.9"), ("--theta", "with --map")),
                            (("--select", "cdf", "--topk", "0.5"), ("--topk", "--select cdf")),
                            (("--select", "auto", "--theta", "0.5"), ("--theta", "--select auto")),
                            (("--select", "auto", "--map", self.path("m.npy")), ("--map", "--select auto")),
                            (("--topk", "0.5", "--seed", "1"), ("--seed", "--topk", "--select auto")),
                            (("--theta", "0.5", "--pv-l1", "0.1"), ("--pv-l1", "--theta", "--select auto")),
                            (("--theta", "0.5", "--target-l2", "0.1"), ("--target-l2", "--theta", "--select auto")),
                            (("--target-l1", "0.1", "--target-l2", "0.1"), ("--target-l1", "--target-l2", "two bounds")),
                            (("--pv-l1", "0.1"), ("--pv-l1", "without --target-l1")),
                            (("--target-l1", "0.1", "--pv-l2", "0.2"), ("--pv-l2", "with --target-l1")),
                            (("--precision", "fp32", "--round-l1", "0.1"), ("--round-l1", "--precision fp32"))):
            with self.subTest(flags):
                self.refused(*self.attend, *flags, says=says)

    def test_bad_inputs(self):
        self.refused(*self.attend[:1], "--q", self.path("none.npy"), *self.attend[3:], says=("--q", "none.npy"))
        self.path("cut.npy").write_bytes(self.path("v.npy").read_bytes()[:-4])
        self.refused("run", *self.inputs[:4], "--v", self.path("cut.npy"), "--out", self.path("o.npy"),
                     says=("--v", "cut.npy"))
        for name, dtype, shape, size in (("rank", "<f4", (5,), 20), ("dim", "<f4", (1, 170, 8), 5440),
                                         ("zero", "<f4", (1, 170, 0), 0),
                                         ("byte", "|u1", (1, 170, 16), 2720),
                                         ("heads", "<f4", (3, 170, 16), 32640),
                                         ("batch", "<f4", (1, 1, 170, 16), 10880),
                                         ("wide", "<f4", (1, 1, 577), 2308)):
            with self.subTest(name):
                npy(self.path(name + ".npy"), dtype, shape, bytes(size))
                self.refused("run", "--q", self.path("q.npy"), "--k", self.path(name + ".npy"),
                             "--v", self.path("v.npy"), "--out", self.path("o.npy"), says=("--k", name + ".npy"))
        for flag in ("--mask", "--map"):
            npy(self.path("odd.npy"), "|u1", (3, 2, 2), bytes(12))
            self.refused(*self.attend, flag, self.path("odd.npy"), says=(flag, "(3, 2, 2)"))
        npy(self.path("float.npy"), "<f4", (2, 2, 3), bytes(48))
        self.refused(*self.attend, "--map", self.path("float.npy"), says=("--map", "float32"))
        self.refused("run", "--tensors", self.path("q.npy"), "--out", self.path("o.npy"), says=("--tensors", "q.npy"))
        for causal, scale, word in (("yes", "1", "causal"), ("true", "wide", "scale"), ("true", "nan", "scale")):
            file = self.capture("bad.safetensors", causal, scale)
            self.refused("run", "--tensors", file, "--out", self.path("o.npy"), says=("bad.safetensors", word))
        self.refused("info", env={"SPARGE_ISA": "abacus"}, says="abacus")
        self.path("o.npy").write_text("precious")
        self.refused(*self.attend, "--tau", "2")
        self.assertEqual(self.path("o.npy").read_text(), "precious")

    # ---------------------------------------------------------------- what works

    def test_run(self):
        extra = ("--lse", self.path("l.npy"), "--map-out", self.path("m.npy"), "--json", "--causal", "--tau", "0.98",
                 "--pv-skip", "off")
        report = json.loads(self.good(*self.attend, *extra, "--threads", "2").stdout)
        self.assertEqual(read_npy(self.path("o.npy"))[:2], ("<f4", (2, 150, 24)))
        self.assertEqual(read_npy(self.path("l.npy"))[:2], ("<f4", (2, 150)))
        self.assertEqual(read_npy(self.path("m.npy"))[:2], ("|u1", (2, 2, 3)))
        self.assertEqual((report["pv_skip"], report["select"], report["query_offset"]), ("off", "cdf", 20))
        self.assertEqual((report["sink"], report["scale"], report["topk"]), (True, 0.25, None))
        self.assertEqual(set(report["stages_ms"]), {"pack", "predict", "schedule", "kernel", "calibrate"})
        self.assertEqual(report["qk_tiles"]["computed"], sum(read_npy(self.path("m.npy"))[2]))
        left = set(os.listdir(self.folder)) - set(self.before)
        self.assertEqual(left, {"o.npy", "l.npy", "m.npy"})
        self.assertEqual(self.good(*self.attend).stdout, "")
        # The written map is accepted again and gives the same result.
        first = read_npy(self.path("o.npy"))
        self.good(*self.attend, "--map", self.path("m.npy"), "--causal")
        self.assertEqual(len(first[2]), len(read_npy(self.path("o.npy"))[2]))

    def test_masks_broadcast(self):
        """A mask that hides the last keys, in every shape that means the same."""
        row = bytes(int(j < 100) for j in range(170))
        added = b"".join(struct.pack("<f", 0.0 if x else -math.inf) for x in row)
        results = set()
        for dtype, shape, data in (("|u1", (1, 170), row), ("|b1", (1, 1, 170), row), ("|b1", (150, 170), row * 150),
                                   ("|u1", (2, 1, 170), row * 2), ("<f4", (1, 1, 1, 170), added),
                                   ("|u1", (1, 2, 150, 170), row * 300)):
            npy(self.path("mask.npy"), dtype, shape, data)
            self.good(*self.attend, "--mask", self.path("mask.npy"), "--precision", "fp32", "--select", "all")
            results.add(read_npy(self.path("o.npy"))[2])
        self.assertEqual(len(results), 1)
        npy(self.path("mask.npy"), "|b1", (150, 1), bytes(int(i < 50) for i in range(150)))  # later queries see nothing
        self.good(*self.attend, "--mask", self.path("mask.npy"), "--lse", self.path("l.npy"))
        lse = struct.unpack("<300f", read_npy(self.path("l.npy"))[2])
        self.assertTrue(all(math.isinf(x) == (i % 150 >= 50) for i, x in enumerate(lse)))

    def test_bfloat16_goes_to_safetensors(self):
        file = self.capture("b.safetensors", code="BF16")
        self.refused("run", "--tensors", file, "--out", self.path("o.npy"), says=("--out", ".safetensors"))
        done = self.good("run", "--tensors", file, "--out", self.path("o.safetensors"))
        self.assertIn("causal true", done.stderr)
        header, data = read_safetensors(self.path("o.safetensors"))
        self.assertEqual((header["o"]["dtype"], header["o"]["shape"]), ("BF16", [2, 130, 16]))
        self.assertEqual(len(data), 2 * 130 * 16 * 2)

    def test_map(self):
        report = json.loads(self.good("map", *self.inputs[:4], "--tau", "0.9", "--map-out", self.path("m.npy"), "--json").stdout)
        self.assertEqual(len(report["heads"]), 2)
        self.assertEqual(sum(h["computed"] for h in report["heads"]), report["qk_tiles"]["computed"])
        self.assertEqual(read_npy(self.path("m.npy"))[1], (2, 2, 3))
        tensors = {n: ("F32", (1, 64, 8), floats(512, seed=4)) for n in "qk"}
        safetensors(self.path("qk.safetensors"), tensors, {})
        self.good("map", "--tensors", self.path("qk.safetensors"), "--map-out", self.path("m.npy"), "--tau", "0.9")

    def test_check(self):
        self.capture("captures/a.safetensors")
        self.capture("captures/b.safetensors", causal="false")
        report = json.loads(self.good("check", self.path("captures"), "--json").stdout)
        self.assertEqual([len(f["heads"]) for f in report["files"]], [2, 2])
        self.assertEqual([f["causal"] for f in report["files"]], [True, False])
        self.assertLess(report["total"]["relative_l1"], 0.2)
        self.assertIn("total", self.good("check", *self.inputs, "--precision", "fp32", "--select", "all").stdout)
        self.assertEqual([f["select"] for f in report["files"]], ["auto", "auto"])
        failed = call("check", *self.inputs, "--max-l1", "1e-9")  # int8 is never that good
        self.assertEqual(failed.returncode, 1, failed.stderr)
        self.assertIn("--max-l1", failed.stderr)
        flags = ("--precision", "fp32", "--select", "all", "--pv-skip", "off", "--max-l1", "1e-5", "--json")
        exact = json.loads(self.good("check", *self.inputs, *flags).stdout)
        self.assertEqual(exact["total"]["stages_l1"]["selection"], 0)
        self.path("empty").mkdir()
        self.refused("check", self.path("empty"), says="empty")

    def test_info_and_demo(self):
        info = json.loads(self.good("info", "--json").stdout)
        self.assertEqual((info["block_q"], info["block_k"]), (128, 64))
        self.assertEqual([x["name"] for x in info["isas"] if x["in_use"]], [info["isa"]])
        self.assertTrue(info["gpus"] or "CUDA" in info["no_gpu"])
        self.capture("captures/a.safetensors")
        table = self.good("demo", "--data", self.path("captures")).stdout
        self.assertIn("a title", table)
        for bound in ("target_l2", "pv_l2"):
            self.assertIn(" %g " % info["defaults"][bound], table)
        self.assertLessEqual(max(map(len, table.splitlines()[:14])), 100)
        report = json.loads(self.good("demo", "--data", self.path("captures"), "--json").stdout)
        self.assertEqual(len(report["heads"]), 2)
        self.refused("demo", "--data", self.path("nowhere"), says="nowhere")

    def test_llama(self):
        backend = self.path("libggml-sparge.so")
        backend.write_bytes(b"")
        said = self.good("llama", "--backend", backend).stdout
        self.assertIn(f"GGML_BACKEND_PATH={backend}", said)
        self.assertIn("sparge llama -- llama-cli", said)
        clean = {"LLAMA_ARG_OVERRIDE_TENSOR": ""}
        seen = self.good("llama", "--backend", backend, "--", "env", env=clean).stdout.splitlines()
        self.assertIn(f"GGML_BACKEND_PATH={backend}", seen)
        self.assertIn("LLAMA_ARG_OVERRIDE_TENSOR=", seen)  # what the caller says stays
        code = "import os, sys; print(sys.argv[1:], os.environ.get('LLAMA_ARG_OVERRIDE_TENSOR'))"
        for arguments, value in ((["-m", "model.gguf", "--json"], "^$=CPU"), (["-ot", "x=CPU"], "None")):
            said = self.good("llama", "--backend", backend, "--", sys.executable, "-c", code, *arguments).stdout.strip()
            self.assertEqual(said, f"{arguments} {value}")
        self.refused("llama", "--backend", self.path("nowhere"), says="nowhere")
        self.refused("llama", "--backend", backend, "--", "no-such-program", says=("no-such-program", "No such file"))


if __name__ == "__main__":
    SPARGE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()

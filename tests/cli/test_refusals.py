"""Bad usage and bad input: exit code 2, one line on stderr that names the culprit, nothing else; and `sparge info`."""

import json
import struct
import unittest
from pathlib import Path

import numpy as np

import cases
import oracle
from cases import Case, EXACT, call, noise, noise_qkv, rng
from oracle import Problem


class Refusals(Case):

    def setUp(self):
        super().setUp()
        self.problem = Problem(*noise_qkv(rng("refusals"), 1, 4, 2, 150, 100, 32))
        self.save(self.problem, ndim=3)
        self.valid = {n: self.path(f"{n}.npy") for n in "qkv"}

    def args(self, verb="run", **replaced):
        names = {**self.valid, **replaced}
        args = [verb]
        for name, path in names.items():
            args += [] if path is None else [f"--{name}", path]
        return [*args, "--out", self.path("o.npy"), "--map-out", self.path("m_out.npy"), "--lse", self.path("l.npy")]

    def refused(self, args, *keywords, env=None):
        """Exit 2, exactly one line on stderr with one of the keywords, silent stdout, no file left behind."""
        before = set(self.folder.iterdir())
        result = call(args, env)
        self.assertEqual(result.code, 2, f"{result.command}\n{result.stdout}{result.stderr}")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, f"one line on stderr\n{result.command}\n{result.stderr}")
        said, *keywords = (x.lower().replace("_", "-") for x in (lines[0], *keywords))
        self.assertTrue(any(k in said for k in keywords), f"{keywords} not in: {lines[0]}\n{result.command}")
        self.assertEqual(result.stdout, "", result.command)
        self.assertEqual(set(self.folder.iterdir()), before, f"a file was left behind\n{result.command}")

    def array(self, name, x):
        np.save(self.path(name), x)
        return self.path(name)

    def test_the_valid_call_is_accepted(self):
        """Otherwise the refusals below prove nothing."""
        result = call(self.args())
        self.assertEqual(result.code, 0, result.stderr)

    def test_shapes(self):
        r = rng("shapes")
        for label, replaced, keywords in (
                ("q with one axis", dict(q=self.array("a.npy", noise(r, 32))), ("a.npy", "--q", " q")),
                ("q with five axes", dict(q=self.array("b.npy", noise(r, 1, 1, 4, 150, 32))), ("b.npy", "--q", " q")),
                ("head sizes of q and k", dict(k=self.array("c.npy", noise(r, 2, 100, 33))),
                ("c.npy", "dim", "head size", " k")),
                ("lengths of k and v", dict(v=self.array("d.npy", noise(r, 2, 99, 32))), ("d.npy", " v", "token")),
                ("heads of k and v", dict(v=self.array("e.npy", noise(r, 4, 100, 32))), ("e.npy", " v", "head")),
                ("heads of q not a multiple", dict(q=self.array("f.npy", noise(r, 5, 150, 32))), ("f.npy", "head")),
                ("fewer heads in q", dict(q=self.array("g.npy", noise(r, 1, 150, 32))), ("g.npy", "head")),
                ("numbers of axes", dict(q=self.array("h.npy", noise(r, 2, 4, 150, 32))), ("h.npy", "dimension")),
                ("batch sizes", {n: self.array(f"m{n}.npy", noise(r, 2 + (n == "v"), 2, 9, 8)) for n in "qkv"},
                 ("mv.npy", "batch")),
                ("head size 577", {n: self.array(f"i{n}.npy", noise(r, 2, 20, 577)) for n in "qkv"},
                ("577", "dim", "head size")),
                ("head size 0", {n: self.array(f"j{n}.npy", noise(r, 2, 20, 0)) for n in "qkv"},
                ("jq.npy", "dim", "head size")),
                ("no heads", {n: self.array(f"l{n}.npy", noise(r, 0, 20, 8)) for n in "qkv"}, ("lq.npy", "head"))):
            with self.subTest(label):
                self.refused(self.args(**replaced), *keywords)

    def test_values(self):
        for flags, keyword in (
                (("--tau", "1.5"), "tau"), (("--tau", "-0.1"), "tau"), (("--tau", "nan"), "tau"),
                (("--tau", "x"), "tau"),
                (("--theta", "nan"), "theta"), (("--pv-skip", "-1"), "pv-skip"), (("--pv-skip", "nan"), "pv-skip"),
                (("--pv-skip", "on"), "pv-skip"), (("--select", "topk", "--topk", "2"), "topk"),
                (("--select", "topk", "--topk", "-1"), "topk"), (("--select", "topk", "--topk", "nan"), "topk"),
                (("--select", "some"), "select"), (("--select", "map"), "map"), (("--precision", "int4"), "precision"),
                (("--threads", "0"), "threads"), (("--threads", "-2"), "threads"), (("--threads", "2x"), "threads"),
                (("--query-offset", "5"), "query-offset"), (("--causal", "--query-offset", "1.5"), "query-offset"),
                (("--causal", "--window", "-3"), "window"), (("--scale", "nan"), "scale"),
                (("--scale", "inf"), "scale"),
                (("--select", "topk", "--tau", "0.9"), "tau"), (("--select", "all", "--theta", "0.3"), "theta"),
                (("--select", "all", "--topk", "0.3"), "topk"), (("--sink", "--no-sink"), "sink"),
                (("--frobnicate", "1"), "frobnicate"), (("--tau",), "tau"), (("stray",), "stray")):
            with self.subTest(flags):
                self.refused([*self.args(), *flags], keyword)

    def test_verbs_and_missing_arguments(self):
        self.refused(["frobnicate"], "frobnicate")
        for name in "qkv":
            self.refused(self.args(**{name: None}), f"--{name}")
        self.refused([a for a in self.args() if a not in ("--out", self.path("o.npy"))], "--out")

    def test_maps(self):
        for label, x in (("too few tiles", np.ones((4, 2, 1), bool)), ("too many tiles", np.ones((4, 2, 3), np.uint8)),
                         ("heads", np.ones((3, 2, 2), bool)), ("batch", np.ones((2, 4, 2, 2), bool)),
                         ("one axis", np.ones(16, bool)), ("float", np.ones((4, 2, 2), np.float32)),
                         ("wide", np.ones((4, 2, 2), np.int64))):
            with self.subTest(label):
                self.refused([*self.args(), "--select", "map", "--map", self.array("given.npy", x)], "given.npy", "map")

    def test_masks(self):
        for label, x in (("keys", np.ones((150, 99), bool)), ("swapped", np.ones((100, 150), bool)),
                         ("heads", np.zeros((3, 150, 100), np.float32)),
                         ("batch", np.zeros((2, 4, 150, 100), np.float16)),
                         ("one axis", np.ones(100, bool)), ("double", np.zeros((150, 100), np.float64)),
                         ("integers", np.ones((150, 100), np.int32))):
            with self.subTest(label):
                self.refused([*self.args(), "--mask", self.array("mask.npy", x)], "mask")

    def test_files_that_are_not_npy(self):
        good = self.valid["k"].read_bytes()
        data = good[128:]
        self.refused(self.args(k=self.path("missing.npy")), "missing.npy")
        self.refused(self.args(k=self.folder), self.folder.name)
        for label, text in (
                ("empty", b""), ("magic only", good[:6]), ("half a header", good[:40]), ("truncated", good[:-100]),
                ("one byte short", good[:-1]), ("not npy", b"hello, this is text\n" * 100),
                ("version 9", good[:6] + b"\x09" + good[7:]),
                ("header longer than the file", good[:8] + struct.pack("<H", 65535) + good[10:200]),
                ("unbalanced header", good[:10] + good[10:128].replace(b"}", b" ") + data)):
            with self.subTest(label):
                self.path("bad.npy").write_bytes(text)
                self.refused(self.args(k=self.path("bad.npy")), "bad.npy")

    def test_npy_headers(self):
        size, data = "(2, 100, 32)", b"\0" * (2 * 100 * 32 * 4)
        for label, descr, shape, fortran in (
                ("big endian", ">f4", size, False), ("Fortran order", "<f4", size, True), ("object", "|O", size, False),
                ("double", "<f8", "(2, 100, 16)", False), ("integers", "<i4", size, False),
                ("bytes", "|S4", size, False),
                ("header promises more", "<f4", "(2, 1000, 32)", False), ("negative", "<f4", "(2, -100, 32)", False),
                ("overflow to zero", "<f4", f"({2**32}, {2**32}, 32)", False),
                ("overflow to the right size", "<f4", f"({2**63 + 2}, 100, 64)", False),
                ("product overflows", "<f4", f"({2**62}, {2**62}, 4)", False),
                ("beyond 64 bits", "<f4", f"({10**30}, 100, 32)", False),
                ("huge but consistent", "<f4", f"(2, {2**40}, 32)", False), ("scalar", "<f4", "()", False),
                ("not numbers", "<f4", "('a', 'b')", False), ("no tuple", "<f4", "6400", False)):
            with self.subTest(label):
                cases.write_npy_header(self.path("bad.npy"), descr, shape, data, fortran)
                self.refused(self.args(k=self.path("bad.npy")), "bad.npy")

    def test_npy_written_by_numpy(self):
        k = self.problem.k[0]
        for label, x in (("big endian", k.astype(">f4")), ("Fortran order", np.asfortranarray(k)),
                         ("double", k.astype(float)),
                         ("object", k[:, :2].astype(object))):
            with self.subTest(label):
                np.save(self.path("bad.npy"), x, allow_pickle=True)
                self.refused(self.args(k=self.path("bad.npy")), "bad.npy")

    def test_safetensors(self):
        q, k, v = (x[0] for x in (self.problem.q, self.problem.k, self.problem.v))
        data = q.tobytes() + k.tobytes() + v.tobytes()

        def header(**changes):
            at, made = 0, {}
            for name, x in zip("qkv", (q, k, v)):
                made[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
                at += x.nbytes
            for key, value in changes.items():
                made["k"][key] = value
            return made

        path = self.path("t.safetensors")
        args = ["run", "--tensors", path, "--out", self.path("o.npy")]
        cases.write_raw_safetensors(path, header(), data)
        self.assertEqual(call(args).code, 0, "the valid file is accepted")
        self.path("o.npy").unlink()
        end = len(data)
        missing = header()
        del missing["k"]
        for label, bad in (
                ("unknown type", header(dtype="F8_E4M3")), ("no such type", header(dtype="X")),
                ("double", header(dtype="F64")),
                ("past the end", header(data_offsets=[end, end + k.nbytes])),
                ("far past", header(data_offsets=[2**62, 2**62 + k.nbytes])),
                ("negative", header(data_offsets=[-k.nbytes, 0])),
                ("backwards", header(data_offsets=[q.nbytes + k.nbytes, q.nbytes])),
                ("wrong size", header(data_offsets=[q.nbytes, q.nbytes + k.nbytes - 4])),
                ("overflow", header(shape=[2**62, 2**62, 4])),
                ("negative shape", header(shape=[-2, -100, 32])), ("text shape", header(shape="abc")),
                ("no tensor k", missing),
                ("a list", [1, 2, 3])):
            with self.subTest(label):
                cases.write_raw_safetensors(path, bad, data)
                self.refused(args, "t.safetensors")
        whole = header()
        text = json.dumps(whole).encode()
        for label, text in (("empty", b""), ("five bytes", b"12345"),
                            ("header past the end", struct.pack("<Q", 2**40) + b"{}"),
                            ("header of 2^64-1", struct.pack("<Q", 2**64 - 1) + b"{}"),
                            ("not JSON", struct.pack("<Q", 8) + b"{\"q\": [[" + data),
                            ("deep nesting", struct.pack("<Q", 200000) + b"[" * 200000),
                            ("truncated", struct.pack("<Q", len(text)) + text + data[:-8])):
            with self.subTest(label):
                path.write_bytes(text)
                self.refused(args, "t.safetensors")
        cases.write_raw_safetensors(path, whole, data)
        self.refused([*args, "--q", self.valid["q"]], "tensors", "--q")

    def test_outputs_that_cannot_be_written(self):
        nowhere = self.path("no_folder") / "x.npy"
        for name in ("--out", "--lse", "--map-out"):
            with self.subTest(name):
                args = self.args()
                args[args.index(name) + 1] = nowhere
                self.refused(args, "x.npy", name)

    def test_map_verb_refuses_too(self):
        for flags, keyword in ((("--tau", "1.5"), "tau"), (("--query-offset", "5"), "query-offset")):
            inputs = [a for name, path in self.valid.items() for a in (f"--{name}", path)]
            args = ["map", *inputs, "--map-out", self.path("m.npy"), *flags]
            self.refused(args, keyword)

    def test_honoured_or_refused(self):
        """Cases the contract leaves open: a result must then be the right one."""
        p = self.problem
        r = rng("open")
        wide = p.q.shape[:2] + (150, 100)
        for label, flags, q in (
                ("window without causal", ("--window", 40), Problem(p.q, p.k, p.v, window=40)),
                ("mask (1, Nq, Nk)", ("--mask", "m"), Problem(p.q, p.k, p.v, mask=r.random((1, 150, 100)) > 0.5)),
                ("mask (1, 1, Nq, Nk)", ("--mask", "m"), Problem(p.q, p.k, p.v, mask=r.random((1, 1, 150, 100)) > 0.5)),
                ("mask (B, H, Nq, Nk)", ("--mask", "m"), Problem(p.q, p.k, p.v, mask=r.random(wide) > 0.5))):
            with self.subTest(label):
                flags = [self.array("open.npy", q.mask) if f == "m" else f for f in flags]
                args = [*self.args(), "--precision", "fp32", "--select", "all", *EXACT, *flags]
                result = call(args)
                if result.code == 0:
                    want = oracle.attention(q)[0][0]
                    self.assertLess(oracle.relative_l1(np.load(self.path("o.npy")), want), cases.BOUND["fp32"])
                    for path in (args[args.index(n) + 1] for n in ("--out", "--lse", "--map-out")):
                        path.unlink()
                else:
                    self.refused(args, "window", "mask", "open.npy")


class Info(Case):

    def test_text(self):
        result = call(["info"])
        self.assertEqual(result.code, 0, result.stderr)
        self.assertIn("128", result.stdout, "block sizes are printed")
        self.assertIn("64", result.stdout)

    def test_json(self):
        result = call(["info", "--json"])
        self.assertEqual(result.code, 0, result.stderr)
        found = cases.find_isas(json.loads(result.stdout))
        self.assertTrue(any(x["runnable"] for x in found))
        self.assertTrue(all(isinstance(x["name"], str) for x in found))

    def test_unknown_instruction_set(self):
        self.problem = Problem(*noise_qkv(rng("info"), 1, 1, 1, 10, 10, 8))
        args = ["run", *self.save(self.problem), "--out", self.path("o.npy")]
        Refusals.refused(self, args, "sparge-isa", "z80", "instruction set", env={"SPARGE_ISA": "z80"})
        self.assertEqual(call(args).code, 0)


if __name__ == "__main__":
    unittest.main()

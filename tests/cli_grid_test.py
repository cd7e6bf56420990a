#!/usr/bin/env python3
"""--grid, --text-tokens and --order from outside, standard library only: python3 cli_grid_test.py PATH_TO_SPARGE"""
import json
import pathlib
import struct
import sys
import tempfile
import unittest

import cli_verbs_test as verbs
from cli_verbs_test import call, floats, npy, read_npy, safetensors

GRID = (3, 10, 7)
CELLS = 210
TEXT = 25
DIM = 16


def values(path):
    _, shape, data = read_npy(path)
    return struct.unpack("<%df" % (len(data) // 4), data), shape


def relative_l1(a, b):
    return sum(abs(x - y) for x, y in zip(a, b)) / sum(map(abs, b))


class Grid(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sparge_grid_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for seed, name in enumerate("qkv"):
            npy(self.path(name + ".npy"), "<f4", (2, CELLS + TEXT, DIM), floats(2 * (CELLS + TEXT) * DIM, seed=seed))
        self.inputs = sum((("--" + n, self.path(n + ".npy")) for n in "qkv"), ())
        self.attend = ("run", *self.inputs, "--out", self.path("o.npy"))
        self.grid = ("--grid", "3,10,7", "--text-tokens", str(TEXT))

    def path(self, name):
        return self.folder / name

    def good(self, *args):
        done = call(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def refused(self, *args, says):
        done = call(*args)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual((done.stdout, len(done.stderr.splitlines())), ("", 1), done.stderr)
        for part in (says,) if isinstance(says, str) else says:
            self.assertIn(part, done.stderr)
        self.assertFalse(self.path("o.npy").exists())

    def capture(self, tokens=CELLS + TEXT, keys=None, **metadata):
        keys = tokens if keys is None else keys
        tensors = {n: ("F32", (1, t, DIM), floats(t * DIM, seed=3)) for n, t in (("q", tokens), ("k", keys), ("v", keys))}
        safetensors(self.path("c.safetensors"), tensors, metadata)
        return ("run", "--tensors", self.path("c.safetensors"), "--out", self.path("o.npy"))

    # ---------------------------------------------------------------- results

    def test_same_result_as_raster_order(self):
        """Non-causal attention does not depend on the order of tokens, so that only rounding may differ."""
        for precision, bound in (("fp32", 1e-5), ("int16", 1e-3), ("int8", 3e-2)):  # docs/numerics.md
            flags = ("--precision", precision, "--select", "all", "--lse", self.path("l.npy"))
            self.good(*self.attend, *flags)
            want, lse = values(self.path("o.npy"))[0], values(self.path("l.npy"))[0]
            for text in (str(TEXT), "%d,after" % TEXT):
                self.good(*self.attend, *flags, "--grid", "3,10,7", "--text-tokens", text)
                self.assertLess(relative_l1(values(self.path("o.npy"))[0], want), 2 * bound)
                self.assertLess(relative_l1(values(self.path("l.npy"))[0], lse), 2 * bound)

    def test_the_order_is_used(self):
        """A map that keeps the first tile alone: the queries of the first block then are those on the curve."""
        npy(self.path("m.npy"), "|u1", (2, 2, 4), bytes([1, 0, 0, 0, 0, 0, 0, 0] * 2))
        seen = []
        for flags in (self.grid, (*self.grid[:3], "%d,after" % TEXT), ()):
            self.good(*self.attend, "--map", self.path("m.npy"), "--lse", self.path("l.npy"), *flags)
            lse = values(self.path("l.npy"))[0]
            seen.append({i for i, x in enumerate(lse[:CELLS + TEXT]) if x > float("-inf")})
        before, after, raster = seen
        self.assertEqual(raster, set(range(128)))
        self.assertEqual((len(before), len(after)), (128, 128))
        self.assertTrue(set(range(TEXT)) <= before, "text before the grid stays in front")
        self.assertTrue(max(after) < CELLS, "text after the grid stays at the end")
        self.assertNotEqual(before, raster)
        self.assertNotEqual(after, raster)

    def test_check_and_map(self):
        report = json.loads(self.good("check", *self.inputs, *self.grid, "--select", "topk", "--topk", "0.5", "--theta",
                                      "-1", "--precision", "fp32", "--pv-skip", "off", "--json").stdout)
        stages = report["total"]["stages_l1"]
        # The reference under the same map has the same tiles only if it, too, knows the order.
        self.assertLess(stages["quantisation"], 1e-5)
        self.assertGreater(stages["selection"], 0.1)
        self.good("map", *self.inputs, *self.grid, "--map-out", self.path("m.npy"))
        self.good(*self.attend, *self.grid, "--map-out", self.path("m2.npy"))
        self.assertEqual(read_npy(self.path("m.npy")), read_npy(self.path("m2.npy")))

    def test_json(self):
        names = ("grid", "text_tokens", "text_after", "order")
        for flags, want in (((), (None, None, None, None)), (self.grid, ([3, 10, 7], TEXT, False, "hilbert")),
                            ((*self.grid[:3], "%d,after" % TEXT), ([3, 10, 7], TEXT, True, "hilbert")),
                            ((*self.grid, "--order", "raster"), ([3, 10, 7], TEXT, False, "raster"))):
            report = json.loads(self.good(*self.attend, *flags, "--json").stdout)
            self.assertEqual(tuple(report[name] for name in names), want)
        self.assertIn("Hilbert order of 3,10,7", self.good(*self.attend, *self.grid).stderr)

    def test_raster_switches_it_off(self):
        self.good(*self.attend)
        want = self.path("o.npy").read_bytes()
        self.good(*self.attend, *self.grid, "--order", "raster")
        self.assertEqual(self.path("o.npy").read_bytes(), want)
        self.good(*self.attend, *self.grid, "--order", "raster", "--causal")
        self.good(*self.attend, *self.grid)
        self.assertNotEqual(self.path("o.npy").read_bytes(), want)

    # ---------------------------------------------------------------- metadata

    def test_metadata(self):
        run = self.capture(grid="3,10,7", text_tokens="%d,after" % TEXT)
        done = self.good(*run, "--json")
        self.assertIn("from its metadata: grid 3,10,7, text_tokens 25,after", done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual((report["grid"], report["text_after"], report["order"]), ([3, 10, 7], True, "hilbert"))
        with_grid = self.path("o.npy").read_bytes()
        done = self.good(*run, "--order", "raster", "--json")
        self.assertIn("grid 3,10,7 (not used)", done.stderr)
        self.assertEqual(json.loads(done.stdout)["order"], "raster")
        self.assertNotEqual(self.path("o.npy").read_bytes(), with_grid)
        # Flags come before metadata.
        report = json.loads(self.good(*run, "--grid", "1,21,10", "--text-tokens", "25", "--json").stdout)
        self.assertEqual((report["grid"], report["text_after"]), ([1, 21, 10], False))

    def test_metadata_gives_way(self):
        """A grid in a file is a default: with what it cannot be combined with, it is not used, and that is said."""
        npy(self.path("mask.npy"), "|u1", (1, CELLS), bytes([1] * CELLS))
        for flags, metadata, keys, word in (((), {"causal": "true"}, CELLS, "causal"), (("--causal",), {}, CELLS, "causal"),
                                            (("--window", "9"), {}, CELLS, "--window 9"),
                                            (("--mask", self.path("mask.npy")), {}, CELLS, "--mask"),
                                            ((), {}, 99, "210 queries on 99 keys")):
            run = self.capture(CELLS, keys, grid="3,10,7", **metadata)
            done = self.good(*run, *flags, "--json")
            self.assertIn("grid 3,10,7 not used, because of " + word, done.stderr)
            self.assertEqual(json.loads(done.stdout)["order"], "raster")
            self.path("o.npy").unlink()
            self.refused(*run, *flags, "--order", "hilbert", says=("grid 3,10,7 cannot be combined with", word))

    def test_bad_metadata(self):
        for metadata, says in (({"grid": "3,10"}, ("metadata 'grid'", "3,10")), ({"grid": "a,b,c"}, "metadata 'grid'"),
                               ({"grid": "3,10,7", "text_tokens": "-1"}, ("metadata 'text_tokens'", "-1")),
                               ({"grid": "3,10,7"}, ("grid 3,10,7 and 0 text tokens make 210", "235"))):
            self.refused(*self.capture(**metadata), says=("c.safetensors", *((says,) if isinstance(says, str) else says)))

    # ---------------------------------------------------------------- refusals

    def test_refusals(self):
        for flags, says in ((("--grid", "3,10"), ("--grid", "3,10")), (("--grid", "3,10,0"), ("--grid", "0")),
                            (("--grid", ""), "--grid"), (("--grid", "3,10,x"), ("--grid", "x")),
                            (("--grid", "3,10,7,1"), "--grid"), (("--grid", "99999,99999,9"), "--grid"),
                            (("--grid", "3,10,7"), ("--grid 3,10,7", "0 text tokens", "210", "235")),
                            (("--text-tokens", "5"), ("--text-tokens 5", "--grid")),
                            (("--order", "hilbert"), ("--order hilbert", "--grid")),
                            (("--order", "raster"), ("--order raster", "--grid")),
                            ((*self.grid, "--order", "snake"), ("--order", "snake")),
                            (("--grid", "3,10,7", "--text-tokens", "25,before"), ("--text-tokens", "25,before")),
                            (("--grid", "3,10,7", "--text-tokens", "x"), ("--text-tokens", "x")),
                            ((*self.grid, "--causal"), ("--grid 3,10,7", "causal")),
                            ((*self.grid, "--window", "4"), ("--grid 3,10,7", "--window 4"))):
            with self.subTest(flags):
                self.refused(*self.attend, *flags, says=says)


if __name__ == "__main__":
    verbs.SPARGE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()

#!/usr/bin/env python3
"""`sparge report` from outside, without a browser: figures, pictures, files, refusals: report_test.py PATH_TO_SPARGE"""
import base64
import json
import math
import os
import pathlib
import random
import re
import struct
import sys
import tempfile
import unittest
import zlib

import cli_verbs_test as verbs

TOKENS, DIM = 400, 16  # 4 x 7 tiles, the last row and column ragged
BLOCK_Q, BLOCK_K = 128, 64


def walk(heads, seed, tokens):
    """Tokens that change slowly, so that there is something to predict."""
    r, values = random.Random(seed), []
    for _ in range(heads):
        x = [0.0] * DIM
        for _ in range(tokens):
            x = [0.95 * v + 0.6 * r.gauss(0, 1) for v in x]
            values += x
    return struct.pack("<%de" % len(values), *values)


def capture(path, heads=2, seed=1, tokens=TOKENS, **metadata):
    tensors = {n: ("F16", (h, tokens, DIM), walk(h, seed + h, tokens)) for n, h in (("q", heads), ("k", 1), ("v", 1))}
    path.parent.mkdir(parents=True, exist_ok=True)
    verbs.safetensors(path, tensors, {"causal": "true", "scale": "0.6", **metadata})
    return path


def data_of(page):
    """The JSON object that a page holds."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert len(found) == 1, len(found)
    return json.loads(found[0])


def pixels(png):
    """Width, height and RGB rows of a PNG with 8 bits per channel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at:at + 8])
        body = png[at + 8:at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", png[at + 8 + size:at + 12 + size])[0]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
            assert (depth, color) == (8, 2), "8 bits, RGB"
        packed += body if kind == b"IDAT" else b""
        at += 12 + size
    raw, rows, above = zlib.decompress(packed), [], bytes(3 * width)
    for y in range(height):
        line = bytearray(raw[y * (3 * width + 1) + 1:(y + 1) * (3 * width + 1)])
        unfilter(raw[y * (3 * width + 1)], line, above)
        above = bytes(line)
        rows.append([tuple(line[3 * x:3 * x + 3]) for x in range(width)])
    return width, height, rows


def unfilter(kind, line, above):
    for i in range(len(line)):
        a, b, c = line[i - 3] if i >= 3 else 0, above[i], above[i - 3] if i >= 3 else 0
        p = a + b - c
        nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        line[i] = (line[i] + (0, a, b, (a + b) // 2, nearest)[kind]) & 255


def picture(uri):
    assert uri.startswith("data:image/png;base64,")
    return pixels(base64.b64decode(uri.split(",")[1], validate=True))


def rgb(text):
    return tuple(bytes.fromhex(text[1:]))


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sparge_report_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.page = self.folder / "report.html"

    def report(self, *args):
        done = verbs.call("report", *args, "-o", self.page)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done, data_of(self.page)

    def refused(self, *args, says):
        before = sorted(self.folder.rglob("*"))
        done = verbs.call("report", *args)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for part in says:
            self.assertIn(part, done.stderr)
        self.assertEqual(sorted(self.folder.rglob("*")), before, "files were left behind")

    def test_figures_are_those_of_check(self):
        captures = self.folder / "captures"
        capture(captures / "0" / "a.safetensors")
        capture(captures / "10" / "a.safetensors", seed=5, causal="false")
        flags = ("--tau", "0.9", "--theta", "-1", "--pv-skip", "4", "--threads", "2")
        done, data = self.report(captures, *flags, "--json")
        check = json.loads(verbs.call("check", captures, *flags, "--json").stdout)
        heads = [head for file in check["files"] for head in file["heads"]]
        self.assertEqual(len(data["heads"]), 4)
        for ours, theirs in zip(data["heads"], heads):
            for key, value in theirs.items():
                self.assertEqual(ours[key], value, key)
        for key, value in check["total"].items():
            self.assertEqual(data["total"][key], value, key)
        self.assertEqual([h["layer"] for h in data["heads"]], ["0", "0", "10", "10"])
        self.assertEqual([h["head"] for h in data["heads"]], [0, 1, 0, 1])
        self.assertTrue(any(h["sparsity"] > 0 for h in data["heads"]), "nothing was skipped: this case shows nothing")
        self.assertEqual([f["tau"] for f in data["files"]], [0.9, 0.9])
        self.assertTrue(all(h["dense_fp32_ms"] > 0 and h["speedup"] > 0 for h in data["heads"]))
        for times in [*data["heads"], data["total"]]:
            self.assertGreater(times["dense_fp32_spread"], 0)  # three times are never the same
            self.assertGreater(times["sparse_spread"], 0)
        printed = json.loads(done.stdout)
        self.assertEqual(printed["total"]["relative_l1"], data["total"]["relative_l1"])
        self.assertNotIn("pictures", printed["heads"][0])

    def test_frontier(self):
        file = capture(self.folder / "a.safetensors")
        _, data = self.report(file, "--tau", "0.8", "--theta", "-1")
        self.assertEqual(data["swept"], "tau")
        for head in data["heads"]:
            sparsity = [point["sparsity"] for point in head["frontier"]]
            self.assertEqual(sparsity, sorted(sparsity, reverse=True), "a larger tau keeps more")
            self.assertGreater(sparsity[0], sparsity[-1])
            here = next(p for p in head["frontier"] if p["value"] == 0.8)
            self.assertEqual(here["sparsity"], head["sparsity"])
            # One head by itself is split along the keys in other places, so that the last bits may differ.
            self.assertTrue(math.isclose(here["relative_l1"], head["relative_l1"], rel_tol=1e-3))
        for i, point in enumerate(data["frontier"]):
            mean = sum(h["frontier"][i]["relative_l1"] for h in data["heads"]) / len(data["heads"])
            self.assertTrue(math.isclose(point["relative_l1"], mean, rel_tol=1e-9))
        self.assertEqual(self.report(file, "--select", "topk", "--topk", "0.3")[1]["swept"], "topk")
        _, dense = self.report(file, "--select", "all")
        self.assertEqual((dense["swept"], dense["heads"][0]["frontier"]), ("", []))
        self.assertNotIn("predicted", dense["heads"][0]["pictures"])

    def test_default(self):
        """Through a layer: the error is what is varied, and a file that is too short for that has nothing to vary."""
        short = capture(self.folder / "in" / "0" / "a.safetensors")
        capture(self.folder / "in" / "1" / "a.safetensors", tokens=1500)
        _, data = self.report(self.folder / "in")
        self.assertEqual(data["swept"], "target_l2")
        self.assertEqual([f["select"] for f in data["files"]], ["auto", "auto"])
        values = [point["value"] for point in data["frontier"]]
        self.assertIn(data["files"][0]["target_l2"], values)
        self.assertEqual([len(h["frontier"]) for h in data["heads"]], [0, 0, len(values), len(values)])
        for head in data["heads"][2:]:
            errors = [point["relative_l1"] for point in head["frontier"]]
            self.assertLess(errors[0], errors[-1])
            self.assertGreater(head["frontier"][-1]["sparsity"], 0)
            self.assertLess(errors[0], head["frontier"][0]["value"] + 0.05, "rounding comes on top")
        for i, point in enumerate(data["frontier"]):
            mean = sum(h["frontier"][i]["sparsity"] for h in data["heads"][2:]) / 2
            self.assertTrue(math.isclose(point["sparsity"], mean, rel_tol=1e-9, abs_tol=1e-12))
        self.assertNotIn("predicted", data["heads"][0]["pictures"])
        _, alone = self.report(short)
        self.assertEqual((alone["swept"], alone["frontier"]), ("", []))

    def test_pictures_show_the_tiles(self):
        file = capture(self.folder / "a.safetensors")
        flags = ("--tau", "0.7", "--theta", "-1", "--no-sink")
        _, data = self.report(file, *flags, "--pv-skip", "1")
        verbs.call("map", "--tensors", file, *flags, "--map-out", self.folder / "m.npy")
        _, shape, kept = verbs.read_npy(self.folder / "m.npy")
        rows, columns = shape[1:]
        colors = {name: rgb(text) for name, text in data["colors"]["tiles"].items()}
        seen = set()
        for index, head in enumerate(data["heads"]):
            images = {name: picture(uri) for name, uri in head["pictures"].items()}
            for name, (width, height, _) in images.items():
                self.assertEqual((width, height), (columns, rows), name)
            for y in range(rows):
                for x in range(columns):
                    at = (index * rows + y) * columns + x
                    hidden = x * BLOCK_K > min((y + 1) * BLOCK_Q, TOKENS) - 1
                    tile, products = images["kept"][2][y][x], images["pv"][2][y][x]
                    self.assertEqual(tile == colors["kept"], kept[at] == 1, (index, y, x))
                    self.assertEqual(tile == colors["hidden"], hidden, (index, y, x))
                    self.assertEqual(images["true"][2][y][x] == colors["hidden"], hidden, (index, y, x))
                    self.assertEqual(products in (colors["kept"], colors["partly"], colors["skipped"]), kept[at] == 1)
                    seen |= {tile, products}
        self.assertIn(colors["dropped"], seen)
        self.assertIn(colors["partly"], seen, "no PV was skipped: this case shows nothing")

    def test_png_files(self):
        capture(self.folder / "in" / "3" / "a.safetensors")
        folder = self.folder / "maps"
        _, data = self.report(self.folder / "in", "--png", folder)
        self.assertEqual(sorted(os.listdir(folder)), ["3-a-head0.png", "3-a-head1.png"])
        width, height, rows = pixels((folder / "3-a-head1.png").read_bytes())
        kept = picture(data["heads"][1]["pictures"]["kept"])
        factor = 384 // kept[0]
        self.assertEqual(height, 2 * factor * kept[1])
        at = width - 2 * factor * kept[0] - 12  # "kept" is the last but one
        self.assertEqual([rows[0][at + factor * x] for x in range(kept[0])], kept[2][0])

    def test_many_heads(self):
        capture(self.folder / "a.safetensors", heads=70)
        _, data = self.report(self.folder / "a.safetensors")
        pictured = [i for i, head in enumerate(data["heads"]) if "pictures" in head]
        self.assertEqual((len(pictured), data["pictured"]), (64, 64))
        worst = sorted(range(70), key=lambda i: -data["heads"][i]["relative_l1"])[:16]
        self.assertLessEqual(set(worst), set(pictured))

    def test_order_of_a_grid(self):
        file = capture(self.folder / "a.safetensors", causal="false", grid="4,10,10")
        _, data = self.report(file, "--theta", "-1")
        (order,) = data["orders"]
        self.assertEqual((order["grid"], order["in_force"]), ([4, 10, 10], "hilbert"))
        self.assertEqual(order["hilbert"]["sparsity"], data["heads"][0]["sparsity"])
        self.assertEqual(order["hilbert"]["map"], data["heads"][0]["pictures"]["true"])
        self.assertNotEqual(order["raster"]["map"], order["hilbert"]["map"])
        frame = order["frame"]
        self.assertEqual((frame["width"], frame["height"], len(set(frame["rank"]))), (10, 10, 100))
        # The curve goes from neighbour to neighbour.
        cell_of = {rank: cell for cell, rank in enumerate(frame["rank"])}
        steps = [(cell, cell_of[rank + 1]) for rank, cell in cell_of.items() if rank + 1 in cell_of]
        self.assertGreater(len(steps), 40)
        self.assertTrue(all(abs(a // 10 - b // 10) + abs(a % 10 - b % 10) == 1 for a, b in steps))
        _, raster = self.report(file, "--theta", "-1", "--order", "raster")
        self.assertEqual(raster["orders"][0]["in_force"], "raster")
        self.assertEqual(raster["orders"][0]["raster"]["map"], raster["heads"][0]["pictures"]["true"])
        causal = capture(self.folder / "b.safetensors", grid="4,10,10")
        self.assertEqual(self.report(causal)[1]["orders"], [])

    def test_titles_cannot_break_the_page(self):
        file = capture(self.folder / "a.safetensors", title="</script><script>alert(1)</script>")
        _, data = self.report(file)
        self.assertEqual(data["files"][0]["title"], "</script><script>alert(1)</script>")
        self.assertNotIn("alert(1)</script>", self.page.read_text("utf-8"))

    def test_needs_no_network(self):
        self.report(capture(self.folder / "a.safetensors"))
        page = self.page.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        self.assertNotRegex(page, r"https?://|src=[\"']?/|@import|url\(")
        self.assertIn("default-src 'none'", page)

    def test_refusals(self):
        file = capture(self.folder / "a.safetensors")
        self.refused(file, says=("-o", "missing"))
        self.refused("-o", self.page, says=("PATH",))
        self.refused(file, "-o", self.folder / "report.pdf", says=("-o", "report.pdf", ".html"))
        self.refused(file, "-o", self.folder / "no" / "report.html", says=("-o", "report.html"))
        (self.folder / "empty").mkdir()
        self.refused(self.folder / "empty", "-o", self.page, says=("empty", "no .safetensors"))
        self.refused(file, "-o", self.page, "--png", file, says=("--png", "a.safetensors"))
        self.refused(file, "-o", self.page, "--png", self.folder / "no" / "maps", says=("--png", "maps"))
        self.refused(file, "-o", self.page, "--tau", "2", says=("--tau", "2"))
        self.refused(file, "-o", self.page, "--map-out", "m.npy", says=("--map-out",))
        (self.folder / "bad.safetensors").write_bytes(b"short")
        self.refused(file, self.folder / "bad.safetensors", "-o", self.page, says=("bad.safetensors",))


if __name__ == "__main__":
    verbs.SPARGE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()

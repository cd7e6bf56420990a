#!/usr/bin/env python3
"""A report in headless Chromium: what it shows, sorting, errors: report_browser_test.py PATH_TO_SPARGE DATA_DIR

Exit code 77, which ctest shows as skipped, where there is no Chromium."""
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import cli_verbs_test as verbs
import report_test

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DATA = ""


class Dom(html.parser.HTMLParser):
    """Rows of the table, images and the state of the page, from Chromium's dump."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.images, self.body, self.cards, self.paths, self.heading = [], [], {}, 0, 0, ""
        self.in_cell = self.in_table_body = self.in_what = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "body":
            self.body = attributes
        elif tag == "img":
            self.images.append(attributes)
        elif tag == "tbody":
            self.in_table_body = True
        elif tag == "tr" and self.in_table_body:
            self.rows.append((int(attributes["data-head"]), []))
        elif tag == "td" and self.in_table_body:
            self.rows[-1][1].append("")
            self.in_cell = True
        elif tag == "path":
            self.paths += 1
        self.cards += attributes.get("class") == "card" and "data-head" in attributes
        self.in_what = attributes.get("id") == "what"

    def handle_endtag(self, tag):
        self.in_cell = False
        self.in_table_body = self.in_table_body and tag != "tbody"

    def handle_data(self, text):
        if self.in_cell:
            self.rows[-1][1][-1] += text
        if self.in_what:
            self.heading += text


class Browser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="sparge_browser_")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.page = cls.folder / "report.html"
        files = [pathlib.Path(DATA) / name for name in ("smollm2-local.safetensors", "video-synthetic.safetensors")]
        done = verbs.call("report", *files, "-o", cls.page)
        assert done.returncode == 0, done.stderr
        cls.data = report_test.data_of(cls.page)

    def open(self, page, hash_part=""):
        """The page after its script ran; fails on anything that it wrote to the console."""
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
                 "--user-data-dir=" + str(self.folder / "profile"), "--enable-logging=stderr", "--v=0",
                 "--virtual-time-budget=10000", "--window-size=1300,3000", "--dump-dom"]
        done = subprocess.run([CHROMIUM, *flags, page.as_uri() + hash_part], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEqual(re.findall(r".*CONSOLE.*", done.stderr), [], "the page complains, or asks for something")
        dom = Dom(done.stdout)
        self.assertEqual(dom.body.get("data-ready"), "yes", "the script did not reach its end")
        return dom

    def test_shows_heads_pictures_and_frontier(self):
        dom = self.open(self.page)
        self.assertEqual([row[0] for row in dom.rows], [0, 1, 2])
        self.assertIn("3 attention heads from 2 files", dom.heading)
        self.assertEqual(dom.cards, 3)
        per_head = len(self.data["heads"][0]["pictures"])
        self.assertEqual(len(dom.images), 3 * per_head + 2)  # the video head has its true map in two orders
        for image in dom.images:
            width, height = map(int, image["data-size"].split("x"))
            self.assertGreater(min(width, height), 0)
        self.assertIn("64x32", {image["data-size"] for image in dom.images})  # 4096 tokens
        self.assertGreaterEqual(dom.paths, 3 + 1 + 3)  # thin lines, the mean, one chart per card
        flat = [text for row in dom.rows for text in row[1]]
        self.assertIn("%.1f %%" % (100 * self.data["heads"][0]["sparsity"]), flat)
        self.assertFalse([text for text in flat if "NaN" in text or "undefined" in text])

    def test_sorts(self):
        for key in ("relative_l1", "tokens", "cosine"):
            for order, sign in (("ascending", 1), ("descending", -1)):
                dom = self.open(self.page, f"#sort={key}&order={order}")
                values = [self.data["heads"][row[0]][key] for row in dom.rows]
                self.assertEqual(values, sorted(values, key=lambda x: sign * x), key)
        dom = self.open(self.page, "#sort=relative_l1")  # as a first click: the worst on top
        worst = max(range(3), key=lambda i: self.data["heads"][i]["relative_l1"])
        self.assertEqual(dom.rows[0][0], worst)

    def test_the_check_for_errors_works(self):
        """A page that wants something from outside, or whose script breaks, is found out."""
        text = self.page.read_text("utf-8")
        for broken in (text.replace("<h1>", '<img src="https://example.org/x.png"><h1>'),
                       text.replace("buildTable();", "buildTables();")):
            page = self.folder / "broken.html"
            page.write_text(broken, "utf-8")
            with self.assertRaises(AssertionError):
                self.open(page)

    def test_many_heads_and_one(self):
        for heads in (1, 70):
            file = report_test.capture(self.folder / f"{heads}.safetensors", heads=heads)
            page = self.folder / f"{heads}.html"
            done = verbs.call("report", file, "-o", page)
            self.assertEqual(done.returncode, 0, done.stderr)
            dom = self.open(page)
            self.assertEqual(len(dom.rows), heads)
            self.assertEqual(dom.cards, min(heads, 4))


if __name__ == "__main__":
    if CHROMIUM is None:
        print("SKIPPED: no chromium on this machine")
        sys.exit(77)
    verbs.SPARGE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    DATA = sys.argv.pop(1)
    unittest.main()
